"""`analyze` over checkpoints: every step equals its own run, and either all steps are written or none."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hub import Hub, Repo
from PIL import Image
from support.figures import skip_figures
from support.retrofit_command import succeeded
from support.tables import assert_same_tables
from tiny import tiny_model

import sinkscope
from sinkscope import InputError, Run, Series, run_recipe
from sinkscope.commands.analyze.options import AnalyzeOptions
from sinkscope.figures.style import COLUMN
from sinkscope.html_page import Contents
from sinkscope.html_page.html import page_data
from sinkscope.models.steps import find_checkpoints, step_of
from sinkscope.results.tables import LEADING

OPTIONS: dict[str, Any] = {"input": "random", "num_seqs": 2, "seq_len": 16, "observables": "attention,activation"}
STEPS = (5, 40, 200)  # sorted by name, 200 would come first


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as transformers' Trainer writes it. Tests must not change it."""
    folder = tmp_path_factory.mktemp("trainer") / "trained"
    model = tiny_model("llama")
    for step in STEPS:
        model.save_pretrained(folder / f"checkpoint-{step}")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.3)
    (folder / "runs").mkdir()
    return folder


@pytest.fixture(scope="session")
def series(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Series:
    """The written series of all steps. Tests must not change it."""
    with pytest.MonkeyPatch.context() as patch:
        skip_figures(patch)
        return sinkscope.analyze_steps(trained, out=tmp_path_factory.mktemp("series") / "out", **OPTIONS)


def copied(trained: Path, target: Path, *steps: int) -> Path:
    for step in steps:
        shutil.copytree(trained / f"checkpoint-{step}", target / f"checkpoint-{step}")
    return target


def refused(*args: Any, error: type[Exception] = InputError, **options: Any) -> str:
    with pytest.raises(error) as caught:
        sinkscope.analyze_steps(*args, **OPTIONS | options)
    assert str(caught.value).count("\n") == 0
    return str(caught.value)


def test_each_step_is_the_run_that_it_would_be_alone(series: Series, trained: Path) -> None:
    assert list(series.runs) == list(STEPS)
    for step, run in series.runs.items():
        alone = sinkscope.analyze(trained / f"checkpoint-{step}", **OPTIONS)
        assert_same_tables(run.tables, alone.tables, check_exact=True)
        rows = series.table[series.table["step"] == step].reset_index(drop=True)
        columns = ["condition", "layer", "metric", "value"]
        pd.testing.assert_frame_equal(rows[columns], run.tables["summary"][columns])
        assert series.headlines.loc[step, "norm_ratio"] == run.metric("norm_ratio")
    assert len({run.metric("norm_ratio") for run in series.runs.values()}) == len(STEPS)
    assert list(series.table.columns) == [*LEADING[:2], "step", "layer", "metric", "value"]
    assert list(series.headlines.columns) == ["sink_rate", "norm_ratio"]
    assert series.warnings == []
    in_bfloat16 = replace(series.runs[40], manifest=series.runs[40].manifest | {"dtype": "bfloat16"})
    warnings = replace(series, runs=series.runs | {40: in_bfloat16}).warnings
    assert warnings == ["dtype differs: float32 (step 5), bfloat16 (step 40), float32 (step 200)"]


def test_the_folder(series: Series) -> None:
    again = Series.open(series.folder)
    pd.testing.assert_frame_equal(again.table, series.table)
    assert page_data(series.contents) == page_data(Contents.of_folder(series.folder))
    assert [row.split(" | ")[0] for row in series.formatted("markdown").splitlines()[2:]] == ["| 5", "| 40", "| 200"]
    figures = {path.stem for path in (series.folder / "figures").iterdir()}
    assert figures == set(series.figures())
    assert figures
    assert all(name.startswith("training-") for name in figures)
    assert {path.name for path in series.folder.iterdir()} == {
        "run.json", "tables", "figures", "index.html", "verdict.md", *(f"step{step}" for step in STEPS),
    }  # fmt: skip
    manifest = json.loads((series.folder / "run.json").read_text(encoding="utf-8"))
    assert [at["step"] for at in manifest["steps"]] == list(STEPS)
    assert (manifest["command"], manifest["tables"]) == ("analyze_steps", ["onset", "series"])
    assert manifest["config"]["revision"] == ",".join(f"checkpoint-{step}" for step in STEPS)
    with pytest.raises(InputError, match=r"is of `sinkscope analyze_steps`.*but holds runs: name one of them"):
        Run.open(series.folder)
    assert [path.name for path in series.folder.parent.iterdir()] == ["out"]


def test_revisions_of_a_hub_repository(hub: Hub, trained: Path, series: Series) -> None:
    hub.repos["org/name"] = Repo({f"step{step}": trained / f"checkpoint-{step}" for step in STEPS})
    again = sinkscope.analyze_steps("org/name", "step200, step5", **OPTIONS)
    assert {step: run.manifest["model"]["revision"] for step, run in again.runs.items()} == {5: "step5", 200: "step200"}
    assert again.folder is None
    assert set(again.table["model"]) == {"org/name"}
    kept = series.table[series.table["step"] != 40].reset_index(drop=True)
    pd.testing.assert_frame_equal(again.table.drop(columns="model"), kept.drop(columns="model"))
    assert refused("org/name", "step5,step6").startswith("at step 6: org/name has no revision 'step6'")


@pytest.mark.slow
def test_a_recipe_measures_the_steps(trained: Path, series: Series, tmp_path: Path) -> None:
    content = {"title": "Steps", "options": OPTIONS, "figures": ["sink-map"]}
    (tmp_path / "steps.yaml").write_text(json.dumps(content))
    done = run_recipe(tmp_path / "steps.yaml", trained, out=tmp_path / "out", page=False)
    assert not [*done.folder.rglob("index.html")]
    again = Series.open(done.folder)
    assert_same_tables(again.tables, series.tables)
    assert done.result is not None
    assert done.result.markdown == again.verdict
    for result in (again, *again.runs.values()):
        assert result.manifest["recipe"]["content"] == content
    assert {path.stem for path in (done.folder / "step5" / "figures").iterdir()} == {"sink-map"}
    assert {path.stem for path in (done.folder / "figures").iterdir()} == set(again.drawings)


@pytest.mark.slow
def test_checkpoints_of_a_training_give_the_order_of_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_figures(monkeypatch, of_runs_only=True)
    lab, out = tmp_path / "lab", tmp_path / "out"
    options = {"steps": 20, "save_every": 2, "batch_size": 8, "block_length": 32, "num_seqs": 8}
    shown = {"figures": False, "page": False}
    sinkscope.train(
        "bigram-backcopy", "none", text="bigram-backcopy", observables="attention", out=lab, **options, **shown
    )
    result = succeeded(
        "analyze", lab / "none" / "checkpoints", "--input", lab / "held-out.npy", "--num-seqs", 8, "--seq-len", 32,
        "--observables", "attention,activation,gradient", "--out", out,
    )  # fmt: skip
    series = Series.open(out)
    assert list(series.runs) == list(range(0, 21, 2))
    assert series.verdict in result.stdout
    assert (out / "verdict.md").read_text(encoding="utf-8") == series.verdict + "\n"
    monkeypatch.setattr("sinkscope.commands.steps.onsets.onset_table", lambda runs: pytest.fail("computed again"))
    assert "training-onsets" in series.figures()
    assert "order-norm-sink_rate" in {finding.name for finding in series.contents.findings}
    table = series.tables["onset"]
    course = table[table["number"] == "course"].pivot(index="step", columns="quantity", values="value")
    null = table.loc[table["number"].isin(["uniform", "step-0"]), "value"].item()
    np.testing.assert_allclose(null * course["value_gradient"], series.headlines["value_gradient_ratio"], rtol=1e-5)
    np.testing.assert_allclose(course["sink_rate"], 100 * series.headlines["sink_rate"], atol=1e-4)
    assert set(table["number"]) >= {"onset", "delay", "lag", "lead"}
    with Image.open(out / "figures" / "training-onsets.png") as picture:
        assert picture.width / picture.info["dpi"][0] == pytest.approx(COLUMN, abs=0.02)


def test_step_of() -> None:
    for name, step in (
        ("step0", 0), ("checkpoint-500", 500), ("step1000-tokens4B", 1000), ("stage1-step-150", 150),
        ("global_step80", 80), ("step512-final", 512), ("ckpt_007", 7), ("12", 12),
    ):  # fmt: skip
        assert step_of(name) == step
    for name in ("main", "checkpoint-best", "v1.5", "step", "0" * 39 + "1", "9" * 20):
        with pytest.raises(InputError, match=f"'{name}' does not end in the number of a step"):
            step_of(name)


def test_what_counts_as_a_series(trained: Path, tmp_path: Path) -> None:
    assert AnalyzeOptions(model=str(trained)).has_steps
    assert AnalyzeOptions(model="org/name", revision="step0,step1").has_steps
    for single in ({"model": "org/name", "revision": "step0"}, {"model": str(trained / "checkpoint-5")}, {}):
        assert not AnalyzeOptions(**single).has_steps
    finished = copied(trained, tmp_path / "finished", 5, 40)
    shutil.copytree(trained / "checkpoint-40", finished, dirs_exist_ok=True)
    assert not AnalyzeOptions(model=str(finished)).has_steps  # it holds the final model
    assert [at.step for at in find_checkpoints(str(finished))] == [5, 40]
    unfinished = copied(trained, tmp_path / "unfinished", 5)
    (unfinished / "checkpoint-notes.txt").touch()
    assert AnalyzeOptions(model=str(unfinished)).has_steps
    assert not AnalyzeOptions(model=str(unfinished), gguf_file="model.gguf").has_steps


def test_wrong_steps_and_options(trained: Path, series: Series, tmp_path: Path) -> None:
    mixed, one = copied(trained, tmp_path / "mixed", 5, 40), copied(trained, tmp_path / "one", 5)
    shutil.copytree(mixed / "checkpoint-40", mixed / "checkpoint-best")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    for arguments, message in (
        (("org/name", "step5,step5"), "'step5' is named twice: name each step once"),
        (("org/name", ["step5", "checkpoint-5"]), "'step5' and 'checkpoint-5' are both step 5"),
        (("org/name", "step5,main"), "'main' does not end in the number of a step"),
        ((mixed,), "leave it out, as in revision=checkpoint-40,checkpoint-5"),
        (("org/name",), "name two or more steps of org/name"),
        ((None, "step5,step6"), "no model to take them from"),
        ((one,), f"to analyze it alone, name {one / 'checkpoint-5'}"),
        ((tmp_path / "empty",), "holds no steps: no folder in it is called checkpoint-…"),
        ((tmp_path / "file",), "is one file, so it has no steps"),
        ((trained, "checkpoint-5,checkpoint-41"), "'checkpoint-41' is unknown; did you mean 'checkpoint-40'?"),
    ):
        assert message in refused(*arguments)
    assert refused(trained, seq_len=1) == "seq_len=1: it must be at least 2"
    assert "at step 5: seq_len=257 is beyond the model's 256 positions" in refused(trained, seq_len=257)

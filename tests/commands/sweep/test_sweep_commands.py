"""Several commands in one sweep, also trainings: each cell equals the folder of its command, and is resumed."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.figures import quick_sweeps
from support.retrofit_command import words_tokenizer
from support.tables import assert_same_tables, tables_in
from support.training import SHAPE, random_blocks
from tiny import tiny_model

import sinkscope
from sinkscope.commands.claims.register import CLAIMS
from sinkscope.commands.sweep.cells import CellFolders, Size, planned, with_sizes
from sinkscope.commands.sweep.command import SweepRun
from sinkscope.commands.sweep.file import read_sweep
from sinkscope.commands.sweep.page import SweepPage
from sinkscope.commands.sweep.tables import sweep_tables
from sinkscope.commands.sweep.worker import Reads, State, load_key
from sinkscope.html_page.contents import Contents

pytestmark = pytest.mark.slow
TRAINING: dict[str, Any] = {"block-length": 16, "batch-size": 2, "steps": 3, "log-every": 1, "save-every": 2}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_sweeps(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, token ids, a configuration and a training text. Tests must not change it."""
    path = tmp_path_factory.mktemp("all")
    tiny_model("llama").save_pretrained(path / "llama")
    words_tokenizer().save_pretrained(path / "llama")
    np.save(path / "text.npy", random_blocks(11).train)
    np.save(path / "ids.npy", random_blocks(11).train[:6])
    (path / "small.json").write_text(json.dumps(SHAPE))
    return path


def content(folder: Path) -> dict[str, Any]:
    trained = {"text": str(folder / "text.npy"), **TRAINING}
    return {
        "title": "All commands",
        "models": [str(folder / "llama")],
        "inputs": {"ids": {"input": str(folder / "ids.npy")}, "random": None},
        "settings": {"epsilon": [0.2, 0.3]},
        "options": {"num-seqs": 4, "seq-len": 12},
        "commands": {
            "analyze": {"options": {"observables": ["attention"]}},
            "intervene": {"inputs": ["ids"], "options": {"do": "mask-sink", "draws": 2, "observables": ["attention"]}},
            "quantize": {"inputs": ["ids"], "settings": {}, "options": {"calibration": 2, "num-seqs": 3}},
            "claims": {"inputs": ["ids"], "settings": {}, "options": {"draws": 2, "nulls": 2}},
            "retrofit": {"options": {"method": ["vga", "none"], **trained}, "settings": {"seed": [0, 1]}},
            "train": {"options": {"method": ["none"], **trained}, "settings": {"config": [str(folder / "small.json")]}},
        },
    }


def written(path: Path, made: dict[str, Any]) -> Path:
    path.write_text(json.dumps(made), encoding="utf-8")  # which is YAML
    return path


@pytest.fixture(scope="module")
def done(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> SweepRun:
    with pytest.MonkeyPatch.context() as patch:
        quick_sweeps(patch)
        for module in ("command", "table"):  # few claims, which need few runs
            few = {name: CLAIMS[name] for name in ("W-1", "W-2", "GS-28")}
            patch.setattr(f"sinkscope.commands.claims.{module}.CLAIMS", few)
        out = tmp_path_factory.mktemp("done")
        return sinkscope.sweep(written(out / "sweep.yaml", content(folder)), out=out / "out", workers=1)


def test_every_command_has_its_cells(done: SweepRun) -> None:
    assert done.failure == ""
    grid = [f"llama × {reads} × epsilon={epsilon}" for reads in ("ids", "random") for epsilon in (0.2, 0.3)]
    assert [each.cell.description for each in done.plan[:10]] == [
        *(f"{cell} (analyze)" for cell in grid), *(f"{cell} (intervene)" for cell in grid[:2]),
        "llama × ids (quantize)", "llama × ids (claims)", "llama × seed=0 (retrofit)", "llama × seed=1 (retrofit)",
    ]  # fmt: skip
    assert len(done.plan) == 11
    assert done.plan[-1].cell.description.startswith("small × config=")
    assert {each.state for each in done.plan} == {State.DONE}
    keys = [load_key(each.cell.options) for each in done.plan]
    assert len(set(keys[:8])) == 1  # one load
    assert len(set(keys)) == 4
    for each in done.plan[8:]:  # a small training takes less time than its figures, which are not drawn
        folder = done.folder / "cells" / each.cell.name
        assert (folder / "retrofit.md").exists()
        assert not (folder / "figures").exists()
        assert not list(folder.glob("*/run/figures/*"))
    plan = with_sizes(planned(done.sweep.cells, CellFolders(Path(os.devnull)), Reads()))
    by_command = {each.cell.command: each for each in plan}
    assert by_command["retrofit"].size.parameters == by_command["analyze"].size.parameters
    assert by_command["train"].size.parameters == 300 * 32 * 2 + 2 * (4 * 32 * 32 + 3 * 32 * 48 + 2 * 32) + 32
    assert by_command["retrofit"].memory > 0


def test_the_tables_of_all_commands_stand_together(done: SweepRun) -> None:
    tables = tables_in(done.folder / "comparison")
    names = {"sweep", "sweep_epsilon", "sweep_effect", "sweep_formats", "claim", "route"}
    assert names | {"sweep_retrofit", "sweep_training"} == {Path(name).stem for name in tables}
    text = (done.folder / "comparison" / "sweep.md").read_text(encoding="utf-8")
    assert "Cost of formats in nats per token" in text
    contents = Contents.of_folder(done.folder / "comparison")
    assert SweepPage().data(contents)["spread"]
    page = SweepPage().overviews(contents)
    assert [title.split(" in ")[0] for title in page] == [
        "Cost of formats",
        "Sink rate at position 0, by model and input",
    ]
    trained = tables["tables/sweep_retrofit.parquet"]
    assert set(trained["seed"]) == {0, 1}
    assert set(trained["model"]) == {"llama", "small"}
    assert set(trained["condition"]) >= {"vga", "none", "untouched"}
    assert set(trained["seq_len"]) == {16}  # the length of the blocks
    effects = tables["tables/sweep_effect.parquet"]
    assert set(effects["epsilon"]) == {0.2, 0.3}
    course = tables["tables/sweep_training.parquet"]
    assert (course["tokens"] == course["step"] * TRAINING["batch-size"] * 16).all()
    on_two = [replace(each, manifest={**each.manifest, "processes": 2}) for each in done.plan]
    assert (sweep_tables(on_two).tables["sweep_training"]["tokens"] == 2 * course["tokens"]).all()


def test_claims_reads_the_cells_of_a_sweep(done: SweepRun) -> None:
    card = sinkscope.claims(from_=[done.folder])
    assert set(card.models) >= {"llama", "small"}
    cells = [done.folder / "cells" / each.cell.name for each in done.plan]
    assert card.table.equals(sinkscope.claims(from_=cells).table)


def test_a_cell_that_trains_is_what_its_command_writes(done: SweepRun, tmp_path: Path) -> None:
    """Earlier cells share a loaded model."""
    each, alone = done.plan[8], tmp_path / "alone"
    sinkscope.retrofit(each.cell.options.model, config=each.cell.options, out=alone)
    ours, expected = tables_in(done.folder / "cells" / each.cell.name), tables_in(alone)
    timed = [name for name in expected if name.endswith("training.parquet")]  # seconds of each step
    assert_same_tables(*({n: t for n, t in tables.items() if n not in timed} for tables in (ours, expected)))
    assert not list(done.folder.rglob(".sinkscope-*"))


def test_shared_options_are_of_the_commands_that_have_them(folder: Path, tmp_path: Path) -> None:
    """This includes options of the command line; a command does not get options that it refuses."""
    made = content(folder) | {"commands": {"analyze": None, "benchmark": None, "train": None}, "inputs": ["random"]}
    made["settings"] = {}
    path = written(tmp_path / "sweep.yaml", made)
    shared = {"attn": "eager", "dtype": "bfloat16", "trust_remote_code": True}
    by_command = {cell.command: cell.options for cell in read_sweep(str(path), shared).cells}
    assert {name: (options.attn, options.dtype) for name, options in by_command.items()} == {
        "analyze": ("eager", "bfloat16"),
        "benchmark": ("sdpa", "bfloat16"),
        "train": ("eager", "bfloat16"),
    }
    assert by_command["benchmark"].trust_remote_code


def test_local_models_are_examined_only_if_their_memory_counts(folder: Path, tmp_path: Path) -> None:
    file = written(tmp_path / "sweep.yaml", {"title": "One", "models": [str(folder / "llama")]})
    for also_local in (True, False):
        (each,) = with_sizes(planned(read_sweep(str(file), {}).cells, CellFolders(tmp_path / "o"), Reads()), also_local)
        assert (each.size != Size()) == also_local
    plans = [with_sizes(planned(read_sweep(str(file), {"dtype": dtype}).cells, CellFolders(tmp_path / "o"), Reads()))
        for dtype in ("float32", "bfloat16")]  # fmt: skip
    (wide,), (narrow,) = plans
    assert wide.memory - narrow.memory > narrow.size.parameters

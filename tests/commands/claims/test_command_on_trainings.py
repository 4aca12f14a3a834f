"""`claims --from` judges folders of `retrofit`, `train` and `analyze` over steps."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.figures import skip_figures
from support.retrofit_command import succeeded

import sinkscope
from sinkscope import Scorecard
from sinkscope.results.statistics import mean_of_rates

SHORT: dict[str, Any] = {
    "steps": 4, "block_length": 24, "batch_size": 2, "log_every": 2, "save_every": 2, "num_seqs": 4,
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("no_figures")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training of few steps on Bigram-Backcopy. Tests must not change it."""
    out = tmp_path_factory.mktemp("trained") / "lab"
    shape = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 1, "n_positions": 32}
    (out.parent / "lab.json").write_text(json.dumps(shape))
    methods = {"plain": "none", "VGA": "vga:placement=output,scale=1"}
    with pytest.MonkeyPatch.context() as patched:
        skip_figures(patched)
        sinkscope.train(out.parent / "lab.json", methods, text="bigram-backcopy", seeds=2, out=out, **SHORT)
    return out


def row(card: Scorecard, claim: str, part: int = 0) -> pd.Series:
    return card.table.query(f"claim == '{claim}' and part == {part}").iloc[0]


@pytest.mark.slow
def test_a_training_is_judged_by_its_tables(lab: Path, tmp_path: Path) -> None:
    succeeded("claims", "--from", lab, "--out", tmp_path / "card")
    card = Scorecard.open(tmp_path / "card")
    assert card.models == ["lab"]
    training = pd.read_parquet(lab / "tables" / "training.parquet")
    last = training.query("metric == 'early_attention_to_start' and layer == 0 and step == 4 and condition == 'plain'")
    judged, values = row(card, "V-4"), last["value"].to_numpy()
    expected = mean_of_rates(values)  # attention is between 0 and 1
    assert (judged["low"], judged["value"], judged["high"]) == (expected.low, values.mean(), expected.high)
    assert judged["note"] == "plain; 4 steps, 2 seeds"
    table = pd.read_parquet(lab / "tables" / "retrofit.parquet").query("metric == 'perplexity'")
    wide = table.pivot(index="seed", columns="condition", values="value")
    assert row(card, "V-14")["value"] == pytest.approx(np.exp(np.log(wide["VGA"] / wide["plain"]).mean()))
    assert row(card, "V-23")["passes"] != "not measured"  # the folder has the time that a step took
    assert card.manifest["judged"]["lab"]["arms:none,vga"] == str(lab)
    assert row(card, "GS-21")["note"].endswith(f"--method none,vscale --out {lab}")
    assert row(card, "W-1")["note"] == f"sinkscope analyze {lab}/plain-seed0/model"


def test_its_steps_are_judged_beside_it(lab: Path, tmp_path: Path) -> None:
    series = []
    for seed in (0, 1):
        series.append(tmp_path / f"steps{seed}")
        options = {"input": str(lab / "held-out.npy"), "seq_len": 24, "num_seqs": 4, "observables": "attention"}
        sinkscope.analyze_steps(lab / f"plain-seed{seed}" / "checkpoints", out=series[-1], **options)
    card = sinkscope.claims(from_=[lab, *series])
    assert card.models == ["lab"]
    rises = []
    for folder in series:
        table = pd.read_parquet(folder / "tables" / "series.parquet").query("metric == 'sink_rate' and layer == -1")
        by_step = table.set_index("step")["value"]
        rises.append(100 * (by_step[4] - by_step[0]))
    assert row(card, "W-30")["value"] == pytest.approx(np.mean(rises))
    assert row(card, "W-30")["note"].endswith("2 seeds")
    alone = sinkscope.claims(from_=series[:1])
    assert alone.models == [str(lab / "plain-seed0")]
    assert row(alone, "W-30")["note"].endswith("one training, interval over its sequences")


def test_an_unfinished_or_damaged_folder_is_refused(lab: Path, tmp_path: Path) -> None:
    shutil.copytree(lab, tmp_path / "lab", ignore=shutil.ignore_patterns("model", "checkpoints"))
    manifest = json.loads((lab / "run.json").read_text())
    for changed, message in (
        ({"tables": []}, "is not finished: the same `sinkscope train` resumes it"),
        ({"arms": {}}, "it has no arm with a run"),
        ({"tables": ["gates", "training"]}, "it has no retrofit"),
        ({"config": {"stride": 3}}, "is of another sinkscope, or damaged: option 'stride'"),
    ):
        (tmp_path / "lab" / "run.json").write_text(json.dumps(manifest | changed))
        with pytest.raises(sinkscope.InputError, match=message):
            sinkscope.claims(from_=[tmp_path / "lab"])

"""Tables with one value per sequence, against plain transformers and against the tables of means."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import reference
import torch
from tiny import batched, measured, ragged_tokens, tiny_model, written
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

import sinkscope
from sinkscope import Run
from sinkscope.measuring.observables.observable import Settings

LENGTHS = (24, 17, 4, 11, 24)  # one without any of the positions 5 to 15, one with some
POSITIONS, WINDOW = 7, 8
FORWARD = ("attention", "geometry", "activation")
FLOAT32 = 2e-7  # round-off of a number that is stored in float32


@cache
def expected(name: str) -> tuple[PreTrainedModel, Settings, dict[str, pd.DataFrame]]:
    """Return a model in float64, and its tables from plain transformers, one sequence at a time."""
    model = tiny_model(name, dtype=torch.float64)
    recorded = reference.record_each(model, ragged_tokens(LENGTHS))
    epsilon = reference.clear_threshold(recorded, WINDOW)
    parts = [_of_one(sequence, epsilon) for sequence in recorded]
    tables = {
        name: pd.concat([part[name].assign(sequence=at) for at, part in enumerate(parts)], ignore_index=True)
        for name in parts[0]
    }
    return model, Settings(positions=POSITIONS, window=WINDOW, epsilon=epsilon), tables


def _of_one(sequence: reference.Sequence, epsilon: float) -> dict[str, pd.DataFrame]:
    length = len(sequence.ids)
    by_head = reference.attention([sequence], min(POSITIONS, length), WINDOW, epsilon)
    masses = ["window_mass", "sink_rate", "sink_mass"]
    heads = by_head[by_head["position"] == 0].drop(columns=["position", "sink_rate", "sink_second_moment"])
    norms = reference.activation([sequence], length).rename(columns={"norm_mean": "norm"})
    smallest = norms.groupby(["layer", "site"], as_index=False)["norm"].min().rename(columns={"norm": "norm_smallest"})
    keys = ["layer", "head", "kv_head"]
    pairs = ["key_norm", "value_norm", "qk_cosine", "qk_norm_product"]
    of_keys = _first_and_later(reference.geometry([sequence], min(16, length)), keys, [*pairs, "sink_logit_gap"])
    return {
        "attention_by_sequence": by_head.groupby(["layer", "position"], as_index=False)[masses].mean(),
        "attention_heads_by_sequence": heads,
        "geometry_by_sequence": of_keys.drop(columns="sink_logit_gap_later"),
        "activation_by_sequence": _first_and_later(norms, ["layer", "site"], ["norm"]).merge(smallest),
    }


def _first_and_later(table: pd.DataFrame, keys: list[str], names: list[str]) -> pd.DataFrame:
    first = table[table["position"] == 0].set_index(keys)[names]
    later = table[table["position"].between(5, 15)].groupby(keys)[names].mean()
    return first.join(later, rsuffix="_later").reset_index()


@pytest.mark.parametrize(
    ("name", "side"),
    [("llama", "right"), ("llama", "left"), ("gemma2", "right"), ("gpt_oss", "left"), ("falcon-new", "right")],
)
def test_every_sequence_has_the_values_of_plain_transformers(name: str, side: str) -> None:
    """Batches have two sequences, the last batch has one, and --positions ends within the later positions."""
    model, settings, tables = expected(name)
    reference.assert_same(measured(model, batched(ragged_tokens(LENGTHS), 2, side), settings, FORWARD), tables, FLOAT32)


SHORT = (12, 5, 9)


def assert_losses(table: pd.DataFrame, model: PreTrainedModel) -> None:
    assert table["layer"].eq(-1).all()
    assert table["sequence"].tolist() == [0, 1, 2]
    assert table["predicted"].tolist() == [length - 1 for length in SHORT]
    texts = map(torch.as_tensor, ragged_tokens(SHORT))
    losses = [float(cross_entropy(model(ids[None]).logits[0, :-1].double(), ids[1:])) for ids in texts]
    np.testing.assert_allclose(table["loss"], losses, rtol=1e-5)


def mean_loss(table: pd.DataFrame) -> float:
    return float(np.average(table["loss"].to_numpy(float), weights=table["predicted"]))


def test_analyze_keeps_the_loss_of_every_sequence(tmp_path: Path) -> None:
    model, path = tiny_model("llama"), written(tmp_path / "ids.jsonl", ragged_tokens(SHORT))
    options: dict[str, Any] = {"input": path, "num_seqs": 3, "seq_len": 12}
    run = sinkscope.analyze(model, observables=("gradient",), batch_size=2, **options)
    assert_losses(run.tables["loss_by_sequence"], model)
    assert mean_loss(run.tables["loss_by_sequence"]) == pytest.approx(run.metric("loss"), rel=1e-6)
    without = sinkscope.analyze(model, observables=("activation",), **options)
    assert "loss_by_sequence" not in without.tables


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = written(tmp_path_factory.mktemp("experiment") / "ids.jsonl", ragged_tokens(SHORT))
    options: dict[str, Any] = {"num_seqs": 3, "seq_len": 12, "positions": 6, "window": 8, "batch_size": 2}
    return sinkscope.intervene(tiny_model("gpt2"), do="scale-sink-value:factor=3", draws=2, input=path, **options)


def test_every_arm_keeps_attention_and_loss_of_every_sequence(experiment: Run) -> None:
    tables = experiment.tables
    conditions = set(tables["attention"]["condition"])
    assert len(conditions) == 4  # before, after and two controls
    for name in ("attention_by_sequence", "loss_by_sequence"):
        assert tables[name].groupby("condition")["sequence"].nunique().to_dict() == dict.fromkeys(conditions, 3)
    keys = ["condition", "layer", "position"]
    means, expected = (
        tables[name].groupby(keys)[["window_mass", "sink_rate", "sink_mass"]].mean().dropna()
        for name in ("attention_by_sequence", "attention")
    )
    pd.testing.assert_frame_equal(means, expected.loc[means.index], rtol=1e-5, atol=1e-7, check_dtype=False)
    assert "attention_heads_by_sequence" not in tables


def test_the_losses_of_an_arm_are_its_own(experiment: Run) -> None:
    assert_losses(experiment.at("before").tables["loss_by_sequence"], tiny_model("gpt2"))
    losses = experiment.tables["effect"].query("metric == 'loss'")
    (label,) = experiment.manifest["arms"]
    assert len(losses) == 4
    for arm, draw, value in losses[["arm", "draw", "value"]].itertuples(index=False):
        condition = {"before": "before", "after": label}.get(arm, f"{label} control {draw}")
        assert mean_loss(experiment.at(condition).tables["loss_by_sequence"]) == pytest.approx(value, rel=1e-6)

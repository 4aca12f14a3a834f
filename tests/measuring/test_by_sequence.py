"""Tables with one value per sequence, against plain transformers and against the tables of means."""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import reference
import torch
from support.encoders import encoder
from tiny import batched, measured, ragged_tokens, tiny_model
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
    if name == "gpt_oss":
        model.set_experts_implementation("eager")  # the grouped product does not support float64
    recorded = [reference.record(reference.eager_twin(model), ids) for ids in ragged_tokens(LENGTHS)]
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


# ------------------------------------------------------------------------------------------ means, in runs


def written(folder: Path, lengths: tuple[int, ...]) -> Path:
    path = folder / "ids.jsonl"
    path.write_text("".join(json.dumps({"input_ids": ids.tolist()}) + "\n" for ids in ragged_tokens(lengths)))
    return path


def assert_means(by_sequence: pd.DataFrame, means: pd.DataFrame, keys: list[str], names: dict[str, str]) -> None:
    """Assert that each column's mean over sequences is the column of that name in the table of means."""
    mine = by_sequence.groupby(keys)[list(names)].mean()
    theirs = means.groupby(keys)[list(names.values())].mean().dropna()
    assert mine.index.equals(theirs.index)
    for ours, column in names.items():
        np.testing.assert_allclose(mine[ours], theirs[column], rtol=1e-5, atol=1e-7, err_msg=ours)


@pytest.mark.parametrize("build", [lambda: tiny_model("llama"), lambda: encoder("bert")], ids=["llama", "bert"])
def test_their_means_are_the_runs_other_tables(build: Callable[[], PreTrainedModel], tmp_path: Path) -> None:
    lengths = (20, 24, 24, 17)
    run = sinkscope.analyze(
        build(), input=written(tmp_path, lengths), num_seqs=4, seq_len=24, positions=20, window=8, batch_size=3,
        epsilon=0.1, observables=FORWARD,
    )  # fmt: skip
    tables = run.tables
    masses = {name: name for name in ("window_mass", "sink_rate", "sink_mass")}
    assert_means(tables["attention_by_sequence"], tables["attention"], ["layer", "position"], masses)
    assert tables["attention_by_sequence"].groupby(["layer", "sequence"]).size().to_list()[:4] == [20, 20, 20, 17]
    by_head, by_site = ["layer", "head", "kv_head"], ["layer", "site"]
    first = {name: tables[name].query("position == 0") for name in ("attention", "geometry", "activation")}
    later = {name: tables[name].query("5 <= position <= 15") for name in ("geometry", "activation")}
    two = {name: name for name in ("window_mass", "sink_mass")}
    assert_means(tables["attention_heads_by_sequence"], first["attention"], by_head, two)
    pairs = ("key_norm", "value_norm", "qk_cosine", "qk_norm_product")
    of_first = {name: name for name in (*pairs, "sink_logit_gap")}
    assert_means(tables["geometry_by_sequence"], first["geometry"], by_head, of_first)
    assert_means(tables["geometry_by_sequence"], later["geometry"], by_head, {f"{name}_later": name for name in pairs})
    norms = tables["activation_by_sequence"]
    assert_means(norms, first["activation"], by_site, {"norm": "norm_mean"})
    assert_means(norms, later["activation"], by_site, {"norm_later": "norm_mean"})
    assert (norms["norm_smallest"] <= norms[["norm", "norm_later"]].min(axis=1)).all()


def plain_losses(model: PreTrainedModel, lengths: tuple[int, ...]) -> list[float]:
    """Return the loss per predicted token of each sequence."""
    losses = []
    for ids in ragged_tokens(lengths):
        tokens = torch.as_tensor(ids)[None]
        losses.append(float(cross_entropy(model(tokens).logits[0, :-1].double(), tokens[0, 1:])))
    return losses


def assert_losses(table: pd.DataFrame, expected_losses: list[float], lengths: tuple[int, ...]) -> None:
    assert table["layer"].eq(-1).all()
    assert table["sequence"].tolist() == list(range(len(lengths)))
    assert table["predicted"].tolist() == [length - 1 for length in lengths]
    np.testing.assert_allclose(table["loss"], expected_losses, rtol=1e-5)


def mean_loss(table: pd.DataFrame) -> float:
    return float(np.average(table["loss"].to_numpy(float), weights=table["predicted"]))


def test_analyze_keeps_the_loss_of_every_sequence(tmp_path: Path) -> None:
    model, lengths = tiny_model("llama"), (12, 5, 9)
    options: dict[str, Any] = {"input": written(tmp_path, lengths), "num_seqs": 3, "seq_len": 12}
    run = sinkscope.analyze(model, observables=("gradient",), batch_size=2, **options)
    assert_losses(run.tables["loss_by_sequence"], plain_losses(model, lengths), lengths)
    assert mean_loss(run.tables["loss_by_sequence"]) == pytest.approx(run.metric("loss"), rel=1e-6)
    without = sinkscope.analyze(model, observables=("activation",), **options)
    assert "loss_by_sequence" not in without.tables


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path = written(tmp_path_factory.mktemp("experiment"), (12, 5, 9))
    options: dict[str, Any] = {"num_seqs": 3, "seq_len": 12, "positions": 6, "window": 8, "batch_size": 2}
    return sinkscope.intervene(tiny_model("gpt2"), do="scale-sink-value:factor=3", draws=2, input=path, **options)


def test_every_arm_keeps_attention_and_loss_of_every_sequence(experiment: Run) -> None:
    tables = experiment.tables
    conditions = set(tables["attention"]["condition"])
    assert len(conditions) == 4  # before, after and two controls
    masses = {name: name for name in ("window_mass", "sink_rate", "sink_mass")}
    keys = ["condition", "layer", "position"]
    is_control = tables["attention"]["condition"].str.contains("control")
    of_controls = is_control & (tables["attention"]["position"] == 0)  # the arm watches position 0
    assert_means(tables["attention_by_sequence"], tables["attention"][~is_control | of_controls], keys, masses)
    assert (
        set(tables["attention_by_sequence"]["condition"]) == conditions == set(tables["loss_by_sequence"]["condition"])
    )
    assert "attention_heads_by_sequence" not in tables


def test_the_losses_of_an_arm_are_its_own(experiment: Run) -> None:
    lengths = (12, 5, 9)
    assert_losses(
        experiment.at("before").tables["loss_by_sequence"], plain_losses(tiny_model("gpt2"), lengths), lengths
    )
    losses = experiment.tables["effect"].query("metric == 'loss'")
    (label,) = experiment.manifest["arms"]
    for arm, condition in (("before", "before"), ("after", label)):
        (value,) = losses[losses["arm"] == arm]["value"]
        assert mean_loss(experiment.at(condition).tables["loss_by_sequence"]) == pytest.approx(value, rel=1e-6)
    for draw, value in losses[losses["arm"] == "control"].set_index("draw")["value"].items():
        table = experiment.at(f"{label} control {draw}").tables["loss_by_sequence"]
        assert mean_loss(table) == pytest.approx(value, rel=1e-6)


# --------------------------------------------------------------------------------------------- the parts

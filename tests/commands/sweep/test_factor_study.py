"""Trainings of a sweep, grouped by the settings in which they differ, on hand-made tables."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from sinkscope.commands.sweep.factor_study import (
    ONSET,
    PAPER,
    STUDY,
    at_the_end,
    onsets,
    published,
    study_rows,
    summary,
    with_levels,
    without_key,
)
from sinkscope.commands.sweep.output import MARKED, words
from sinkscope.commands.sweep.page import SweepPage
from sinkscope.commands.sweep.tables import SweepTables
from sinkscope.figures import KINDS
from sinkscope.html_page import Contents


def table(rates: dict[tuple[str, str], list[float]]) -> pd.DataFrame:
    """Make the table of trainings from (settings, arm) → the sink rate of each seed at the last of three steps."""
    rows = [
        ("m", arm, -1, settings, seed, step, 32 * step, metric, value)
        for (settings, arm), last in rates.items()
        for seed, rate in enumerate(last)
        for step in (0, 100, 200)
        for metric, value in (("sink_rate", rate * step / 200), ("loss", 3 - step / 100 - rate))
    ]
    columns = ["model", "condition", "layer", "settings", "seed", "step", "tokens", "metric", "value"]
    return pd.DataFrame(rows, columns=columns)


SCHEMES = table({
    ("config=small:layers=3,position_scheme=alibi", "none"): [0.2, 0.4],
    ("config=small:layers=3,position_scheme=none", "none"): [0.0, 0.1],
})  # fmt: skip
DECAYS = table({
    (f"weight-decay={decay}", arm): [rate]
    for decay in ("0.5", "5.0")
    for arm, rate in (("softmax", 0.3), ("sigmoid", 0.0))
})  # fmt: skip
BIASES = table({("", arm): rates for arm, rates in {"sigmoid": [0.1, 0.3], "KV-bias": [0.5], "none": [0.2]}.items()})


def test_levels_consist_of_the_settings_that_differ() -> None:
    assert set(with_levels(SCHEMES)["level"]) == {"position_scheme=alibi", "position_scheme=none"}
    assert set(with_levels(DECAYS)["level"]) == {
        "weight_decay=0.5 softmax", "weight_decay=0.5 sigmoid", "weight_decay=5 softmax", "weight_decay=5 sigmoid",
    }  # fmt: skip
    assert set(with_levels(table({("config=small", "none"): [0.1]}))["level"]) == {"small none"}
    assert set(with_levels(table({("seed=3", "none"): [0.1]}))["level"]) == {"none"}
    of_one = ["position-scheme=bucket-number,learning-rate=1e-05", "position-scheme=alibi,learning-rate=0.01"]
    assert list(dict.fromkeys(with_levels(table({(one, "none"): [0.1] for one in of_one}))["level"])) == [
        "position_scheme=bucket-number learning_rate=1e-05", "position_scheme=alibi learning_rate=0.01",
    ]  # fmt: skip


def test_a_setting_that_all_levels_have_is_named_once() -> None:
    assert without_key(["a=1 b", "a=2 b"]) == ("a", ["1 b", "2 b"])
    for levels in (["a=1", "none"], ["a=1 b=2", "a=2 b=1"]):
        assert without_key(levels) == ("", levels)


def figure_of(table: pd.DataFrame, name: str) -> Any:
    return KINDS["cells of a sweep"][name](SweepTables({STUDY: table}, {}))


def test_every_seed_the_means_and_published_rates_are_in_the_row_of_their_level() -> None:
    (ax,) = figure_of(BIASES, "sweep-factor").axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ["sigmoid", "KV-bias", "none"]
    expected = {
        "each seed": [(10, -0.2), (30, 0.2), (50, 1), (20, 2)],
        "mean": [(20, 0), (50, 1), (20, 2)],
        "WSE, 60M": [(0.44, 0), (18.18, 2)],
        "WSE, 60M, transcribed": [(0.04, 1)],
    }
    assert [line.get_label() for line in ax.lines] == list(expected)
    for line, points in zip(ax.lines, expected.values(), strict=True):
        np.testing.assert_allclose(line.get_xydata(), points)
    weights = BIASES[BIASES["metric"] == "loss"].assign(metric="total_weight")
    for weight, is_proxy in ((0.5, True), (0.95, False)):  # a bias takes a small share
        (ax,) = figure_of(pd.concat([BIASES, weights.assign(value=weight)]), "sweep-factor").axes
        assert ax.get_xlabel().startswith("sink rate at position 0 in %")
        assert ("where attention is not softmax" in ax.get_xlabel()) == is_proxy
    (ax,) = figure_of(table({("", "none"): [0.2], ("fixed-position=1", "none"): [0.3]}), "sweep-factor").axes
    assert ax.get_xlabel() == "sink rate at the fixed token in %"


def test_each_level_has_a_panel_with_its_mean_by_step() -> None:
    figure = figure_of(BIASES, "sweep-training-sink")
    assert {ax.get_title(): ax.lines[0].get_ydata().tolist() for ax in figure.axes} == {
        "sigmoid": [0, 10, 20], "KV-bias": [0, 25, 50], "none": [0, 10, 20],
    }  # fmt: skip
    assert figure.get_suptitle().startswith("mean and range of 1 to 2 seeds")
    figure = figure_of(SCHEMES, "sweep-training-loss")
    assert figure.get_suptitle() == "by position_scheme · mean and range of 2 seeds"
    np.testing.assert_allclose(figure.axes[0].lines[0].get_xydata(), [(0, 2.7), (100, 1.7), (200, 0.7)])


def test_cells_for_single_seeds_or_arms_give_the_same_levels() -> None:
    together = table({(f"tokens={tokens}", "none"): [0.2, 0.4] for tokens in (64, 128)})
    apart = together.assign(settings=together["settings"] + ",seed=" + together["seed"].astype(str))
    pd.testing.assert_frame_equal(summary(apart), summary(together))
    assert set(with_levels(apart)["level"]) == {"tokens=64", "tokens=128"}
    together = table({("tokens=64", arm): [0.2, 0.4] for arm in ("none", "sigmoid")})
    apart = together.assign(settings="method=" + together["condition"] + ",tokens=64")
    pd.testing.assert_frame_equal(summary(apart), summary(together))
    assert summary(apart)[PAPER].tolist() == ["18.18", "0.44"]


@pytest.mark.parametrize(
    ("level", "rate"),
    [
        ("position_scheme=alibi", 20.78),
        ("weight_decay=5 softmax", 0.01),
        ("sigmoid", 0.44),
        ("weight_decay=5 sigmoid", None),  # table 14 has other weight decays
        ("num_hidden_layers=3 position_scheme=alibi", 20.78),
        ("position_scheme=alibi norm_placement=post", None),
        ("position_scheme=alibi batch_size=7", None),
        ("softmax", 18.18),
        ("num_attention_heads=4 feed_forward=gelu", 14.76),
        ("num_attention_heads=2 none", 12.95),
        ("bos=never softmax", 18.18),
    ],
)
def test_published_rates_are_those_of_a_single_factor(level: str, rate: float | None) -> None:
    result = published(level)
    assert (None if result is None else result.value) == rate


def test_the_end_of_each_training() -> None:
    end = at_the_end(with_levels(SCHEMES))
    assert end.loc[("position_scheme=alibi", 1), "sink_rate"] == pytest.approx(40)
    assert end.loc[("position_scheme=alibi", 1), "loss"] == pytest.approx(0.6)
    text = summary(SCHEMES).set_index("level")
    assert text.loc["position_scheme=alibi", "sink rate in %"] == "30 ± 14"
    assert text.loc["position_scheme=alibi", "WSE, sink rate in %"] == "20.78"
    assert text.loc["position_scheme=none", "seeds"] == "2"
    assert summary(DECAYS).set_index("level").loc["weight_decay=5 sigmoid", "sink rate in %"] == "0"


def test_after_how_many_tokens_a_sink_is_there() -> None:
    """The sink rate rises evenly over 200 steps of 32 tokens, and the onset is the first log above 10 %."""
    begun = onsets(with_levels(SCHEMES))
    assert begun.to_dict() == {("position_scheme=alibi", 0): 6400, ("position_scheme=alibi", 1): 3200}
    text = summary(SCHEMES).set_index("level")[ONSET]
    assert text["position_scheme=alibi"] == "4.8 ± 2.3"
    assert text["position_scheme=none"] == "–"
    some = table({("config=a", "none"): [0.3, 0.0], ("config=b", "none"): [0.3, 0.3]})
    assert summary(some).set_index("level")[ONSET].to_dict() == {"a": "3.2 (1 of 2)", "b": "3.2 ± 0"}


def test_numbers_are_those_of_the_seeds_that_have_them() -> None:
    values = {"total_weight": (1.0, 1.0), "total_weight_at_sink": (0.001,), "loss": (1000.0, 4000.0)}
    rows = [
        ("m", "a", -1, "config=small", seed, 200, 6400, metric, value)
        for metric, of_seeds in values.items()
        for seed, value in enumerate(of_seeds)
    ]
    whole = pd.DataFrame(rows, columns=SCHEMES.columns)
    (row,) = summary(whole).to_dict("records")
    assert (row["total weight"], row["total weight at the sink"]) == ("1 ± 0", "0.001 (1 of 2)")
    assert row["loss"] == "2500 ± 2100"  # without an exponent
    others = pd.DataFrame({"layer": [-1, 0, -1], "metric": ["loss", "sink_rate", "learning_rate"], "value": 0.5})
    assert study_rows(others)["metric"].tolist() == ["loss"]
    said = [words(SweepTables({STUDY: of}, {}), {"content": {"title": ""}}) for of in (whole, SCHEMES, BIASES)]
    assert ["Σ|sim ÷ Z|" in each for each in said] == [True, False, False]
    assert [MARKED in each for each in said] == [False, False, True]  # of KV-bias


def test_the_page_has_the_mean_and_spread_of_the_last_step_of_each_level() -> None:
    data = SweepPage().data(Contents({"command": "sweep"}, {STUDY: SCHEMES}))
    rows = {(level, metric): numbers for level, metric, *numbers in data["last_steps"]}
    assert rows["position_scheme=alibi", "sink_rate"] == pytest.approx([0.3, 0.02**0.5, 2])
    assert rows["position_scheme=none", "loss"] == pytest.approx([0.95, 0.005**0.5, 2])
    assert {level for *_, level, _, _ in data["levels"]} == {level for level, _ in rows}
    published_shares = {level: rate for *_, level, rate, _ in data["levels"]}
    assert published_shares == pytest.approx({"position_scheme=alibi": 0.2078, "position_scheme=none": 0.2035})
    marks = SweepPage().data(Contents({"command": "sweep"}, {STUDY: BIASES}))["levels"]
    assert {level: mark for *_, level, _, mark in marks} == {"sigmoid": "", "KV-bias": "†", "none": ""}
    empty = SweepPage().data(Contents({"command": "sweep"}, {}))
    assert (empty["levels"], empty["last_steps"], empty["spread"]) == ([], [], False)
    assert SweepPage().linked(Path("out", "comparison"), {"cells": ["a"]}) == {"a": Path("out", "cells", "a")}


def test_each_training_ends_at_its_own_last_step() -> None:
    rows = [
        ("m", "none", -1, f"steps={last}", 0, step, 32 * step, "sink_rate", step / 1000)
        for last in (100, 200)
        for step in (0, 100, 200)
        if step <= last
    ]
    columns = ["model", "condition", "layer", "settings", "seed", "step", "tokens", "metric", "value"]
    end = at_the_end(with_levels(pd.DataFrame(rows, columns=columns)))["sink_rate"]
    assert end.to_dict() == pytest.approx({("steps=100", 0): 10, ("steps=200", 0): 20})

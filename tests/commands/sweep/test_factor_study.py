"""Trainings of a sweep, grouped by the settings in which they differ, on hand-made tables."""

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
)
from sinkscope.commands.sweep.output import words
from sinkscope.commands.sweep.page import SweepPage
from sinkscope.commands.sweep.tables import SweepTables
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


def test_levels_consist_of_the_settings_that_differ() -> None:
    assert set(with_levels(SCHEMES)["level"]) == {"position_scheme=alibi", "position_scheme=none"}
    assert set(with_levels(DECAYS)["level"]) == {
        "weight_decay=0.5 softmax", "weight_decay=0.5 sigmoid", "weight_decay=5 softmax", "weight_decay=5 sigmoid",
    }  # fmt: skip
    assert set(with_levels(table({("config=small", "none"): [0.1]}))["level"]) == {"small none"}
    assert set(with_levels(table({("seed=3", "none"): [0.1]}))["level"]) == {"none"}


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
    said = [words(SweepTables({STUDY: of}, {}), {"content": {"title": ""}}) for of in (whole, SCHEMES)]
    assert ["Σ|sim ÷ Z|" in each for each in said] == [True, False]


def test_the_page_has_the_mean_and_spread_of_the_last_step_of_each_level() -> None:
    data = SweepPage().data(Contents({"command": "sweep"}, {STUDY: SCHEMES}))
    rows = {(level, metric): numbers for level, metric, *numbers in data["last_steps"]}
    assert rows["position_scheme=alibi", "sink_rate"] == pytest.approx([0.3, 0.02**0.5, 2])
    assert rows["position_scheme=none", "loss"] == pytest.approx([0.95, 0.005**0.5, 2])
    assert {level for *_, level, _, _ in data["levels"]} == {level for level, _ in rows}
    published_shares = {level: rate for *_, level, rate, _ in data["levels"]}
    assert published_shares == pytest.approx({"position_scheme=alibi": 0.2078, "position_scheme=none": 0.2035})
    empty = SweepPage().data(Contents({"command": "sweep"}, {}))
    assert (empty["levels"], empty["last_steps"]) == ([], [])


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

"""The order of events in a training: onsets, their delays and leads, in made-up courses with a known order."""

from collections.abc import Mapping
from dataclasses import replace
from math import inf, isnan
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.made_up_steps import GROUPS, SEQUENCES, UNIFORM, made_up_steps, sigmoid

from sinkscope.commands.steps.onsets import (
    FEWEST_STEPS,
    ONSET_COLUMNS,
    QUANTITIES,
    _in_order,
    _LeftOut,
    _order,
    delay,
    findings,
    lag_correlation,
    lead,
    lead_of,
    left_out,
    onset_of,
    onset_table,
    resampled,
    steps_between,
)
from sinkscope.results.findings import SINK, Outcome
from sinkscope.results.run import RunData
from sinkscope.results.statistics import bootstrap, jackknife, resamplings
from sinkscope.results.tables import names_of

STEPS = [0, *(2**power for power in range(12))]
LATE, EARLY = 300, 50  # between the steps 256 and 512, and 32 and 64: two steps apart


def rows_of(table: pd.DataFrame, number: str) -> dict[tuple[str, str], Any]:
    return {(row.quantity, row.other): row for row in table[table["number"] == number].itertuples()}


def training(**onsets: float) -> dict[str, np.ndarray]:
    """Return courses with these onsets; ratios rise evenly in logarithms."""
    of = {name: sigmoid(STEPS, onset) for name, onset in onsets.items()}
    rises = {"value_gradient": lambda x: 2 * 20**x, "norm": lambda x: 100**x, "sink_rate": lambda x: 0.2 * x}
    return {name: rise(of[name]) for name, rise in rises.items()}


def sentences(runs: list[tuple[int, RunData]]) -> dict[str, str]:
    return {finding.name: finding.sentence for finding in findings(onset_table(runs))}


def test_draws_have_the_interval_of_the_jackknife_and_what_all_steps_share_drops_out() -> None:
    for groups in (4, 20):
        values = np.random.default_rng(groups).normal(size=(1, 1 + groups))
        expected, estimate = jackknife(values[0]), bootstrap(resampled(values)[:, 0])
        assert estimate.value == values[0, 0]
        assert estimate.high - estimate.low == pytest.approx(expected.high - expected.low, rel=0.15)
    values = np.random.default_rng(4).normal(size=5)
    scale = 3.182446 / 1.959964 * 0.75**0.5
    by_hand = values[0] + scale * (resamplings(4, size=4) - 1) @ (values[1:].mean() - values[1:])
    np.testing.assert_allclose(resampled(values[None])[:, 0], by_hand, atol=1e-5)
    shared = np.random.default_rng(0).normal(size=21)
    drawn = resampled(np.stack([shared, shared + 3]))
    assert drawn[:, 0].std() > 0.1
    np.testing.assert_allclose(drawn[:, 1] - drawn[:, 0], 3)


def onset(course: list[float], threshold: float | None = None) -> float:
    rows = np.tile(course, (5, 1))
    return steps_between(onset_of(rows, threshold)[1], range(0, 10 * len(course), 10)).value


def test_an_onset_is_where_a_course_stays_beyond_its_threshold() -> None:
    assert onset([0, 2, 0, 2, 2], 1) == 30  # not at its first visit
    assert onset([2, 2, 2], 1) == 0
    assert onset([2, 2, 0], 1) == inf
    assert onset([0, 1, 1], 1) == inf  # at the threshold is not above it
    assert onset([0, 4, 6, 10]) == 20  # halfway from first to last
    assert onset([10, 6, 4, 0]) == 20
    assert onset([0, 20, 0, 10]) == 30
    assert isnan(onset([3, 9, 3]))  # the last value is that of the first step


def test_ends_of_an_onset_are_steps_and_it_needs_a_change_beyond_the_first_interval() -> None:
    random = np.random.default_rng(0)
    course = np.array([0.0, 0.5, 0.2]) + random.normal(size=(1001, 3))
    course[0] = 0.0, 0.5, 0.2
    assert not len(onset_of(course)[1])
    assert len(onset_of(course + np.array([0, 0, 5]))[1])
    places = np.repeat([2, 1, 2, 4], [1, 100, 860, 40])
    onset = steps_between(places, [0, 10, 100, 1000])
    assert (onset.value, onset.low, onset.high) == (100, 10, inf)  # also after the last step


def test_each_draw_has_its_own_threshold_and_its_own_direction() -> None:
    rise = np.array([0.0, 4.0, 6.0, 10.0])
    rows = np.stack([*[rise] * 100, rise + 20, rise[::-1]])
    assert (onset_of(rows)[1] == 2).all()


def test_a_delay_is_that_of_the_second_onset() -> None:
    first, second = np.full(1001, 1), np.full(1001, 2)
    estimate = delay(first, second, [0, 9, 99, 999])
    assert (estimate.value, estimate.low, estimate.high) == (1, 1, 1)
    assert delay(second, first, [0, 9, 99, 999]).high == -1
    assert isnan(delay(first, np.full(1001, 4), [0, 9, 99, 999]).value)  # not by the last step
    assert isnan(delay(first, np.empty(0), [0, 9, 99, 999]).value)
    mostly = np.repeat([1, 4], [901, 100])  # in the other draws, both are not by the last step
    together = delay(mostly, mostly, [0, 9, 99, 999])
    assert (together.value, together.low, together.high) == (0, 0, 0)


def test_lag_correlation_is_pearsons() -> None:
    x, y = np.random.default_rng(0).normal(size=(2, 3, 12))
    expected = [np.corrcoef(a[:-1], b[1:])[0, 1] for a, b in zip(x, y, strict=True)]
    np.testing.assert_allclose(lag_correlation(x, y), expected)
    np.testing.assert_allclose(lead(x, y), -lead(y, x))
    np.testing.assert_allclose(lead(x, x), 0, atol=1e-12)


def courses(steps: int, seed: int, memory: float = 0.0, follows: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Return two courses without sampling noise; changes of the second follow those of the first by one step."""
    random = np.random.default_rng(seed)
    changes = random.normal(size=(2, steps))
    for step in range(1, steps):
        changes[:, step] += memory * changes[:, step - 1]
        changes[1, step] += follows * changes[0, step - 1]
    first, second = changes.cumsum(1)
    return np.tile(first, (3, 1)), np.tile(second, (3, 1))


def test_a_course_that_follows_another_by_a_step_is_found() -> None:
    first, second = courses(20, 0, follows=3.0)
    lead, back = lead_of(first, second), lead_of(second, first)
    assert lead.value > 0.5
    assert lead.value > lead.null_high
    assert back.value == pytest.approx(-lead.value)
    assert back.value < back.null_low
    assert lead.low == lead.high == pytest.approx(lead.value)  # no noise in these


@pytest.mark.parametrize("memory", [0.0, 0.8, -0.6])
def test_unrelated_courses_are_beyond_the_null_as_rarely_as_it_says(memory: float) -> None:
    leads = [lead_of(*courses(20, seed, memory)) for seed in range(300)]
    beyond = np.mean([not each.null_low <= each.value <= each.null_high for each in leads])
    assert beyond < 0.09  # 0.05 and 3 standard errors of 300 trials
    if not memory:
        assert beyond > 0.015


@pytest.mark.parametrize("first", ["sink_rate", "norm"])
def test_the_order_of_a_training_with_a_known_order(first: str) -> None:
    onsets = {"sink_rate": LATE, "norm": LATE} | {first: EARLY}
    runs = made_up_steps(STEPS, training(value_gradient=EARLY, **onsets))
    table = onset_table(runs)
    onset_rows, delays = rows_of(table, "onset"), rows_of(table, "delay")
    expected = {"norm": {EARLY: 64, LATE: 512}[onsets["norm"]], "value_gradient": 64}
    assert {name: onset_rows[name, ""].value for name in expected} == expected
    for row in onset_rows.values():
        assert row.low <= row.value <= row.high
    between = delays["norm", "sink_rate"]
    assert (between.high < 0) if first == "sink_rate" else (between.low > 0)
    said = sentences(runs)["order-norm-sink_rate"]
    assert said.startswith("The sink has" if first == "sink_rate" else "The norm has")
    assert f" is {abs(between.value):.2f} [" in said


def test_a_fall_is_said_to_be_one() -> None:
    courses = training(value_gradient=EARLY, norm=EARLY, sink_rate=LATE)
    said = sentences(made_up_steps(STEPS, courses | {"norm": 1 / courses["norm"]}, noise=1e-6))
    assert "below 0.1 from step 64 on" in said["onset-norm"]
    assert said["order-norm-sink_rate"].startswith("The norm (falling) has its onset before the sink: ")


def test_quantities_are_those_of_the_tables() -> None:
    courses = training(value_gradient=EARLY, norm=EARLY, sink_rate=LATE)
    runs = made_up_steps(STEPS, courses, noise=1e-6)
    for _, run in runs:
        norms = run.tables["activation_by_sequence"]
        norms.loc[norms["layer"] == 0, "norm"] /= 2  # the norm is that of the largest layer
    table = onset_table(runs)
    pd.testing.assert_frame_equal(onset_table(runs[::-1]), table)
    shown = table[table["number"] == "course"].pivot(index="step", columns="quantity", values="value")
    np.testing.assert_allclose(shown["value_gradient"], courses["value_gradient"] / UNIFORM, rtol=1e-4)
    np.testing.assert_allclose(shown["norm"], courses["norm"], rtol=1e-4)
    np.testing.assert_allclose(shown["sink_rate"], 100 * courses["sink_rate"], atol=1e-3)
    threshold = {name: row.value for (name, _), row in rows_of(table, "threshold").items()}
    halfway = {name: np.sqrt(shown[name].iloc[0] * shown[name].iloc[-1]) for name in ("value_gradient", "norm")}
    assert threshold == pytest.approx(halfway | {"sink_rate": SINK}, rel=1e-4)
    assert set(rows_of(table, "uniform")) == {("value_gradient", "")}


def test_the_null_is_the_value_at_step_0_where_that_is_larger() -> None:
    courses = training(value_gradient=EARLY, norm=EARLY, sink_rate=LATE)
    courses["value_gradient"] = 5 * courses["value_gradient"]
    runs = made_up_steps(STEPS, courses, noise=1e-6)
    table = onset_table(runs)
    assert rows_of(table, "step-0")["value_gradient", ""].value == pytest.approx(courses["value_gradient"][0])
    assert "null: step 0" in sentences(runs)["onset-value_gradient"]
    later = onset_table(runs[1:])  # without step 0
    assert rows_of(later, "uniform")["value_gradient", ""].value == UNIFORM


def test_no_interval_of_a_rate_is_below_0() -> None:
    runs = made_up_steps(STEPS, training(value_gradient=EARLY, norm=EARLY, sink_rate=LATE))
    for _, run in runs:
        rates = run.tables["attention_by_sequence"]
        rates.loc[rates["sequence"] > 0, "sink_rate"] = 0.0  # many draws lack the only sequence with a sink
    rates = onset_table(runs).query("number == 'course' and quantity == 'sink_rate'")
    assert rates["low"].eq(0).all()


@pytest.mark.slow
def test_no_order_is_claimed_where_there_is_none() -> None:
    """Norm and value gradient are at their thresholds at the same step, where the noise of each decides."""
    claimed = led = apart = 0
    for seed in range(20):
        runs = made_up_steps(STEPS, training(value_gradient=64, norm=64, sink_rate=64), 0.5, seed)
        table = onset_table(runs)
        between = rows_of(table, "delay")["value_gradient", "norm"]
        claimed += between.low > 0 or between.high < 0
        apart += between.value != 0
        row = rows_of(table, "lead")["value_gradient", "norm"]
        led += (row.low > 0 and row.value > row.null_high) or (row.high < 0 and row.value < row.null_low)
        said = {finding.name: finding.sentence for finding in findings(table)}
        assert said["order-value_gradient-norm"].startswith("The order") == bool(between.low <= 0 <= between.high)
    assert apart > 4  # without intervals, an order would be claimed in half of the trainings
    assert claimed <= 2  # 5 % of 20, and less because onsets are steps
    assert led <= 2


def test_findings_have_the_value_and_the_interval_of_their_rows() -> None:
    table = onset_table(made_up_steps(STEPS, training(value_gradient=16, norm=64, sink_rate=256), 0.5))
    stated = {finding.name: finding for finding in findings(table)}
    said = {name: (finding.value, finding.low, finding.high) for name, finding in stated.items()}
    lags = {names: row.value for names, row in rows_of(table, "lag").items()}
    for (first, second), row in rows_of(table, "lead").items():
        assert row.value == pytest.approx(lags[first, second] - lags[second, first])
    for (name, _), row in rows_of(table, "onset").items():
        words = f"from step {row.value:.0f} on [{row.low:.0f}, {row.high:.0f}]."
        assert stated[f"onset-{name}"].sentence.endswith(words)
    for number, kind in (("onset", "onset"), ("delay", "order"), ("lead", "lead")):
        for names, row in rows_of(table, number).items():
            name = "-".join([kind, *filter(None, names)])
            assert said[name] == (row.value, row.low, row.high), name


@pytest.mark.parametrize(
    ("value", "low", "high", "leads"),
    [
        (0.7, 0.1, 0.9, True), (0.5, 0.1, 0.9, False), (0.7, -0.1, 0.9, False),
        (-0.7, -0.9, -0.1, True), (-0.5, -0.9, -0.1, False), (-0.7, -0.9, 0.1, False),
    ],
)  # fmt: skip
def test_a_lead_is_beyond_zero_and_beyond_its_null(value: float, low: float, high: float, leads: bool) -> None:
    rows = [
        ("lag", "norm", "sink_rate", -1, 0.3, 0.3, 0.3, np.nan, np.nan),
        ("lag", "sink_rate", "norm", -1, 0.2, 0.2, 0.2, np.nan, np.nan),
        ("lead", "norm", "sink_rate", -1, value, low, high, -0.6, 0.6),
    ]
    lead, _ = findings(pd.DataFrame(rows, columns=names_of(ONSET_COLUMNS)))
    first, second = ("norm", "sink") if value > 0 else ("sink", "norm")
    words = f"Changes of the {first} precede those of the {second}" if leads else "Neither norm nor sink leads the"
    assert lead.sentence.startswith(words)
    assert lead.outcome == (Outcome.PRESENT if leads else Outcome.UNDECIDED)
    assert lead.threshold == (0.6 if value > 0 else -0.6)
    assert ": r = 0.30 for norm first, 0.20 for sink first; " in lead.sentence


def test_an_interval_of_steps_has_95_percent_of_the_draws() -> None:
    estimate = _in_order(np.append(500.0, np.random.default_rng(0).permutation(1001)))
    assert (estimate.low, estimate.value, estimate.high) == (25, 500, 975)


def test_a_quantity_that_lacks_a_group_of_sequences_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    of = {"norm": [1.0, 2.0, 3.0], "sink_rate": [0.1, 0.2, np.nan]}
    for name, values in of.items():
        monkeypatch.setitem(QUANTITIES, name, QUANTITIES[name]._replace(of=lambda _, values=values: np.array(values)))
    assert left_out(RunData({"input": {"sequences": 2}}, {})).keys() == {"norm"}


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.1, 0.5, "The sink has its onset before the norm"),
        (-0.5, -0.1, "The norm has its onset before the sink"),
        (0.0, 0.5, "The order of the onsets of sink and norm is not resolved"),
        (-0.5, 0.0, "The order of the onsets of sink and norm is not resolved"),
    ],
)
def test_an_order_is_that_of_an_interval_without_0(low: float, high: float, words: str) -> None:
    row = SimpleNamespace(value=(low + high) / 2, low=low, high=high, quantity="a", other="b")
    finding = _order(row, "sink", "norm")
    assert finding.sentence.startswith(words)
    assert (finding.outcome == Outcome.PRESENT) == (low * high > 0)


def test_a_flat_training_has_no_onsets_and_no_order() -> None:
    flat = {name: np.full(len(STEPS), of[0]) for name, of in training(value_gradient=9, norm=9, sink_rate=9).items()}
    runs = made_up_steps(STEPS, flat)
    table = onset_table(runs)
    onsets = {name: row.value for (name, _), row in rows_of(table, "onset").items()}
    assert isnan(onsets["value_gradient"])
    assert isnan(onsets["norm"])
    assert onsets["sink_rate"] == inf
    assert {finding.outcome for finding in findings(table) if finding.name.startswith("onset")} == {Outcome.ABSENT}
    assert all("is not resolved: one of them has no onset" in sentence for name, sentence in sentences(runs).items()
        if name.startswith("order"))  # fmt: skip
    leads = [finding for finding in findings(table) if finding.name.startswith("lead") and isnan(finding.value)]
    assert {lead.outcome for lead in leads} == {Outcome.UNDEFINED}
    assert all(lead.sentence.endswith("leads is not known: one does not change.") for lead in leads)


def test_steps_that_cannot_be_resampled_together_have_no_table() -> None:
    runs = made_up_steps(STEPS, training(value_gradient=EARLY, norm=EARLY, sink_rate=LATE))
    assert {name for name, _ in rows_of(onset_table(runs), "onset")} == set(QUANTITIES)
    assert len(onset_table(runs[:1])) == 0
    assert len(onset_table([*runs[:-1], changed(runs[-1], sha256="another")])) == 0
    assert len(onset_table([changed(run, sequences=1) for run in runs])) == 0
    only = [(step, replace(run, tables=without(run.tables, "gradient"))) for step, run in runs]
    assert {name for name, _ in rows_of(onset_table(only), "onset")} == {"norm", "sink_rate"}
    only = [(step, replace(run, tables=without(run.tables, "attention_by_sequence"))) for step, run in only]
    assert len(onset_table(only)) == 0
    for steps in (FEWEST_STEPS - 1, FEWEST_STEPS):
        assert bool(rows_of(onset_table(runs[-steps:]), "lead")) == (steps == FEWEST_STEPS)


def test_copies_of_a_text_are_left_out_together() -> None:
    texts = [nth // 2 for nth in range(SEQUENCES)]
    _, run = changed(
        made_up_steps(STEPS[:1], training(value_gradient=EARLY, norm=EARLY, sink_rate=LATE))[0], texts=texts
    )
    everything, *others = _LeftOut(run).weights
    assert everything.all()
    assert len(others) == min(GROUPS, SEQUENCES // 2)
    for group, kept in enumerate(others):
        assert (kept == [text % GROUPS != group for text in texts]).all()


def without(tables: Mapping[str, pd.DataFrame], name: str) -> dict[str, pd.DataFrame]:
    return {kept_name: table for kept_name, table in tables.items() if kept_name != name}


def changed(pair: tuple[int, RunData], **read: Any) -> tuple[int, RunData]:
    step, run = pair
    return step, replace(run, manifest=run.manifest | {"input": run.manifest["input"] | read})


def test_the_null_of_a_lead_keeps_the_changes_of_a_step_together() -> None:
    """Whatever the order of its changes, a course does not lead itself."""
    course = np.tile(np.random.default_rng(0).normal(size=20).cumsum(), (3, 1))
    same = lead_of(course, course)
    assert (same.value, same.null_low, same.null_high) == pytest.approx((0, 0, 0), abs=1e-9)

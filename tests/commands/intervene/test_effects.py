"""Findings on arms depend on the spread of the controls, and their intervals on the sequences."""

import statistics
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.made_up_runs import grid, make_run

from sinkscope.commands.intervene.findings import (
    ArmEffect,
    findings_of,
    interval,
    interval_by_layer,
    overview,
    report,
    whole_model,
)
from sinkscope.commands.intervene.page import IntervenePage
from sinkscope.measuring.summary import arm_metrics
from sinkscope.output.run import Run
from sinkscope.results.findings import Outcome
from sinkscope.results.statistics import resamplings

NAN = float("nan")


def finding(run: Run, label: str) -> str:
    """Return all sentences on an arm."""
    return " ".join(finding.sentence for finding in findings_of(run, label))


def run_of(
    rates: dict[int, tuple[float, float, tuple[float, ...]]],
    masses: dict[int, tuple[float, float, tuple[float, ...]]] | None = None,
    perplexity: tuple[float, float, tuple[float, ...]] = (20.0, 21.0, (20.1, 20.2)),
    magnitude: tuple[float, float, tuple[float, ...]] = (100.0, 100.0, (100.0, 100.0)),
    anywhere: tuple[float, float, tuple[float, ...]] | None = None,
    expects: str = "sink-falls",
    watched: Sequence[int] = (),
) -> Run:
    """Make a run of one arm `x` from position → (before, after, controls), the same in each of six layers.

    It watches all of these positions, or those named.
    """
    rows = []

    def add(metric: str, position: int, values: tuple[float, float, tuple[float, ...]], layers: int) -> None:
        before, after, controls = values
        for layer in range(-1, layers):
            rows.append((layer, "before", -1, metric, position, before))
            rows.append((layer, "after", -1, metric, position, after))
            rows.extend((layer, "control", draw, metric, position, value) for draw, value in enumerate(controls))

    for position, values in rates.items():
        add("sink_rate", position, values, 6)
        add("window_mass", position, (masses or {}).get(position, values), 6)
    add("massive_magnitude", -1, magnitude, 6)
    if anywhere:
        add("sink_rate_anywhere", -1, anywhere, 6)
    add("perplexity", -1, perplexity, 0)
    table = pd.DataFrame(rows, columns=["layer", "arm", "draw", "metric", "position", "value"])
    table = table.assign(model="tiny", condition="x", name="x")
    arm = {"do": ["x"], "paper": "NU", "expects": expects, "watched": list(watched or rates), "controls": []}
    manifest = {"model": {"name": "tiny"}, "condition": "natural", "command": "intervene", "arms": {"x": arm}}
    return Run(manifest, {"effect": table})


@given(
    st.floats(0.3, 0.7),
    st.lists(st.floats(-0.1, 0.1), min_size=2, max_size=5),
    st.sampled_from([-1, 1]),
    st.sampled_from([-1e-6, 1e-6]),
)
@example(0.5, [0.1, *[0.0] * 8], 1, -1e-6)  # one control may change more than the mean + 2 standard deviations
@settings(max_examples=60, deadline=None)
def test_a_change_counts_only_beyond_random_changes(
    before: float, controls: list[float], direction: int, beyond: float
) -> None:
    """It counts beyond the mean of the controls' changes + 2 standard deviations, all of them, and half a percent."""
    reach = max(statistics.mean(controls) + 2 * statistics.stdev(controls), *controls, 0.005)
    after, drawn = before + direction * (reach + beyond), tuple(before + direction * change for change in controls)
    outcome = Outcome.RISES if direction > 0 else Outcome.FALLS
    effect = ArmEffect(before, after, drawn)
    assert effect.outcome == (outcome if beyond > 0 else Outcome.UNCHANGED)
    assert effect.spread == pytest.approx(statistics.stdev(drawn))
    assert ArmEffect(before, after, drawn[:1]).outcome == ArmEffect(before, after, ()).outcome == Outcome.UNDECIDED
    assert ArmEffect(NAN, after, drawn).outcome == Outcome.UNDEFINED


def test_a_sink_moves_only_if_the_target_gains_beyond_the_control() -> None:
    rates = {0: (0.7, 0.1, (0.7, 0.69, 0.71)), 1: (0.0, 0.4, (0.0, 0.0, 0.0))}
    gains = {1: (0.02, 0.30, (0.02, 0.03, 0.02))}
    moved = run_of(rates, gains, expects="sink-moves")
    assert finding(moved, "x").endswith("Here the sink moved to position 1 (NU).")
    unmoved = run_of(rates, {1: (0.02, 0.05, (0.02, 0.09, 0.04))}, expects="sink-moves")
    assert "moved to" not in finding(unmoved, "x")
    assert "did not move" in finding(unmoved, "x")
    both = run_of({0: (0.7, 0.7, (0.7, 0.69, 0.71)), 1: rates[1]}, gains, expects="sink-moves")
    assert "attention to position 1 rises, but the sink at position 0 does not fall" in finding(both, "x")
    both.manifest["arms"]["x"]["expects"] = "sink-stays"
    assert finding(both, "x").endswith("Here it does (NU).")


JUST = 1e-6
FALLEN = (0.7, 0.68, 0.69)  # controls of a rate that was 0.7


@pytest.mark.parametrize(
    ("expects", "before", "after", "controls", "outcome", "words"),
    [
        ("sink-falls", 0.7, 0.35 - JUST, FALLEN, Outcome.CONFIRMED, "it does"),
        ("sink-falls", 0.7, 0.35 + JUST, FALLEN, Outcome.PARTLY, "it does, but at least 50% of it is left"),
        ("sink-falls", 0.7, 0.69, FALLEN, Outcome.REFUTED, "it does not fall beyond the control's spread"),
        ("sink-stays", 0.7, 0.69, FALLEN, Outcome.CONFIRMED, "it does"),
        ("sink-stays", 0.7, 0.35 + JUST, FALLEN, Outcome.PARTLY, "it does, though part of it is lost"),
        ("sink-stays", 0.7, 0.35 - JUST, FALLEN, Outcome.REFUTED, "less than 50% of it is left"),
        *((expects, 0.01 - JUST, 0.0, (0.0, 0.0), Outcome.ABSENT, "there is no sink before the intervention")
            for expects in ("sink-falls", "sink-stays")),
        ("sink-falls", 0.01 + JUST, 0.0, (0.01, 0.01), Outcome.CONFIRMED, "it does"),
        ("sink-moves", 0.01 - JUST, 0.0, (0.0, 0.0), Outcome.REFUTED,
            "it did not move: position 1 gains no attention beyond the control's spread"),
        *((expects, 0.7, 0.0, controls, Outcome.UNDECIDED, "there are too few controls to judge it")
            for expects in ("sink-falls", "sink-stays", "sink-moves") for controls in ((), (0.7,))),
        ("perplexity-collapses", 20.0, 200 + JUST, (), Outcome.CONFIRMED, "it does"),
        ("perplexity-collapses", 20.0, 200 - JUST, (), Outcome.REFUTED, "it does not: the factor is not above 10"),
        *(("perplexity-unharmed", 20.0, after, (), Outcome.CONFIRMED, "it is: it changes by less than 5%")
            for after in (19 + JUST, 21 - JUST)),
        *(("perplexity-unharmed", 20.0, after, (), Outcome.REFUTED, "it is not: it changes by more than 5%")
            for after in (19 - JUST, 21 + JUST)),
    ],
)  # fmt: skip
def test_what_papers_expect_is_decided_at_the_thresholds(
    expects: str, before: float, after: float, controls: tuple[float, ...], outcome: Outcome, words: str
) -> None:
    if expects.startswith("perplexity"):
        run = run_of({0: (0.7, 0.7, (0.7, 0.7))}, perplexity=(before, after, controls), expects=expects)
    else:
        run = run_of({0: (before, after, controls), 1: (0.0, 0.0, controls)}, expects=expects)
    change, *_, judged = findings_of(run, "x")
    assert (judged.name, judged.outcome) == (expects, outcome)
    assert judged.sentence.endswith(f"Here {words} (NU).")
    values = {"perplexity-collapses": after / before, "perplexity-unharmed": after / before - 1}
    assert judged.value == pytest.approx(values.get(expects, after))
    if outcome == Outcome.ABSENT:
        assert change.sentence == "There is no sink at position 0, before or after."
    if outcome == Outcome.UNDECIDED:
        assert change.sentence.endswith("has too few controls to be judged, at 0.000 times its value before.")


def test_a_change_is_said_once_as_a_ratio() -> None:
    run = run_of({0: (0.8, 0.2, (0.8, 0.8))}, perplexity=(20.0, 25.0, (21.0, 22.0)))
    risen = run_of({0: (0.2, 0.4, (0.2, 0.2))})
    for one, most in ((run, 0.0), (risen, 0.9)):  # these layers change more than the others
        rates = one.tables["effect"]
        is_after = (rates["metric"] == "sink_rate") & (rates["arm"] == "after")
        rates.loc[is_after & rates["layer"].isin([1, 2, 4]), "value"] = most
    rates = run.tables["effect"]
    sentences = finding(run, "x")
    assert "falls to 0.250 times its value before, most in layers 1–2, 4." in sentences
    three = finding(Run(run.manifest, {"effect": rates[rates["layer"] < 3]}), "x")
    assert "falls to 0.250 times its value before." in three  # all of its layers are not the most changed ones
    assert "rises to 2.000 times its value before, most in layers 1–2, 4." in finding(risen, "x")
    assert "The sink rate at position 0 rises" in finding(run_of({0: (0.0, 0.4, (0.0, 0.0))}), "x")
    assert list(overview(run)["sink rate @0"]) == ["80.0%", "20.0%", "80.0% ± 0.0%"]  # before, after, control
    assert list(overview(run)["perplexity"]) == ["20.00", "25.00", "21.50 ± 0.71"]
    assert "Perplexity is 1.250 times its value before, and 1.075 times under the control." in sentences


@pytest.mark.parametrize(
    ("do", "after", "place"),
    [
        ("zero-massive:layers=0,coordinates=7", 900.0, "layer"),
        ("mean-massive:layers=1,coordinates=7,means=3", 900.0, "coordinate"),
        ("zero-massive:layers=1,coordinates=5", 900.0, None),
        ("zero-massive:layers=0,coordinates=7", 90.0, None),  # it falls
        ("mask-sink", 900.0, None),
    ],
)
def test_a_largest_activation_that_rises_elsewhere_is_named(do: str, after: float, place: str | None) -> None:
    run = run_of({0: (0.7, 0.7, (0.7, 0.7))}, magnitude=(100.0, after, (100.0, 100.0)))
    run.manifest["arms"]["x"]["do"] = [do]
    massive = pd.DataFrame([  # the single largest entry is in layer 0, the largest mean over sequences in layer 1
        (0, 0, 0, 7, 10.0), (0, 1, 0, 7, 1000.0), (1, 0, 0, 5, -900.0), (1, 0, 3, 6, 20.0), (1, 1, 0, 5, 800.0),
    ])  # fmt: skip
    massive.columns = ["layer", "sequence", "position", "coordinate", "value"]
    larger = pd.DataFrame({"layer": [2], "sequence": 0, "position": 9, "coordinate": 9, "value": 5000.0})
    massive = pd.concat([massive.assign(condition="x"), larger.assign(condition="before")], ignore_index=True)
    run = Run(run.manifest, {**run.tables, "massive": massive})
    named = [finding.numbers for finding in findings_of(run, "x") if finding.name == "largest-rises"]
    assert [numbers["place"] for numbers in named] == ([place] if place else [])
    assert all((numbers["layer"], numbers["position"], numbers["coordinate"]) == (1, 0, 5) for numbers in named)


def test_the_metrics_of_an_arm() -> None:
    attention = grid(layer=range(2), head=range(2), position=range(2))
    attention["window_mass"] = [0.8, 0.1, 0.4, 0.2, 0.2, 0.0, 0.0, 0.0]
    attention["sink_rate"] = [1.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0]
    massive = pd.DataFrame({"layer": [0, 0, 1, 1, 1], "sequence": [0, 1, 0, 1, 1]})
    massive = massive.assign(value=[-3.0, 5.0, 2000.0, -1000.0, 900.0], is_massive=[False, False, True, True, False])
    sinks = pd.DataFrame([(0, 0, 0, 0), (0, 0, 0, 7), (0, 1, 1, 3)], columns=["layer", "head", "sequence", "position"])
    sinks = sinks.assign(queries=20, window_mass=0.9, uniform_mass=0.05)
    tables = {"attention": attention.assign(uniform_mass=0.05), "massive": massive, "sink_positions": sinks}
    table = arm_metrics(tables, [0], loss=2.0)
    values = table.set_index(["metric", "position", "layer"])["value"]
    assert (values["sink_rate", 0, 0], values["sink_rate", 0, -1]) == (0.75, 0.375)
    assert (values["window_mass", 0, 0], values["window_mass", 1, -1]) == pytest.approx((0.6, 0.075))
    assert values["sink_rate_anywhere", -1, 0] == 0.5  # two of four pairs, one of them with two sinks
    assert values["sink_rate_anywhere", -1, -1] == 0.25
    assert values["massive_magnitude", -1, 0] == 4.0
    assert values["massive_magnitude", -1, -1] == values["massive_magnitude", -1, 1] == 1500.0
    assert values["massive_count", -1, -1] == 1.0
    assert values["perplexity", -1, -1] == pytest.approx(np.exp(2.0))


@pytest.mark.parametrize("sink", [0, 3])
def test_a_sink_that_moves_is_said_to_be_where_it_is(sink: int) -> None:
    rates = dict.fromkeys((0, 1, 8), (0.0, 0.0, (0.0, 0.0)))  # not watched, and no sinks if `sink` is 3
    rates |= {sink: (0.7, 0.0, (0.7, 0.69, 0.71)), sink + 1: (0.01, 0.55, (0.01, 0.01)), 7: (0.1, 0.2, (0.1, 0.1))}
    run = run_of(rates, anywhere=(0.72, 0.6, (0.72, 0.72)), watched=(sink, 7))
    sinks = pd.DataFrame({"condition": ["x"] * 5 + ["before"] * 5, "position": [sink, *[sink + 1] * 3, *[9] * 6]})
    sinks = sinks.assign(queries=20, window_mass=0.9, uniform_mass=0.05)
    run = Run(run.manifest, {**run.tables, "sink_positions": sinks})
    values = [finding.value for finding in findings_of(run, "x")]
    assert values == [0.0, 0.6, 0.2, 21.0, 0.0]  # sink, anywhere, target, perplexity, and the sink against the paper
    said = finding(run, "x")
    assert "position is a sink in 60.0% (72.0% before, 72.0% under the control) of the heads and sequences, " in said
    assert f"The sink rate at position {sink} falls to 0.000 times its value before" in said
    assert f"position {sink + 1} in 55.0% (1.0% before, 1.0% under the control) of the heads; 75% of the sinks" in said
    assert f"Here it does, and position {sink + 1} becomes one in 55.0% (1.0% before" in said
    assert list(overview(run)[f"sink rate @{sink + 1}"])[:2] == ["1.0%", "55.0%"]  # before, after
    assert list(overview(run)["sinks anywhere"])[:2] == ["72.0%", "60.0%"]


def test_without_a_rate_no_change_is_said() -> None:
    rates = run_of({2: (NAN, NAN, (NAN, NAN))}, {2: (0.3, 0.1, (0.3, 0.31))})
    rows = rates.tables["effect"].query("metric == 'window_mass'").assign(metric="uniform_mass", value=0.34)
    run = Run(rates.manifest | {"config": {"epsilon": 0.3}}, {"effect": pd.concat([rates.tables["effect"], rows])})
    change, mass, *_ = findings_of(run, "x")
    assert (change.outcome, mass.outcome) == (Outcome.UNDEFINED, Outcome.FALLS)
    assert "uniform attention alone gives it 34.0% of the attention" in change.sentence
    assert "Here there is no sink rate" in finding(run, "x")


def test_each_streaming_arm_has_its_own_windows() -> None:
    columns = ["condition", "method", "window", "keep", "bucket", "perplexity"]
    rows = [("near", "dense", -1, 0, -1, 20.0), ("near", "window", 8, 0, -1, 90.0)]
    rows += [("far", "dense", -1, 0, -1, 20.0), ("far", "window", 32, 0, -1, 40.0), ("far", "window", 32, 0, 4, 1.0)]
    rows += [("far", "sinks kept", 16, 4, -1, 30.0), ("far", "window", 16, 0, -1, 50.0)]
    run = run_of({0: (0.7, 0.1, ())})
    arm = {"do": [], "paper": "S2M", "expects": "", "watched": [], "controls": []}
    manifest = run.manifest | {"arms": {"near": arm, "far": arm}}
    run = Run(manifest, {"streaming": pd.DataFrame(rows, columns=columns)})
    table, dense = overview(run), "dense, as streaming measures it"
    assert list(table["perplexity"]) == ["20.00", "90.00", "20.00", "40.00", "30.00", "50.00"]
    windows = [dense, "last 8 tokens", dense, "last 32 tokens", "last 16 tokens and the first 4", "last 16 tokens"]
    assert list(table["arm"]) == windows
    assert finding(run, "far") == " ".join(  # the shortest window first
        f"With the last {kept}, perplexity is {ratio} times that of dense attention."
        for kept, ratio in (("16 tokens", "2.500"), ("16 tokens and the first 4", "1.500"), ("32 tokens", "2.000"))
    )
    assert "the last 8 tokens" not in finding(run, "far")


def test_the_page_and_the_card_have_the_controls_of_the_whole_model() -> None:
    run = run_of({0: (0.8, 0.2, (0.7, 0.9))}, perplexity=(20.0, 25.0, (21.0, 23.0)))
    card = whole_model(run).set_index(["setting", "metric"])["value"]
    assert [card[setting, "perplexity"] for setting in ("", "x", "x, random controls")] == [20.0, 25.0, 22.0]
    table = run.tables["effect"].assign(name="what the arm `x` does")
    table.loc[table["layer"] >= 0, "value"] = 0.0
    contents: Any = SimpleNamespace(all_tables={"effect": table}, manifest=run.manifest)
    controls = {row[:3]: row[3:] for row in IntervenePage().data(contents)["controls"]}
    assert controls["x", "sink_rate", 0] == pytest.approx((0.8, statistics.stdev((0.7, 0.9)), 2))
    assert controls["x", "perplexity", -1] == pytest.approx((22.0, statistics.stdev((21.0, 23.0)), 2))


SEQUENCES, LAYERS = 20, 3


@pytest.fixture(scope="module")
def arm() -> Run:
    """Make a run whose arm lowers every sink rate by 0.2, doubles every perplexity, and leaves the entries."""
    random = np.random.default_rng(0)
    before = grid(condition=["before"], layer=range(LAYERS), sequence=range(SEQUENCES), position=[0])
    before = before.assign(sink_rate=random.uniform(0.3, 1, len(before)), window_mass=0.5)
    after = before.assign(condition="arm", sink_rate=before["sink_rate"] - 0.2)
    loss = grid(condition=["before"], layer=[-1], sequence=range(SEQUENCES)).assign(predicted=7)
    loss["loss"] = random.uniform(2, 5, SEQUENCES)
    doubled = loss.assign(condition="arm", loss=loss["loss"] + np.log(2))
    massive = grid(condition=["before", "arm"], layer=range(LAYERS), sequence=range(SEQUENCES), position=[0])
    massive["value"] = -10.0 * massive["sequence"] * (massive["layer"] + 1) / LAYERS
    both = pd.DataFrame({"arm": ["before", "after"], "draw": -1})
    effect = grid(condition=["arm"], name=["arm"], layer=range(-1, LAYERS), metric=["sink_rate"], position=[0])
    effect = pd.concat([effect, effect[effect["layer"] == -1].assign(metric="perplexity", position=-1)])
    effect = effect.merge(both, how="cross").assign(value=0.5)
    effect.loc[(effect["metric"] == "perplexity") & (effect["arm"] == "after"), "value"] = 1.0
    tables = {"attention_by_sequence": [before, after], "loss_by_sequence": [loss, doubled], "massive": [massive]}
    plain = make_run(sequences=SEQUENCES)
    arms = {"arm": {"do": [], "watched": [0], "expects": ""}}
    manifest = plain.manifest | {"command": "intervene", "arms": arms, "draws": 0}
    return Run(manifest, {name: pd.concat(parts) for name, parts in tables.items()} | {"effect": effect})


def test_a_change_that_all_sequences_share_has_no_width(arm: Run) -> None:
    rate = arm.tables["attention_by_sequence"].groupby("condition")["sink_rate"].mean()
    assert interval(arm, "arm", "sink_rate", 0) == pytest.approx([rate["arm"]] * 2)
    loss = arm.tables["loss_by_sequence"].groupby("condition")["loss"].mean()
    assert interval(arm, "arm", "perplexity") == pytest.approx([np.exp(loss["arm"])] * 2)
    assert interval(arm, "arm", "massive_magnitude") == pytest.approx([95.0, 95.0])


def test_the_number_of_controls_is_that_of_the_arm_with_most(arm: Run) -> None:
    record = arm.manifest["arms"]["arm"]
    arms = {"arm": record | {"controls": [["a"]]}, "other": record | {"controls": [["a"], ["b"], ["c"]]}}
    effect = arm.tables["effect"]
    both = arm.tables | {"effect": pd.concat([effect, effect.assign(condition="other")])}
    setting = report(Run(arm.manifest | {"arms": arms}, both)).settings[-1]
    assert (setting.name, setting.value) == ("control", 3)
    assert "at most 3 for each arm" in setting.sentence


def test_a_ratio_resamples_both_runs_together(arm: Run) -> None:
    rates = arm.tables["attention_by_sequence"].groupby(["condition", "sequence"])["sink_rate"].mean().unstack(0)
    means = resamplings(SEQUENCES) @ rates
    ends = np.quantile((means["arm"] / means["before"])[1:], [0.025, 0.975])
    change, perplexity = findings_of(arm, "arm")
    assert (change.numbers["ratio_low"], change.numbers["ratio_high"]) == pytest.approx(tuple(ends))
    assert "ratio_low" not in perplexity.numbers  # twice the perplexity in all sequences
    expects = {"arm": {"do": [], "paper": "NU", "watched": [0], "expects": "perplexity-unharmed"}}
    for spread, outcome in ((0.0, Outcome.REFUTED), (9.0, Outcome.UNDECIDED)):  # doubled, on average
        loss = arm.tables["loss_by_sequence"].copy()
        loss.loc[(loss["condition"] == "arm") & (loss["sequence"] < 10), "loss"] += spread
        loss.loc[(loss["condition"] == "arm") & (loss["sequence"] >= 10), "loss"] -= spread
        run = Run(arm.manifest | {"arms": expects}, arm.tables | {"loss_by_sequence": loss})
        assert findings_of(run, "arm")[-1].outcome == outcome
    rare = arm.tables["attention_by_sequence"].copy()
    rare["sink_rate"] *= rare["sequence"] == 0  # many resamples have no sink at all
    change = findings_of(Run(arm.manifest, arm.tables | {"attention_by_sequence": rare}), "arm")[0]
    assert "ratio" in change.numbers
    assert "ratio_low" not in change.numbers
    alone = Run(arm.manifest, {name: table[table["condition"] == "arm"] for name, table in arm.tables.items()})
    assert all("ratio_low" not in finding.numbers for finding in findings_of(alone, "arm"))  # `before` is elsewhere


def test_changes_that_differ_between_sequences_are_resampled(arm: Run) -> None:
    table = arm.tables["attention_by_sequence"].assign(position=5)
    table["layer"] *= 2  # the layers between have no attention
    is_arm = table["condition"] == "arm"
    table.loc[is_arm, "sink_rate"] = 0.1
    changed = Run(arm.manifest, {"attention_by_sequence": table})
    before = table[~is_arm].pivot(index="sequence", columns="layer", values="sink_rate").to_numpy()
    means = resamplings(SEQUENCES) @ (0.1 - before) / SEQUENCES
    ends = np.quantile(means[1:].mean(1), [0.025, 0.975])
    assert interval(changed, "arm", "sink_rate", 5) == pytest.approx(before.mean() + ends)
    by_layer = interval_by_layer(changed, "arm", "sink_rate", 5)
    assert interval(changed, "another", "sink_rate", 5) is None  # nor without tables by sequence
    assert interval_by_layer(Run(arm.manifest, {"effect": arm.tables["effect"]}), "arm", "sink_rate", 5).empty
    for layer in range(LAYERS):
        ends = before[:, layer].mean() + np.quantile(means[1:, layer], [0.025, 0.975])
        assert by_layer.loc[2 * layer].tolist() == pytest.approx(ends)


def test_the_layers_that_are_named_change_as_the_model_does() -> None:
    """The rate falls in layers 1 to 3 by less than it rises in layer 0, which the sentence leaves out."""
    before, after = [0.05, 0.8, 0.8, 0.8, 0.8, 0.8], [0.7, 0.2, 0.3, 0.4, 0.8, 0.8]
    rows: list[tuple[Any, ...]] = []
    for layer, (was, becomes) in enumerate([(np.mean(before), np.mean(after)), *zip(before, after, strict=True)], -1):
        rows += [(layer, "before", -1, "sink_rate", 0, was), (layer, "after", -1, "sink_rate", 0, becomes)]
        rows += [(layer, "control", draw, "sink_rate", 0, was + 0.001 * draw) for draw in range(2)]
    for metric, value in (("perplexity", 20.0), ("massive_magnitude", 100.0)):
        rows += [(-1, arm, -1, metric, -1, value) for arm in ("before", "after")]
    table = pd.DataFrame(rows, columns=["layer", "arm", "draw", "metric", "position", "value"])
    arm = {"do": ["x"], "paper": "NU", "expects": "", "watched": [0], "controls": []}
    manifest = {"model": {"name": "tiny"}, "condition": "natural", "command": "intervene", "arms": {"x": arm}}
    change = findings_of(Run(manifest, {"effect": table.assign(model="tiny", condition="x", name="x")}), "x")[0]
    assert (change.outcome, change.numbers["layers"]) == ("falls", (1, 2, 3))


def test_a_place_that_one_of_two_interventions_changes_is_not_named() -> None:
    """Each changes a layer of its own; the largest entry is in the second one's, at a position that neither changes."""
    massive = pd.DataFrame([(0, 0, 0, 7, 10.0), (1, 0, 3, 5, -900.0)])
    massive.columns = ["layer", "sequence", "position", "coordinate", "value"]
    arm = run_of({0: (0.7, 0.7, (0.7, 0.7))}, magnitude=(100.0, 900.0, (100.0, 100.0)))
    arm.manifest["arms"]["x"]["do"] = ["zero-massive:layers=0,coordinates=7", "zero-massive:layers=1,coordinates=5"]
    run = Run(arm.manifest, {**arm.tables, "massive": massive.assign(condition="x")})
    (named,) = (finding for finding in findings_of(run, "x") if finding.name == "largest-rises")
    assert named.numbers["place"] == "position"
    assert named.sentence.endswith("position 3, a position that `zero-massive and zero-massive` does not change.")

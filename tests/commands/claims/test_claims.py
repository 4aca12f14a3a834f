"""Claims on models with a known truth, as a planted sink, and their nulls: random weights, controls, plain arms."""

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from support.hand_made_runs import HOLDS, NO_BOS, analysis, by_sequence, experiment
from support.hand_made_trainings import gradients, training
from support.hand_made_trainings import judged as judged_trainings
from tiny import VOCAB, tiny_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import sinkscope
from sinkscope.commands.claims.claim import Judgment, Part, judge
from sinkscope.commands.claims.evidence import MAIN, Evidence, Null
from sinkscope.commands.claims.figures import OUTCOME_LOOKS, _decided, _distance
from sinkscope.commands.claims.register import CLAIMS
from sinkscope.commands.claims.scorecard import Scorecard, headline, once, scorecard_markdown, unusual, value_text
from sinkscope.commands.claims.studies import PLAIN
from sinkscope.commands.claims.table import evidence_of, judged, no_interval
from sinkscope.figures import KINDS
from sinkscope.measuring.observables.query_bias import NO_QUERY_BIAS
from sinkscope.measuring.random_weights import WEIGHTS_AT_RANDOM
from sinkscope.output.run import Run
from sinkscope.results.findings import Outcome
from sinkscope.results.judgment import NotDefined, above, at_least, at_most, below, between
from sinkscope.results.judgment import Test as Threshold
from sinkscope.results.run import RunData
from sinkscope.results.sequences import Lacks
from sinkscope.results.statistics import Estimate, exact
from sinkscope.results.trainings import UNTOUCHED


def as_draw(run: RunData, draw: int | None) -> RunData:
    """Return a run as one on random weights; None: as it is."""
    if draw is None:
        return run
    model = run.manifest["model"] | {"weights": WEIGHTS_AT_RANDOM}
    return RunData(run.manifest | {"model": model, "draw": draw}, run.tables)


def of_text(rate: float, draw: int | None = None) -> RunData:
    """Return a run with this sink rate at position 0; with a draw, a run on random weights."""
    table = by_sequence({"sink_rate": [rate, 0.0]}, noise=0.01, position=[0, 1])
    return as_draw(analysis({"attention_by_sequence": table}), draw)


def sink(*of_random_weights: float) -> Judgment:
    runs = [of_text(0.5), *(of_text(rate, draw) for draw, rate in enumerate(of_random_weights))]
    return judge(CLAIMS["W-1"], evidence_of(runs, "made"))


def test_a_claim_distinguishes_a_model_from_random_weights_if_none_of_them_passes() -> None:
    judgment = sink(0.0, 0.01, 0.02)
    assert (judgment.outcome, judgment.null_passes, judgment.tells) == (HOLDS, 0.0, "yes")
    assert judgment.estimates[0].null_low < judgment.estimates[0].null < judgment.estimates[0].null_high < 3
    assert (sink(0.0, 0.4).null_passes, sink(0.0, 0.4).tells) == (0.5, "no")
    assert sink().tells == ""


def test_one_number_that_separates_the_model_from_its_null_suffices() -> None:
    judgment = sink(0.0, 0.01, 0.02)
    (estimate,), (part,) = judgment.estimates, judgment.claim.parts
    as_null = replace(estimate, null=estimate.value, null_low=estimate.low, null_high=estimate.high)
    for estimates, tells in (((estimate, as_null), "yes"), ((as_null, estimate), "yes"), ((as_null, as_null), "no")):
        claim = replace(judgment.claim, parts=(part, part))
        assert replace(judgment, claim=claim, estimates=estimates).tells == tells


def test_the_table_has_the_numbers_of_the_judgment() -> None:
    runs = [of_text(0.5), *(of_text(rate, draw) for draw, rate in enumerate((0.0, 0.01, 0.02)))]
    (row,) = card_of(*runs, claims=["W-1"]).table.to_dict("records")
    (estimate,) = judge(CLAIMS["W-1"], evidence_of(runs, "made")).estimates
    assert row["low"] < row["value"] < row["high"]
    assert row["null_low"] < row["null"] < row["null_high"]
    assert (row["least"], row["most"], row["is_ours"]) == (10.0, np.inf, True)
    for name in ("value", "low", "high", "null", "null_low", "null_high"):
        assert row[name] == getattr(estimate, name)


def test_a_draw_of_random_weights_is_judged_against_the_others() -> None:
    runs = [of_text(0.5), *(of_text(0.0, draw) for draw in range(3))]
    nulls = [
        (draw.run(MAIN).manifest["draw"], [null.run(MAIN).manifest["draw"] for null in draw.nulls])
        for draw in evidence_of(runs, "made").nulls
    ]
    assert nulls == [(0, [1, 2]), (1, [0, 2]), (2, [0, 1])]


def absent_from_draws(error: type[Exception]) -> Part:
    def measure(evidence: Evidence) -> Estimate:
        if "draw" in evidence.run(MAIN).manifest:
            raise error("random weights lack it")
        return exact(1.0)

    return Part("a number", measure, above(0.0))


@pytest.mark.parametrize(
    ("errors", "tells"), [((Lacks,), ""), ((NotDefined,), "undefined"), ((Lacks, NotDefined), "undefined")]
)
def test_a_null_without_one_of_the_numbers_is_undefined_whatever_else_was_not_measured(errors, tells: str) -> None:
    claim = replace(CLAIMS["W-1"], parts=tuple(map(absent_from_draws, errors)))
    judgment = judge(claim, evidence_of([of_text(0.5), of_text(0.0, 0)], "made"))
    assert (judgment.outcome, judgment.tells) == (HOLDS, tells)


@pytest.mark.parametrize("error", [Lacks, NotDefined])
def test_a_number_without_a_null_separates_nothing(error: type[Exception]) -> None:
    """The draws have a larger sink rate than the model, and fail by their wide interval alone."""
    draws = []
    for draw in range(2):
        table = by_sequence({"sink_rate": [0.2, 0.0]}, noise=0.5, position=[0, 1])
        draws.append(as_draw(analysis({"attention_by_sequence": table}), draw))
    runs = [of_text(0.12), *draws]
    claim = replace(CLAIMS["W-1"], parts=(*CLAIMS["W-1"].parts, absent_from_draws(error)))
    for each in (CLAIMS["W-1"], claim):
        judgment = judge(each, evidence_of(runs, "made"))
        assert judgment.outcome == HOLDS
        assert judgment.estimates[0].null_low > judgment.estimates[0].value
        assert judgment.tells != "yes"


def test_plain_training_is_a_null_of_other_arms_alone() -> None:
    for claim in CLAIMS.values():
        if claim.null == Null.PLAIN:
            methods = {method for need in claim.needs for method in need.of.split(",")}
            assert methods - {PLAIN, UNTOUCHED}, claim.id


def of_massive(entry: float, draw: int | None = None, coordinates: int = 1) -> RunData:
    """Return a run in which each sequence has this largest entry, massive from 1000 on, at one of the coordinates."""
    rows = [(0, sequence, 0, 3 + sequence % coordinates, entry, entry, entry > 1000) for sequence in range(40)]
    columns = ["layer", "sequence", "position", "coordinate", "value", "ratio", "is_massive"]
    return as_draw(analysis({"massive": pd.DataFrame(rows, columns=columns)}, input=NO_BOS), draw)


@pytest.mark.parametrize(
    ("of_random_weights", "tells", "share"),
    [((1.0, 1.0), "undefined", np.nan), ((5000.0, 1.0), "no", 1.0), ((5000.0, 5000.0), "no", 1.0), ((), "", None)],
)
def test_a_claim_about_what_random_weights_lack_has_no_null(of_random_weights, tells: str, share: float) -> None:
    """Massive activations are at one coordinate: random weights have none."""
    runs = [of_massive(5000.0), *(of_massive(entry, draw) for draw, entry in enumerate(of_random_weights))]
    judgment = judge(CLAIMS["S-9"], evidence_of(runs, "made"))
    assert (judgment.outcome, judgment.tells) == (HOLDS, tells)
    assert share is None or judgment.null_passes == pytest.approx(share, nan_ok=True)
    # one draw that defines it is a null
    judgment = judge(CLAIMS["S-9"], evidence_of([of_massive(5e3), of_massive(1.0, 0), of_massive(5e3, 1, 2)], "made"))
    assert (judgment.outcome, judgment.tells, judgment.null_passes) == (HOLDS, "yes", 0.0)


def drained(sinks: float, ratio: float, draw: int | None = None, noise: float = 0.001) -> RunData:
    """Return a run with this share of heads that have a sink, and this ratio of value norms in all heads."""
    mass = np.where(np.linspace(0, 1, 10, endpoint=False) < sinks, 0.9, 0.05)
    norms = {"value_norm": ratio, "value_norm_later": 1.0}
    return as_draw(analysis({
        "attention_heads_by_sequence": by_sequence({"window_mass": mass, "uniform_mass": 0.07}, head=range(10)),
        "geometry_by_sequence": by_sequence(norms, noise=noise, head=range(10)),
    }), draw)  # fmt: skip


@pytest.mark.parametrize(
    ("of_random_weights", "noise", "tells", "share"),
    [(1.0, 0.001, "yes", 0.0), (0.2, 0.001, "no", 1.0), (0.1, 6.5, "no", 0.0)],  # the last fails by its interval
)
def test_that_random_weights_have_no_sink_is_no_evidence_for_what_the_sink_is(
    of_random_weights: float, noise: float, tells: str, share: float
) -> None:
    runs = [drained(0.8, 0.3), *(drained(0.0, of_random_weights, draw, noise) for draw in range(2))]
    judgment = judge(CLAIMS["GS-20"], evidence_of(runs, "made"))
    assert (judgment.outcome, judgment.tells, judgment.null_passes) == (HOLDS, tells, share)


def spiking(ratio: float, draw: int | None = None) -> RunData:
    """Return gradients of values and keys, at position 0 `ratio` times the later ones; 4 times by uniform attention."""
    tables = {name: pd.concat([table, table.assign(pathway="key")]) for name, table in gradients(ratio).items()}
    uniform = pd.DataFrame({"layer": [-1], "metric": "uniform_gradient_ratio", "value": 4.0})
    made = as_draw(analysis({**tables, "summary": uniform}), draw)
    made.manifest["input"] |= {"longest": 64}
    return made


@pytest.mark.parametrize(
    ("null", "value", "words"),
    [(2.0, 2.0, "8.0 against 2.0 on random weights and 4.0 of uniform attention"), (5.0, 1.6, "8.0 against 5.0 on")],
)
def test_a_gradient_spike_is_compared_with_the_larger_null(null: float, value: float, words: str) -> None:
    evidence = evidence_of([spiking(8.0), *(spiking(null, draw) for draw in range(3))], "made")
    (estimate,) = judge(CLAIMS["GS-6"], evidence).estimates
    assert estimate.value == pytest.approx(value)
    assert estimate.note.startswith(words)
    (of_keys,) = judge(CLAIMS["GS-7"], evidence).estimates
    assert of_keys.value == pytest.approx(8.0 / null)


def test_a_spike_is_measured_with_position_0_masked_and_with_another() -> None:
    run, name = experiment({"control 0": [0.0], "control 1": [0.0]}, "mask-sink"), "mask-sink"
    ratios = {"before": 16.0, name: 3.0, f"{name} control 0": 8.0, f"{name} control 1": 8.0}
    tables = {
        of: pd.concat([gradients(ratio)[of].assign(condition=label) for label, ratio in ratios.items()])
        for of in ("gradient", "gradient_by_group")
    }
    masks = RunData(run.manifest | {"input": spiking(1.0).manifest["input"]}, tables)
    runs = [spiking(16.0), *(spiking(2.0, draw) for draw in range(3)), masks]
    values = [estimate.value for estimate in judge(CLAIMS["GS-28"], evidence_of(runs, "made")).estimates]
    assert values == pytest.approx([3 / 4, 16 / 4, 8 / 16])


def card_of(*runs: RunData, claims: Iterable[str]) -> Scorecard:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sinkscope.commands.claims.table.CLAIMS", {name: CLAIMS[name] for name in claims})
        table = judged(evidence_of(runs, "made"))
    return Scorecard({}, {"claim": table, "route": pd.DataFrame({"effect": [], "model": []})})


def test_the_first_line_counts_the_claims_that_hold_and_whose_null_is_defined_and_fails() -> None:
    for null, count in ((0.0, "1 claim holds, and its"), (0.4, "0 claims hold, and their")):
        card = card_of(of_text(0.5), of_text(null, 0), claims=["W-1"])
        assert headline(card.table).startswith(count)
        assert scorecard_markdown(card).splitlines()[0] == f"## made: {headline(card.table)}"
    card = card_of(of_massive(5000.0), of_massive(1.0, 0), claims=["S-9"])
    assert headline(card.table) == "0 claims hold, and their null does not pass them"
    assert "- Hold, and their null is not defined: 1 (S-9)." in scorecard_markdown(card)
    assert "– (not defined)" in scorecard_markdown(card)


def test_several_models_have_numbers_of_the_claims_that_one_of_them_decides() -> None:
    one, massive = of_text(0.5), of_massive(5000.0)
    both = RunData(massive.manifest, {**of_text(0.4).tables, **massive.tables})
    table = pd.concat([
        card_of(run, claims=("W-1", "S-9", "W-41")).table.assign(model=name)
        for name, run in (("one", one), ("other", both))
    ])  # fmt: skip
    table = pd.concat([table, table[table["claim"] == "W-1"].assign(claim="V-15")])  # of a study
    card = Scorecard({}, {"claim": table, "route": pd.DataFrame({"effect": [], "model": []})})
    outcomes, heading, numbers = scorecard_markdown(card).partition("### other")
    assert "Decided by no model: W-41." in outcomes
    assert ("| W-1 |" in outcomes, "| S-9 |" in outcomes, heading) == (True, True, "### other")
    assert ["| W-1 |" in numbers, "| S-9 |" in numbers, "| V-15 |" in numbers] == [False, True, True]


@pytest.mark.parametrize(
    ("passes", "wanted", "words"),
    [
        ("not enough seeds", 7.0, "> 10‡ (power 31%); 7 seeds would decide"),
        ("inconclusive", np.inf, "> 10‡; more than 1000 seeds would decide"),
        ("fails", 7.0, "> 10‡"),
    ],
)
def test_what_would_decide_is_printed(passes: str, wanted: float, words: str) -> None:
    card = card_of(of_text(0.5), *(of_text(rate, draw) for draw, rate in enumerate((0.0, 0.0, 0.4))), claims=["W-1"])
    card.tables["claim"] = card.table.assign(passes=passes, power=0.31, seeds_wanted=wanted)
    (printed,) = card.summary_tables.values()
    assert printed["test"].item() == words
    assert printed["null"].item().endswith("; 33% pass")


def test_claims_on_one_number_are_counted_once() -> None:
    runs = [of_text(0.5), of_text(0.0, 0)]
    for run in runs:
        run.manifest["not_measured"] = {"query-bias": NO_QUERY_BIAS}
    card = card_of(*runs, claims=("W-1", "W-21", "N-12", "W-3", "CV-5"))
    table = card.table
    assert headline(card.table).startswith("1 claim holds, and its")
    assert "- Hold, and their null does not pass them: 1 (W-1 = W-21 = N-12)." in scorecard_markdown(card)
    assert "Not measured: CV-5 (sinkscope intervene made --do zero-massive)." in scorecard_markdown(card)
    assert ", 1 not measured." in scorecard_markdown(card)  # of three numbers
    apart = table.assign(value=table["value"] + table["claim"].eq("N-12"))  # N-12 has another number
    assert once(apart[apart["outcome"] == HOLDS]) == ["W-1 = W-21", "N-12"]
    wider = pd.concat([table, table[table["claim"] == "W-21"].assign(model="other")])
    assert once(wider[wider["outcome"] == HOLDS]) == ["W-1 = N-12", "W-21"]


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ((-np.inf, np.inf), "1.2 (no interval)"),
        ((0.0, np.inf), "1.2 (no interval)"),
        ((1.1, np.inf), "1.2 [at least 1.1]"),
        ((-np.inf, 1.3), "1.2 [at most 1.3]"),
        ((1.1, 1.5), "1.2 [1.1, 1.5]"),
        ((1.2, 1.2), "1.2"),
        ((1.0, 1.2), "1.2 [1, 1.2]"),  # exactly at the threshold
        ((1.00001, 1.2), "1.2 [1.00001, 1.2]"),  # the end that decides is above the threshold
    ],
)
def test_the_number_that_decides_is_printed_and_an_end_that_is_missing_is_not(
    ends: tuple[float, float], words: str
) -> None:
    row = SimpleNamespace(claim="W-13", part=0, value=1.2, low=ends[0], high=ends[1], least=1.0, most=np.inf)
    assert value_text(row) == words


@pytest.mark.parametrize(
    ("estimate", "sequences", "reason"),
    [
        (Estimate(1.0, -np.inf, np.inf), 1, "no interval: fewer than two sequences"),
        (Estimate(1.0, -np.inf, np.inf, seeds=1), 1, ""),  # `words_for` says so
        (Estimate(1.0, 0.0, np.inf), 9, "the interval has no end: too few units, or a denominator that may be zero"),
        (Estimate(1.0, 0.5, 2.0), 1, ""),
        (Estimate(np.nan, -np.inf, np.inf), 1, ""),
    ],
)
def test_an_interval_without_an_end_is_explained(estimate: Estimate, sequences: int, reason: str) -> None:
    run = of_text(0.5)
    run.manifest["input"] = run.manifest["input"] | {"sequences": sequences}
    assert no_interval(estimate, run) == reason


@pytest.mark.parametrize(
    ("test", "low", "value", "high", "distance"),
    [
        (at_least(0.5), 0.9, 1.0, 1.1, 1.0),  # twice the threshold
        (at_most(0.5), 0.9, 1.0, 1.1, -1.0),
        (between(1.0, 4.0), 2.9, 3.0, 3.1, np.log2(4 / 3)),  # the nearer of two thresholds
        (between(1.0, 4.0), 7.0, 8.0, 9.0, -1.0),
        (between(1.0, 4.0), 0.4, 0.5, 0.6, -1.0),
        (at_least(0.5), -0.1, 0.75, 1.6, 1.0),  # the interval is not positive: in quarters
        (above(10.0), -5.0, 15.0, 30.0, 2.0),
        (below(0.0), -0.6, -0.5, -0.4, 2.0),
        (at_least(0.5), 99.0, 100.0, 101.0, 4.0),  # the end of the axis
    ],
)
def test_a_value_is_drawn_at_its_distance_from_the_nearer_threshold(
    test: Threshold, low: float, value: float, high: float, distance: float
) -> None:
    row = SimpleNamespace(least=test.least, most=test.most, low=low, value=value, high=high)
    assert _distance(value, row) == pytest.approx(distance)


def test_a_number_that_decides_is_drawn_for_each_claim_and_a_condition_once() -> None:
    rows = [("A", 0, "rate", 1.0), ("A", 1, "sink", 2.0), ("B", 0, "rate", 1.0), ("B", 1, "sink", 2.0)]
    rows += [("C", 0, "rate", 1.0), ("C", 1, "sink", 3.0)]
    table = pd.DataFrame(rows, columns=["claim", "part", "quantity", "value"]).assign(outcome=str(HOLDS))
    without = table.assign(outcome=str(Outcome.NOT_MEASURED))
    drawn = _decided(pd.concat([table, without], ignore_index=True))
    assert list(zip(drawn["claim"], drawn["part"], strict=True)) == [
        ("A", 0), ("A", 1), ("B", 0), ("C", 0), ("C", 1)
    ]  # fmt: skip


def test_a_scorecard_says_how_many_intervals_miss_by_chance() -> None:
    """One in twenty intervals at 95 % misses by chance; a number without an interval was not tested."""
    whole = card_of(of_text(0.5), claims=["W-1"]).table
    exactly = whole.assign(low=whole["value"], high=whole["value"])
    table = pd.concat([*[whole] * 40, exactly], ignore_index=True)
    text = scorecard_markdown(Scorecard({}, {"claim": table, "route": pd.DataFrame({"effect": [], "model": []})}))
    assert "40 numbers were tested, each separately at 95 %" in text
    assert "about 2 of the intervals would miss them by chance." in text


def test_a_scorecard_begins_with_what_is_unusual() -> None:
    """What a scorecard of one model is compared with is in reports/claims."""
    whole = Scorecard.open("reports/claims")

    def sentences(*models: str) -> dict[str, str]:
        table = whole.table[whole.table["model"].isin(models or whole.models)]
        card = replace(whole, tables={**whole.tables, "claim": table})
        by_claim = {finding.numbers["claim"]: finding.sentence for finding in unusual(table)}
        assert f"What is unusual:\n\n- {next(iter(by_claim.values()))}" in card.markdown
        return by_claim

    every = sentences()
    assert not any("Sinks are drained" in sentence for sentence in every.values())  # holds, or is inconclusive
    assert every["GS-4"].startswith("Few MLP blocks write position 0's norm: fails in gemma3-270m; holds in")
    gemma, smollm = sentences("gemma3-270m"), sentences("SmolLM2-135M-Instruct.Q4_1")
    assert gemma["GS-4"].endswith("norm: fails in this model; holds in SmolLM2-135M-Instruct.Q4_1, mgm (GS-4).")
    assert "W-1" not in gemma
    assert smollm["S-5"].endswith("huge: fails in gemma3-270m, mgm; holds in this model (S-5).")
    assert "GS-4" not in smollm  # it holds here and in one of the others
    ours = whole.table[whole.table["model"] == "gemma3-270m"]
    ours = ours.assign(outcome=ours["outcome"].mask(ours["claim"] == "GS-4", HOLDS))  # otherwise than in the report
    assert "GS-4" not in {finding.numbers["claim"] for finding in unusual(ours)}


def test_the_figure_of_several_models_has_each_decided_claim_once_and_those_that_differ_first() -> None:
    card = Scorecard.open("reports/claims")
    texts = [label.get_text() for label in KINDS["claims"]["scorecard-by-model"](card).axes[0].get_yticklabels()]
    rows = [text.split()[0] for text in texts if text.split()[0] in CLAIMS]
    others = set()
    for text in texts:
        code, _, numbers = text.removeprefix("hold wherever they are decided: ").partition("-")
        for span in numbers.split(", ") if text.startswith("hold ") else ():
            first, _, last = span.partition("–")
            others |= {f"{code}-{number}" for number in range(int(first), int(last or first) + 1)}
    outcomes = card.by_model
    decided = outcomes.isin(list(OUTCOME_LOOKS)).any(axis=1)
    assert {*rows} | others == {*outcomes.index[decided]}
    assert not {*rows} & others
    assert rows.index("S-11") < rows.index("S-2")  # models differ on S-11
    assert rows.index("GS-8") < rows.index("GS-4")


def test_an_intervention_is_compared_with_its_random_controls() -> None:
    """A sink that stays without an embedding is no evidence if it stays under any change."""
    for under_controls, tells in (((0.5, 0.48), "no"), ((0.01, 0.01), "yes")):
        rates = {"before": (0.5, 0.0), "after": (0.45, 0.0)}
        rates |= {f"control {draw}": (rate, 0.0) for draw, rate in enumerate(under_controls)}
        evidence = evidence_of([of_text(0.5), experiment(rates, "nullify-first-embedding")], "made")
        stays = judge(CLAIMS["N-9"], evidence)
        assert (stays.claim.null, stays.outcome, stays.tells) == (Null.CONTROLS, HOLDS, tells)
    of_one_control = replace(evidence, control=1)  # is compared with the others
    assert of_one_control.controls(stays.claim.needs[0]) == ["nullify-first-embedding control 0"]


def test_a_method_is_compared_with_plain_training_of_another_seed() -> None:
    numbers = {"none": {"sink_rate": (0.5, 0.51, 0.49)}, "vscale": {"sink_rate": (0.5, 0.5, 0.5)}}
    norms = {"none": {"layer_inf_norm": (5.0, 5.2, 4.8)}, "vga": {"layer_inf_norm": (1.0, 1.1, 0.9)}}
    keeps, falls = (judged_trainings(claim, training(arms)) for claim, arms in (("GS-21", numbers), ("V-15", norms)))
    assert (keeps.claim.null, keeps.outcome, keeps.tells) == (Null.PLAIN, HOLDS, "no")
    assert (falls.outcome, falls.tells) == (HOLDS, "yes")
    apart = {"loss": (2.0, 3.0, 1.0)}
    assert judged_trainings("GS-25", training({"none": apart, "vscale": apart})).null_passes == 0


BOS = 1
# claims that there is a sink, a drain or a gradient sink, except V-2, because the largest norm ratio of many layers is
# above 1 also on random weights
ASSERTING = (
    "GS-1", "GS-2", "GS-5", "GS-6", "GS-7", "GS-14", "GS-20", "GS-28", "W-1", "W-2", "W-4", "W-13", "W-14", "W-15",
    "W-16", "W-17", "W-18", "S-5", "S-6", "S-9", "S-10", "S-13", "V-1", "V-3", "V-24", "W-21", "N-12",
)  # fmt: skip


def analyzed(model: PreTrainedModel, tmp_path, **options) -> Run:
    ids = np.random.default_rng(0).integers(3, VOCAB, size=(30, 64))  # as many texts as decide that there is no sink
    ids[:, 0] = BOS
    np.save(tmp_path / "text.npy", ids)
    return sinkscope.analyze(model, input=tmp_path / "text.npy", bos="never", **options)


def test_claims_of_figure_3_also_hold_with_initial_weights(tmp_path) -> None:
    """Their null, whose tensors have the deviations of a trained model, may fail them."""
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 16, "num_attention_heads": 4}
    torch.manual_seed(0)
    run = analyzed(LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, **sizes)), tmp_path, observables=("gradient",))
    for name in ("GS-16", "GS-17"):
        judgment = judge(CLAIMS[name], evidence_of([run], "made"))
        assert (judgment.outcome, judgment.tells) == (HOLDS, "no")


def outcomes(runs: Iterable[RunData], names: Iterable[str]) -> dict[str, Outcome]:
    evidence = evidence_of(runs, "MODEL")
    return {name: judge(CLAIMS[name], evidence).outcome for name in names}


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom"])
def test_no_claim_of_a_sink_holds_on_random_weights(family: str, tmp_path) -> None:
    run = analyzed(tiny_model(family, spread=1.0), tmp_path)
    torch.manual_seed(1)
    spread = tiny_model(family, spread=1.0)
    for weight in spread.parameters():
        weight.data = weight[torch.randperm(len(weight))]
    decided = outcomes([run, as_draw(analyzed(spread, tmp_path), 0)], ASSERTING)
    assert not {name: outcome for name, outcome in decided.items() if outcome == Outcome.HOLDS}
    assert decided["GS-2"] == decided["W-1"] == decided["GS-20"] == Outcome.FAILS


def planted(entry: float = 30_000.0, bias: float = 12.0, read_by_values: float = 0.0) -> PreTrainedModel:
    """Make a model whose BOS has one massive coordinate, which all keys and queries read, and values do not read."""
    model = tiny_model("qwen2", spread=1.0)
    coordinate, width = 7, model.config.hidden_size // model.config.num_attention_heads
    with torch.no_grad():
        model.get_input_embeddings().weight[BOS, coordinate] = entry
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.q_proj.bias.view(-1, width)[:, -1] = bias  # the slowest rotation, so that positions hardly matter
            attention.k_proj.weight[:, coordinate] = 0.0
            attention.k_proj.weight.view(-1, width, model.config.hidden_size)[:, -1, coordinate] = 1.0
            attention.v_proj.weight[:, coordinate] = read_by_values
            attention.v_proj.bias.zero_()
            layer.mlp.up_proj.weight[:, coordinate] = 0.0
    return model


def test_claims_of_a_planted_sink_hold(tmp_path) -> None:
    run = analyzed(planted(), tmp_path)
    null = as_draw(analyzed(tiny_model("qwen2", spread=1.0), tmp_path), 0)
    wanted = ("GS-1", "GS-2", "GS-3", "GS-20", "W-1", "W-13", "W-15", "S-5", "S-6", "S-10", "S-13", "V-2")
    decided = outcomes([run, null], wanted)
    assert not {name: outcome for name, outcome in decided.items() if outcome != Outcome.HOLDS}
    table = judged(evidence_of([run, null], "MODEL"))
    assert table[table["claim"] == "S-9"]["note"].iloc[0] == "the BOS before all sequences has one state"
    without = table[table["outcome"] == Outcome.NOT_MEASURED]
    assert "sinkscope analyze MODEL --input random --bos always" in set(without["note"])


@pytest.mark.parametrize(
    ("without", "fail", "hold"),
    [
        ({"bias": 0.0}, ("GS-2", "GS-20", "W-1", "W-16", "V-1"), ("S-5", "S-6", "V-2", "W-13")),
        ({"entry": 50.0}, ("S-5", "S-6"), ("GS-2", "GS-20", "W-1", "W-15", "V-2")),
        ({"read_by_values": 1.0}, ("GS-20", "W-15", "V-1"), ("GS-2", "W-1", "S-5", "V-2")),
    ],
    ids=["no sink", "nothing massive", "no drain"],
)
def test_each_planted_property_decides_its_own_claims(without, fail, hold, tmp_path) -> None:
    run = analyzed(planted(**without), tmp_path, observables=("attention", "geometry", "activation", "massive"))
    decided = outcomes([run], (*fail, *hold))
    assert decided == dict.fromkeys(fail, Outcome.FAILS) | dict.fromkeys(hold, Outcome.HOLDS)
    if "entry" in without:
        assert outcomes([run], ("W-13",))["W-13"] == Outcome.DOES_NOT_APPLY  # no layer has massive activations

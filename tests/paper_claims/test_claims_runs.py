"""Claims on runs of one model, with hand-made tables for which a claim is known to hold or to fail."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.hand_made_runs import (
    BOS,
    FAILS,
    HOLDS,
    INCONCLUSIVE,
    NO_BOS,
    NOT_APPLIES,
    SEQUENCES,
    UNMEASURED,
    analysis,
    by_sequence,
    experiment,
    family,
    judged,
    manifest,
)

from sinkscope.measuring.observables.query_bias import NO_QUERY_BIAS
from sinkscope.paper_claims.arms import beyond_controls
from sinkscope.paper_claims.claim import Judgment
from sinkscope.paper_claims.evidence import Evidence
from sinkscope.paper_claims.papers.nu import CLAIMS, NULLIFIED
from sinkscope.results.judgment import Outcome
from sinkscope.results.run import RunData

# --- NU

LAYERS, WIDTH = 4, 300
TERMS = ["biases", "content", "delta", "key bias"]


def gamma(massive: dict[int, float]) -> pd.DataFrame:
    """Make γ with these entries where EPE_0 is massive, and other entries of magnitude 1 at most."""
    entries = np.random.default_rng(0).uniform(-1, 1, WIDTH)
    entries[list(massive)] = list(massive.values())
    is_massive = np.isin(np.arange(WIDTH), list(massive))
    frame = pd.DataFrame({"coordinate": range(WIDTH), "gamma": entries, "is_massive_epe": is_massive})
    return pd.concat([frame.assign(layer=layer) for layer in range(LAYERS)], ignore_index=True)


def alignment(first: float, later: float) -> pd.DataFrame:
    places = [(layer, head, position) for layer in range(LAYERS) for head in (-1, 0) for position in range(16)]
    table = pd.DataFrame(places, columns=["layer", "head", "position"])
    return table.assign(key_alignment=np.where(table["position"] == 0, first, later) * (table["head"] == -1))


def natural(**given: Any) -> RunData:
    """Make a model for which all claims on a single run hold, except for the given tables."""
    tables = {
        "query_bias": alignment(0.8, -0.1),
        "gamma": gamma({138: 12.0, 247: -18.0}),
        "query_bias_by_sequence": by_sequence(
            {"delta": 100.0, "delta_later": -140.0, "delta_later_std": 30.0}, LAYERS, 1.0
        ),
        "logit_terms_by_sequence": by_sequence(
            {"at_first": [0.3, 1.0, 3.0, 0.5], "at_others": [0.3, 0.0, 0.0, 0.5]}, LAYERS, 0.01, term=TERMS
        ),
        "epe_by_group": pd.DataFrame(
            [(0, group, position, 0.7) for group in range(-1, 20) for position in range(16)],
            columns=["layer", "group", "position", "cosine"],
        ),
        "epe_rest_by_sequence": by_sequence({"cosine": 0.05, "cosine_whole": 0.7}, LAYERS, 0.01),
        "attention_by_sequence": by_sequence({"sink_rate": [0.6, 0.1]}, LAYERS, 0.01, position=range(2)),
    }
    return analysis(tables | given)


NO_GAP = by_sequence({"at_first": 0.0, "at_others": 1.0}, LAYERS, term=["content", "delta"])
FLAT = {138: 0.5, 247: -0.4}
OF_ONE_RUN = [  # claim, tables that differ, and the outcomes of its numbers
    ("N-1", {"query_bias_by_sequence": by_sequence(
        {"delta": [100.0, 100.0, -150.0, -80.0], "delta_later": -140.0, "delta_later_std": 50.0}, LAYERS, 1.0)},
        (FAILS,)),
    ("N-2", {"query_bias": alignment(0.4, -0.1)}, (FAILS, HOLDS)),
    ("N-2", {"query_bias": alignment(0.8, -0.5)}, (HOLDS, FAILS)),  # later keys must not be parallel to the bias either
    ("N-3", {"gamma": gamma({})}, (FAILS,)),
    ("N-4", {"gamma": gamma(FLAT)}, (FAILS,)),
    ("N-4", {"gamma": gamma({})}, ()),  # there is no γ at massive coordinates if there are none
    ("N-5", {"gamma": gamma(FLAT)}, (FAILS,)),
    ("N-11", {"logit_terms_by_sequence": by_sequence(
        {"at_first": [0.0, 3.0, 1.0, 0.0], "at_others": 0.0}, LAYERS, 0.01, term=TERMS)}, (FAILS,)),
    ("N-11", {"logit_terms_by_sequence": NO_GAP}, (INCONCLUSIVE,)),  # Δ has no share in a missing gap
    ("N-14", {"epe_rest_by_sequence": by_sequence({"cosine": 0.6, "cosine_whole": 0.7}, LAYERS, 0.01)},
        (FAILS, HOLDS)),
    ("N-14", {"query_bias": alignment(0.1, 0.0)}, (HOLDS, FAILS)),  # neither the rest nor EPE is aligned
]  # fmt: skip


@pytest.mark.parametrize(("claim", "tables", "outcomes"), OF_ONE_RUN)
def test_claims_of_one_run_fail_where_it_is_not_so(
    claim: str, tables: dict[str, pd.DataFrame], outcomes: tuple[Outcome, ...]
) -> None:
    found = judged(claim, natural(**tables))
    assert found.outcomes == outcomes
    assert outcomes or (found.outcome, found.reason) == (NOT_APPLIES, "EPE_0 has no massive coordinate")


def test_claims_of_one_run_hold_where_it_is_so_with_the_numbers_of_the_tables() -> None:
    run = natural()
    found = {claim: judged(claim, run) for claim in {claim for claim, *_ in OF_ONE_RUN} | {"N-13"}}
    assert {judgment.outcome for judgment in found.values()} == {HOLDS}
    values = {claim: judgment.estimates[0] for claim, judgment in found.items()}
    assert (values["N-3"].value, values["N-4"].value) == (2, 1.0)
    assert values["N-5"].value == pytest.approx(100 * 1.5 / WIDTH)  # ranks 1 and 2
    assert values["N-11"].value == pytest.approx(0.75, abs=0.01)
    assert values["N-11"].low < 0.75 < values["N-11"].high
    assert values["N-13"].value == pytest.approx(0.7)


def test_the_spread_of_delta_is_that_of_all_later_tokens() -> None:
    """Sequences with means −150 and −130 and deviations of 5 have a common deviation of √125."""
    table = by_sequence({"delta": -117.0, "delta_later": -140.0, "delta_later_std": 5.0}, LAYERS)
    table["delta_later"] += np.where(table["sequence"] % 2, 10.0, -10.0)
    (estimate,) = judged("N-1", natural(query_bias_by_sequence=table)).estimates
    assert f"{23 / 125**0.5:+.1f}" in estimate.note


# --- interventions

BEFORE = {"before": [0.6, 0.05]}
QUIET = {f"control {draw}": [0.6 + 0.002 * draw, 0.05] for draw in range(3)}
ARMS = {  # claim → intervention, rates with which the claim holds, and with which it fails
    "N-6": ("nullify-query-bias", [0.3, 0.05], [0.62, 0.05]),
    "N-7": ("replace-epe:at=epe", [0.0, 0.1], [0.4, 0.1]),
    "N-8": ("transplant-epe:at=epe", [0.1, 0.5], [0.5, 0.1]),
    "N-9": ("nullify-first-embedding", [0.55, 0.05], [0.1, 0.05]),
    "N-10": ("zero-key-columns", [0.3, 0.05], [0.62, 0.05]),
}


@pytest.mark.parametrize("claim", ARMS)
def test_an_arm_decides_if_there_was_a_sink(claim: str) -> None:
    name, holds, fails = ARMS[claim]
    for rates, outcome in ((holds, HOLDS), (fails, FAILS)):
        run = experiment(BEFORE | {"after": rates} | QUIET, name)
        noiseless = run.tables["attention_by_sequence"].assign(sink_rate=lambda table: table["sink_rate"].clip(0))
        assert judged(claim, RunData(run.manifest, {"attention_by_sequence": noiseless})).outcome == outcome
    no_sink = {condition: [0.02, 0.02] for condition in ("before", *QUIET)} | {"after": [0.0, 0.02]}
    assert judged(claim, experiment(no_sink, name)).outcome == FAILS
    missing = judged(claim, natural())
    assert missing.outcome == UNMEASURED
    assert missing.reason.startswith(f"sinkscope intervene MODEL --do {name}")


def test_a_fall_counts_only_beyond_that_of_random_changes() -> None:
    wide = {f"control {draw}": [rate, 0.05] for draw, rate in enumerate((0.2, 0.4, 0.6))}
    for controls in (wide, {"control 0": [0.6, 0.05]}, {}):
        run = experiment(BEFORE | {"after": [0.3, 0.05]} | controls, "nullify-query-bias")
        assert judged("N-6", run).outcome == INCONCLUSIVE
    run = experiment(BEFORE | {"after": [0.3, 0.05]} | QUIET, "nullify-query-bias")
    found = beyond_controls(Evidence.of([run], [NULLIFIED]), NULLIFIED)
    assert found.value == pytest.approx(-30.2, abs=0.5)
    assert found.low < found.value < found.high < 0
    random_columns = {f"control {draw}": [0.2 + 0.001 * draw, 0.05] for draw in range(3)}
    run = experiment(BEFORE | {"after": [0.0, 0.05]} | random_columns, "zero-key-columns")
    assert judged("N-10", run).outcomes == (HOLDS, FAILS, HOLDS)


def test_an_arm_is_known_by_its_intervention_and_not_by_its_label() -> None:
    run = experiment(BEFORE | {"after": [0.0, 0.0]} | QUIET, "replace-epe:at=epe")
    other = RunData(run.manifest | {"arms": {"replace-epe:at=epe": {"asked": ["replace-epe"]}}}, run.tables)
    assert judged("N-7", natural(), other).outcome == UNMEASURED


# --- scopes


def test_other_models_are_none_of_nus() -> None:
    rotary = analysis(natural().tables, family=family("rotary"), not_measured={"query-bias": NO_QUERY_BIAS})
    learned = analysis(natural().tables, not_measured={"query-bias": NO_QUERY_BIAS})
    for claim in (claim.id for claim in CLAIMS if claim.id != "N-12"):
        assert judged(claim, rotary).outcome == NOT_APPLIES
        assert judged(claim, learned).reason == NO_QUERY_BIAS
    run = experiment(BEFORE | {"after": [0.5, 0.0]} | QUIET, "nullify-first-embedding")
    run.manifest["input"]["token_zero"] = "the (id 5)"
    assert judged("N-9", run).outcome == NOT_APPLIES  # the claim is about a BOS


@pytest.mark.parametrize(
    ("positions", "reason", "outcome"),
    [
        ("learned", None, NOT_APPLIES),
        ("learned", NO_QUERY_BIAS, HOLDS),
        ("rotary", NO_QUERY_BIAS, HOLDS),
        ("rotary", None, HOLDS),  # a query bias, but no learned positions
        ("learned", "its weights are quantized", NOT_APPLIES),
    ],
)
def test_sinks_elsewhere_count_where_part_of_the_mechanism_is_missing(
    positions: str, reason: str | None, outcome: Outcome
) -> None:
    not_measured = {"query-bias": reason} if reason else {}
    run = analysis(natural().tables, family=family(positions), not_measured=not_measured)
    assert judged("N-12", run).outcome == outcome
    none = by_sequence({"sink_rate": [0.01, 0.0]}, LAYERS, position=range(2))
    if outcome == HOLDS:
        assert judged("N-12", RunData(run.manifest, {"attention_by_sequence": none})).outcome == FAILS


# --- WSE: repeated tokens


def equal(kind: str, layers: int = LAYERS, **given: Any) -> pd.DataFrame:
    columns = {"state_difference": 1e-5, "weight_difference": np.nan, "bound_share": np.nan, "bound_ratio": np.nan}
    columns |= {"bound_share": 1.0, "bound_ratio": 0.9} if kind == "rotary" else {"weight_difference": 1e-6}
    return by_sequence(columns | given, layers).assign(positions=kind)


def repeated(kind: str, table: pd.DataFrame, smallest: float = 1000.0) -> RunData:
    norms = by_sequence({"norm": 1000.0, "norm_later": 1000.0, "norm_smallest": smallest}, LAYERS, 1.0)
    return analysis(
        {"equal_tokens": table, "activation_by_sequence": norms.assign(site="layer_out")},
        "repeated",
        family=family(kind),
    )


@pytest.mark.parametrize(
    ("claim", "kind", "column", "wrong"),
    [
        ("W-5", "rotary", "state_difference", 2e-3),
        ("W-7", "none", "weight_difference", 2e-4),
        ("W-8", "alibi", "weight_difference", 2e-4),
        ("W-9", "rotary", "bound_share", 0.99),
    ],
)
def test_one_wrong_sequence_of_one_layer_is_enough(claim: str, kind: str, column: str, wrong: float) -> None:
    assert judged(claim, repeated(kind, equal(kind))).outcome == HOLDS
    table = equal(kind)
    table.loc[len(table) // 2, column] = wrong
    found = judged(claim, repeated(kind, table))
    assert found.outcome == FAILS
    assert found.estimates[0].value == pytest.approx(wrong)


def test_layers_of_other_positions_do_not_count() -> None:
    """The first layers have rotary positions, and the last layer has none."""
    mixed = pd.concat([equal("rotary"), equal("none", weight_difference=1e-6).assign(layer=LAYERS)])
    run = analysis({"equal_tokens": mixed}, "repeated", family=family("rotary", layer_positions=["rotary", "none"]))
    assert judged("W-7", run).outcome == HOLDS
    assert judged("W-7", run).estimates[0].note == "1 layer"
    assert judged("W-9", run).outcome == HOLDS
    assert judged("W-8", run).outcome == NOT_APPLIES


@pytest.mark.parametrize(
    ("claim", "kind"), [("W-5", "learned"), ("W-6", "learned"), ("W-7", "rotary"), ("W-8", "none"), ("W-9", "alibi")]
)
def test_other_positions_are_out_of_scope(claim: str, kind: str) -> None:
    found = judged(claim, repeated(kind, equal(kind)), text(kind=kind))
    assert found.outcome == NOT_APPLIES
    assert kind in found.reason


@pytest.mark.parametrize(
    ("operation", "applies"),
    [("sigmoid", False), ("p-norm softmax", False), ("elu-kernel", True), ("softmax", True), ("scaled softmax", True)],
)
def test_equal_tokens_stay_equal_where_weights_have_one_sum(operation: str, applies: bool) -> None:
    run = repeated("rotary", equal("rotary"))
    run.manifest["model"]["operations"] = [operation]
    found = judged("W-5", run)
    assert (found.outcome == NOT_APPLIES) == (not applies)
    assert applies or found.reason == f"its attention is {operation}, whose weights do not sum to 1"


def test_models_and_runs_in_which_tokens_are_not_equal() -> None:
    learned_sink = repeated("rotary", equal("rotary"))
    learned_sink.manifest["outside"] = {"the model's own sink logits": [0]}
    with_a_prefix = analysis({}, "repeated", family=family("rotary"))  # the prefix is before the repeated token
    for run in (learned_sink, with_a_prefix):
        assert judged("W-5", run).outcome == judged("W-9", run).outcome == NOT_APPLIES
    assert "denominator" in judged("W-7", repeated("none", equal("none", weight_difference=np.nan))).reason


# --- massive everywhere


def text(massive: bool = True, kind: str = "rotary", rate: float = 0.5) -> RunData:
    norms = by_sequence({"norm": 1000.0, "norm_later": 10.0, "norm_smallest": 5.0}, LAYERS, 1.0)
    entries = by_sequence({"position": 0.0}, LAYERS).assign(is_massive=massive)
    entries["is_massive"] &= entries["layer"] > 0
    rates = by_sequence({"sink_rate": [rate]}, LAYERS, position=range(1))
    tables = {"activation_by_sequence": norms.assign(site="layer_out"), "massive": entries}
    tables["attention_by_sequence"] = rates
    return analysis(tables, family=family(kind), input=NO_BOS)


@pytest.mark.parametrize(("smallest", "outcome"), [(990.0, HOLDS), (100.0, FAILS)])
def test_the_smallest_token_must_be_as_massive_as_the_sink(smallest: float, outcome: Outcome) -> None:
    found = judged("W-6", text(), repeated("rotary", equal("rotary"), smallest))
    assert found.outcome == outcome
    assert found.estimates[0].value == pytest.approx(smallest / 1000, rel=1e-2)


def test_a_bos_or_no_massive_layers_leave_nothing_to_compare() -> None:
    equal_tokens = repeated("rotary", equal("rotary"))
    with_bos = RunData(text().manifest | {"input": BOS}, text().tables)
    assert judged("W-6", with_bos, equal_tokens).outcome == UNMEASURED
    assert judged("W-5", RunData(equal_tokens.manifest | {"input": BOS}, equal_tokens.tables)).outcome == UNMEASURED
    assert judged("W-6", text(massive=False), equal_tokens).outcome == NOT_APPLIES
    gone = judged("W-6", text(rate=0.0), equal_tokens)
    assert (gone.outcome, "no sink without a BOS" in gone.reason) == (NOT_APPLIES, True)


# --- table 7


@pytest.mark.parametrize(
    ("claim", "name", "holds", "fails"),
    [
        ("W-10", "replace-epe", [0.1, 0.05], [0.5, 0.05]),
        ("W-11", "transplant-epe", [0.05, 0.55], [0.05, 0.1]),
    ],
)
def test_vectors_of_positions_decide(claim: str, name: str, holds: list[float], fails: list[float]) -> None:
    for rates, outcome in ((holds, HOLDS), (fails, FAILS)):
        assert judged(claim, experiment(BEFORE | {"after": rates} | QUIET, name, "repeated")).outcome == outcome
    weak = {condition: [0.03, 0.03] for condition in ("before", *QUIET)} | {"after": [0.01, 0.03]}
    assert judged(claim, experiment(weak, name, "repeated")).outcome == FAILS
    rotary = experiment(BEFORE | {"after": holds} | QUIET, name, "repeated", family=family("rotary"))
    assert judged(claim, rotary).outcome == NOT_APPLIES
    natural_text = experiment(BEFORE | {"after": holds} | QUIET, name)
    assert judged(claim, analysis({}), natural_text).outcome == UNMEASURED


def test_the_sink_has_to_leave_position_0() -> None:
    run = experiment(BEFORE | {"after": [0.61, 0.55]} | QUIET, "transplant-epe", "repeated")
    moved, left, before = judged("W-11", run).outcomes
    assert (moved, before) == (HOLDS, HOLDS)
    assert left != HOLDS


# --- inputs: a comparison has the same BOS policy for all


def read(condition: str, rate: float, bos: bool, kind: str = "rotary", main: bool = False) -> RunData:
    """Make a run on an input with this sink rate at position 0; `main` is the unchanged model, with more tables."""
    table = by_sequence({"sink_rate": [rate, 0.01]}, noise=1e-3 * (rate > 0), position=range(2))
    tables = {"attention_by_sequence": table} | ({"attention": table} if main else {})
    return analysis(tables, condition, family=family(kind), input=BOS if bos else NO_BOS)


def of_both(kind: str = "rotary", **rates: tuple[float, float]) -> list[RunData]:
    """Make runs from input → its sink rates with a BOS, which the model's own text has, and without."""
    return [
        read(name, rate, bos, kind, main=name == "natural" and bos)
        for name, both in rates.items()
        for rate, bos in zip(both, (True, False), strict=True)
    ]


def test_inputs_are_compared_under_one_policy() -> None:
    """A sink at the BOS stays on random tokens after the BOS; without a BOS there is none."""
    like_gemma = of_both(natural=(0.80, 0.0), random=(0.79, 0.0), repeated=(0.61, 0.0))
    found = judged("W-2", *like_gemma)
    assert (found.outcome, found.estimates[0].value) == (HOLDS, pytest.approx(0.79 / 0.80, abs=0.01))
    assert found.estimates[0].note == "with a BOS text 80.0, random 79.0 %; without text 0.0, random 0.0 %"
    found = judged("W-2", read("natural", 0.8, True, main=True), read("random", 0.0, False))
    assert (found.outcome, found.reason) == (UNMEASURED, "sinkscope analyze MODEL --input random --bos always")
    assert judged("W-1", *like_gemma).estimates[0].note == "with a BOS text 80.0 %; without text 0.0 %"
    assert judged("W-1", read("natural", 0.8, False, main=True)).estimates[0].note == "without text 80.0 %"
    found = judged("W-3", *like_gemma)  # there was no sink without a BOS that equal tokens could lose
    assert found.outcome == NOT_APPLIES
    assert "with a BOS text 80.0, repeated 61.0 %; without text 0.0, repeated 0.0 %" in found.reason


def test_repeated_tokens_are_judged_without_a_bos() -> None:
    assert judged("W-3", *of_both(natural=(0.80, 0.7), repeated=(0.61, 0.0))).outcome == HOLDS
    assert judged("W-3", *of_both(natural=(0.80, 0.7), repeated=(0.0, 0.61))).outcome == FAILS
    found = judged("W-4", *of_both("learned", natural=(0.80, 0.7), repeated=(0.0, 0.6)))
    assert (found.outcome, found.estimates[0].value) == (HOLDS, pytest.approx(0.6 / 0.7, abs=0.01))
    assert judged("W-4", *of_both("learned", natural=(0.80, 0.7), repeated=(0.6, 0.0))).outcome == FAILS


def test_interventions_on_repeated_tokens_after_a_bos_are_another_experiment() -> None:
    rates = {"before": [0.6, 0.05], "after": [0.1, 0.05], "control 0": [0.6, 0.05], "control 1": [0.6, 0.05]}
    run = experiment(rates, "replace-epe", "repeated")
    assert judged("W-10", run).outcome == HOLDS
    after_bos = RunData(run.manifest | {"input": BOS}, run.tables)
    assert judged("W-10", analysis({}), after_bos).outcome == UNMEASURED


# --- lengths


def of_length(length: int, *shares: float) -> RunData:
    """Make a hundred heads of one layer; these shares of them have a window mass above 0.2, 0.3 and 0.4."""
    heads = np.array([0.1 + 0.1 * sum(place < 100 * share for share in shares) + 0.01 for place in range(100)])
    table = by_sequence({"window_mass": heads[None]}, 1, 1e-3, head=range(100))
    config = {"epsilon": 0.3, "seq_len": length, "window": length}
    tables = {"attention_heads_by_sequence": table} | ({"attention": table} if length == 64 else {})
    return RunData(manifest() | {"config": config}, tables)


def by_length(*shares: tuple[float, float, float]) -> Judgment:
    return judged("W-20", *(of_length(length, *own) for length, own in zip((16, 32, 64, 128), shares, strict=True)))


def test_a_rate_near_0_cannot_fall() -> None:
    """In points, the same fall of a smaller rate is smaller, but it is not flatter."""
    held = by_length((0.90, 0.78, 0.65), (0.72, 0.58, 0.42), (0.58, 0.43, 0.35), (0.44, 0.31, 0.24))
    assert held.outcomes == (HOLDS, HOLDS)
    assert held.estimates[1].note == "ε = 0.2: 90.0, 72.0, 58.0, 44.0 %; ε = 0.4: 65.0, 42.0, 35.0, 24.0 %"
    assert by_length((0.90, 0.8, 0.5), (0.6, 0.5, 0.48), (0.4, 0.35, 0.3), (0.3, 0.28, 0.26)).outcomes == (HOLDS, FAILS)
    assert by_length((0.3, 0.3, 0.3), (0.4, 0.4, 0.35), (0.5, 0.5, 0.4), (0.6, 0.6, 0.5)).outcomes[0] == FAILS
    floor = by_length((0.9, 0.5, 0.12), (0.8, 0.3, 0.05), (0.7, 0.1, 0.0), (0.6, 0.0, 0.0))
    assert (floor.outcome, "which is a floor" in floor.reason) == (NOT_APPLIES, True)
    assert by_length(*[(0.05, 0.0, 0.0)] * 4).outcome == NOT_APPLIES


# --- what the sink adds


@pytest.mark.parametrize("bos", [True, False])
def test_a_no_op_is_set_against_a_constant(bos: bool) -> None:
    """If zeros do harm and the mean over sequences does not, the values of the sink are a bias."""
    losses = {
        "before": 2.0,
        "scale-sink-value:where=sinks": 2.5,
        "scale-sink-value:where=sinks control 0": 2.0,
        "scale-sink-value:where=sinks control 1": 2.0,
    }
    zero, mean = (_with_losses(own) for own in (losses, {"before": 2.0, "mean-sink-value:where=sinks": 2.01}))
    mass = by_sequence({"window_mass": [[0.9, 0.9]] * 4}, head=range(2))
    natural = analysis({"attention_heads_by_sequence": mass}, input=BOS if bos else NO_BOS)
    found = judged("V-24", natural, zero, mean)
    assert found.outcome == FAILS
    assert found.estimates[0].value == pytest.approx(np.exp(0.5))
    assert "with their mean over sequences in place of zero ×1.01 [1.01, 1.01]" in found.estimates[0].note
    assert ("constant anyway" in found.estimates[0].note) == bos


def _with_losses(losses: Mapping[str, float]) -> RunData:
    name = list(losses)[1]
    parts = [
        pd.DataFrame({"layer": -1, "sequence": range(SEQUENCES), "loss": loss, "predicted": 63, "condition": condition})
        for condition, loss in losses.items()
    ]
    arms = {name: {"asked": [name], "do": [name], "watched": [0], "controls": [[name]] * (len(losses) - 2)}}
    return RunData(manifest("natural", "intervene", arms=arms), {"loss_by_sequence": pd.concat(parts)})


# --- single tables


def elsewhere(*shares: float) -> RunData:
    """Make sequences whose other tokens have this share of the largest entry, in the second of two layers."""
    count = len(shares)
    entries = {"layer": 1, "sequence": range(count), "position": 0, "coordinate": 7, "value": 2e4, "ratio": 1e4}
    places = {"sequence": [*range(count)] * 2, "layer": [0] * count + [1] * count, "position": 0, "coordinate": 7}
    rows = pd.DataFrame(places | {"largest": 2e4, "elsewhere": [1e4] * count + [2e4 * share for share in shares]})
    tables = {"massive": pd.DataFrame(entries).assign(is_massive=True), "massive_elsewhere": rows}
    return RunData(manifest() | {"input": {**BOS, "sequences": count}}, tables)


def test_outlier_features_are_looked_for_in_every_sequence() -> None:
    assert judged("S-15", elsewhere(*[0.01] * 10)).outcome == HOLDS
    later = judged("S-15", elsewhere(0.01, *[0.9] * 9))  # the first sequence does not represent the others
    assert (later.outcome, later.estimates[0].value) == (FAILS, pytest.approx(0.811))
    assert judged("S-15", elsewhere(*[0.01, 0.2] * 5)).outcome == INCONCLUSIVE


@pytest.mark.parametrize(("position", "expected"), [(2, HOLDS), (3, FAILS)])
def test_the_sinks_of_a_prefix_lm(position: int, expected: Outcome) -> None:
    sinks = pd.DataFrame({"layer": 0, "head": 0, "sequence": range(40), "position": position, "queries": 30})
    late = sinks.assign(position=60, queries=2)  # a key with only two queries does not count

    def outcome(table: pd.DataFrame, **given: Any) -> Outcome:
        return judged("W-39", analysis({"sink_positions": table}, **given)).outcome

    prefix = family("rotary", prefix=3)
    assert outcome(sinks, family=prefix) == outcome(pd.concat([sinks, late]), family=prefix) == expected
    assert outcome(sinks) == outcome(sinks[:0], family=prefix) == NOT_APPLIES


@pytest.mark.parametrize(("mass", "expected"), [(0.01, HOLDS), (0.2, FAILS)])
def test_the_first_token_of_a_window(mass: float, expected: Outcome) -> None:
    table = {"window_edge_by_sequence": by_sequence({"edge_mass": mass}, noise=0.001)}
    model = {"name": "made", "weights": "trained", "sliding_window": 8}
    assert judged("W-41", analysis(table, model=model)).outcome == expected
    assert judged("W-41", analysis(table)).outcome == NOT_APPLIES


def test_post_norm_models_have_no_gradient_gain_of_one_branch_and_no_bound() -> None:
    gains = {name: np.ones(16) for name in ("bloat", "compress", "change", "input_norm")}
    attn = by_sequence(gains, noise=0.01, position=range(16)).assign(branch="attn")
    found = judged("GS-15", analysis({"gradient_ratio_by_sequence": attn}))
    assert found.outcome == NOT_APPLIES
    assert found.reason == "the gradient's gain in the mlp branch is not defined in any layer"
    both = pd.concat([attn, attn.assign(branch="mlp")], ignore_index=True)
    assert judged("GS-15", analysis({"gradient_ratio_by_sequence": both})).outcome in (HOLDS, FAILS, INCONCLUSIVE)
    few = judged("GS-17", analysis({"gradient_ratio_by_sequence": attn.assign(compress=0.0)}))
    assert (few.outcome, "too few layers" in few.reason) == (NOT_APPLIES, True)
    bound = pd.DataFrame({"layer": [0, 0], "position": [0, 1], "holds": [np.nan] * 2, "tightness": [np.nan] * 2})
    found = judged("GS-19", analysis({"norm_bound": bound}))
    assert (found.outcome, found.reason) == (NOT_APPLIES, "the bound applies to no layer of this model")


# --- streaming

USUAL = {None: 10.0, 0: 90.0, 1: 13.0, 2: 12.0, 4: 10.1}  # first tokens kept (None: dense) → perplexity


def streamed(perplexities: dict[int | None, float]) -> RunData:
    """Make eight texts, each about equally hard for every method."""
    rows = [
        {"method": "dense" if keep is None else "kept", "window": -1 if keep is None else 64, "keep": keep or 0}
        | {"sequence": text, "loss": np.log(perplexity) + 0.5 * np.sin(text) + 0.002 * np.sin((keep or 7) * text)}
        for keep, perplexity in perplexities.items()
        for text in range(8)
    ]
    run = analysis({})
    run.manifest["input"]["longest"] = 512
    tables = {"streaming": pd.DataFrame(), "streaming_by_sequence": pd.DataFrame(rows)}
    return RunData(run.manifest | {"command": "intervene", "arms": {}}, tables)


def judged_stream(claim: str, perplexities: dict[int | None, float], registers: int = 0) -> Judgment:
    natural = analysis({})
    natural.manifest["model"]["registers"] = registers
    return judged(claim, natural, streamed(perplexities))


@pytest.mark.parametrize(
    ("claim", "otherwise"), [("S-1", {0: 10.5}), ("S-2", {4: 13.0}), ("S-3", {2: 10.1}), ("S-3", {1: 10.1})]
)
def test_perplexities_decide(claim: str, otherwise: dict[int | None, float]) -> None:
    assert judged_stream(claim, USUAL).outcome == HOLDS
    assert judged_stream(claim, USUAL | otherwise).outcome == FAILS


def test_register_tokens_alone_against_more_first_tokens() -> None:
    assert "no register tokens" in judged_stream("S-4", USUAL).reason
    assert judged_stream("S-4", {**USUAL, 2: 10.1, 5: 10.0}, registers=2).outcome == HOLDS
    found = judged_stream("S-4", {**USUAL, 2: 12.0, 5: 10.0}, registers=2)
    assert (found.outcome, found.estimates[0].value) == (FAILS, pytest.approx(1.2, rel=0.01))
    assert found.estimates[0].note == "2 register tokens"
    missing = judged_stream("S-4", USUAL, registers=2)  # no stream kept five first tokens
    assert (missing.outcome, "keep=5" in missing.reason) == (UNMEASURED, True)

"""NU's claims on tables made by hand: the known outcome both ways."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.hand_made_runs import (
    FAILS,
    HOLDS,
    INCONCLUSIVE,
    NOT_APPLIES,
    UNMEASURED,
    analysis,
    by_sequence,
    experiment,
    family,
    judged,
)

from sinkscope.measuring.observables.query_bias import NO_QUERY_BIAS
from sinkscope.paper_claims.arms import beyond_controls
from sinkscope.paper_claims.evidence import Evidence
from sinkscope.paper_claims.papers.nu import CLAIMS, NULLIFIED
from sinkscope.results.judgment import Outcome
from sinkscope.results.run import RunData

LAYERS, WIDTH = 4, 300
TERMS = ["biases", "content", "delta", "key bias"]


def gamma(massive: dict[int, float]) -> pd.DataFrame:
    """γ with these entries where EPE_0 is massive, and others of magnitude 1 at most."""
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
    """A model in which all claims of a single run hold, except for what is given."""
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
    ("N-2", {"query_bias": alignment(0.8, -0.5)}, (HOLDS, FAILS)),  # later keys may not be parallel to the bias either
    ("N-3", {"gamma": gamma({})}, (FAILS,)),
    ("N-4", {"gamma": gamma(FLAT)}, (FAILS,)),
    ("N-4", {"gamma": gamma({})}, ()),  # without massive coordinates there is no γ at them
    ("N-5", {"gamma": gamma(FLAT)}, (FAILS,)),
    ("N-11", {"logit_terms_by_sequence": by_sequence(
        {"at_first": [0.0, 3.0, 1.0, 0.0], "at_others": 0.0}, LAYERS, 0.01, term=TERMS)}, (FAILS,)),
    ("N-11", {"logit_terms_by_sequence": NO_GAP}, (INCONCLUSIVE,)),  # of no gap Δ has no share
    ("N-14", {"epe_rest_by_sequence": by_sequence({"cosine": 0.6, "cosine_whole": 0.7}, LAYERS, 0.01)},
        (FAILS, HOLDS)),
    ("N-14", {"query_bias": alignment(0.1, 0.0)}, (HOLDS, FAILS)),  # the rest is not aligned, but EPE is not either
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
    """Sequences at −150 and −130 with deviations of 5: together a deviation of √125."""
    table = by_sequence({"delta": -117.0, "delta_later": -140.0, "delta_later_std": 5.0}, LAYERS)
    table["delta_later"] += np.where(table["sequence"] % 2, 10.0, -10.0)
    (estimate,) = judged("N-1", natural(query_bias_by_sequence=table)).estimates
    assert f"{23 / 125**0.5:+.1f}" in estimate.note


# --- interventions

BEFORE = {"before": [0.6, 0.05]}
QUIET = {f"control {draw}": [0.6 + 0.002 * draw, 0.05] for draw in range(3)}
ARMS = {  # claim → the intervention, rates with which it holds, and with which it fails
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
    assert judged("N-9", run).outcome == NOT_APPLIES  # it is about a BOS


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

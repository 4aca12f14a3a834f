"""WSE's claims on repeated tokens, on tables made by hand: the known outcome both ways."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.hand_made_runs import (
    BOS,
    FAILS,
    HOLDS,
    NO_BOS,
    NOT_APPLIES,
    UNMEASURED,
    analysis,
    by_sequence,
    experiment,
    family,
    judged,
)

from sinkscope.results.judgment import Outcome
from sinkscope.results.run import RunData

LAYERS = 3


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
    """Rotary in the first layers and none in the last."""
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
    found = judged(claim, repeated(kind, equal(kind)), natural(kind=kind))
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
    with_a_prefix = analysis({}, "repeated", family=family("rotary"))  # before the repeated token
    for run in (learned_sink, with_a_prefix):
        assert judged("W-5", run).outcome == judged("W-9", run).outcome == NOT_APPLIES
    assert "denominator" in judged("W-7", repeated("none", equal("none", weight_difference=np.nan))).reason


# --- massive everywhere


def natural(massive: bool = True, kind: str = "rotary", rate: float = 0.5) -> RunData:
    norms = by_sequence({"norm": 1000.0, "norm_later": 10.0, "norm_smallest": 5.0}, LAYERS, 1.0)
    entries = by_sequence({"position": 0.0}, LAYERS).assign(is_massive=massive)
    entries["is_massive"] &= entries["layer"] > 0
    rates = by_sequence({"sink_rate": [rate]}, LAYERS, position=range(1))
    tables = {"activation_by_sequence": norms.assign(site="layer_out"), "massive": entries}
    tables["attention_by_sequence"] = rates
    return analysis(tables, family=family(kind), input=NO_BOS)


@pytest.mark.parametrize(("smallest", "outcome"), [(990.0, HOLDS), (100.0, FAILS)])
def test_the_smallest_token_must_be_as_massive_as_the_sink(smallest: float, outcome: Outcome) -> None:
    found = judged("W-6", natural(), repeated("rotary", equal("rotary"), smallest))
    assert found.outcome == outcome
    assert found.estimates[0].value == pytest.approx(smallest / 1000, rel=1e-2)


def test_a_bos_or_no_massive_layers_leave_nothing_to_compare() -> None:
    equal_tokens = repeated("rotary", equal("rotary"))
    with_bos = RunData(natural().manifest | {"input": BOS}, natural().tables)
    assert judged("W-6", with_bos, equal_tokens).outcome == UNMEASURED
    assert judged("W-5", RunData(equal_tokens.manifest | {"input": BOS}, equal_tokens.tables)).outcome == UNMEASURED
    assert judged("W-6", natural(massive=False), equal_tokens).outcome == NOT_APPLIES
    gone = judged("W-6", natural(rate=0.0), equal_tokens)
    assert (gone.outcome, "no sink without a BOS" in gone.reason) == (NOT_APPLIES, True)


# --- table 7

BEFORE = {"before": [0.6, 0.05]}
CONTROLS = {f"control {draw}": [0.6 + 0.002 * draw, 0.05] for draw in range(3)}


@pytest.mark.parametrize(
    ("claim", "name", "holds", "fails"),
    [
        ("W-10", "replace-epe", [0.1, 0.05], [0.5, 0.05]),
        ("W-11", "transplant-epe", [0.05, 0.55], [0.05, 0.1]),
    ],
)
def test_vectors_of_positions_decide(claim: str, name: str, holds: list[float], fails: list[float]) -> None:
    for rates, outcome in ((holds, HOLDS), (fails, FAILS)):
        assert judged(claim, experiment(BEFORE | {"after": rates} | CONTROLS, name, "repeated")).outcome == outcome
    weak = {condition: [0.03, 0.03] for condition in ("before", *CONTROLS)} | {"after": [0.01, 0.03]}
    assert judged(claim, experiment(weak, name, "repeated")).outcome == FAILS
    rotary = experiment(BEFORE | {"after": holds} | CONTROLS, name, "repeated", family=family("rotary"))
    assert judged(claim, rotary).outcome == NOT_APPLIES
    natural_text = experiment(BEFORE | {"after": holds} | CONTROLS, name)
    assert judged(claim, analysis({}), natural_text).outcome == UNMEASURED


def test_the_sink_has_to_leave_position_0() -> None:
    run = experiment(BEFORE | {"after": [0.61, 0.55]} | CONTROLS, "transplant-epe", "repeated")
    moved, left, before = judged("W-11", run).outcomes
    assert (moved, before) == (HOLDS, HOLDS)
    assert left != HOLDS

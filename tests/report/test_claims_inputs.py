"""Claims that compare inputs have one BOS policy for all of them; claims that read every sequence or length."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
import pytest
from support.hand_made_runs import NO_BOS, SEQUENCES, analysis, by_sequence, experiment, family, manifest

from sinkscope.report.claims.claim import Judgment, Outcome, judge
from sinkscope.report.claims.evidence import Evidence
from sinkscope.report.claims.register import CLAIMS
from sinkscope.results.run import RunData

HOLDS, FAILS, NOT_APPLIES = Outcome.HOLDS, Outcome.FAILS, Outcome.DOES_NOT_APPLY
BOS = {"sequences": SEQUENCES, "token_zero": "bos <s> (id 1)"}


def judged(claim: str, *runs: RunData) -> Judgment:
    return judge(CLAIMS[claim], Evidence.of(runs, ["natural", *CLAIMS[claim].reads]))


def read(condition: str, rate: float, bos: bool, kind: str = "rotary", main: bool = False) -> RunData:
    """A run on an input with this sink rate at position 0; `main`: the model as it is, with more tables."""
    table = by_sequence({"sink_rate": [rate, 0.01]}, noise=1e-3 * (rate > 0), position=range(2))
    tables = {"attention_by_sequence": table} | ({"attention": table} if main else {})
    return analysis(tables, condition, family=family(kind), input=BOS if bos else NO_BOS)


def of_both(rates: Mapping[str, tuple[float, float]], own: bool, kind: str = "rotary") -> list[RunData]:
    """Input → its sink rates with a BOS and without; `own`: what the model's own text has."""
    return [
        read(name, rate, bos, kind, main=name == "natural" and bos == own)
        for name, both in rates.items()
        for rate, bos in zip(both, (True, False), strict=True)
    ]


LIKE_GEMMA = {"natural": (0.80, 0.0), "random": (0.79, 0.0), "repeated": (0.61, 0.0)}


def test_a_sink_at_the_bos_stays_on_random_tokens_after_the_bos() -> None:
    """Against random tokens without a BOS it would be said to be gone."""
    found = judged("W-2", *of_both(LIKE_GEMMA, own=True))
    assert (found.outcome, found.estimates[0].value) == (HOLDS, pytest.approx(0.79 / 0.80, abs=0.01))
    assert found.estimates[0].note == "with a BOS text 80.0, random 79.0 %; without text 0.0, random 0.0 %"
    mixed = [read("natural", 0.8, True, main=True), read("random", 0.0, False)]
    found = judged("W-2", *mixed)
    assert (found.outcome, found.reason) == (
        Outcome.NOT_MEASURED,
        "sinkscope analyze MODEL --input random --bos always",
    )


def test_where_equal_tokens_had_no_sink_to_lose_it_does_not_vanish() -> None:
    found = judged("W-3", *of_both(LIKE_GEMMA, own=True))
    assert found.outcome == NOT_APPLIES
    assert "with a BOS text 80.0, repeated 61.0 %; without text 0.0, repeated 0.0 %" in found.reason
    vanishes = {"natural": (0.80, 0.7), "repeated": (0.61, 0.0)}
    assert judged("W-3", *of_both(vanishes, own=True)).outcome == HOLDS
    assert judged("W-3", *of_both({**vanishes, "repeated": (0.0, 0.61)}, own=True)).outcome == FAILS


def test_a_sink_that_stays_on_repeated_tokens_is_compared_without_a_bos() -> None:
    stays = {"natural": (0.80, 0.7), "repeated": (0.0, 0.6)}
    found = judged("W-4", *of_both(stays, own=True, kind="learned"))
    assert (found.outcome, found.estimates[0].value) == (HOLDS, pytest.approx(0.6 / 0.7, abs=0.01))
    assert judged("W-4", *of_both({**stays, "repeated": (0.6, 0.0)}, own=True, kind="learned")).outcome == FAILS


def test_a_sink_rate_says_under_which_policy_it_was_measured() -> None:
    assert (
        judged("W-1", *of_both(LIKE_GEMMA, own=True)).estimates[0].note == "with a BOS text 80.0 %; without text 0.0 %"
    )
    alone = judged("W-1", read("natural", 0.8, False, main=True))
    assert alone.estimates[0].note == "without text 80.0 %"


def test_interventions_on_repeated_tokens_after_a_bos_are_another_experiment() -> None:
    rates = {"before": [0.6, 0.05], "after": [0.1, 0.05], "control 0": [0.6, 0.05], "control 1": [0.6, 0.05]}
    run = experiment(rates, "replace-epe", "repeated")
    assert judged("W-10", run).outcome == HOLDS
    after_bos = RunData(run.manifest | {"input": BOS}, run.tables)
    assert judged("W-10", analysis({}), after_bos).outcome == Outcome.NOT_MEASURED


# --- lengths


def of_length(length: int, mass: float) -> RunData:
    """Window masses of one layer's ten heads around `mass`, from 0.15 below to 0.15 above it."""
    heads = np.linspace(mass - 0.15, mass + 0.15, 10)
    table = by_sequence({"window_mass": heads[None]}, 1, 1e-3, head=range(10))
    config = {"epsilon": 0.3, "seq_len": length, "window": length}
    tables = {"attention_heads_by_sequence": table} | ({"attention": table} if length == 64 else {})
    return RunData(manifest() | {"config": config}, tables)


def test_a_rate_near_0_cannot_fall() -> None:
    """At ε = 0.4 the sink is gone from T = 64 on: that its slope is less steep over all lengths says nothing."""
    floor = judged(
        "W-20", *(of_length(length, mass) for length, mass in ((16, 0.42), (32, 0.3), (64, 0.2), (128, 0.12)))
    )
    assert floor.outcome != FAILS
    gone = judged("W-20", *(of_length(length, mass) for length, mass in ((16, 0.3), (32, 0.2), (64, 0.1), (128, 0.05))))
    assert gone.outcome == NOT_APPLIES
    assert "a floor" in gone.reason
    steady = [of_length(length, mass) for length, mass in ((16, 0.5), (32, 0.48), (64, 0.46), (128, 0.44))]
    assert judged("W-20", *steady).outcomes[1] == HOLDS
    rising = [of_length(length, mass) for length, mass in ((16, 0.3), (32, 0.35), (64, 0.4), (128, 0.45))]
    assert judged("W-20", *rising).outcomes[0] == FAILS


# --- outlier features


def elsewhere(*shares: float) -> RunData:
    """Sequences whose other tokens have this share of the largest entry; all in the second of two layers."""
    count = len(shares)
    entries = {"layer": 1, "sequence": range(count), "position": 0, "coordinate": 7, "value": 2e4, "ratio": 1e4}
    places = {"sequence": [*range(count)] * 2, "layer": [0] * count + [1] * count, "position": 0, "coordinate": 7}
    rows = pd.DataFrame(places | {"largest": 2e4, "elsewhere": [1e4] * count + [2e4 * share for share in shares]})
    tables = {"massive": pd.DataFrame(entries).assign(is_massive=True), "massive_elsewhere": rows}
    return RunData(manifest() | {"input": {**BOS, "sequences": count}}, tables)


def test_outlier_features_are_looked_for_in_every_sequence() -> None:
    assert judged("S-15", elsewhere(*[0.01] * 10)).outcome == HOLDS
    later = judged("S-15", elsewhere(0.01, *[0.9] * 9))  # the first sequence alone says nothing of the others
    assert (later.outcome, later.estimates[0].value) == (FAILS, pytest.approx(0.811))
    assert judged("S-15", elsewhere(*[0.01, 0.2] * 5)).outcome == Outcome.INCONCLUSIVE

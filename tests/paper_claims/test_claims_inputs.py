"""Claims that compare inputs have one BOS policy for all of them; claims that read every sequence or length."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
import pytest
from support.hand_made_runs import NO_BOS, SEQUENCES, analysis, by_sequence, experiment, family, manifest

from sinkscope.paper_claims.claim import Judgment, judge
from sinkscope.paper_claims.evidence import MAIN, Evidence
from sinkscope.paper_claims.register import CLAIMS
from sinkscope.results.judgment import Outcome
from sinkscope.results.run import RunData

HOLDS, FAILS, NOT_APPLIES = Outcome.HOLDS, Outcome.FAILS, Outcome.DOES_NOT_APPLY
BOS = {"sequences": SEQUENCES, "token_zero": "bos <s> (id 1)"}


def judged(claim: str, *runs: RunData) -> Judgment:
    return judge(CLAIMS[claim], Evidence.of(runs, [MAIN, *CLAIMS[claim].reads]))


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


def of_length(length: int, *shares: float) -> RunData:
    """A hundred heads of one layer; of these so large shares have a window mass above 0.2, 0.3 and 0.4."""
    heads = np.array([0.1 + 0.1 * sum(place < 100 * share for share in shares) + 0.01 for place in range(100)])
    table = by_sequence({"window_mass": heads[None]}, 1, 1e-3, head=range(100))
    config = {"epsilon": 0.3, "seq_len": length, "window": length}
    tables = {"attention_heads_by_sequence": table} | ({"attention": table} if length == 64 else {})
    return RunData(manifest() | {"config": config}, tables)


def by_length(*shares: tuple[float, float, float]) -> Judgment:
    return judged("W-20", *(of_length(length, *own) for length, own in zip((16, 32, 64, 128), shares, strict=True)))


def test_a_rate_near_0_cannot_fall() -> None:
    """The same share of a smaller rate is fewer points, which is no flatter fall."""
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
    """Zeros do harm and the mean over sequences does not: the sink's values are a bias."""
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

"""Claims that compare inputs have one BOS policy for all of them; claims that read every sequence or length."""

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

from sinkscope.paper_claims.claim import Judgment
from sinkscope.results.judgment import Outcome
from sinkscope.results.run import RunData


def read(condition: str, rate: float, bos: bool, kind: str = "rotary", main: bool = False) -> RunData:
    """A run on an input with this sink rate at position 0; `main`: the model as it is, with more tables."""
    table = by_sequence({"sink_rate": [rate, 0.01]}, noise=1e-3 * (rate > 0), position=range(2))
    tables = {"attention_by_sequence": table} | ({"attention": table} if main else {})
    return analysis(tables, condition, family=family(kind), input=BOS if bos else NO_BOS)


def of_both(kind: str = "rotary", **rates: tuple[float, float]) -> list[RunData]:
    """Input → its sink rates with a BOS, as in the model's own text, and without."""
    return [
        read(name, rate, bos, kind, main=name == "natural" and bos)
        for name, both in rates.items()
        for rate, bos in zip(both, (True, False), strict=True)
    ]


def test_inputs_are_compared_under_one_policy() -> None:
    """A sink at the BOS stays on random tokens after the BOS; without a BOS they have none."""
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


# --- single tables


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
    later = judged("S-15", elsewhere(0.01, *[0.9] * 9))  # the first sequence does not represent the others
    assert (later.outcome, later.estimates[0].value) == (FAILS, pytest.approx(0.811))
    assert judged("S-15", elsewhere(*[0.01, 0.2] * 5)).outcome == INCONCLUSIVE


@pytest.mark.parametrize(("position", "expected"), [(2, HOLDS), (3, FAILS)])
def test_the_sinks_of_a_prefix_lm(position: int, expected: Outcome) -> None:
    sinks = pd.DataFrame({"layer": 0, "head": 0, "sequence": range(40), "position": position, "queries": 30})
    late = sinks.assign(position=60, queries=2)  # a key that two queries see does not count

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
    assert found.reason == "in no layer can the gradient's gain in the mlp branch be told"
    both = pd.concat([attn, attn.assign(branch="mlp")], ignore_index=True)
    assert judged("GS-15", analysis({"gradient_ratio_by_sequence": both})).outcome in (HOLDS, FAILS, INCONCLUSIVE)
    bound = pd.DataFrame({"layer": [0, 0], "position": [0, 1], "holds": [np.nan] * 2, "tightness": [np.nan] * 2})
    found = judged("GS-19", analysis({"norm_bound": bound}))
    assert (found.outcome, found.reason) == (NOT_APPLIES, "the bound is of no layer of this model")

"""Claims on trainings that differ in how blocks begin, where tokens stand, or what attention sees: both ways."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.hand_made_runs import analysis, by_sequence, family
from support.hand_made_trainings import SHAPE, rates, training

from sinkscope.commands.evidence import Collection
from sinkscope.paper_claims.claim import Judgment, judge
from sinkscope.paper_claims.evidence import MAIN, Evidence
from sinkscope.paper_claims.register import CLAIMS
from sinkscope.paper_claims.studies import Training
from sinkscope.results.judgment import Outcome

HOLDS, FAILS, INCONCLUSIVE, INAPPLICABLE = (
    Outcome.HOLDS, Outcome.FAILS, Outcome.INCONCLUSIVE, Outcome.DOES_NOT_APPLY
)  # fmt: skip
SEEDS = (0.0, 0.002, -0.002)
SIGMOID = "operation:kind=sigmoid"


def trained(by_position: Sequence[float], arm: str = "none", seeds: Sequence[float] = SEEDS, **given: Any) -> Training:
    """A training whose arm has these sink rates at positions 0, 1, …, a little else in each seed."""
    runs = [
        {"attention_by_sequence": rates(by_position[0] + more, 0.0, np.add(by_position[1:], more))} for more in seeds
    ]
    numbers = {"sink_rate": [by_position[0] + more for more in seeds]}
    return training({arm: numbers}, tables={arm: runs}, **given)


def outcome(claim: str, *trainings: Training) -> Outcome:
    return judge(CLAIMS[claim], Collection(trainings=trainings).evidence({})["made"]).outcome


def test_a_random_first_token() -> None:
    plain, more, less = trained([0.2, 0.0]), trained([0.4, 0.0], random_tokens=1), trained([0.1, 0], random_tokens=1)
    assert outcome("W-35", plain, more) == HOLDS
    assert outcome("W-35", plain, less) == FAILS
    two = {share: trained([0.3, share], random_tokens=2) for share in (0.6, 0.1)}
    assert outcome("W-36", plain, two[0.6]) == HOLDS
    assert outcome("W-36", plain, two[0.1]) == FAILS
    assert outcome("W-36", plain, more) == Outcome.NOT_MEASURED  # none has two


def test_random_tokens_where_there_is_no_sink() -> None:
    none = [trained([0.05, 0.02], random_tokens=count) for count in (0, 1, 2)]
    assert outcome("W-35", *none) == outcome("W-36", *none) == INAPPLICABLE


@pytest.mark.parametrize(("second", "expected"), [(0.7, HOLDS), (0.02, FAILS)])
def test_a_fixed_token(second: float, expected: Outcome) -> None:
    first = trained([0.7, 0.0], fixed_position=0)
    assert outcome("W-37", first, trained([0.0, second], fixed_position=1)) == expected
    assert outcome("W-37", first, trained([0.9, second], fixed_position=1)) == FAILS  # the sink stays where it was


@pytest.mark.parametrize(("least", "expected"), [(0.2, HOLDS), (0.05, FAILS)])
def test_every_positional_scheme(least: float, expected: Outcome) -> None:
    schemes = {"none": least, "absolute": 0.3, "learned": 0.3, "relative": 0.3, "alibi": 0.3, "rotary": 0.3}

    def each(names: Mapping[str, float]) -> list[Training]:
        return [trained([rate, 0], shape=SHAPE | {"position_scheme": name}) for name, rate in names.items()]

    assert outcome("W-42", *each(schemes)) == expected
    assert outcome("W-42", *each(schemes | {"bucket-number": 0.0})) == expected  # none of the paper's
    del schemes["alibi"]
    assert outcome("W-42", *each(schemes)) == Outcome.NOT_MEASURED


@pytest.mark.parametrize(("worst", "expected"), [(0.005, HOLDS), (0.2, FAILS)])
def test_sigmoid_attention_at_every_rate_and_decay(worst: float, expected: Outcome) -> None:
    seeds = (0.0, 0.0001, 0.0002)

    def sigmoid(rate: float, **given: Any) -> Training:
        return trained([rate, 0], SIGMOID, seeds, **given)

    def softmax(rate: float) -> list[Training]:
        return [trained([rate, 0], "none", seeds, learning_rate=each) for each in (1e-3, 1e-4)]

    by_rate = [sigmoid(0.001, learning_rate=1e-3), sigmoid(0.001, learning_rate=1e-4)]
    by_decay = [sigmoid(worst, weight_decay=1.0), sigmoid(0.001, weight_decay=0.5)]
    assert outcome("W-58", *by_rate, *by_decay, *softmax(0.4)) == expected
    assert outcome("W-58", *by_rate, *by_decay, *softmax(0.05)) == INAPPLICABLE  # there is no sink to be without
    assert outcome("W-58", *by_rate, *softmax(0.4)) == Outcome.NOT_MEASURED


def test_learning_rates_where_there_is_no_sink() -> None:
    assert outcome("W-31", *(trained([0.05, 0], learning_rate=rate) for rate in (1e-3, 1e-4))) == INAPPLICABLE


def test_of_several_groups_of_levels_the_one_with_most_sinks_is_read_and_named() -> None:
    """Whatever their order is."""
    rising = [trained([share, 0], steps=800, learning_rate=rate) for rate, share in ((1e-4, 0.2), (1e-3, 0.6))]
    falling = [trained([share, 0], steps=400, learning_rate=rate) for rate, share in ((1e-4, 0.3), (1e-3, 0.1))]
    for given in (rising + falling, falling + rising):
        found = judge(CLAIMS["W-31"], Collection(trainings=tuple(given)).evidence({})["made"])
        assert found.outcome == HOLDS
        assert "steps=800, of 2 settings that with most plain sinks" in found.estimates[0].note


def test_amounts_of_data_are_of_one_text() -> None:
    little, much = (trained([share, 0], text=name, blocks=count) for share, name, count in (
        (0.001, "a.txt", 10), (0.5, "b.txt", 1000)))  # fmt: skip
    assert outcome("W-34", little, much) == Outcome.NOT_MEASURED


@pytest.mark.parametrize(("parameters", "expected"), [(1.1e9, HOLDS), (6e7, INAPPLICABLE)])
def test_at_a_billion_parameters(parameters: float, expected: Outcome) -> None:
    made = training({"none": {"sink_rate": [0.45, 0.46, 0.44]}, SIGMOID: {"sink_rate": [0.02, 0.03, 0.02]}})
    for run in made.runs.values():
        run.manifest["model"]["parameters"] = int(parameters)
    assert outcome("W-59", made) == expected


def of_run(claim: str, tables: Mapping[str, pd.DataFrame], **given: Any) -> Judgment:
    run = analysis(tables, **given)
    return judge(CLAIMS[claim], Evidence.of([run], CLAIMS[claim].needs))


@pytest.mark.parametrize(("position", "expected"), [(2, HOLDS), (3, FAILS)])
def test_the_sinks_of_a_prefix_lm(position: int, expected: Outcome) -> None:
    sinks = pd.DataFrame({"layer": 0, "head": 0, "sequence": range(40), "position": position, "queries": 30})
    prefix = family("rotary", prefix=3)
    assert of_run("W-39", {"sink_positions": sinks}, family=prefix).outcome == expected
    assert of_run("W-39", {"sink_positions": sinks}).outcome == INAPPLICABLE
    assert of_run("W-39", {"sink_positions": sinks[:0]}, family=prefix).outcome not in (HOLDS, FAILS)
    late = sinks.assign(position=60, queries=2)  # of a key that two queries see, which says nothing
    assert of_run("W-39", {"sink_positions": pd.concat([sinks, late])}, family=prefix).outcome == expected


@pytest.mark.parametrize(("mass", "expected"), [(0.01, HOLDS), (0.2, FAILS)])
def test_the_first_token_of_a_window(mass: float, expected: Outcome) -> None:
    table = by_sequence({"edge_mass": mass}, noise=0.001)
    model = {"name": "made", "weights": "trained", "sliding_window": 8}
    assert of_run("W-41", {"window_edge_by_sequence": table}, model=model).outcome == expected
    assert of_run("W-41", {"window_edge_by_sequence": table}).outcome == INAPPLICABLE


def test_a_model_whose_branch_has_no_gradient_gain() -> None:
    """Of post-norm models the gain is told for one branch alone."""
    gains = {name: np.ones(16) for name in ("bloat", "compress", "change", "input_norm")}
    attn = by_sequence(gains, noise=0.01, position=range(16)).assign(branch="attn")

    def bloat(table: pd.DataFrame) -> Judgment:
        run = analysis({"gradient_ratio_by_sequence": table})
        return judge(CLAIMS["GS-15"], Evidence.of([run], [MAIN]))

    found = bloat(attn)
    assert found.outcome == INAPPLICABLE
    assert found.reason == "in no layer can the gradient's gain in the mlp branch be told"
    both = pd.concat([attn, attn.assign(branch="mlp")], ignore_index=True)
    assert bloat(both).outcome not in (INAPPLICABLE, Outcome.NOT_MEASURED)


def test_a_model_whose_norms_have_no_bound() -> None:
    """Post-norm models: theorem 2 is of a norm in front of a branch."""
    bound = pd.DataFrame({"layer": [0, 0], "position": [0, 1], "holds": [np.nan] * 2, "tightness": [np.nan] * 2})
    found = judge(CLAIMS["GS-19"], Evidence.of([analysis({"norm_bound": bound})], [MAIN]))
    assert (found.outcome, found.reason) == (INAPPLICABLE, "the bound is of no layer of this model")

"""Claims on trainings that differ in one setting, on steps, and on related models, with a known truth."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from support.hand_made_runs import FAILS, FEW_SEEDS, HOLDS, INCONCLUSIVE, NOT_APPLIES, UNMEASURED, manifest
from support.hand_made_trainings import SHAPE, Tables, gradients, judged, rates, steps, training

from sinkscope.commands.claims.claim import Judgment, judge
from sinkscope.commands.claims.gathered import Collection
from sinkscope.commands.claims.over_seeds import mean_over_seeds, range_of_rates
from sinkscope.commands.claims.papers.wse import _best_decay
from sinkscope.commands.claims.register import CLAIMS
from sinkscope.commands.claims.studies import Training
from sinkscope.results.findings import Outcome
from sinkscope.results.run import RunData

SIGMOID = "operation:kind=sigmoid"


def plain(percent: float, around: Sequence[float] = (0.0, 0.5, -0.5), **given: Any) -> Training:
    """Make a plain training with this sink rate; seeds differ by these points."""
    return training({"none": {"sink_rate": [(percent + more) / 100 for more in around]}}, **given)


def trained(by_position: Sequence[float], arm: str = "none", spread: float = 0.2, **given: Any) -> Training:
    """Make a training whose arm has these sink rates in percent at positions 0, 1, …, which vary a little by seed."""
    seeds = [np.add(by_position, more) / 100 for more in (0, spread, -spread)]
    runs = [{"attention_by_sequence": rates(own[0], 0.0, own[1:])} for own in seeds]
    return training({arm: {"sink_rate": [own[0] for own in seeds]}}, tables={arm: runs}, **given)


def shaped(**given: Any) -> dict[str, Any]:
    return {"shape": SHAPE | given}


# claim → settings of trainings, and sink rates with which it holds and fails
VARIED: dict[str, tuple[list[dict[str, Any]], Sequence[float], Sequence[float]]] = {
    "W-31": ([{"learning_rate": rate} for rate in (1e-4, 2e-4, 4e-4)], (3, 11, 18), (18, 11, 3)),
    "W-32": ([{"learning_rate": 1e-4, "steps": 400}, {"learning_rate": 4e-4, "steps": 100}], (6, 18), (18, 6)),
    "W-33": ([{"batch_size": size} for size in (2, 4, 8)], (16, 17, 16), (5, 17, 30)),
    "W-34": ([{"tokens": 640, "blocks": 5}, {"tokens": 64000, "blocks": 500}], (0.3, 40), (40, 40)),
    "W-38": ([{"weight_decay": decay} for decay in (0, 0.1, 0.5, 5)], (15, 18, 41, 0.3), (41, 18, 15, 20)),
    "W-40": ([shaped(sliding_window=size) for size in (64, None)], (0.3, 30), (30, 30)),
    "W-45": ([shaped(hidden_act=act) for act in ("silu", "gelu", "relu")], (18, 18, 17), (18, 2, 40)),
    "W-46": ([shaped(num_attention_heads=heads) for heads in (1, 4, 8)], (18, 16, 18), (2, 18, 40)),
}


@pytest.mark.parametrize("claim", VARIED)
def test_a_setting_decides_both_ways(claim: str) -> None:
    settings, good, bad = VARIED[claim]

    def outcome(found: Sequence[float], *around: float) -> Outcome:
        """Judge levels whose seeds differ from level to level."""
        pairs = enumerate(zip(found, settings, strict=True))
        return judged(claim, *(plain(rate, np.roll(around, place), **given) for place, (rate, given) in pairs)).outcome

    assert outcome(good, 0.0, 0.01, -0.01) == HOLDS
    assert outcome(bad, 0.0, 0.01, -0.01) == FAILS
    assert outcome(good, 0.0) == FEW_SEEDS


def test_a_slope_is_a_regression_for_each_seed() -> None:
    trainings = [
        plain(rate, around, learning_rate=level)
        for rate, level, around in ((3, 1e-4, (0, 1, 2)), (11, 2e-4, (1, 0, -1)), (18, 8e-4, (0, -2, 1)))
    ]
    found = judged("W-31", *trainings).estimates[0]
    levels = np.log2([1e-4, 2e-4, 8e-4])
    slopes = [stats.linregress(levels, rates).slope for rates in ((3, 12, 18), (4, 11, 16), (5, 10, 19))]
    low, high = stats.t.interval(0.95, 2, np.mean(slopes), stats.sem(slopes))
    assert (found.low, found.value, found.high) == pytest.approx((low, np.mean(slopes), high))
    assert found.note == "0.0001: 4.0, 0.0002: 11.0, 0.0008: 17.7 %; 3 seeds, Student's t"


def test_extremes_of_many_levels_are_not_further_apart_by_chance() -> None:
    """For eight levels that differ only by noise, few intervals are above 0; the means are far from the extremes."""
    decays, drawn = np.array([0.0, 0.1, 0.2, 0.4, 0.5, 1.0, 2.0, 5.0]), np.random.default_rng(0)
    studies = [drawn.normal(30, 5, size=(5, 8)) for _ in range(200)]
    of_decays = [mean_over_seeds(_best_decay(decays, rates)) for rates in studies]
    of_ranges = [range_of_rates(decays, rates) for rates in studies]
    for found, by_chance in ((of_decays, 3.5), (of_ranges, 14.2)):
        assert np.mean([each.low > 0 for each in found]) <= 0.08
        assert abs(np.mean([each.value for each in found])) < by_chance / 2


def test_random_first_tokens() -> None:
    none, one = trained([20, 0]), trained([40, 0], random_tokens=1)
    assert judged("W-35", none, one).outcome == HOLDS
    assert judged("W-35", none, trained([10, 0], random_tokens=1)).outcome == FAILS
    assert judged("W-36", none, trained([30, 60], random_tokens=2)).outcome == HOLDS
    assert judged("W-36", none, trained([30, 10], random_tokens=2)).outcome == FAILS
    assert judged("W-36", none, one).outcome == UNMEASURED  # no training has two random tokens
    no_sink = [trained([5, 2], random_tokens=count) for count in (0, 1, 2)]
    assert judged("W-35", *no_sink).outcome == judged("W-36", *no_sink).outcome == NOT_APPLIES


def test_a_fixed_token_makes_its_position_the_sink() -> None:
    first = trained([70, 0], fixed_position=0)
    for by_position, expected in (([0, 70], HOLDS), ([0, 2], FAILS), ([90, 70], FAILS)):  # also a sink at 0
        assert judged("W-37", first, trained(by_position, fixed_position=1)).outcome == expected


def test_every_positional_scheme_has_a_sink() -> None:
    schemes = {"none": 20, "absolute": 30, "learned": 30, "relative": 30, "alibi": 30, "rotary": 30}

    def outcome(rates_of: Mapping[str, float]) -> Outcome:
        return judged("W-42", *(plain(rate, **shaped(position_scheme=name)) for name, rate in rates_of.items())).outcome

    assert outcome(schemes | {"bucket-number": 0}) == HOLDS  # this scheme is not in the paper
    assert outcome(schemes | {"none": 5}) == FAILS
    assert outcome({name: rate for name, rate in schemes.items() if name != "alibi"}) == UNMEASURED


def test_sigmoid_attention_has_no_sink_at_any_rate_decay_and_size() -> None:
    def made(rate: float, arm: str = SIGMOID, **given: Any) -> Training:
        return trained([rate, 0], arm, 0.01, **given)

    def softmax(rate: float) -> list[Training]:
        return [made(rate, "none", learning_rate=each) for each in (1e-3, 1e-4)]

    by_rate = [made(0.1, learning_rate=1e-3), made(0.1, learning_rate=1e-4)]
    by_decay = [made(0.5, weight_decay=1.0), made(0.1, weight_decay=0.5)]
    assert judged("W-58", *by_rate, *by_decay, *softmax(40)).outcome == HOLDS
    worse = [made(20, weight_decay=1.0), by_decay[1]]
    assert judged("W-58", *by_rate, *worse, *softmax(40)).outcome == FAILS
    assert judged("W-58", *by_rate, *by_decay, *softmax(5)).outcome == NOT_APPLIES  # softmax has no sink either
    assert judged("W-58", *by_rate, *softmax(40)).outcome == UNMEASURED
    for parameters, expected in ((1.1e9, HOLDS), (6e7, NOT_APPLIES)):
        billion = training({"none": {"sink_rate": [0.45, 0.46, 0.44]}, SIGMOID: {"sink_rate": [0.02, 0.03, 0.02]}})
        for run in billion.runs.values():
            run.manifest["model"]["parameters"] = int(parameters)
        assert judged("W-59", billion).outcome == expected


def by_step(ratios: Mapping[int, float], sinks: Mapping[int, float], noise: float = 0.0) -> dict[int, Tables]:
    return {step: {"attention_by_sequence": rates(sinks[step], noise), **gradients(ratios[step])} for step in sinks}


def test_steps_of_one_training_are_judged_over_its_sequences() -> None:
    appears = {0: 0.0, 100: 0.3, 200: 0.5}

    def outcomes(ratios: Sequence[float], sinks: Mapping[int, float]) -> tuple[Judgment, Judgment]:
        one = steps("org/model", by_step(dict(zip(sinks, ratios, strict=True)), sinks), "series")
        return judged("W-30", one, name="model"), judged("GS-27", one, name="model")

    rise, spike = outcomes((2.0, 8.0, 6.0), appears)
    assert (rise.outcome, spike.outcome) == (HOLDS, HOLDS)
    assert rise.estimates[0].value == pytest.approx(50)
    assert rise.estimates[0].note == "first above 10 % at step 100; one training, interval over its sequences"
    assert spike.estimates[0].value == pytest.approx(3.0)
    assert outcomes((2.0, 8.0, 2.0), appears)[1].outcome == FAILS
    flat = outcomes((2.0, 2.0, 2.5), dict.fromkeys(appears, 0.001))
    assert [each.outcome for each in flat] == [FAILS, NOT_APPLIES]


def test_of_several_settings_it_is_judged_in_the_one_with_most_sinks() -> None:
    """The note names the setting; in the first setting, which has as many seeds, no sink appears."""
    ends = {1e-4: (0.01, 0.02, 0.03), 2e-4: (0.4, 0.5, 0.6), 4e-4: (0.7, 0.8)}  # by learning rate
    trainings = [
        training(
            {"none": {"sink_rate": last}},
            courses={"none": {"sink_rate": [[end / 99, end] for end in last]}},
            learning_rate=rate,
        )
        for rate, last in ends.items()
    ]
    found = judged("W-30", *trainings)
    assert (found.outcome, found.estimates[0].value) == (HOLDS, pytest.approx(50 * 98 / 99))
    words = "learning_rate=0.0002, of 2 settings the one with most plain sinks: 2.0, 50.0 %; 3 seeds, Student's t"
    assert found.estimates[0].note == f"first above 10 % at step 1; {words}"


COUNTS = (14, 70, 160, 410, 1000)


def model(name: str, rate: float, parameters: int = 1, **given: Any) -> RunData:
    described = manifest("natural", **given)
    described["model"] = described["model"] | {"name": name, "parameters": parameters}
    described["input"] = described["input"] | {"longest": 64}
    return RunData(described, {"attention_by_sequence": rates(rate, 0.0)})


def of_sizes(claim: str, found: Sequence[float], scores: Sequence[float] = ()) -> Judgment:
    names = {f"org/pythia-{count}m": count for count in COUNTS}
    runs = [model(name, rate, count * 10**6) for (name, count), rate in zip(names.items(), found, strict=False)]
    given = []
    for name, score in zip(names, scores, strict=False):
        row = {"condition": "hellaswag", "metric": "acc_norm", "score": score, "is_asked": True}
        table = pd.DataFrame([row, row | {"metric": "acc", "score": 0.0}])
        given.append(RunData({"model": {"name": name}}, {"benchmark": table}))
    evidence = Collection([*runs, model("org/other-9m", 0.9, 9)], scores=tuple(given)).evidence({})
    assert judge(CLAIMS[claim], evidence["org/other-9m"]).outcome == UNMEASURED
    return judge(CLAIMS[claim], evidence["org/pythia-14m"])


def test_the_sink_and_hellaswag_by_size() -> None:
    rising, falling = (0.1, 0.2, 0.3, 0.4, 0.5), (0.5, 0.4, 0.3, 0.2, 0.1)
    found = of_sizes("W-22", rising)
    assert (found.outcome, found.estimates[0].note[:26]) == (HOLDS, "14 M 10.0 %, 70 M 20.0 %, ")
    assert of_sizes("W-22", falling).outcome == FAILS
    assert of_sizes("W-22", (0.1, 0.5, 0.2, 0.4, 0.3)).outcome == INCONCLUSIVE
    assert of_sizes("W-22", rising[:3]).outcome == UNMEASURED
    assert of_sizes("W-23", rising, (0.26, 0.27, 0.3, 0.34, 0.4)).outcome == HOLDS
    assert of_sizes("W-23", rising, (0.4, 0.34, 0.3, 0.27, 0.26)).outcomes == (HOLDS, FAILS)
    assert of_sizes("W-23", rising, (0.26, 0.27, 0.3)).outcome == UNMEASURED


def test_a_chat_model_is_compared_with_its_base() -> None:
    def found(rate: float) -> Judgment:
        evidence = Collection([model("org/lm-1b", 0.5), model("org/lm-1b-instruct", rate)]).evidence({})
        assert judge(CLAIMS["W-12"], evidence["org/lm-1b"]).outcome == NOT_APPLIES
        return judge(CLAIMS["W-12"], evidence["org/lm-1b-instruct"])

    assert found(0.51).outcome == HOLDS
    assert (found(0.2).outcome, found(0.2).estimates[0].value) == (FAILS, pytest.approx(-30))
    for rate in CLAIMS["W-12"].published:  # the test can fail for pairs of the paper, and most of them pass
        assert (found(0.5 + rate.value / 100).outcome == FAILS) == (rate.name == "Mistral-7B")
    alone = Collection([model("org/lm-1b-instruct", 0.5)]).evidence({})["org/lm-1b-instruct"]
    assert judge(CLAIMS["W-12"], alone).reason == "sinkscope analyze org/lm-1b"

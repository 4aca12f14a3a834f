"""Claims on trainings that differ in one setting, on steps, and on related models, of which the truth is known."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from support.hand_made_runs import manifest
from support.hand_made_trainings import SHAPE, Tables, gradients, rates, steps, training

from sinkscope.commands.evidence import Collection
from sinkscope.errors import InputError
from sinkscope.paper_claims.claim import Judgment, judge
from sinkscope.paper_claims.register import CLAIMS
from sinkscope.paper_claims.studies import Steps, Training, base_of, family_of
from sinkscope.results.judgment import Outcome
from sinkscope.results.run import RunData
from sinkscope.results.scores import Scores
from sinkscope.results.statistics import Estimate

HOLDS, FAILS, INCONCLUSIVE, UNMEASURED = Outcome.HOLDS, Outcome.FAILS, Outcome.INCONCLUSIVE, Outcome.NOT_MEASURED


def judged(claim: str, *parts: Training | Steps, name: str = "made") -> Judgment:
    trainings = tuple(part for part in parts if isinstance(part, Training))
    series = tuple(part for part in parts if isinstance(part, Steps))
    return judge(CLAIMS[claim], Collection((), trainings, series).evidence({})[name])


def plain(percent: float, around: Sequence[float] = (0.0, 0.5, -0.5), **given: Any) -> Training:
    """A plain training with this sink rate; seeds differ by these points."""
    return training({"none": {"sink_rate": [(percent + more) / 100 for more in around]}}, **given)


# claim → settings of trainings, and sink rates with which it holds and fails
VARIED: dict[str, tuple[list[dict[str, Any]], Sequence[float], Sequence[float]]] = {
    "W-31": ([{"learning_rate": rate} for rate in (1e-4, 2e-4, 4e-4)], (3, 11, 18), (18, 11, 3)),
    "W-32": ([{"learning_rate": 1e-4, "steps": 400}, {"learning_rate": 4e-4, "steps": 100}], (6, 18), (18, 6)),
    "W-33": ([{"batch_size": size} for size in (2, 4, 8)], (16, 17, 16), (5, 17, 30)),
    "W-34": ([{"tokens": 640, "blocks": 5}, {"tokens": 64000, "blocks": 500}], (0.3, 40), (40, 40)),
    "W-38": ([{"weight_decay": decay} for decay in (0, 0.1, 0.5, 5)], (15, 18, 41, 0.3), (41, 18, 15, 20)),
    "W-40": ([{"shape": SHAPE | {"sliding_window": size}} for size in (64, None)], (0.3, 30), (30, 30)),
    "W-45": ([{"shape": SHAPE | {"hidden_act": act}} for act in ("silu", "gelu", "relu")], (18, 18, 17), (18, 2, 40)),
    "W-46": ([{"shape": SHAPE | {"num_attention_heads": n}} for n in (1, 4, 8)], (18, 16, 18), (2, 18, 40)),
}


@pytest.mark.parametrize("claim", VARIED)
def test_a_setting_decides_both_ways(claim: str) -> None:
    settings, good, bad = VARIED[claim]

    def outcome(found: Sequence[float], *around: float) -> Outcome:
        """The levels' seeds differ otherwise in each level."""
        trainings = [
            plain(rate, np.roll(around, place), **given)
            for place, (rate, given) in enumerate(zip(found, settings, strict=True))
        ]
        return judged(claim, *trainings).outcome

    assert outcome(good, 0.0, 0.01, -0.01) == HOLDS
    assert outcome(bad, 0.0, 0.01, -0.01) == FAILS
    assert outcome(good, 0.0) == Outcome.NOT_ENOUGH_SEEDS


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


def test_trainings_that_differ_in_more_are_not_compared() -> None:
    one = plain(3, learning_rate=1e-4)
    assert judged("W-31", one, plain(18, learning_rate=4e-4)).outcome == HOLDS
    other = judged("W-31", one, plain(18, learning_rate=4e-4, steps=9))
    assert other.outcome == UNMEASURED
    assert other.reason.endswith("--method none --learning-rate R, with several R")
    assert (
        judged("W-31", one, plain(18, learning_rate=4e-4, shape=SHAPE | {"hidden_act": "relu"})).outcome == UNMEASURED
    )
    assert judged("W-32", one, plain(18, learning_rate=4e-4)).outcome == UNMEASURED  # not the same product


def test_weight_decays_that_the_claim_speaks_of_have_to_be_there() -> None:
    found = judged("W-38", *(plain(18, weight_decay=decay) for decay in (0.0, 0.1)))
    assert (found.outcome, "weight decays of 5 or more" in found.reason) == (UNMEASURED, True)


def test_a_window_is_as_long_as_what_the_sink_rate_is_averaged_over() -> None:
    found = judged("W-40", *(plain(18, shape=SHAPE | {"sliding_window": size}) for size in (8, None)))
    assert (found.outcome, "lets only the first 8 see" in found.reason) == (UNMEASURED, True)


# claim → which of its numbers, the settings of eight trainings, and what the extremes of one seed would give by chance
EXTREMES: dict[str, tuple[int, list[dict[str, Any]], float]] = {
    "W-38": (1, [{"weight_decay": decay} for decay in (0.0, 0.1, 0.2, 0.4, 0.5, 1.0, 2.0, 5.0)], 3.5),
    "W-33": (0, [{"batch_size": size} for size in (1, 2, 4, 8, 16, 32, 64, 128)], 14.2),
}


@pytest.mark.parametrize("claim", EXTREMES)
def test_extremes_of_many_levels_are_not_further_apart_by_chance(claim: str) -> None:
    """Levels that differ by noise alone, a standard deviation of 5: of 40 studies few intervals are above 0."""
    number, settings, by_chance = EXTREMES[claim]
    rng = np.random.default_rng(0)

    def estimate() -> Estimate:
        trainings = [plain(30, rng.normal(0, 5, size=5), **given) for given in settings]
        return judged(claim, *trainings).estimates[number]

    found = [estimate() for _ in range(40)]
    assert sum(each.low > 0 for each in found) <= 4
    assert abs(np.mean([each.value for each in found])) < by_chance / 2


def test_a_range_is_of_sinks() -> None:
    """Where no level has one, that they do not differ says nothing."""
    without = [plain(2, batch_size=size) for size in (2, 4, 8)]
    found = judged("W-33", *without)
    assert (found.outcome, found.reason) == (Outcome.DOES_NOT_APPLY, "no sink rate is above 10 %")


# --- steps


def by_step(ratios: Mapping[int, float], sinks: Mapping[int, float], noise: float = 0.01) -> dict[int, Tables]:
    return {step: {"attention_by_sequence": rates(sinks[step], noise), **gradients(ratios[step])} for step in sinks}


APPEARS = {0: 0.0, 100: 0.3, 200: 0.5}


def test_the_sink_of_one_training_appears_by_its_sequences() -> None:
    spike = {0: 2.0, 100: 8.0, 200: 6.0}
    one = steps("org/model", by_step(spike, APPEARS, noise=0.0), "series")
    found = judged("W-30", one, name="model")
    assert found.outcome == HOLDS
    assert found.estimates[0].value == pytest.approx(50)
    assert found.estimates[0].note == "first above 10 % at step 100; one training, interval over its sequences"
    assert judged("GS-27", one, name="model").estimates[0].value == pytest.approx(3.0)
    assert judged("GS-27", one, name="model").outcome == HOLDS


def test_steps_without_a_sink_or_a_spike() -> None:
    flat = steps("org/model", by_step({0: 2.0, 100: 2.0, 200: 2.5}, dict.fromkeys(APPEARS, 0.001), 0.0), "series")
    assert judged("W-30", flat, name="model").outcome == FAILS
    assert judged("GS-27", flat, name="model").outcome == Outcome.DOES_NOT_APPLY
    lost = steps("org/model", by_step({0: 2.0, 100: 8.0, 200: 2.0}, APPEARS), "series")
    assert judged("GS-27", lost, name="model").outcome == FAILS


def test_steps_of_an_arm_belong_to_its_training(tmp_path: Path) -> None:
    made = training({"none": {"loss": (1.0, 2.0, 3.0)}, "vga": {"loss": (1.0, 2.0, 3.0)}}, folder=tmp_path / "out")

    def of(arm: str, last: float) -> Steps:
        sinks = {0: last / 100, 100: last}
        return steps(str(tmp_path / "out" / arm / "checkpoints"), by_step({0: 2, 100: 4}, sinks, 0.0), f"series-{arm}")

    seeds = [of(f"none-seed{seed}", rate) for seed, rate in enumerate((0.5, 0.6, 0.4))]
    found = judged("W-30", made, *seeds)
    assert found.outcome == HOLDS
    low, high = stats.t.interval(0.95, 2, 49.5, stats.sem([49.5, 59.4, 39.6]))
    assert (found.estimates[0].low, found.estimates[0].high) == pytest.approx((low, high))
    evidence = Collection((), (made,), (*seeds, of("vga-seed0", 0.0))).evidence({})
    assert list(evidence) == ["made", "made (vga)"]
    assert judge(CLAIMS["W-30"], evidence["made (vga)"]).outcome == FAILS
    with pytest.raises(InputError, match="are steps of one training"):
        judged("W-30", made, seeds[0], steps(str(seeds[0].of), by_step({0: 2}, {0: 0.0}), "again"))
    without = judged("W-30", made)
    assert without.reason == f"sinkscope analyze {tmp_path}/out/none-seed0/checkpoints, and of every other seed"


def test_a_training_that_logged_its_sink_rate_needs_no_steps() -> None:
    """For when the sink appears; the spike of gradients has to be measured."""
    logged = {"none": {"sink_rate": [[0.005, 0.05, 0.505], [0.006, 0.2, 0.606], [0.004, 0.0, 0.404]]}}
    made = training({"none": {"loss": (1.0, 2.0, 3.0)}}, courses=logged)
    found = judged("W-30", made)
    assert found.outcome == HOLDS
    assert found.estimates[0].value == pytest.approx(50)
    assert found.estimates[0].note.startswith("first above 10 % at step 2, first above 10 % at step 1;")
    never = {"none": {"sink_rate": [[0.0, 0.05, 0.06], [0.0, 0.0, 0.04], [0.0, 0.05, 0.05]]}}
    assert judged("W-30", training({"none": {"loss": (1.0, 2.0, 3.0)}}, courses=never)).outcome == FAILS
    assert judged("GS-27", made).outcome == UNMEASURED


def test_of_several_settings_it_is_judged_in_that_with_most_sinks() -> None:
    """And says so: in the first, which has as many seeds, there is no sink to appear."""
    ends = {1e-4: (0.01, 0.02, 0.03), 2e-4: (0.4, 0.5, 0.6), 4e-4: (0.7, 0.8)}  # by learning rate
    trainings = [
        training(
            {"none": {"sink_rate": last}}, courses={"none": {"sink_rate": [[end / 99, end] for end in last]}}, **rate
        )
        for rate, last in (({"learning_rate": rate}, last) for rate, last in ends.items())
    ]
    found = judged("W-30", *trainings)
    assert (found.outcome, found.estimates[0].value) == (HOLDS, pytest.approx(50 * 98 / 99))
    words = "learning_rate=0.0002, of 2 settings that with most plain sinks: 2.0, 50.0 %; 3 seeds, Student's t"
    assert found.estimates[0].note == f"first above 10 % at step 1; {words}"


# --- related models


def model(name: str, rate: float, parameters: int = 1, noise: float = 0.0, **given: Any) -> RunData:
    described = manifest("natural", **given)
    described["model"] = described["model"] | {"name": name, "parameters": parameters}
    described["config"] = {"epsilon": 0.3, "seq_len": 64, "window": 64}
    described["input"] = described["input"] | {"longest": 64}
    return RunData(described, {"attention_by_sequence": rates(rate, noise)})


def test_names_say_which_models_belong_together() -> None:
    assert family_of("EleutherAI/pythia-70m-deduped") == family_of("EleutherAI/pythia-1.4b-deduped")
    assert family_of("EleutherAI/pythia-70m") != family_of("EleutherAI/pythia-70m-deduped")
    assert family_of("gpt2") == family_of("gpt2-xl") != family_of("facebook/opt-125m")
    assert family_of("meta-llama/Llama-3.2-1B") != family_of("meta-llama/Meta-Llama-3-8B")
    assert base_of("meta-llama/Llama-2-7b-chat-hf") == "meta-llama/Llama-2-7b-hf"
    assert base_of("mistralai/Mistral-7B-Instruct-v0.1") == "mistralai/Mistral-7B-v0.1"
    assert base_of("google/gemma-3-270m") is None


def sizes(found: Sequence[float], counts: Sequence[int] = (14, 70, 160, 410, 1000)) -> Judgment:
    runs = [model(f"org/pythia-{count}m", rate, count * 10**6) for count, rate in zip(counts, found, strict=False)]
    evidence = Collection([*runs, model("org/other-9m", 0.9, 9)]).evidence({})
    assert judge(CLAIMS["W-22"], evidence["org/other-9m"]).outcome == UNMEASURED
    return judge(CLAIMS["W-22"], evidence["org/pythia-14m"])


def test_the_sink_by_size() -> None:
    assert sizes((0.1, 0.2, 0.3, 0.4, 0.5)).outcome == HOLDS
    assert sizes((0.5, 0.4, 0.3, 0.2, 0.1)).outcome == FAILS
    assert sizes((0.1, 0.5, 0.2, 0.4, 0.3)).outcome == INCONCLUSIVE
    assert sizes((0.1, 0.2, 0.3)).outcome == UNMEASURED
    assert sizes((0.1, 0.2, 0.3, 0.4, 0.5)).estimates[0].note.startswith("14 M 10.0 %, 70 M 20.0 %, ")


def test_the_sink_and_hellaswag_by_size() -> None:
    counts, rates_of = (14, 70, 160, 410, 1000), (0.1, 0.2, 0.3, 0.4, 0.5)
    runs = [model(f"org/pythia-{count}m", rate, count * 10**6) for count, rate in zip(counts, rates_of, strict=True)]

    def found(scores: Sequence[float]) -> Judgment:
        given = []
        for count, score in zip(counts, scores, strict=False):
            row = {"condition": "hellaswag", "metric": "acc_norm", "score": score, "is_asked": True}
            manifest = {"model": {"name": f"org/pythia-{count}m"}}
            given.append(Scores(manifest, pd.DataFrame([row, row | {"metric": "acc", "score": 0.0}])))
        evidence = Collection(runs, scores=tuple(given)).evidence({})
        return judge(CLAIMS["W-23"], evidence["org/pythia-14m"])

    assert found((0.26, 0.27, 0.3, 0.34, 0.4)).outcome == HOLDS
    assert found((0.4, 0.34, 0.3, 0.27, 0.26)).outcomes == (HOLDS, FAILS)
    assert found((0.26, 0.27, 0.3)).outcome == UNMEASURED


def test_a_chat_model_beside_its_base() -> None:
    def found(rate: float, **given: Any) -> Judgment:
        runs = [model("org/lm-1b", 0.5), model("org/lm-1b-instruct", rate, **given)]
        evidence = Collection(runs).evidence({})
        assert judge(CLAIMS["W-12"], evidence["org/lm-1b"]).outcome == Outcome.DOES_NOT_APPLY
        return judge(CLAIMS["W-12"], evidence["org/lm-1b-instruct"])

    assert found(0.51).outcome == HOLDS
    assert found(0.2).outcome == FAILS
    for rate in CLAIMS["W-12"].published:  # the test can fail on the paper's own pairs, and most of them pass
        assert (found(0.5 + rate.value / 100).outcome == FAILS) == (rate.name == "Mistral-7B")
    assert found(0.2).estimates[0].value == pytest.approx(-30)
    alone = Collection([model("org/lm-1b-instruct", 0.5)]).evidence({})["org/lm-1b-instruct"]
    assert judge(CLAIMS["W-12"], alone).reason == "sinkscope analyze org/lm-1b"


def test_post_norm_models_alone_decide_what_is_said_of_them() -> None:
    wired = {"family": manifest()["family"] | {"wiring": "post-norm"}}
    evidence = Collection([model("a", 0.5, **wired), model("b", 0.01, **wired), model("c", 0.5)]).evidence({})
    outcomes = [judge(CLAIMS["W-43"], evidence[name]).outcome for name in "abc"]
    assert outcomes == [HOLDS, FAILS, Outcome.DOES_NOT_APPLY]

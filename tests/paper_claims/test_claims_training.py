"""Claims on arms of trainings that are known to hold or to fail, or have too few seeds to decide."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from support.hand_made_runs import FAILS, FEW_SEEDS, HOLDS, INCONCLUSIVE, NOT_APPLIES, UNMEASURED
from support.hand_made_trainings import Numbers, Tables, judged, norms, rates, training

from sinkscope.commands.evidence import Collection
from sinkscope.figures.claims import _place
from sinkscope.paper_claims.claim import judge
from sinkscope.paper_claims.register import CLAIMS
from sinkscope.paper_claims.studies import Training
from sinkscope.paper_claims.table import judged as judged_table
from sinkscope.results.judgment import Outcome
from sinkscope.verdict.scorecard import Scorecard, scorecard_markdown

LOW, HIGH, WIDE = (1.0, 1.1, 0.9), (5.0, 5.2, 4.8), (0.1, 9.0, 1.0)
PLAIN_SINK = {"attention_by_sequence": rates(0.5)}
# claim → arm, metric and command; whether it holds if the arm has a lower value than the plain arm
COMPARED = {
    "GS-25": ("vscale", "loss", "train", True),
    "GS-26": ("vscale", "value_gradient_norm", "train", True),
    "V-14": ("vga", "perplexity", "train", True),
    "V-15": ("vga", "max_inf_norm", "train", True),
    "V-16": ("vga", "kurtosis", "train", True),
    "V-17": ("register-tokens", "kurtosis", "train", False),
    "V-18": ("vga", "perplexity_increase", "train", True),
    "V-19": ("register-tokens", "perplexity_increase", "train", False),
    "V-22": ("vga", "perplexity", "retrofit", True),
}


@pytest.mark.parametrize("claim", COMPARED)
def test_an_arm_is_compared_with_the_plain_one(claim: str) -> None:
    arm, metric, command, low_holds = COMPARED[claim]

    def made(own: Sequence[float], plain: Sequence[float], command: str = command) -> Training:
        untouched = {"untouched": {metric: HIGH[: len(own)]}} if command == "retrofit" else {}
        return training({**untouched, "none": {metric: plain}, arm: {metric: own}}, command)

    assert judged(claim, made(LOW, HIGH)).outcome == (HOLDS if low_holds else FAILS)
    assert judged(claim, made(HIGH, LOW)).outcome == (FAILS if low_holds else HOLDS)
    assert judged(claim, made(WIDE, LOW)).outcome in (INCONCLUSIVE, FEW_SEEDS)  # depending on the mean
    assert judged(claim, made(LOW[:1], HIGH[:1])).outcome == FEW_SEEDS
    if command == "train" and claim.startswith("V"):  # a fine-tuned model does not decide it
        tuned = judged(claim, made(LOW, HIGH, "retrofit"))
        assert (tuned.outcome, tuned.reason.split()[:2]) == (UNMEASURED, ["sinkscope", "train"])


@pytest.mark.parametrize(
    ("claim", "arm", "metric", "plain", "margin"),
    [("GS-25", "vscale", "loss", 3.0, 0.02), ("V-14", "vga", "perplexity", 4.52, 4.52 * 0.02)],
)
def test_no_difference_is_no_cost(claim: str, arm: str, metric: str, plain: float, margin: float) -> None:
    """Small differences, as in the tables of the paper, are no cost; a cost beyond our margin fails."""

    def outcome(times: float) -> Outcome:
        own = [plain + (times + noise) * margin for noise in (-0.05, 0.0, 0.05)]
        return judged(claim, training({"none": {metric: (plain,) * 3}, arm: {metric: own}})).outcome

    # more seeds could show that 0.95 margins are no cost
    expected = {-2.0: HOLDS, 0.0: HOLDS, 0.5: HOLDS, 0.95: FEW_SEEDS, 1.1: INCONCLUSIVE, 2.0: FAILS}
    assert {times: outcome(times) for times in expected} == expected
    assert CLAIMS[claim].is_ours


@pytest.mark.parametrize(
    ("seconds", "share", "outcomes"),
    [(0.51, 1e-3, (HOLDS, HOLDS)), (0.6, 1e-3, (HOLDS, FAILS)), (0.51, 0.1, (FAILS, HOLDS)), (None, 1e-3, ())],
)
def test_gates_cost_no_time(seconds: float | None, share: float, outcomes: tuple[Outcome, ...]) -> None:
    made = training({"none": {"loss": LOW}, "vga": {"loss": LOW}})
    for record in made.manifest["arms"].values():
        record["step_seconds"] = seconds if record["label"] == "vga" else 0.5
    for run in made.runs.values():
        run.manifest["model"]["parameters"] = 1000.0 + 1000 * share * ("vga" in run.condition)
    found = judged("V-23", made)
    assert found.outcomes == outcomes
    assert ("no step time" in found.reason) == (seconds is None)


def test_the_interval_is_students_over_the_seeds() -> None:
    own, plain = np.array([1.0, 1.5, 1.2]), np.array([2.0, 2.1, 2.6])
    numbers = {"none": {"perplexity_increase": plain}, "register-tokens": {"perplexity_increase": own}}
    found = judged("V-19", training(numbers)).estimates[0]
    expected = stats.t.interval(0.95, 2, (own - plain).mean(), stats.sem(own - plain))
    assert (found.low, found.value, found.high) == pytest.approx((expected[0], (own - plain).mean(), expected[1]))
    assert found.note == "register-tokens 1.23, none 2.23; 2000 steps, 3 seeds, Student's t"
    found = judged("V-16", training({"none": {"kurtosis": plain}, "vga": {"kurtosis": own}})).estimates[0]
    logs = np.log(plain / own)
    expected = np.exp(stats.t.interval(0.95, 2, logs.mean(), stats.sem(logs)))
    assert (found.low, found.value, found.high) == pytest.approx((expected[0], np.exp(logs.mean()), expected[1]))
    assert found.note.endswith("3 seeds, Student's t of logarithms")
    (one,) = judged("V-14", training({"none": {"perplexity": (2.0,)}, "vga": {"perplexity": (1.0,)}})).estimates
    assert (one.value, one.low, "one seed" in one.note) == (0.5, 0.0, True)


def test_seeds_and_arms_are_pooled_over_folders_that_differ_in_nothing_else() -> None:
    def one(seed: int, own: float, **options: Any) -> Training:
        made = training({"none": {"perplexity": (2.0,)}, "vga": {"perplexity": (own,)}}, seed=seed, **options)
        arms = {name: record | {"seed": seed} for name, record in made.manifest["arms"].items()}
        tables = {name: table.assign(seed=seed) for name, table in made.tables.items()}
        return Training({**made.manifest, "arms": arms}, made.runs, tables)

    alike = [one(seed, own) for seed, own in enumerate((1.0, 1.1, 1.2))]
    pooled = judged("V-14", *alike)
    assert pooled.estimates[0].note.endswith("3 seeds, Student's t of logarithms")
    assert judged("V-14", *alike, alike[0]).estimates == pooled.estimates  # a seed counts once
    assert judged("V-14", *alike, one(3, 9.0, steps=7)).estimates == pooled.estimates

    plain, own = {"none": {"perplexity": HIGH}}, {"vga": {"perplexity": LOW}}
    together = judged("V-14", training({**plain, **own}))
    assert judged("V-14", training(plain), training(own)).estimates == together.estimates
    assert judged("V-14", training(plain), training(own, steps=7)).outcome == UNMEASURED
    other = training({"vga": {"perplexity": WIDE}})
    assert judged("V-14", other, training({**plain, **own})).estimates == together.estimates  # both in one folder


@pytest.mark.parametrize(("own", "plain", "outcome"), [(0.5, 0.5, HOLDS), (0.3, 0.5, FAILS), (0.01, 0.015, FAILS)])
def test_a_kept_sink_has_to_have_been_there(own: float, plain: float, outcome: Outcome) -> None:
    arms = {name: {"sink_rate": [rate, 1.02 * rate, 0.98 * rate]} for name, rate in (("none", plain), ("vscale", own))}
    assert judged("GS-21", training(arms)).outcome == outcome


@pytest.mark.parametrize(
    ("claim", "own", "outcome"),
    [
        ("GS-22", {"layer_out": (1, 5), "mlp_out": (9, 9), "attn_out": (1, 1)}, HOLDS),
        ("GS-22", {"layer_out": (20, 1), "mlp_out": (1, 1), "attn_out": (1, 1)}, FAILS),
        ("GS-23", {"layer_out": (9, 9), "mlp_out": (1, 2), "attn_out": (1, 1)}, HOLDS),
        ("GS-24", {"layer_out": (9, 9), "mlp_out": (1, 2), "attn_out": (3, 3)}, HOLDS),
        ("GS-24", {"layer_out": (9, 9), "mlp_out": (4, 4), "attn_out": (1, 1)}, FAILS),
    ],
)
def test_norms_of_v_scale(claim: str, own: Mapping[str, Sequence[float]], outcome: Outcome) -> None:
    """The norms of the plain arm are 10 in the output of the first layer, and 4 in the branches of the second."""
    sites = {"none": {"layer_out": (10, 2), "mlp_out": (1, 4), "attn_out": (2, 4)}, "vscale": own}
    tables = {
        arm: [{"activation": norms(**{site: np.array(x) * factor for site, x in of.items()})} for factor in (1, 1.01)]
        for arm, of in sites.items()
    }
    assert judged(claim, training({arm: {"loss": LOW[:2]} for arm in sites}, tables=tables)).outcome == outcome


def test_a_fine_tune_is_compared_with_the_model_it_began_from() -> None:
    around = np.array((1.0, 1.01, 0.99))
    for norm, kurtosis, outcome in ((9, 1, HOLDS), (9, 50, FAILS), (50, 1, FAILS)):
        arms = {
            "untouched": {"max_inf_norm": around * 100, "kurtosis": around * 100},
            "none": {"max_inf_norm": around * 150, "kurtosis": around},
            "vga": {"max_inf_norm": around * norm, "kurtosis": around * kurtosis},
        }
        assert judged("V-20", training(arms, "retrofit")).outcome == HOLDS
        for plain in (arms["none"], {}):
            assert judged("V-21", training(arms | {"none": plain}, "retrofit")).outcome == outcome


# --- gates


def gated(left: Sequence[float], gates: Sequence[float]) -> dict[str, pd.DataFrame]:
    """Make one head with the gate by position, and the value gradient before it ÷ after it."""
    at = range(len(gates))
    gate = pd.DataFrame({"layer": 0, "head": 0, "kv_head": 0, "position": at, "gate": gates})
    parts = [
        pd.DataFrame({"layer": 0, "pathway": pathway, "head": 0, "position": at, "grad_norm": values})
        for pathway, values in (("value", np.full(len(gates), 2.0)), ("raw_value", 2 * np.array(left)))
    ]
    return {"gate": gate, "gradient": pd.concat(parts, ignore_index=True)}


FOLLOWS, AGAINST, GATES = (0.1, 0.8, 0.9, 0.7), (1.2, 0.8, 0.7, 0.9), (0.1, 0.8, 0.9, 0.7)


@pytest.mark.parametrize(
    ("left", "outcome"),
    [
        ([FOLLOWS] * 5, HOLDS),
        ([FOLLOWS] * 3, FEW_SEEDS),  # by chance with a probability of 1/8
        ([AGAINST] * 5, FAILS),
        ([FOLLOWS, FOLLOWS, AGAINST], FEW_SEEDS),
    ],
)
def test_a_gradient_is_severed_where_it_follows_the_gate(left: Sequence[Sequence[float]], outcome: Outcome) -> None:
    tables = {"vga": [gated(each, GATES) for each in left], "none": [{}] * len(left)}
    numbers = {"loss": (*LOW, *LOW)[: len(left)]}
    found = judged("V-13", training({"none": numbers, "vga": numbers}, tables=tables))
    assert found.outcome == outcome
    if left[-1] == FOLLOWS:
        assert [part.value for part in found.estimates] == pytest.approx([1.0, 0.1])
    on_outputs = [own | {"gradient": own["gradient"].query("pathway != 'raw_value'")} for own in tables["vga"]]
    none = judged("V-13", training({"none": numbers, "vga": numbers}, tables=tables | {"vga": on_outputs}))
    assert (none.outcome, none.reason) == (NOT_APPLIES, "the gates of vga are on heads' outputs, not on values")


# --- sinks outside the text


@pytest.mark.parametrize(
    ("outside", "of_text", "plain", "outcome"),
    [(0.8, 0.1, 0.5, HOLDS), (0.1, 0.8, 0.5, FAILS), (0.1, 0.0, 0.05, NOT_APPLIES)],  # last: no sink to take
)
def test_the_sink_moves_to_a_register_in_front_of_the_text(
    outside: float, of_text: float, plain: float, outcome: Outcome
) -> None:
    """Position 0 is the register, and the first token of the text is at 2."""
    arm = "register-tokens:count=2"
    register = {"attention_by_sequence": rates(0.9, later=(0.9, of_text)), "attention_outside": pd.DataFrame()}
    arms = {"none": {"sink_rate": [plain] * 3}, arm: {"sink_rate_outside": [outside] * 3}}
    tables = {"none": [{"attention_by_sequence": rates(plain)}] * 3, arm: [register] * 3}
    assert judged("W-47", training(arms, tables=tables)).outcome == outcome


def biased(arms: Mapping[str, Numbers]) -> Training:
    """Make a plain arm with a sink, and other arms whose sink is outside the text, at the given rates."""
    moved: Tables = {"attention_by_sequence": rates(0.05), "attention_outside": pd.DataFrame()}
    tables = {arm: [PLAIN_SINK if arm == "none" else moved] * 3 for arm in ("none", *arms)}
    return training({"none": {"loss": LOW, "sink_rate": [0.5] * 3, "massive_count": LOW}} | dict(arms), tables=tables)


def test_key_biases_move_the_sink_at_no_cost_and_each_claim_reads_its_own_arm() -> None:
    for outside, loss, outcome in ((0.7, LOW, HOLDS), (0.7, HIGH, FAILS), (0.0, LOW, FAILS)):
        arm = {"loss": loss, "sink_rate_outside": [outside] * 3}
        assert judged("W-48", biased({"key-bias": arm})).outcome == outcome
    learned: Numbers = {"loss": LOW, "sink_rate_outside": [0.7] * 3, "massive_count": [0.0] * 3}
    both = {"key-bias:value=learned": learned, "key-bias": {"loss": HIGH, "sink_rate_outside": [0.0] * 3}}
    assert list(Collection(trainings=(biased(both),)).evidence({})) == ["made"]
    outcomes = {claim: judged(claim, biased(both)).outcome for claim in ("W-48", "W-49", "S-14")}
    assert outcomes == {"W-48": FAILS, "W-49": HOLDS, "S-14": FEW_SEEDS}
    both["key-bias:value=learned"] = {**learned, "massive_count": [3.0, 4.0, 5.0]}
    assert judged("S-14", biased(both)).outcome == FAILS


def test_an_arm_with_further_parameters_is_another_one() -> None:
    """This holds for any order of arms; the start of a bias makes no difference."""
    numbers: dict[str, Numbers] = {
        "key-bias:value=zero,deviation=0.02": {"loss": LOW, "sink_rate_outside": [0.7] * 3},
        "key-bias:value=zero,dimensions=1": {"loss": LOW, "sink_rate_outside": [0.0] * 3},
    }
    assert judged("W-48", biased(numbers)).outcome == HOLDS
    assert judged("W-48", biased(dict(reversed(numbers.items())))).outcome == HOLDS
    del numbers["key-bias:value=zero,deviation=0.02"]
    assert judged("W-48", biased(numbers)).outcome == UNMEASURED


def of_norms(by_arm: Mapping[str, float]) -> Training:
    tables = {
        arm: [{"summary": pd.DataFrame({"metric": "norm_ratio", "layer": [0], "value": [float(norm)]})}] * 3
        for arm, norm in by_arm.items()
    }
    return training({arm: {"loss": LOW} for arm in by_arm}, tables=tables)


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        ((9, 1.1, 1.2, 8, 7), HOLDS),
        ((9, 1.1, 5, 8, 7), FAILS),
        ((9, 1.1, 1.2, 1.3, 7), FAILS),
        ((9, 1.1, 1.2, 8, 1.3), FAILS),
        ((1.5, 1, 1, 1, 1), NOT_APPLIES),
    ],
)
def test_which_biases_end_massive_activations(norms: Sequence[float], expected: Outcome) -> None:
    biases = ("key-bias:value=zero,deviation=0.02", "key-bias:value=learned,deviation=0.02", "value-bias")
    made = of_norms(dict(zip(("none", *biases, "register-tokens"), norms, strict=True)))
    assert judged("W-52", made).outcome == expected


@pytest.mark.parametrize(("plain", "own", "expected"), [(5, 1, HOLDS), (5, 3, FAILS), (1, 1, NOT_APPLIES)])
def test_an_end_of_massive_activations_needs_some_in_plain_training(plain: int, own: int, expected: Outcome) -> None:
    assert judged("W-56", of_norms({"none": plain, "operation:kind=sigmoid": own})).outcome == expected


@pytest.mark.parametrize(("rates_at", "expected"), [((0.0, 0.01, 0.04, 0.26), HOLDS), ((0.3, 0.2, 0.1, 0.0), FAILS)])
def test_a_fixed_value_drives_the_sink_back(rates_at: Sequence[float], expected: Outcome) -> None:
    labels = ["key-bias:deviation=0.02", *(f"key-bias:value=axis,norm={norm}" for norm in (1, 5, 20))]
    arms = {
        label: {"sink_rate": [rate] * 5, "sink_rate_outside": [0.7 - rate] * 5}
        for label, rate in zip(labels, rates_at, strict=True)
    }
    assert judged("W-51", training(arms)).outcome == expected


# --- other attention operations


def operations(plain: float, kinds: Mapping[str, float]) -> Training:
    """Make five seeds that differ by a hundredth of their rates."""
    rates_of = {"none": plain} | {f"operation:kind={kind}": rate for kind, rate in kinds.items()}
    around = (1.0, 1.01, 0.99, 1.0, 1.0)
    return training({
        arm: {"sink_rate": [rate * factor for factor in around], "loss": (*LOW, *LOW[:2])}
        for arm, rate in rates_of.items()
    })  # fmt: skip


def test_operations_without_normalization_have_no_sink() -> None:
    kinds = dict.fromkeys(("sigmoid", "elu", "identity", "mlp-kernel"), 0.004)
    assert judged("W-54", operations(0.2, kinds)).outcome == HOLDS
    assert judged("W-54", operations(0.2, kinds | {"identity": 0.3})).outcome == FAILS
    nowhere = judged("W-54", operations(0.004, kinds))  # softmax has no sink either
    assert nowhere.outcome == NOT_APPLIES
    assert nowhere.reason == "plain training has no sink: its sink rate in % is 0.4, not above 10"
    missing = judged("W-54", operations(0.2, {"sigmoid": 0.004, "elu": 0.004}))
    assert f"--method none,{','.join(f'operation:kind={kind}' for kind in kinds)}" in missing.reason


def test_operations_with_sums_have_one_that_a_smaller_normalizer_weakens() -> None:
    for rate, expected in ((0.3, HOLDS), (0.02, FAILS)):
        sums = dict.fromkeys(("sigmoid-normalized", "elu-kernel"), rate)
        assert judged("W-55", operations(0.2, sums)).outcome == expected
    for step, expected in ((0.1, HOLDS), (-0.1, FAILS)):
        scaled = {f"softmax,factor={scale}": 0.5 + step * (scale - 1) for scale in (0.05, 0.1, 0.2, 2.0)}
        assert judged("W-57", operations(0.5, scaled)).outcome == expected


# --- the Bigram-Backcopy lab


def course(attention: Sequence[float], value: Sequence[float], risk: float = 0.01) -> dict[str, Sequence[float]]:
    """Make metric → its values by step."""
    return {
        "attention_to_start": (0, 1),
        "early_attention_to_start": attention,
        "start_value_norm": value,
        "other_value_norm": (1.0,) * len(value),
        "delta_logit": attention,
        "backcopy_risk": (1.0, risk),
        "bigram_risk": (1.0, risk),
    }


SINKS, BETWEEN = course((0.3, 0.6, 0.9), (1.0, 0.6, 0.1)), course((0.3, 0.4, 0.5), (1.0, 0.9, 0.8))
NO_SINK, WORSE = course((0.3, 0.25, 0.2), (1.0, 1.0, 0.98)), course((0.3, 0.6, 0.95), (1.0, 0.6, 0.1), risk=0.5)


def test_claims_of_the_lab_both_ways() -> None:
    around = (1.0, 1.01, 0.99, 1.02, 0.98)
    for plain, vga, outcome in ((SINKS, NO_SINK, HOLDS), (NO_SINK, WORSE, FAILS)):
        courses = {
            method: {name: [np.array(x, float) * factor for factor in around] for name, x in own.items()}
            for method, own in (("none", plain), ("vga", vga), ("iga", BETWEEN))
        }
        lab = training({method: {"loss": around} for method in courses}, courses=courses, text="bigram-backcopy")
        evidence = Collection(trainings=(lab,)).evidence({})["made"]
        claims = [f"V-{number}" for number in range(4, 12)]
        assert {claim: judge(CLAIMS[claim], evidence).outcome for claim in claims} == dict.fromkeys(claims, outcome)


# --- what is missing


@pytest.mark.parametrize(
    ("claim", "command"),
    [
        ("GS-21", "sinkscope retrofit org/model --method none,vscale --seeds 3"),
        ("V-21", "sinkscope retrofit org/model --method none,vga --seeds 3"),
        ("W-48", "sinkscope train --method none,key-bias:value=zero --seeds 3"),
        ("V-6", "sinkscope run bigram-backcopy"),
        ("W-30", "sinkscope analyze org/model --revision STEP,STEP,…"),
        ("W-22", "sinkscope claims --from RUN --from RUN …, with runs of 4 or more sizes of its family"),
        ("W-23", "sinkscope claims --from RUN … --from SCORES …, with runs of 4 or more sizes of its family and "
            "the results of sinkscope benchmark --tasks hellaswag for each"),
    ],
)  # fmt: skip
def test_the_command_that_would_decide_is_named(claim: str, command: str) -> None:
    run = training({"none": {"loss": LOW}}, model="org/model").runs["none-seed0"]
    found = judge(CLAIMS[claim], Collection(runs=[run]).evidence({})["org/model"])
    assert (found.outcome, found.reason) == (UNMEASURED, command)


def test_the_command_that_adds_an_arm_to_a_folder_is_named(tmp_path: Path) -> None:
    made = training({"none": {"loss": LOW}}, folder=tmp_path / "out", steps=7, weight_decay=0.0, bf16=True)
    reason = judged("GS-21", made).reason
    assert reason.startswith("sinkscope train ")
    assert set(reason.split(" --")[1:]) == {
        "steps 7", "weight-decay 0.0", "bf16", "seeds 3", "method none,vscale", f"out {tmp_path / 'out'}",
    }  # fmt: skip
    alone = training({"none": {"loss": LOW[:1]}}, folder=tmp_path / "out")
    assert judged("GS-21", alone).reason == "sinkscope train --method none,vscale --seeds 3"
    assert judged("V-4", made).reason == "sinkscope run bigram-backcopy"  # the training has another text
    lacks = judged("V-14", training({"none": {"loss": LOW}, "vga": {"loss": LOW}}))
    assert (lacks.outcome, lacks.reason) == (UNMEASURED, "the runs of vga lack the metric 'perplexity'")


# --- several judgments in one scorecard


def scorecard(*trainings: Training) -> str:
    evidence = Collection(trainings=trainings).evidence({})
    table = pd.concat([judged_table(one, name) for name, one in evidence.items()], ignore_index=True)
    return scorecard_markdown(Scorecard({}, table, pd.DataFrame(columns=["model", "effect"])))


def test_other_parameters_are_judged_under_names_of_their_own() -> None:
    good: Numbers = {"perplexity": (0.5, 0.51, 0.49)}
    arms = {"none": {"perplexity": LOW}, "vga:scale=1": {"perplexity": HIGH}, "vga": good}
    made = training(arms | {"vscale": {"perplexity": HIGH}})
    assert list(Collection(trainings=(made,)).evidence({})) == ["made", "made (vga)"]
    assert judged("V-14", made).outcome == FAILS
    assert judged("V-14", made, name="made (vga)").outcome == HOLDS
    assert judged("GS-25", made, name="made (vga)").outcome == UNMEASURED
    text = scorecard(training(arms))
    assert "| V-14 | Perplexity is no worse. | fails | holds |" in text
    first, second = text.split("### made\n")[1].split("### made (vga)\n")
    assert "vga:scale=1 5, none 1; 2000 steps, 3 seeds" in first
    assert "vga 0.5, none 1; 2000 steps, 3 seeds" in second


def test_a_claim_that_several_models_decide_together_is_shown_once() -> None:
    """The models differ in one setting; claims about a single model are shown under its name."""
    made = []
    for place, decay in enumerate((0.1, 5.0)):
        courses = {"none": {"sink_rate": [[0.0, 0.1 * rate] for rate in (4 + place, 5, 6)]}}
        numbers = {"none": {"sink_rate": (0.4, 0.5, 0.6)}}
        made.append(training(numbers, model=f"small:{place}", courses=courses, weight_decay=decay))
    text = scorecard(*made)
    assert "| W-38 |" in text.split("### small:0, small:1\n")[1].split("###")[0]
    assert text.count("| W-38 |") == 2  # the outcomes, and once the numbers
    for place in range(2):
        assert "| W-30 |" in text.split(f"### small:{place}\n")[1].split("###")[0]


def test_a_line_of_the_figure_has_one_scale() -> None:
    """This includes intervals that begin below 0, which has no logarithm."""
    row: Any = SimpleNamespace(low=-0.03, value=0.009, high=0.05, least=-np.inf, most=0.02)
    assert _place(row.high, row) < 0 < _place(row.value, row) < _place(row.low, row)
    positive: Any = SimpleNamespace(low=0.005, value=0.01, high=0.04, least=-np.inf, most=0.02)
    assert [_place(x, positive) for x in (0.005, 0.01, 0.04)] == pytest.approx([2, 1, -1])

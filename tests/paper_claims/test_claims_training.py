"""Claims on arms of trainings, of which the truth is known: both ways, and with too few seeds to say."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from support.hand_made_trainings import Numbers, norms, rates, training

from sinkscope.commands.evidence import Collection
from sinkscope.figures.claims import _place
from sinkscope.paper_claims.claim import Judgment, judge
from sinkscope.paper_claims.register import CLAIMS
from sinkscope.paper_claims.studies import Training
from sinkscope.paper_claims.table import judged as judged_table
from sinkscope.results.judgment import Outcome
from sinkscope.verdict.scorecard import Scorecard, scorecard_markdown

HOLDS, FAILS, INCONCLUSIVE = Outcome.HOLDS, Outcome.FAILS, Outcome.INCONCLUSIVE
LOW, HIGH, WIDE = (1.0, 1.1, 0.9), (5.0, 5.2, 4.8), (0.1, 9.0, 1.0)


def judged(claim: str, *trainings: Training, name: str = "made") -> Judgment:
    return judge(CLAIMS[claim], Collection(trainings=trainings).evidence({})[name])


# claim → the arm, its metric and the command; whether it holds where the arm's is low beside the plain arm's
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
def test_an_arm_beside_the_plain_one(claim: str) -> None:
    arm, metric, command, low_holds = COMPARED[claim]

    def outcome(own: Sequence[float], plain: Sequence[float]) -> Outcome:
        untouched = {"untouched": {metric: HIGH[: len(own)]}} if command == "retrofit" else {}
        return judged(claim, training({**untouched, "none": {metric: plain}, arm: {metric: own}}, command)).outcome

    assert outcome(LOW, HIGH) == (HOLDS if low_holds else FAILS)
    assert outcome(HIGH, LOW) == (FAILS if low_holds else HOLDS)
    assert outcome(WIDE, LOW) in (INCONCLUSIVE, Outcome.NOT_ENOUGH_SEEDS)  # by whether the mean speaks for the claim
    assert outcome(LOW[:1], HIGH[:1]) == Outcome.NOT_ENOUGH_SEEDS


@pytest.mark.parametrize("claim", ["V-14", "V-15", "V-16", "V-17", "V-18", "V-19"])
def test_a_fine_tuned_model_does_not_decide_what_training_from_scratch_does(claim: str) -> None:
    arm, metric, _, low_holds = COMPARED[claim]
    numbers = {"untouched": {metric: HIGH}, "none": {metric: HIGH}, arm: {metric: LOW}}
    found = judged(claim, training(numbers, "retrofit"))
    assert (found.outcome, found.reason.split()[:2]) == (Outcome.NOT_MEASURED, ["sinkscope", "train"])
    fresh = {name: own for name, own in numbers.items() if name != "untouched"}
    assert judged(claim, training(numbers, "retrofit"), training(fresh)).outcome == (HOLDS if low_holds else FAILS)


@pytest.mark.parametrize(
    ("claim", "arm", "metric", "plain", "margin"),
    [("GS-25", "vscale", "loss", 3.0, 0.02), ("V-14", "vga", "perplexity", 4.52, 4.52 * 0.02)],
)
def test_no_difference_is_no_cost(claim: str, arm: str, metric: str, plain: float, margin: float) -> None:
    """As in the paper's own tables; a cost beyond the margin, which is ours, fails."""

    def outcome(difference: float) -> Outcome:
        own = [plain + difference + noise * margin for noise in (-0.05, 0.0, 0.05)]
        return judged(claim, training({"none": {metric: (plain,) * 3}, arm: {metric: own}})).outcome

    assert [outcome(times * margin) for times in (-2.0, 0.0, 0.5)] == [HOLDS] * 3
    assert outcome(0.95 * margin) == Outcome.NOT_ENOUGH_SEEDS  # more of them could show it
    assert outcome(1.1 * margin) == INCONCLUSIVE
    assert outcome(2 * margin) == FAILS
    assert CLAIMS[claim].is_ours


def test_gates_cost_no_time(tmp_path: Path) -> None:
    def of(own: float | None, new: float = 1e-3) -> Judgment:
        made = training({"none": {"loss": LOW}, "vga": {"loss": LOW}})
        for record in made.manifest["arms"].values():
            record["step_seconds"] = own if record["label"] == "vga" else 0.5
        for run in made.runs.values():
            run.manifest["model"]["parameters"] = 1000.0 + 1000 * new * ("vga" in run.condition)
        return judged("V-23", made)

    assert of(0.51).outcome == HOLDS
    assert of(0.6).outcomes == (HOLDS, FAILS)
    assert of(0.51, 0.1).outcomes == (FAILS, HOLDS)
    assert "no step time" in of(None).reason


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


def test_one_seed_has_a_number_and_the_reason_why_it_decides_nothing() -> None:
    found = judged("V-14", training({"none": {"perplexity": (2.0,)}, "vga": {"perplexity": (1.0,)}}))
    assert found.outcome == Outcome.NOT_ENOUGH_SEEDS
    assert (found.estimates[0].value, found.estimates[0].low) == (0.5, 0.0)
    assert "one seed" in found.estimates[0].note


def test_seeds_are_pooled_over_folders_that_differ_in_nothing_else() -> None:
    def one(seed: int, own: float, **options: Any) -> Training:
        made = training({"none": {"perplexity": (2.0,)}, "vga": {"perplexity": (own,)}}, seed=seed, **options)
        arms = {name: record | {"seed": seed} for name, record in made.manifest["arms"].items()}
        tables = {name: table.assign(seed=seed) for name, table in made.tables.items()}
        return Training({**made.manifest, "arms": arms}, made.runs, tables)

    alike = [one(seed, own) for seed, own in enumerate((1.0, 1.1, 1.2))]
    assert judged("V-14", *alike).estimates[0].note.endswith("3 seeds, Student's t of logarithms")
    assert judged("V-14", *alike, alike[0]).estimates == judged("V-14", *alike).estimates  # a seed counts once
    other = one(3, 9.0, steps=7)
    assert judged("V-14", *alike, other).estimates == judged("V-14", *alike).estimates


def test_arms_of_a_seed_may_stand_in_folders_of_their_own() -> None:
    plain, own = {"none": {"perplexity": HIGH}}, {"vga": {"perplexity": LOW}}
    together = judged("V-14", training({**plain, **own}))
    assert judged("V-14", training(plain), training(own)).estimates == together.estimates
    assert judged("V-14", training(plain), training(own, steps=7)).outcome == Outcome.NOT_MEASURED
    other = training({"vga": {"perplexity": WIDE}})
    assert judged("V-14", other, training({**plain, **own})).estimates == together.estimates  # those that have both


def test_a_kept_sink_has_to_have_been_there() -> None:
    def outcome(own: Sequence[float], plain: Sequence[float]) -> Outcome:
        return judged("GS-21", training({"none": {"sink_rate": plain}, "vscale": {"sink_rate": own}})).outcome

    assert outcome((0.51, 0.49, 0.5), (0.5, 0.5, 0.51)) == HOLDS
    assert outcome((0.31, 0.29, 0.3), (0.5, 0.5, 0.51)) == FAILS
    assert outcome((0.01, 0.02, 0.01), (0.01, 0.015, 0.02)) == FAILS


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
    """The plain arm's: 10 in the first layer's output, 4 of the branches in the second."""
    plain = {"layer_out": (10, 2), "mlp_out": (1, 4), "attn_out": (2, 4)}

    def of(sites: Mapping[str, Sequence[float]]) -> list[dict[str, pd.DataFrame]]:
        return [
            {"activation": norms(**{site: np.array(x) * factor for site, x in sites.items()})}
            for factor in (1.0, 1.01, 0.99)
        ]

    made = training({"none": {"loss": LOW}, "vscale": {"loss": LOW}}, tables={"none": of(plain), "vscale": of(own)})
    assert judged(claim, made).outcome == outcome


def test_a_fine_tune_beside_the_model_it_began_from() -> None:
    def outcomes(norm: float, kurtosis: float) -> tuple[Outcome, Outcome]:
        around = np.array((1.0, 1.01, 0.99))
        arms = {
            "untouched": {"max_inf_norm": around * 100, "kurtosis": around * 100},
            "none": {"max_inf_norm": around * 150, "kurtosis": around},
            "vga": {"max_inf_norm": around * norm, "kurtosis": around * kurtosis},
        }
        made = training(arms, "retrofit")
        assert judged("V-20", made).outcome == HOLDS
        return judged("V-21", made).outcome, judged("V-21", training(arms | {"none": {}}, "retrofit")).outcome

    assert outcomes(9, 1) == (HOLDS, HOLDS)
    assert outcomes(9, 50)[0] == FAILS
    assert outcomes(50, 1)[0] == FAILS


# --- gates


def gated(left: Sequence[float], gates: Sequence[float]) -> dict[str, pd.DataFrame]:
    """One head: by position the gate, and the value gradient in front of it ÷ behind it."""
    at = range(len(gates))
    gate = pd.DataFrame({"layer": 0, "head": 0, "kv_head": 0, "position": at, "gate": gates})
    parts = [
        pd.DataFrame({"layer": 0, "pathway": pathway, "head": 0, "position": at, "grad_norm": values})
        for pathway, values in (("value", np.full(len(gates), 2.0)), ("raw_value", 2 * np.array(left)))
    ]
    return {"gate": gate, "gradient": pd.concat(parts, ignore_index=True)}


def test_a_gradient_is_severed_where_it_follows_the_gate() -> None:
    gates = (0.1, 0.8, 0.9, 0.7)

    def found(*left: Sequence[float]) -> Judgment:
        tables = {"vga": [gated(each, gates) for each in left], "none": [{}] * len(left)}
        numbers = {"loss": (*LOW, *LOW)[: len(left)]}
        return judged("V-13", training({"none": numbers, "vga": numbers}, tables=tables))

    follows = (0.1, 0.8, 0.9, 0.7)
    assert found(*[follows] * 5).outcome == HOLDS
    assert found(follows, follows, follows).outcome == Outcome.NOT_ENOUGH_SEEDS  # by chance with a probability of 1/8
    assert [part.value for part in found(follows, follows, follows).estimates] == pytest.approx([1.0, 0.1])
    against = (1.2, 0.8, 0.7, 0.9)
    assert found(*[against] * 5).outcome == FAILS
    assert found(follows, follows, against).outcome == Outcome.NOT_ENOUGH_SEEDS


def test_gates_on_outputs_sever_nothing() -> None:
    run = gated((1.0,), (1.0,))
    run["gradient"] = run["gradient"].query("pathway != 'raw_value'")
    tables = {"none": [{}] * 3, "vga": [run] * 3}
    made = training({"none": {"loss": LOW}, "vga": {"loss": LOW}}, tables=tables)
    found = judged("V-13", made)
    assert (found.outcome, found.reason) == (
        Outcome.DOES_NOT_APPLY,
        "the gates of vga are on heads' outputs, not on values",
    )


# --- sinks outside the text


def test_the_sink_moves_to_a_register_in_front_of_the_text() -> None:
    """Position 0 is the register, and the first token of the text stands at 2."""

    def outcome(outside: float, of_text: float, plain_rate: float = 0.5) -> Outcome:
        register = [
            {"attention_by_sequence": rates(0.9, behind=(0.9, of_text)), "attention_outside": pd.DataFrame()}
            for _ in range(3)
        ]
        arms = {
            "none": {"sink_rate": [plain_rate] * 3},
            "register-tokens:count=2": {"sink_rate_outside": [outside] * 3},
        }
        plain = [{"attention_by_sequence": rates(plain_rate)}] * 3
        return judged("W-47", training(arms, tables={"none": plain, "register-tokens:count=2": register})).outcome

    assert outcome(0.8, 0.1) == HOLDS
    assert outcome(0.1, 0.8) == FAILS
    assert outcome(0.1, 0.0, plain_rate=0.05) == Outcome.DOES_NOT_APPLY  # there is no sink to take


def test_key_biases_move_it_at_no_cost() -> None:
    def outcome(outside: float, loss: Sequence[float]) -> Outcome:
        biased = [{"attention_by_sequence": rates(0.05), "attention_outside": pd.DataFrame()}] * 3
        arms = {
            "none": {"loss": LOW, "sink_rate": [0.5] * 3},
            "key-bias": {"loss": loss, "sink_rate_outside": [outside] * 3},
        }
        plain = [{"attention_by_sequence": rates(0.5)}] * 3
        return judged("W-48", training(arms, tables={"none": plain, "key-bias": biased})).outcome

    assert outcome(0.7, LOW) == HOLDS
    assert outcome(0.7, HIGH) == FAILS
    assert outcome(0.0, LOW) == FAILS


def test_biases_of_one_method_are_told_apart() -> None:
    """Key biases of value zero and learned ones are arms of one method; each claim reads its own."""
    moved = {"attention_by_sequence": rates(0.05), "attention_outside": pd.DataFrame()}
    arms: dict[str, Numbers] = {
        "none": {"loss": LOW, "sink_rate": [0.5] * 3, "massive_count": LOW},
        "key-bias:value=learned": {"loss": LOW, "sink_rate_outside": [0.7] * 3, "massive_count": [0.0] * 3},
        "key-bias": {"loss": HIGH, "sink_rate_outside": [0.0] * 3},
    }
    plain = {"attention_by_sequence": rates(0.5)}
    given = training(arms, tables={label: [plain if label == "none" else moved] * 3 for label in arms})
    assert list(Collection(trainings=(given,)).evidence({})) == ["made"]
    assert [judged(claim, given).outcome for claim in ("W-48", "W-49", "S-14")] == [
        FAILS,
        HOLDS,
        Outcome.NOT_ENOUGH_SEEDS,
    ]
    arms["key-bias:value=learned"] |= {"massive_count": [3.0, 4.0, 5.0]}
    assert judged("S-14", training(arms)).outcome == FAILS


def test_an_arm_with_further_parameters_is_another_one() -> None:
    """Whatever their order in the folder is; where a bias starts is no difference."""
    moved = {"attention_by_sequence": rates(0.05), "attention_outside": pd.DataFrame()}
    meant, other = "key-bias:value=zero,deviation=0.02", "key-bias:value=zero,dimensions=1"
    numbers: dict[str, Numbers] = {
        meant: {"loss": LOW, "sink_rate_outside": [0.7] * 3},
        other: {"loss": LOW, "sink_rate_outside": [0.0] * 3},
    }
    plain = {"none": {"loss": LOW, "sink_rate": [0.5] * 3}}

    def outcome(*labels: str) -> Outcome:
        arms = plain | {label: numbers[label] for label in labels}
        tables = {label: [moved] * 3 for label in labels} | {"none": [{"attention_by_sequence": rates(0.5)}] * 3}
        return judged("W-48", training(arms, tables=tables)).outcome

    assert outcome(meant, other) == outcome(other, meant) == HOLDS
    assert outcome(other) == Outcome.NOT_MEASURED


@pytest.mark.parametrize(
    ("norms", "expected"),
    [
        ((9, 1.1, 1.2, 8, 7), HOLDS),
        ((9, 1.1, 5, 8, 7), FAILS),
        ((9, 1.1, 1.2, 1.3, 7), FAILS),
        ((9, 1.1, 1.2, 8, 1.3), FAILS),
        ((1.5, 1, 1, 1, 1), Outcome.DOES_NOT_APPLY),
    ],
)
def test_which_biases_end_massive_activations(norms: Sequence[float], expected: Outcome) -> None:
    biases = ("key-bias:value=zero,deviation=0.02", "key-bias:value=learned,deviation=0.02", "value-bias")
    labels = ("none", *biases, "register-tokens")
    tables = {
        label: [{"summary": pd.DataFrame({"metric": "norm_ratio", "layer": [0], "value": [norm]})}] * 3
        for label, norm in zip(labels, norms, strict=True)
    }
    assert judged("W-52", training({label: {"loss": LOW} for label in labels}, tables=tables)).outcome == expected


@pytest.mark.parametrize(("rates_at", "expected"), [((0.0, 0.01, 0.04, 0.26), HOLDS), ((0.3, 0.2, 0.1, 0.0), FAILS)])
def test_a_fixed_value_drives_the_sink_back(rates_at: Sequence[float], expected: Outcome) -> None:
    labels = ["key-bias:deviation=0.02", *(f"key-bias:value=axis,norm={norm}" for norm in (1, 5, 20))]
    arms = {
        label: {"sink_rate": [rate] * 5, "sink_rate_outside": [0.7 - rate] * 5}
        for label, rate in zip(labels, rates_at, strict=True)
    }
    assert judged("W-51", training(arms)).outcome == expected


# --- other attention operations


def operations(rates_of: Mapping[str, float]) -> Training:
    """Five seeds that differ by a hundredth of their rates."""
    around = (1.0, 1.01, 0.99, 1.0, 1.0)
    return training({
        typed: {"sink_rate": [rate * factor for factor in around], "loss": (*LOW, *LOW[:2])}
        for typed, rate in rates_of.items()
    })  # fmt: skip


def test_operations_without_normalization_have_no_sink() -> None:
    kinds = [f"operation:kind={kind}" for kind in ("sigmoid", "elu", "identity", "mlp-kernel")]
    assert judged("W-54", operations({"none": 0.2} | dict.fromkeys(kinds, 0.004))).outcome == HOLDS
    assert judged("W-54", operations({"none": 0.2} | dict.fromkeys(kinds, 0.004) | {kinds[2]: 0.3})).outcome == FAILS
    nowhere = judged("W-54", operations({"none": 0.004} | dict.fromkeys(kinds, 0.004)))  # nor has softmax
    assert (nowhere.outcome, nowhere.reason) == (
        Outcome.DOES_NOT_APPLY,
        "plain training has no sink: its sink rate in % is 0.4, not above 10",
    )
    missing = judged("W-54", operations({"none": 0.2} | dict.fromkeys(kinds[:2], 0.004)))
    assert f"--method none,{','.join(kinds)}" in missing.reason


@pytest.mark.parametrize(("rate", "expected"), [(0.3, HOLDS), (0.02, FAILS)])
def test_operations_with_sums_have_one(rate: float, expected: Outcome) -> None:
    kinds = [f"operation:kind={kind}" for kind in ("sigmoid-normalized", "elu-kernel")]
    assert judged("W-55", operations({"none": 0.2} | dict.fromkeys(kinds, rate))).outcome == expected


@pytest.mark.parametrize(
    ("norms", "expected"), [((5.0, 1.0), HOLDS), ((5.0, 3.0), FAILS), ((1.0, 1.0), Outcome.DOES_NOT_APPLY)]
)
def test_an_end_of_massive_activations_needs_some_in_plain_training(norms: Sequence[float], expected: Outcome) -> None:
    plain, sigmoid = (
        [{"summary": pd.DataFrame({"metric": "norm_ratio", "layer": [0], "value": norm})}] * 3 for norm in norms
    )
    arms = {"none": {"loss": LOW}, "operation:kind=sigmoid": {"loss": LOW}}
    found = judged("W-56", training(arms, tables={"none": plain, "operation:kind=sigmoid": sigmoid}))
    assert found.outcome == expected


@pytest.mark.parametrize(("step", "expected"), [(0.1, HOLDS), (-0.1, FAILS)])
def test_a_smaller_normalizer_weakens_the_sink(step: float, expected: Outcome) -> None:
    scales = (0.05, 0.1, 0.2, 2.0)
    arms = {f"operation:kind=softmax,factor={scale}": 0.5 + step * (scale - 1) for scale in scales}
    assert judged("W-57", operations({"none": 0.5} | arms)).outcome == expected


# --- the Bigram-Backcopy lab


def lab(plain: Mapping[str, Any], vga: Mapping[str, Any], iga: Mapping[str, Any]) -> Training:
    """Metric → its values by step, of all seeds alike but for a little."""
    around = (1.0, 1.01, 0.99, 1.02, 0.98)
    courses = {
        method: {
            name: [np.array(values, float) * factor for factor in around]
            for name, values in {"attention_to_start": (0, 1), **course}.items()
        }
        for method, course in (("none", plain), ("vga", vga), ("iga", iga))
    }
    arms = {method: {"loss": around} for method in courses}
    return training(arms, courses=courses, text="bigram-backcopy")


def course(attention: Sequence[float], value: Sequence[float], risk: float = 0.01) -> dict[str, Sequence[float]]:
    return {
        "early_attention_to_start": attention,
        "start_value_norm": value,
        "other_value_norm": (1.0,) * len(value),
        "delta_logit": attention,
        "backcopy_risk": (1.0, risk),
        "bigram_risk": (1.0, risk),
    }


@pytest.mark.parametrize("claim", ["V-4", "V-5", "V-6", "V-7", "V-8", "V-9", "V-10", "V-11"])
def test_claims_of_the_lab_both_ways(claim: str) -> None:
    sinks = course((0.3, 0.6, 0.9), (1.0, 0.6, 0.1))
    between = course((0.3, 0.4, 0.5), (1.0, 0.9, 0.8))
    none = course((0.3, 0.25, 0.2), (1.0, 1.0, 0.98))
    worse = course((0.3, 0.6, 0.95), (1.0, 0.6, 0.1), risk=0.5)
    assert judged(claim, lab(sinks, none, between)).outcome == HOLDS
    assert judged(claim, lab(none, worse, between)).outcome == FAILS


def test_the_lab_is_the_task_and_no_other_text() -> None:
    made = training({"none": {"loss": LOW}})
    found = judged("V-4", made)
    assert (found.outcome, found.reason) == (Outcome.NOT_MEASURED, "sinkscope run bigram-backcopy")


# --- what is missing


@pytest.mark.parametrize(
    ("claim", "command"),
    [
        ("GS-21", "sinkscope retrofit org/model --method none,vscale --seeds 3"),
        ("V-21", "sinkscope retrofit org/model --method none,vga --seeds 3"),
        ("W-48", "sinkscope train --method none,key-bias:value=zero --seeds 3"),
        ("V-6", "sinkscope run bigram-backcopy"),
        ("W-30", "sinkscope analyze org/model --revision STEP,STEP,…"),
        (
            "W-23",
            "sinkscope claims --from RUN … --from SCORES …, with runs of 4 or more sizes of its family and what "
            "sinkscope benchmark --tasks hellaswag gave of each",
        ),
    ],
)
def test_a_model_alone_is_told_which_command_decides(claim: str, command: str) -> None:
    run = training({"none": {"loss": LOW}}, model="org/model").runs["none-seed0"]
    found = judge(CLAIMS[claim], Collection(runs=[run]).evidence({})["org/model"])
    assert (found.outcome, found.reason) == (Outcome.NOT_MEASURED, command)


def test_a_folder_without_the_arm_is_told_how_to_add_it(tmp_path: Path) -> None:
    made = training({"none": {"loss": LOW}}, folder=tmp_path / "out", steps=7, weight_decay=0.0, bf16=True)
    reason = judged("GS-21", made).reason
    assert reason.startswith("sinkscope train ")
    assert set(reason.split(" --")[1:]) == {
        "steps 7", "weight-decay 0.0", "bf16", "seeds 3", "method none,vscale", f"out {tmp_path / 'out'}",
    }  # fmt: skip
    alone = training({"none": {"loss": LOW[:1]}}, folder=tmp_path / "out")
    assert judged("GS-21", alone).reason == "sinkscope train --method none,vscale --seeds 3"


def test_what_was_not_measured_is_named() -> None:
    found = judged("V-14", training({"none": {"loss": LOW}, "vga": {"loss": LOW}}))
    assert (found.outcome, found.reason) == (Outcome.NOT_MEASURED, "the runs of vga lack the metric 'perplexity'")


# --- variants of a method


def test_other_parameters_are_judged_under_names_of_their_own() -> None:
    arms = {
        "none": {"perplexity": LOW},
        "vga:placement=output": {"perplexity": HIGH},
        "vga": {"perplexity": (0.5, 0.51, 0.49)},
        "vscale": {"perplexity": HIGH},
    }
    made = training(arms)
    assert list(Collection(trainings=(made,)).evidence({})) == ["made", "made (vga)"]
    assert judged("V-14", made).outcome == FAILS
    assert judged("V-14", made, name="made (vga)").outcome == HOLDS
    assert judged("GS-25", made, name="made (vga)").outcome == Outcome.NOT_MEASURED


def test_their_numbers_stand_below_the_outcomes_side_by_side() -> None:
    arms = {"none": {"perplexity": LOW}, "vga:scale=1": {"perplexity": HIGH}, "vga": {"perplexity": (0.5, 0.51, 0.49)}}
    evidence = Collection(trainings=(training(arms),)).evidence({})
    table = pd.concat([judged_table(one, name) for name, one in evidence.items()], ignore_index=True)
    text = scorecard_markdown(Scorecard({}, table, pd.DataFrame(columns=["model", "effect"])))
    assert "| V-14 | Perplexity is no worse. | fails | holds |" in text
    first, second = text.split("### made\n")[1].split("### made (vga)\n")
    assert "vga:scale=1 5, none 1; 2000 steps, 3 seeds" in first
    assert "vga 0.5, none 1; 2000 steps, 3 seeds" in second


def test_what_several_models_decide_together_stands_there_once() -> None:
    """Models that differ in one setting; what is of each alone stands under its name."""
    made = []
    for place, decay in enumerate((0.1, 5.0)):
        courses = {"none": {"sink_rate": [[0.0, 0.1 * rate] for rate in (4 + place, 5, 6)]}}
        numbers = {"none": {"sink_rate": (0.4, 0.5, 0.6)}}
        made.append(training(numbers, model=f"small:{place}", courses=courses, weight_decay=decay))
    evidence = Collection(trainings=tuple(made)).evidence({})
    table = pd.concat([judged_table(one, name) for name, one in evidence.items()], ignore_index=True)
    text = scorecard_markdown(Scorecard({}, table, pd.DataFrame(columns=["model", "effect"])))
    both = text.split("### small:0, small:1\n")[1].split("###")[0]
    assert "| W-38 |" in both
    assert text.count("| W-38 |") == 2  # the outcomes, and once the numbers
    for place in range(2):
        assert "| W-30 |" in text.split(f"### small:{place}\n")[1].split("###")[0]


def test_a_line_of_the_figure_has_one_scale() -> None:
    """Also where the interval begins below 0, which has no logarithm."""
    row: Any = SimpleNamespace(low=-0.03, value=0.009, high=0.05, least=-np.inf, most=0.02)
    assert _place(row.high, row) < 0 < _place(row.value, row) < _place(row.low, row)
    positive: Any = SimpleNamespace(low=0.005, value=0.01, high=0.04, least=-np.inf, most=0.02)
    assert [_place(x, positive) for x in (0.005, 0.01, 0.04)] == pytest.approx([2, 1, -1])

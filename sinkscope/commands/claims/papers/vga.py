"""Claims on gates: Value-State Gated Attention (VGA), and Gated Attention for Large Language Models (GA)."""

from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
from scipy import stats

from sinkscope.commands.claims import over_seeds
from sinkscope.commands.claims.arms import NO_COST, perplexity_of_controls, perplexity_ratio
from sinkscope.commands.claims.claim import HAS_SINK_HEADS, Claim, Part, of_sink_heads
from sinkscope.commands.claims.evidence import MAIN, Evidence, Need, Null
from sinkscope.commands.claims.over_seeds import (
    CORRELATION,
    HAS_SINK,
    RESIDUAL,
    OfArm,
    OfStudy,
    difference,
    metric,
    of_one,
    of_study,
    ranked,
    ratio,
    raw_residual,
    study_claim,
)  # fmt: skip
from sinkscope.commands.claims.scopes import causal, gated
from sinkscope.commands.claims.studies import PLAIN, ClaimStudy, StudyArm
from sinkscope.measuring import estimates
from sinkscope.measuring.observables.reductions import LATER
from sinkscope.results.judgment import NotDefined, Test, above, at_least, at_most, below
from sinkscope.results.metrics import KURTOSIS_IN_W8A8, NORM_IN_W8A8
from sinkscope.results.papers import published
from sinkscope.results.run import WITH
from sinkscope.results.sequences import Lacks, table_of_run
from sinkscope.results.statistics import Estimate, bootstrap, exact, positive_jackknife, rank_correlation
from sinkscope.results.trainings import UNTOUCHED

TO_ZERO = Need("loss-do", "scale-sink-value:where=sinks")
TO_MEAN = Need("loss-do-alone", "mean-sink-value:where=sinks")
STRONG_MASS = 0.9  # mean attention to position 0 in the heads of V-3


def _drain_follows(evidence: Evidence) -> Estimate:
    run, geometry = evidence.natural, "geometry_by_sequence"
    mass = estimates.by_head(run, "attention_heads_by_sequence", "window_mass")[0]
    first, later = (estimates.by_head(run, geometry, name)[0] for name in ("value_norm", "value_norm_later"))
    return rank_correlation(mass, first / later, estimates.layers_of_heads(run))


def _later_gradient(evidence: Evidence) -> Estimate:
    attention = evidence.natural.table("attention").query("position == 0")
    mass = attention.groupby(["layer", "kv_head"])["window_mass"].mean()
    strong = mass.index[mass > STRONG_MASS]
    if strong.empty:
        raise NotDefined(f"no head gives position 0 more than {STRONG_MASS} of its attention")
    ratios = []
    groups = evidence.natural.table("gradient_by_group").groupby("group")
    for table in (evidence.natural.table("gradient"), *(rows for _, rows in groups)):
        value = estimates.before_valves(table).query("pathway == 'value' and head >= 0")
        by_position = value.pivot(index=["layer", "head"], columns="position", values="grad_norm").loc[list(strong)]
        ratios.append((by_position.iloc[:, LATER].mean(axis=1) / by_position[0]).median())
    return positive_jackknife(np.array(ratios)).over(f"{len(strong)} key/value head{'s' * (len(strong) > 1)}")


def _gate_closes(evidence: Evidence) -> Estimate:
    table = evidence.natural.table("gate")
    later = table["position"].between(LATER.start, LATER.stop - 1)
    return exact(table[table["position"] == 0]["gate"].mean() / table[later]["gate"].mean())


def _no_op(evidence: Evidence) -> Estimate:
    """Return the effect of zero values at the sink; the note has the effect of their mean over sequences."""
    # If only zeros do harm, the values are a constant bias.
    controls = perplexity_of_controls(evidence, TO_ZERO)
    note = f"of other positions ×{controls.value:.3g}"
    if evidence.has(TO_MEAN):
        constant = perplexity_ratio(evidence, TO_MEAN)
        note += f"; with their mean over sequences in place of zero ×{constant.value:.3g}"
        note += f" [{constant.low:.3g}, {constant.high:.3g}]"
        if evidence.runs[MAIN].bos == WITH:
            note += ", the same BOS in every sequence: its values are constant anyway"
    return (perplexity_ratio(evidence, TO_ZERO) / controls).over(note)


# --- trained gates and register tokens compared with plain arms

GATE, REGISTERS = "vga", "register-tokens"
WITH_GATE = Need("arms", f"{PLAIN},{GATE}")
# tables 1 and 2 are about models trained from random weights, so fine-tuned models do not count as evidence
FROM_SCRATCH, WITH_REGISTERS = Need("train", f"{PLAIN},{GATE}"), Need("train", f"{PLAIN},{REGISTERS}")
TRAINED = "trained from scratch"


# the methods of tables 1 and 2; the gates of the last two differ only in what they read (§3.2)
IGA_OF_TABLES = "iga:placement=output,scale=1"
METHODS = (PLAIN, REGISTERS, "learnable-sink", IGA_OF_TABLES, GATE)
ALL_METHODS = Need("train", ",".join(METHODS))


@of_study
def _ranked_as_published(study: ClaimStudy, of: OfArm, of_paper: Mapping[str, tuple[float, ...]]) -> Estimate:
    architecture = str(study.by_seed[0][PLAIN].run.manifest["model"].get("architecture")).lower()
    values = next((each for kind, each in of_paper.items() if kind in architecture), next(iter(of_paper.values())))
    return ranked(of, dict(zip(values, METHODS, strict=True)))(study)


def _in_order(words: str, of: OfArm, of_paper: Mapping[str, tuple[float, ...]]) -> tuple[str, OfStudy, Test]:
    """Return the rank correlation of the numbers of METHODS with the paper's, as a number of a claim.

    `of_paper` has the numbers of its models by a part of their architecture's name; the first is for all others.
    """
    quantity = f"rank correlation of the methods' {words} with the paper's"
    return quantity, _ranked_as_published(of, of_paper), above(0.0)


# --- the gradient before the gate


def _gated_gradients(arm: StudyArm) -> pd.DataFrame:
    """Return, by layer, key/value head and position, the gate and the value gradient before it ÷ after it."""
    gradient, index = table_of_run(arm.run, "gradient").query("head >= 0"), ["layer", "head", "position"]
    wide = gradient.pivot_table(index=index, columns="pathway", values="grad_norm")
    if "raw_value" not in wide:
        raise NotDefined(f"the gates of {arm.label} are on heads' outputs, not on values")
    gates = table_of_run(arm.run, "gate").set_index(index)["gate"]
    return pd.DataFrame({"gate": gates, "left": wide["raw_value"] / wide["value"]}).dropna()


def _follows_gate(arm: StudyArm) -> float:
    rows = _gated_gradients(arm)
    return _correlated(rows["gate"], rows["left"]) if rows.nunique().min() > 1 else float("nan")


# --- quantization and cost

# at the sites of Bondarenko et al.'s code, which the paper follows
NORM, KURTOSIS, LOSS_IN_W8A8 = (
    metric(name) for name in ("layer_inf_norm", "kurtosis_with_norms", "perplexity_increase")
)


def _against_best(study: ClaimStudy) -> Estimate:
    """Return the gate − the method that is best, in the mean over seeds, of all others that were trained with it.

    The best of each seed would be better than any method if all differ by chance only.
    """

    def others(arms: Mapping[str, StudyArm]) -> dict[str, StudyArm]:
        gate = arms[GATE]
        beside = [arm for arm in gate.training.arms if arm.seed == gate.seed and arm.method not in (GATE, PLAIN)]
        return {PLAIN: arms[PLAIN]} | {arm.label: arm for arm in beside}

    labels = sorted(set.intersection(*(set(others(arms)) for arms in study.by_seed)))
    cost = metric("perplexity_increase")

    best = min(labels, key=lambda label: np.mean([cost(others(arms)[label]) for arms in study.by_seed]))

    def beyond_best(arms: Mapping[str, StudyArm]) -> float:
        return cost(arms[GATE]) - cost(others(arms)[best])

    estimate = over_seeds.of_several(beyond_best, PLAIN)(study)
    words = f"{best}, the best of {', '.join(labels)}"
    return estimate.over(f"{words}; {estimate.note.partition('; ')[2]}")


def _step_seconds(arm: StudyArm) -> float:
    records = arm.training.manifest["arms"].values()
    record = next(one for one in records if (one["label"], one["seed"]) == (arm.label, arm.seed))
    if record.get("step_seconds") is None:
        raise Lacks(f"the training of {arm.label} has no step time: it was resumed, or is of an older sinkscope")
    return float(record["step_seconds"])


def _new_parameters(study: ClaimStudy) -> Estimate:
    gated, plain = (study.by_seed[0][name].run.manifest["model"]["parameters"] for name in (GATE, PLAIN))
    return exact((gated - plain) / gated).over(f"{gated - plain:,} of {gated:,}")


# --- fine-tuning: a plain arm and VGA compared with the model from which both began (table 3)

TUNED = Need("retrofit", f"{PLAIN},{UNTOUCHED}")
GATED = Need("retrofit", f"{PLAIN},{GATE},{UNTOUCHED}")


# --- the Bigram-Backcopy lab: plain, VGA and IGA, by step (figures 4 to 6). All numbers are for queries that are
# no triggers, in the layer in which the plain arm attends most to <s>.

INPUT_GATE = "iga"
LAB_ALONE = Need("backcopy", PLAIN)
LAB_BOTH = Need("backcopy", f"{PLAIN},{GATE}")
LAB_ALL = Need("backcopy", f"{PLAIN},{GATE},{INPUT_GATE}")
BEFORE_TRIGGERS = "attention on <s> before any trigger"
DRAIN = "‖v of <s>‖ ÷ others"


def _start_mass(arm: StudyArm) -> pd.Series:
    return arm.by_step("early_attention_to_start", arm.training.sinking_layer)


def _logit(arm: StudyArm) -> pd.Series:
    return arm.by_step("delta_logit", arm.training.sinking_layer)


def _value_norm(arm: StudyArm) -> pd.Series:
    """Return the norm of the projected value of <s> ÷ the norm for tokens that are not triggers."""
    start, others = (arm.by_step(f"{of}_value_norm", arm.training.sinking_layer) for of in ("start", "other"))
    return start / others


def _at_end(course: Callable[[StudyArm], pd.Series]) -> OfArm:
    return lambda arm: float(course(arm).iloc[-1])


def _range_of(course: Callable[[StudyArm], pd.Series]) -> OfArm:
    return lambda arm: float(np.ptp(course(arm)))


def _correlated(x: pd.Series | pd.Index, y: pd.Series) -> float:
    return float(stats.spearmanr(x, y)[0])


# --- Qiu et al. 2025: gates on heads' outputs or on values

ON_OUTPUTS, ON_VALUES = IGA_OF_TABLES, "iga:placement=value,scale=1"
OUTPUTS, VALUES = Need("train", f"{PLAIN},{ON_OUTPUTS}"), Need("train", f"{PLAIN},{ON_VALUES}")
MIXTURE = "15B mixture of experts"  # its tables are known from its abstract and reviews
FIRST_MASS = metric("sink_mass")
MASSIVE_COUNT = ("massive activation: their number per sequence", metric("massive_count"), 0.0)

CLAIMS = (
    Claim("V-1", "§1", "Sinks are drained.",
        (Part("rank correlation over heads of window mass and value norm ÷ later", _drain_follows, below(0.0)),
         *of_sink_heads("value norm", "value_norm", below(0.5)))),
    Claim("V-2", "§1", "The residual stream peaks at the sink.",
        (Part("norm at 0 ÷ later, layer with the largest",
            lambda e: bootstrap(estimates.norm_ratios(e.natural, "layer_out").max(1)), above(1.0)),), is_ours=False),
    Claim("V-3", "§3.1", "A strong sink takes the gradient from the other values.",
        (Part("value gradient later ÷ at 0, median over heads with window mass > 0.9", _later_gradient, at_most(0.1)),),
        scope=(causal,)),
    Claim("V-12", "§3.3", "The gate closes at the sink.",
        (Part("gate at 0 ÷ later, means over heads and layers", _gate_closes, below(0.5)),), scope=(gated,)),
    Claim("V-24", "§1", "The sink is a no-op: its values can be set to zero.",
        (Part("perplexity with v = 0 at position 0 in the heads with a sink ÷ with v = 0 there at others", _no_op,
            at_most(1.05)), HAS_SINK_HEADS), (MAIN, TO_ZERO), (causal,), also_reads=(TO_MEAN,)),
    study_claim("V-13", "eq. 8", "A closed gate cuts off the gradient.", WITH_GATE,
        ("rank correlation over heads and positions of the gate and the value gradient before it ÷ after it",
            of_one(_follows_gate, GATE, ends=CORRELATION), above(0.0)),
        ("value gradient at 0 before the gate ÷ after it, median over heads",
            of_one(lambda arm: float(_gated_gradients(arm).xs(0, level="position")["left"].median()), GATE),
            below(1.0)), set_against=Null.THEOREM),
    study_claim("V-25", "eq. 8, 15", "The value's gradient has a content and a self-regulatory path.", WITH_GATE,
        ("relative residual of (g I + g (1 − g) W V) u, median", of_one(raw_residual, GATE), at_most(RESIDUAL)),
        is_ours=False, set_against=Null.THEOREM),
    study_claim("V-14", "table 1", "Perplexity is no worse.", FROM_SCRATCH,
        ("perplexity, VGA ÷ plain", ratio(metric("perplexity"), GATE), at_most(1 + NO_COST)),
        published=published("VGA table 1", {"BERT": 4.52 / 4.52, "OPT": 15.49 / 15.95, "GPT-2": 16.52 / 17.03},
            TRAINED)),
    study_claim("V-15", "table 1", "The largest norm falls.", FROM_SCRATCH,
        ("max I+O norm, plain ÷ VGA", ratio(NORM, PLAIN, GATE), above(1.0)), is_ours=False,
        published=published("VGA table 1", {"BERT": 24.5, "OPT": 2.2, "GPT-2": 20.8}, TRAINED)),
    study_claim("V-16", "table 1", "Kurtosis falls.", FROM_SCRATCH,
        ("kurtosis, plain ÷ VGA", ratio(KURTOSIS, PLAIN, GATE), above(1.0)), is_ours=False,
        published=published("VGA table 1", {"BERT": 35.0, "OPT": 63.0, "GPT-2": 429.0}, TRAINED)),
    study_claim("V-17", "table 1", "Register tokens worsen kurtosis.", WITH_REGISTERS,
        ("kurtosis, registers ÷ plain", ratio(KURTOSIS, REGISTERS), above(1.0)), is_ours=False,
        published=published("VGA table 1", {"BERT": 2.6, "OPT": 3.8, "GPT-2": 0.36}, TRAINED)),
    study_claim("V-26", "table 1", "The methods' outliers have the paper's order.", ALL_METHODS,
        _in_order("max I+O norm", NORM, {"bert": (812.39, 1205.91, 41.65, 38.71, 33.19),
            "opt": (1.01, 0.75, 0.77, 0.5, 0.45), "gpt": (256.84, 73.81, 14.5, 17.68, 12.37)}),
        _in_order("kurtosis", KURTOSIS, {"bert": (2987.23, 7812.73, 225.88, 90.65, 84.55),
            "opt": (2177, 8322.68, 22.23, 102, 34.77), "gpt": (13412.71, 4871.96, 71.08, 33.51, 31.27)}),
        is_ours=False),
    study_claim("V-27", "table 2", "In 8 bits the methods have the paper's order.", ALL_METHODS,
        _in_order("Δ perplexity", LOSS_IN_W8A8, {"bert": (612.80, 909.14, 0.26, 0.15, 0.12),
            "opt": (27.83, 107.96, 1.39, 1.12, 0.93)}),
        _in_order("max I+O norm", metric(NORM_IN_W8A8), {"bert": (486.19, 415.27, 42.82, 45.06, 37.1),
            "opt": (657.77, 835.33, 114.45, 102.15, 100.01)}),
        _in_order("kurtosis", metric(KURTOSIS_IN_W8A8), {"bert": (2508.21, 7284.18, 153.47, 91.27, 78.32),
            "opt": (6548.18, 6646.24, 26.35, 95.48, 18.34)}), is_ours=False),
    study_claim("V-18", "table 2", "VGA loses least in 8 bits.", FROM_SCRATCH,
        ("Δ perplexity in W8A8, VGA − best other arm", _against_best, below(0.0)), is_ours=False,
        published=published("VGA table 2", {"BERT": 0.12 - 0.15, "OPT": 0.93 - 1.12}, "VGA − IGA")),
    study_claim("V-19", "table 2", "Registers lose more in 8 bits than plain.", WITH_REGISTERS,
        ("Δ perplexity in W8A8, registers − plain", difference(LOSS_IN_W8A8, REGISTERS), above(0.0)), is_ours=False,
        published=published("VGA table 2", {"BERT": 909 - 613, "OPT": 108 - 28}, "difference")),
    study_claim("V-23", "§3.2", "The overhead of VGA is marginal.", WITH_GATE,
        ("new ÷ all parameters", _new_parameters, below(0.01)),
        ("seconds a step of training, VGA ÷ plain", ratio(_step_seconds, GATE), below(1.05))),
    study_claim("V-20", "table 3", "A plain fine-tuning increases the largest norm.", TUNED,
        ("max I+O norm, after ÷ before", ratio(NORM, PLAIN, UNTOUCHED), above(1.0)), is_ours=False,
        set_against=Null.NONE,
        published=published("VGA table 3", {"GPT-2": 1.55}, "fine-tuned")),
    study_claim("V-21", "table 3", "The retrofit removes the outliers.", GATED,
        ("max I+O norm, VGA ÷ before", ratio(NORM, GATE, UNTOUCHED), below(0.2)),
        ("kurtosis, VGA ÷ before", ratio(KURTOSIS, GATE, UNTOUCHED), below(0.05)),
        published=published("VGA table 3", {"GPT-2": 0.094}, "fine-tuned")),
    study_claim("V-22", "table 3", "The retrofit has the best perplexity.", GATED,
        ("perplexity, VGA − plain fine-tune", difference(metric("perplexity"), GATE), below(0.0)), is_ours=False,
        published=published("VGA table 3", {"GPT-2": -0.07}, "fine-tuned")),
    study_claim("V-4", "fig. 4", "The plain lab model has a sink.", LAB_ALONE,
        (BEFORE_TRIGGERS, of_one(_at_end(_start_mass), PLAIN, ends=(0.0, 1.0)), at_least(0.5)),
        set_against=Null.NONE),
    study_claim("V-5", "fig. 4", "The plain lab model has a value drain.", LAB_ALONE,
        (DRAIN, of_one(_at_end(_value_norm), PLAIN), at_most(0.5)), set_against=Null.NONE),
    study_claim("V-6", "fig. 4", "VGA has no sink.", LAB_BOTH, (f"{BEFORE_TRIGGERS}, VGA − untrained",
        of_one(lambda arm: float(_start_mass(arm).iloc[-1] - _start_mass(arm).iloc[0]), GATE, PLAIN), at_most(0.0))),
    study_claim("V-7", "fig. 4", "VGA has no value drain.", LAB_BOTH,
        (DRAIN, of_one(_at_end(_value_norm), GATE, PLAIN), at_least(0.8))),
    study_claim("V-8", "fig. 5", "The plain model runs a cycle.", LAB_ALONE,
        ("rank correlation of attention and value norm over steps",
            of_one(lambda arm: _correlated(_start_mass(arm), _value_norm(arm)), PLAIN, ends=CORRELATION), below(0.0)),
        ("rank correlation of Δlogit and the step",
            of_one(lambda arm: _correlated(_logit(arm).index, _logit(arm)), PLAIN, ends=CORRELATION), above(0.0)),
        set_against=Null.NONE),
    study_claim("V-9", "fig. 5", "VGA is stable.", LAB_BOTH,
        ("range of the attention over steps, VGA ÷ plain", ratio(_range_of(_start_mass), GATE), below(0.5)),
        ("range of the value norm", ratio(_range_of(_value_norm), GATE), below(0.5)),
        ("range of Δlogit", ratio(_range_of(_logit), GATE), below(0.5))),
    study_claim("V-10", "fig. 5", "VGA learns as well.", LAB_BOTH,
        ("backcopy risk, VGA − plain, in nats",
            difference(_at_end(lambda arm: arm.by_step("backcopy_risk")), GATE), at_most(NO_COST)),
        ("of bigrams", difference(_at_end(lambda arm: arm.by_step("bigram_risk")), GATE), at_most(NO_COST))),
    study_claim("V-11", "fig. 6", "IGA is between plain and VGA.", LAB_ALL,
        (f"{BEFORE_TRIGGERS}, plain − IGA", difference(_at_end(_start_mass), PLAIN, INPUT_GATE), above(0.0)),
        ("IGA − VGA", difference(_at_end(_start_mass), INPUT_GATE, GATE), above(0.0))),
    study_claim("GA-1", "§4.2", "A gate on heads' outputs removes the sink.", OUTPUTS,
        ("attention to position 0, gated ÷ plain", ratio(FIRST_MASS, ON_OUTPUTS, where=HAS_SINK), at_most(0.25)),
        published=published("Qiu et al.", {"elementwise": 0.048 / 0.467, "headwise": 0.073 / 0.467}, MIXTURE)),
    study_claim("GA-2", "§4.2", "The gate removes massive activations.", OUTPUTS,
        ("max infinity norm, gated ÷ plain",
            ratio(metric("max_inf_norm"), ON_OUTPUTS, where=MASSIVE_COUNT), below(0.5)),
        published=published("Qiu et al.", {"elementwise": 94 / 1053, "headwise": 98 / 1053}, MIXTURE)),
    study_claim("GA-3", "§4.2", "Gates are sparse, and depend on the query.", OUTPUTS,
        ("mean gate", of_one(metric("gate_mean"), ON_OUTPUTS, ends=(0.0, 1.0)), below(0.5)),
        ("standard deviation of gates over tokens ÷ their mean",
            of_one(lambda arm: metric("gate_deviation")(arm) / metric("gate_mean")(arm), ON_OUTPUTS), above(0.5)),
        published=published("Qiu et al.", {"elementwise": 0.116, "headwise": 0.172}, MIXTURE)),
    study_claim("GA-4", "§4.2", "A gate on values leaves the sink.", VALUES,
        ("attention to position 0, gated ÷ plain", ratio(FIRST_MASS, ON_VALUES, where=HAS_SINK), at_least(0.5)),
        published=published("Qiu et al.", {"on values": 0.297 / 0.467}, MIXTURE)),
)  # fmt: skip

"""Claims of Value-State Gated Attention (VGA) on trained gates and register tokens beside plain arms."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from scipy import stats

from sinkscope.paper_claims.arms import NO_COST
from sinkscope.paper_claims.claim import Claim, NotDefined, Part, above, at_most, below
from sinkscope.paper_claims.evidence import Evidence, Lacks, table_of
from sinkscope.paper_claims.nulls import Null
from sinkscope.paper_claims.over_seeds import correlation, difference, metric, of_one, ratio, study_of, words_for_arms
from sinkscope.paper_claims.studies import ArmStudy
from sinkscope.paper_claims.trainings import PLAIN, Arm
from sinkscope.results.papers import published
from sinkscope.results.statistics import Estimate, exact, mean_of_runs
from sinkscope.training.tables import UNTOUCHED

GATE, REGISTERS = "vga", "register-tokens"
ARMS = f"arms:{PLAIN},{GATE}"
# tables 1 and 2 are of models that were trained so from random weights: a fine-tuned one says nothing of them
FROM_SCRATCH, WITH_REGISTERS = f"train:{PLAIN},{GATE}", f"train:{PLAIN},{REGISTERS}"
TRAINED = "trained from scratch"


# --- the gradient in front of the gate


def _gated_gradients(arm: Arm) -> pd.DataFrame:
    """Of each layer, key/value head and position: its gate, and its value gradient in front of it ÷ behind it.

    Raises:
        NotDefined: the gates are not on values.
    """
    gradient = table_of(arm.run, "gradient")
    wide = gradient[gradient["head"] >= 0].pivot_table(
        index=["layer", "head", "position"], columns="pathway", values="grad_norm"
    )
    if "raw_value" not in wide:
        raise NotDefined(f"the gates of {arm.label} are on heads' outputs, not on values")
    gates = table_of(arm.run, "gate").set_index(["layer", "head", "position"])["gate"]
    return pd.DataFrame({"gate": gates, "left": wide["raw_value"] / wide["value"]}).dropna()


def _follows_gate(arm: Arm) -> float:
    rows = _gated_gradients(arm)
    if rows.nunique().min() < 2:
        return float("nan")
    return float(stats.spearmanr(rows["gate"], rows["left"])[0])


def _left_at_sink(arm: Arm) -> float:
    return float(_gated_gradients(arm).xs(0, level="position")["left"].median())


# --- quantization and cost


def _against_best(evidence: Evidence) -> Estimate:
    """Against the best of all other methods that were trained beside it, of each seed."""
    study = study_of(evidence, FROM_SCRATCH, ArmStudy)
    others = sorted(set.intersection(*(set(arms) for arms in study.by_seed)) - {GATE, UNTOUCHED})
    cost = metric("perplexity_increase")
    values = [cost(arms[GATE]) - min(cost(arms[name]) for name in others) for arms in study.by_seed]
    labels = ", ".join(study.by_seed[0][name].label for name in others)
    return mean_of_runs(np.array(values)).over(f"others: {labels}; {words_for_arms(study)}")


def _step_seconds(arm: Arm) -> float:
    """Wall time of the training ÷ its steps. Raises Lacks where it was resumed, or is of an older version."""
    records = arm.training.manifest["arms"].values()
    record = next(one for one in records if (one["label"], one["seed"]) == (arm.label, arm.seed))
    if record.get("step_seconds") is None:
        raise Lacks(f"the training of {arm.label} has no step time: it was resumed, or is of an older sinkscope")
    return float(record["step_seconds"])


def _new_parameters(evidence: Evidence) -> Estimate:
    arms: Mapping[str, Arm] = study_of(evidence, ARMS, ArmStudy).by_seed[0]
    gated, plain = (arms[name].run.manifest["model"]["parameters"] for name in (GATE, PLAIN))
    return exact((gated - plain) / gated).over(f"{gated - plain:,} of {gated:,}")


CLAIMS = (
    Claim("V-13", "eq. 8", "The gradient is severed.",
        (Part("rank correlation over heads and positions of the gate and the value gradient in front of it ÷ behind",
            correlation(ARMS, _follows_gate, GATE), above(0.0)),
         Part("value gradient at 0 in front of the gate ÷ behind, median over heads",
            of_one(ARMS, _left_at_sink, GATE), below(1.0))),
        (ARMS,), set_against=Null.THEOREM),
    Claim("V-14", "table 1", "Perplexity is no worse.",
        (Part("perplexity, VGA ÷ plain", ratio(FROM_SCRATCH, metric("perplexity"), GATE), at_most(1 + NO_COST)),),
        (FROM_SCRATCH,),
        published=published("VGA table 1", {"BERT": 4.52 / 4.52, "OPT": 15.49 / 15.95, "GPT-2": 16.52 / 17.03},
            TRAINED)),
    Claim("V-15", "table 1", "The largest norm falls.",
        (Part("max infinity norm, plain ÷ VGA", ratio(FROM_SCRATCH, metric("max_inf_norm"), PLAIN, GATE), above(1.0)),),
        (FROM_SCRATCH,), published=published("VGA table 1", {"BERT": 24.5, "OPT": 2.2, "GPT-2": 20.8}, TRAINED),
        is_ours=False),
    Claim("V-16", "table 1", "Kurtosis falls.",
        (Part("kurtosis, plain ÷ VGA", ratio(FROM_SCRATCH, metric("kurtosis"), PLAIN, GATE), above(1.0)),),
        (FROM_SCRATCH,),
        published=published("VGA table 1", {"BERT": 35.0, "OPT": 63.0, "GPT-2": 429.0}, TRAINED), is_ours=False),
    Claim("V-17", "table 1", "Register tokens worsen kurtosis.",
        (Part("kurtosis, registers ÷ plain", ratio(WITH_REGISTERS, metric("kurtosis"), REGISTERS), above(1.0)),),
        (WITH_REGISTERS,), published=published("VGA table 1", {"BERT": 2.6, "OPT": 3.8, "GPT-2": 0.36}, TRAINED),
        is_ours=False),
    Claim("V-18", "table 2", "VGA quantizes best.",
        (Part("Δ perplexity in W8A8, VGA − best other arm", _against_best, below(0.0)),), (FROM_SCRATCH,),
        published=published("VGA table 2", {"BERT": 0.12 - 0.15, "OPT": 0.93 - 1.12}, "VGA − IGA"), is_ours=False),
    Claim("V-19", "table 2", "Registers quantize worse than plain.",
        (Part("Δ perplexity in W8A8, registers − plain",
            difference(WITH_REGISTERS, metric("perplexity_increase"), REGISTERS), above(0.0)),),
        (WITH_REGISTERS,), published=published("VGA table 2", {"BERT": 909 - 613, "OPT": 108 - 28}, "difference"),
        is_ours=False),
    Claim("V-23", "§3.2", "Its overhead is marginal.",
        (Part("new ÷ all parameters", _new_parameters, below(0.01)),
         Part("seconds a step of training, VGA ÷ plain", ratio(ARMS, _step_seconds, GATE), below(1.05))), (ARMS,)),
)  # fmt: skip

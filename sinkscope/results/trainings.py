"""The table `retrofit` of all trained arms, and the layer with the most attention to <s>.

VGA's tables 1 to 3 have the columns of `retrofit`; their norms and kurtosis are layer_inf_norm and kurtosis_with_norms.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from sinkscope.results.metrics import ARM_METRICS, PERPLEXITY_IN_W8A8
from sinkscope.results.run import RunData
from sinkscope.results.tables import LEADING, METRIC, SEED, TOKEN_PLACE, VALUE, WHOLE_MODEL, Column, names_of

TRAINED_TABLES = {
    "gates": (
        SEED,
        Column("head", "head of values or queries, as the parameter counts; or the register", kind="whole"),
        Column("parameter", "parameter of the retrofit", kind="text"),
        Column("displacement", "distance of the head's parameters from where they started"),
    ),
    "retrofit": (SEED, METRIC, VALUE),
    "value_norms": (
        *TOKEN_PLACE,
        Column("is_trigger", "whether the token is a trigger of the task", kind="truth"),
        Column("norm", "L2 norm of all heads' values as they are projected"),
        Column("attended_norm", "the same as they are attended to, after a gate on values"),
    ),
}  # fmt: skip
UNTOUCHED = "untouched"  # the arm of the unchanged model
AnyRun = TypeVar("AnyRun", bound=RunData)


def runs_by_seed(arms: Mapping[str, Mapping[str, Any]], runs: Mapping[str, AnyRun]) -> dict[int, dict[str, AnyRun]]:
    """Return seed → label → run of the `arms` of run.json; the untouched model's run belongs to every seed."""
    trained = [name for name in runs if name != UNTOUCHED]
    by_seed: dict[int, dict[str, AnyRun]] = {}
    for seed in sorted({arms[name]["seed"] for name in trained}):
        by_seed[seed] = {UNTOUCHED: runs[UNTOUCHED]} if UNTOUCHED in runs else {}
        by_seed[seed] |= {arms[name]["label"]: runs[name] for name in trained if arms[name]["seed"] == seed}
    return by_seed


def retrofit_table(
    arms: Mapping[str, Mapping[str, Any]], runs: Mapping[str, RunData], gates: pd.DataFrame
) -> pd.DataFrame:
    """Return the table `retrofit`: model, condition (the method's label), layer −1, seed, metric, value.

    There is a row for each arm and metric that was measured, in the order of `ARM_METRICS`. The numbers of `w8a8` in
    full precision replace the run's, so that each increase is between numbers of one measurement.

    Args:
        arms: the entry of run.json: name of an arm → its method, seed and label.
        runs: name of an arm → its run; also that of the untouched model.
        gates: the table `gates`.
    """
    farthest = gates.groupby(["seed", "condition"])["displacement"].max()
    rows = []
    for seed, of_seed in runs_by_seed(arms, runs).items():
        for label, run in of_seed.items():
            costs = run.manifest.get("w8a8") or {}
            numbers = {metric: run.metric(metric) for metric in ARM_METRICS} | costs
            if costs:
                numbers["perplexity_increase"] = numbers[PERPLEXITY_IN_W8A8] - numbers["perplexity"]
            if (seed, label) in farthest:
                numbers["gate_displacement_max"] = float(farthest[seed, label])
            rows += [(run.model, label, WHOLE_MODEL, seed, metric, numbers[metric]) for metric in ARM_METRICS]
    table = pd.DataFrame(rows, columns=[*LEADING, *names_of(TRAINED_TABLES["retrofit"])])
    return table.dropna(subset="value", ignore_index=True)


def sinking_layer(table: pd.DataFrame) -> int:
    """Return the layer in which the first arm gives most attention to <s> at the last step."""
    rows = table[(table["condition"] == table["condition"].iloc[0]) & (table["metric"] == "attention_to_start")]
    last = rows[rows["step"] == rows["step"].max()]
    return int(last.groupby("layer")["value"].mean().idxmax())


# a loss and a sink rate of the table `training`: those of a probe of observables, or else those of every training
HELD_OUT, LOGGED = ("held_out_loss", "sink_rate_by_weight"), ("loss", "sink_rate")


def courses(training: pd.DataFrame, names: tuple[str, str]) -> dict[tuple[str, int], pd.DataFrame]:
    """Return (arm, seed) → its loss and sink rate by step, where both were measured."""
    rows = training[(training["layer"] == WHOLE_MODEL) & training["metric"].isin(names)]
    keys = ["condition", "seed"]
    wide = rows.pivot_table(index=[*keys, "step"], columns="metric", values="value", sort=False)
    if not set(names) <= set(wide):
        return {}
    wide = wide[list(names)].set_axis(["loss", "rate"], axis=1).dropna().sort_index(level="step", sort_remaining=False)
    return {(str(arm), int(seed)): rows.droplevel(keys) for (arm, seed), rows in wide.groupby(level=keys, sort=False)}


def at_equal_loss(*every: pd.DataFrame) -> pd.DataFrame:
    """Return `step`, `loss`, `rate` of some courses, a row each, where each first has the lowest loss that all reach.

    Rates of unequally trained arms differ also because a sink takes time. Between logs, all three are linear. A course
    that begins below this loss has NaN.
    """
    level = max(course["loss"].min() for course in every)
    rows = []
    for course in every:
        table = course.reset_index()[["step", "loss", "rate"]].to_numpy(float)
        first = int(np.argmax(table[:, 1] <= level))
        before, after = table[max(first - 1, 0)], table[first]
        share = (before[1] - level) / (before[1] - after[1]) if first else 1.0
        reached = before + share * (after - before)
        rows.append(np.full(3, np.nan) if reached[1] < level - 1e-9 else reached)
    return pd.DataFrame(rows, columns=["step", "loss", "rate"])


def tokens_a_step(options: Mapping[str, Any], processes: int = 1) -> int:
    """Return the tokens in all blocks of a step, from the options of a training in run.json."""
    return options["batch_size"] * options["accumulation"] * processes * options["block_length"]

"""The table `retrofit` of all trained arms, and the layer with the most attention to <s>.

VGA's tables 1 to 3 have the columns of `retrofit`, but their norms and kurtosis are those of other sites.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from sinkscope.results.run import RunData
from sinkscope.results.tables import (
    LEADING,
    METRIC,
    POSITION,
    SEED,
    SEQUENCE,
    TOKEN,
    TOKEN_ID,
    VALUE,
    WHOLE_MODEL,
    Column,
    names_of,
)

TRAINED_TABLES = {
    "gates": (
        SEED,
        Column("head", "head of values or queries, as the parameter counts; or the register", kind="whole"),
        Column("parameter", "parameter of the retrofit", kind="text"),
        Column("displacement", "distance of the head's parameters from where they started"),
    ),
    "retrofit": (SEED, METRIC, VALUE),
    "value_norms": (
        SEQUENCE, POSITION, TOKEN_ID, TOKEN,
        Column("is_trigger", "whether the token is a trigger of the task", kind="truth"),
        Column("norm", "L2 norm of all heads' values as they are projected"),
        Column("attended_norm", "the same as they are attended to, after a gate on values"),
    ),
}  # fmt: skip
UNTOUCHED = "untouched"  # the arm of the unchanged model

# heading of a table in Markdown → its metrics; all of them make up the table `retrofit`, in this order
TABLES: dict[str, tuple[str, ...]] = {
    "In full precision": ("perplexity", "max_inf_norm", "kurtosis"),
    "In W8A8": ("perplexity_quantized", "perplexity_increase", "max_inf_norm_quantized", "kurtosis_quantized"),
    "Position 0 against the others": (
        "sink_rate",
        "sink_rate_outside",
        "sink_mass",
        "massive_count",
        "norm_ratio",
        "value_gradient_norm",
        "value_gradient_ratio",
        "raw_value_gradient_ratio",
        "value_drain",
        "raw_value_drain",
        "gate_first",
        "gate_later",
        "gate_mean",
        "gate_closed",
        "gate_deviation",
        "gate_displacement_max",
    ),
}
ROWS = tuple(metric for metrics in TABLES.values() for metric in metrics)


def retrofit_table(
    runs: Mapping[str, RunData], quantized: Mapping[str, Mapping[str, float]], gates: pd.DataFrame, seed: int = 0
) -> pd.DataFrame:
    """Return the table `retrofit` of one seed: model, condition (the arm), layer −1, seed, metric, value.

    There is a row for each arm and metric that was measured, in the order of `TABLES`. The numbers of `w8a8` in full
    precision replace the run's, so that each increase is between numbers of one measurement.
    """
    farthest = gates.groupby("condition")["displacement"].max()
    rows = []
    for arm, run in runs.items():
        numbers = {metric: run.metric(metric) for metric in ROWS} | dict(quantized.get(arm, {}))
        if arm in quantized:
            numbers["perplexity_increase"] = numbers["perplexity_quantized"] - numbers["perplexity"]
        if arm in farthest:
            numbers["gate_displacement_max"] = float(farthest[arm])
        rows += [(run.model, arm, WHOLE_MODEL, seed, metric, numbers[metric]) for metric in ROWS]
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
    return {(str(arm), int(seed)): own.droplevel(keys) for (arm, seed), own in wide.groupby(level=keys, sort=False)}


def at_equal_loss(*every: pd.DataFrame) -> pd.DataFrame:
    """Return `step`, `loss`, `rate` of some courses, a row each, where each first has the lowest loss that all reach.

    Rates of unequally trained arms differ also because a sink takes time. Between logs, all three are linear. A course
    that begins below this loss has NaN.
    """
    level = max(course["loss"].min() for course in every)
    found = []
    for course in every:
        table = course.reset_index()[["step", "loss", "rate"]].to_numpy(float)
        at = int(np.argmax(table[:, 1] <= level))
        before, after = table[max(at - 1, 0)], table[at]
        share = (before[1] - level) / (before[1] - after[1]) if at else 1.0
        reached = before + share * (after - before)
        found.append(np.full(3, np.nan) if reached[1] < level - 1e-9 else reached)
    return pd.DataFrame(found, columns=["step", "loss", "rate"])


def tokens_a_step(options: Mapping[str, Any], processes: int = 1) -> int:
    """Return the tokens in all blocks of a step, from the options of a training in run.json."""
    return options["batch_size"] * options["accumulation"] * processes * options["block_length"]

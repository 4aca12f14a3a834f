"""The arms of a retrofit as VGA's tables 1 to 3 have them: from their runs, W8A8 and their gates' displacement."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from sinkscope.measuring.summary import WHOLE_MODEL
from sinkscope.report.paper_tables import as_markdown, table_with_spread
from sinkscope.results.run import RunData
from sinkscope.results.tables import LEADING, TRAINING_TABLES, names_of

UNTOUCHED = "untouched"  # the arm that is the model as it is

# metrics of the table `retrofit`, in its order: those of `summary`, and
#   …_quantized            the same in W8A8
#   perplexity_increase    perplexity_quantized − perplexity
#   gate_displacement_max  the farthest that a head's new parameters have moved (table `gates`)
METRICS = (
    "perplexity",
    "perplexity_quantized",
    "perplexity_increase",
    "max_inf_norm",
    "max_inf_norm_quantized",
    "kurtosis",
    "kurtosis_quantized",
    "sink_rate",
    "value_drain",
    "raw_value_drain",
    "gate_first",
    "gate_later",
    "massive_count",
    "norm_ratio",
    "value_gradient_ratio",
    "gate_displacement_max",
)

# heading → metric, how it is called there (↓: less is better), and how its numbers are written
MARKDOWN: dict[str, tuple[tuple[str, str, str], ...]] = {
    "In full precision (VGA tables 1 and 3)": (
        ("perplexity", "Perplexity (↓)", "{:,.2f}"),
        ("max_inf_norm", "Max I+O norm (↓)", "{:,.2f}"),
        ("kurtosis", "Avg. kurtosis (↓)", "{:,.2f}"),
    ),
    "In W8A8 (VGA table 2)": (
        ("perplexity_quantized", "INT8 perplexity (↓)", "{:,.2f}"),
        ("perplexity_increase", "Δ perplexity (↓)", "{:+,.2f}"),
        ("max_inf_norm_quantized", "Max I+O norm (↓)", "{:,.2f}"),
        ("kurtosis_quantized", "Avg. kurtosis (↓)", "{:,.2f}"),
    ),
    "Position 0 against the others": (
        ("sink_rate", "Sink rate", "{:.1%}"),
        ("massive_count", "Massive activations", "{:.1f}"),
        ("norm_ratio", "Residual norm ÷ others", "{:.2f}"),
        ("value_gradient_ratio", "Value gradient ÷ later", "{:.2f}"),
        ("value_drain", "Value norm ÷ others", "{:.2f}"),
        ("raw_value_drain", "before the gate", "{:.2f}"),
        ("gate_first", "Gate", "{:.3f}"),
        ("gate_later", "at others", "{:.3f}"),
        ("gate_displacement_max", "Gates moved by, at most", "{:.3g}"),
    ),
}


def retrofit_table(
    runs: Mapping[str, RunData], quantized: Mapping[str, Mapping[str, float]], gates: pd.DataFrame, seed: int = 0
) -> pd.DataFrame:
    """Table `retrofit`: model, condition (the arm), layer −1, seed, metric (of METRICS), value; what was not measured
    is left out.

    runs        arm → its run, on held-out text
    quantized   arm → what `w8a8` gives on the same text. Its numbers in full precision take the run's place, so that
                each increase is that of one measurement.
    gates       the table of that name, all arms together
    """
    farthest = gates.groupby("condition")["displacement"].max()
    rows = []
    for arm, run in runs.items():
        numbers = {metric: run.metric(metric) for metric in METRICS} | dict(quantized.get(arm, {}))
        if arm in quantized:
            numbers["perplexity_increase"] = numbers["perplexity_quantized"] - numbers["perplexity"]
        if arm in farthest:
            numbers["gate_displacement_max"] = float(farthest[arm])
        rows += [
            (run.model, arm, WHOLE_MODEL, seed, metric, numbers[metric])
            for metric in METRICS
            if not np.isnan(numbers[metric])
        ]
    return pd.DataFrame(rows, columns=[*LEADING, *names_of(TRAINING_TABLES["retrofit"])])


def retrofit_markdown(table: pd.DataFrame) -> str:
    """The table `retrofit` in the columns of VGA's tables, an arm a row; of several seeds the mean ± the standard
    deviation (n − 1). A dash where a number is missing; columns that no arm has are left out, and so are tables without
    any.
    """
    arms = table["condition"].unique()
    wide, spread = (
        table.pivot_table(index="condition", columns="metric", values="value", aggfunc=how, dropna=False).reindex(arms)
        for how in ("mean", "std")
    )
    parts = [f"# {model}" for model in table["model"].unique()]
    for heading, columns in MARKDOWN.items():
        there = [column for column in columns if column[0] in wide]
        if there:
            parts += [f"## {heading}", as_markdown(table_with_spread(wide, spread, there), numbers=True)]
    return "\n\n".join(parts) + "\n"

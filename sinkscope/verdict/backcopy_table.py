"""What the Bigram-Backcopy task shows at the end of a training, in Markdown."""

from collections.abc import Iterable

import pandas as pd

from sinkscope.measuring.summary import WHOLE_MODEL
from sinkscope.results.run import RunData
from sinkscope.verdict.markdown import as_markdown, table_with_spread

COLUMNS = (
    "bigram_risk",
    "backcopy_risk",
    "attention_to_start",
    "early_attention_to_start",
    "attention_to_triggers",
    "value_ratio",
    "attended_ratio",
    "delta_logit",
)


def backcopy_markdown(training: pd.DataFrame, note: str = "") -> str:
    """The metrics of the last step, a row for each arm: mean ± standard deviation (n − 1) over seeds, in the layer of
    `sinking_layer`. `training` is the table of that name, of all arms; `note` stands behind the title.
    """
    layers = (WHOLE_MODEL, sinking_layer(training))
    last = training[(training["step"] == training["step"].max()) & training["layer"].isin(layers)]
    wide = last.pivot_table(index=["condition", "seed"], columns="metric", values="value", sort=False)
    wide["value_ratio"] = wide["start_value_norm"] / wide["other_value_norm"]
    wide["attended_ratio"] = wide["start_attended_norm"] / wide["other_attended_norm"]
    arms = training["condition"].unique()
    mean, spread = (wide.groupby("condition").agg(how).reindex(arms) for how in ("mean", "std"))
    table = as_markdown(table_with_spread(mean, spread, COLUMNS), numbers=True)
    title = f"## Non-trigger queries at step {last['step'].iloc[0]} (VGA figures 4 to 6)"
    return f"{title}{note and f'; {note}'}\n\n{table}\n"


def without_start(runs: Iterable[RunData]) -> str:
    """What is to be said of trainings without <s> in front, whose metrics are named after it; empty of others."""
    begin_with_it = all(run.manifest["input"]["token_zero"].startswith("bos") for run in runs)
    return "" if begin_with_it else "the first token stands in the place of <s>"


def sinking_layer(table: pd.DataFrame) -> int:
    """The layer in which the first arm's attention goes most to <s> at the last step."""
    rows = table[(table["condition"] == table["condition"].iloc[0]) & (table["metric"] == "attention_to_start")]
    last = rows[rows["step"] == rows["step"].max()]
    return int(last.groupby("layer")["value"].mean().idxmax())

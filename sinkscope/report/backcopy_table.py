"""What the Bigram-Backcopy lab found, in Markdown: from the table `training` alone."""

import pandas as pd

from sinkscope.measuring.summary import WHOLE_MODEL
from sinkscope.report.paper_tables import as_markdown, table_with_spread

# metric, how it is called, and how its numbers are written
COLUMNS = (
    ("bigram_risk", "Bigram risk", "{:.4f}"),
    ("backcopy_risk", "Backcopy risk", "{:.4f}"),
    ("attention_to_start", "Attention on `<s>`", "{:.3f}"),
    ("early_attention_to_start", "before any trigger", "{:.3f}"),
    ("attention_to_triggers", "on triggers", "{:.3f}"),
    ("value_ratio", "‖v‖ of `<s>` ÷ others", "{:.3f}"),
    ("attended_ratio", "behind the gate", "{:.3f}"),
    ("delta_logit", "Δlogit of `<s>`", "{:.2f}"),
)


def backcopy_markdown(training: pd.DataFrame) -> str:
    """What the probe found at the last step, an arm a row: mean ± standard deviation (n − 1) over seeds; of layers the
    one whose attention the first arm sinks most. `training`: the table of that name, of all arms.
    """
    layers = (WHOLE_MODEL, sinking_layer(training))
    last = training[(training["step"] == training["step"].max()) & training["layer"].isin(layers)]
    wide = last.pivot_table(index=["condition", "seed"], columns="metric", values="value", sort=False)
    wide["value_ratio"] = wide["start_value_norm"] / wide["other_value_norm"]
    wide["attended_ratio"] = wide["start_attended_norm"] / wide["other_attended_norm"]
    arms = training["condition"].unique()
    mean, spread = (wide.groupby("condition").agg(how).reindex(arms) for how in ("mean", "std"))
    written = as_markdown(table_with_spread(mean, spread, COLUMNS), numbers=True)
    return f"## Non-trigger queries at step {last['step'].iloc[0]} (VGA figures 4 to 6)\n\n{written}\n"


def sinking_layer(table: pd.DataFrame) -> int:
    """Where the first arm's attention goes most to <s> in the end."""
    rows = table[(table["condition"] == table["condition"].iloc[0]) & (table["metric"] == "attention_to_start")]
    last = rows[rows["step"] == rows["step"].max()]
    return int(last.groupby("layer")["value"].mean().idxmax())

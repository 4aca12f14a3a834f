"""The findings on trained arms: the table `retrofit`, the Bigram-Backcopy task, and movements of new parameters."""

from collections.abc import Iterable

import pandas as pd

from sinkscope.measuring.summary import WHOLE_MODEL
from sinkscope.results.findings import Finding
from sinkscope.results.metrics import METRICS
from sinkscope.results.run import RunData
from sinkscope.training.tables import TABLES, sinking_layer
from sinkscope.verdict.table_formats import as_markdown, table_with_spread

BACKCOPY_COLUMNS = (
    "bigram_risk", "backcopy_risk", "attention_to_start", "early_attention_to_start", "attention_to_triggers",
    "value_ratio", "attended_ratio", "delta_logit",
)  # fmt: skip


def backcopy_markdown(training: pd.DataFrame, note: str = "") -> str:
    """Return the last step in the `sinking_layer`, mean ± standard deviation over seeds; `note` is in the title."""
    layers = (WHOLE_MODEL, sinking_layer(training))
    last = training[(training["step"] == training["step"].max()) & training["layer"].isin(layers)]
    wide = last.pivot_table(index=["condition", "seed"], columns="metric", values="value", sort=False)
    wide["value_ratio"] = wide["start_value_norm"] / wide["other_value_norm"]
    wide["attended_ratio"] = wide["start_attended_norm"] / wide["other_attended_norm"]
    arms = training["condition"].unique()
    mean, spread = (wide.groupby("condition").agg(how).reindex(arms) for how in ("mean", "std"))
    table = as_markdown(table_with_spread(mean, spread, BACKCOPY_COLUMNS), numbers=True)
    title = f"## Non-trigger queries at step {last['step'].iloc[0]} (VGA figures 4 to 6)"
    return f"{title}{note and f'; {note}'}\n\n{table}\n"


def without_start(runs: Iterable[RunData]) -> str:
    """Return the note for trainings whose sequences do not begin with the <s> of metric names; "" for others."""
    begin_with_it = all(run.manifest["input"]["token_zero"].startswith("bos") for run in runs)
    return "" if begin_with_it else "the first token takes the place of <s>"


def gates_moved(gates: pd.DataFrame) -> list[Finding]:
    found = []
    for arm, rows in gates.groupby("condition", sort=False):
        most, mean = rows.loc[rows["displacement"].idxmax()], rows["displacement"].mean()
        layer = most["layer"] if most["layer"] >= 0 else None
        sentence = (
            f"{arm}: new parameters moved by {METRICS['gate_displacement_mean'].text(mean)} on average, by "
            f"{METRICS['gate_displacement_max'].text(most['displacement'])} at most"
        )
        sentence += "" if layer is None else f", in layer {layer}"
        numbers = {"arm": str(arm), "mean": mean, "layer": layer}
        found.append(Finding("gates-moved", "Gates", value=most["displacement"], numbers=numbers, sentence=sentence))
    return found


def retrofit_summaries(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Return heading → table of arms, mean ± standard deviation over seeds, without columns that no arm has."""
    arms = table["condition"].unique()
    wide, spread = (
        table.pivot_table(index="condition", columns="metric", values="value", aggfunc=how, dropna=False).reindex(arms)
        for how in ("mean", "std")
    )
    known = {heading: [name for name in metrics if name in wide] for heading, metrics in TABLES.items()}
    return {heading: table_with_spread(wide, spread, metrics) for heading, metrics in known.items() if metrics}


def retrofit_markdown(table: pd.DataFrame) -> str:
    parts = [f"# {model}" for model in table["model"].unique()]
    for heading, summary in retrofit_summaries(table).items():
        parts += [f"## {heading}", as_markdown(summary, numbers=True)]
    return "\n\n".join(parts) + "\n"

"""Scores on benchmarks against the sink rate, a panel for each task (WSE figure 10)."""

import pandas as pd

from sinkscope.figures.axes import panel_grid
from sinkscope.figures.labels import escape
from sinkscope.figures.spec import declare
from sinkscope.figures.style import TEXT, Figure, line_looks, new_figure
from sinkscope.figures.sweep_parts import ACROSS, PANEL, model_names, rate_axis
from sinkscope.verdict.sweep_tables import SCORES, SweepTables


def _rows(tables: SweepTables) -> pd.DataFrame:
    """Scores of models whose sink rate on the first input is known, at the same revision."""
    scores, rates = tables.scores, tables.rates
    if scores.empty or rates.empty:
        return pd.DataFrame()
    first = rates[(rates["input"] == rates["input"].iloc[0]) & (rates["settings"] == rates["settings"].iloc[0])]
    return scores.merge(first[["model", "revision", "input", "sink_rate"]], on=["model", "revision"])


def lacking(tables: SweepTables) -> str | None:
    rows = _rows(tables)
    few = rows.empty or len(rows.drop_duplicates(["model", "revision"])) < 2
    return "no two models have a score and a sink rate" if few else None


@declare("sweep-benchmarks", "scores against the sink rate, by task and family", SCORES, lacking=lacking)
def draw(tables: SweepTables) -> Figure:
    rows = _rows(tables)
    alone = rows["family"] == ""
    rows = rows.assign(line=rows["family"].where(~alone, rows["model"]))
    tasks = list(rows["task"].unique())
    looks = dict(zip(rows["line"].unique(), line_looks(), strict=False))
    across = min(len(tasks), ACROSS)
    figure = new_figure(TEXT if across > 1 else TEXT * 0.6, PANEL * -(-len(tasks) // across) + 0.9)
    axes, lowest = panel_grid(figure, len(tasks), across)
    for ax, task in zip(axes, tasks, strict=True):
        for name, found in rows[rows["task"] == task].groupby("line", sort=False):
            found = found.sort_values("parameters")
            style = looks[name] | ({} if len(found) > 1 else {"linestyle": "none"})
            (label,) = model_names([str(name)])
            ax.errorbar(
                100 * found["sink_rate"], found["score"], yerr=found["error"], label=label, capsize=1.5, **style
            )
        ax.set_title(escape(str(task)))
        rate_axis(ax, "x", label=ax in lowest)
    axes[0].set_ylabel("score (± standard error)")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure

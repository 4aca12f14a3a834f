"""Trainings of a sweep by step, a panel for each level of what differs: sink rate and loss (WSE figures 4 to 8)."""

import pandas as pd
from matplotlib.axes import Axes

from sinkscope.figures.axes import curve, panel_grid, value_axis
from sinkscope.figures.labels import escape, heading, shorten
from sinkscope.figures.spec import declare
from sinkscope.figures.steps import seeds_words, step_axis
from sinkscope.figures.style import OTHERS, SINK, WIDE, Figure, Look, new_figure
from sinkscope.paper_claims.arms import SINK as SINK_RATE
from sinkscope.results.metrics import METRICS
from sinkscope.verdict.factor_study import LEVEL, TABLE, measured_at, with_levels, without_key
from sinkscope.verdict.sweep_tables import SweepTables

ACROSS, HEIGHT, LINE = 4, 0.92, 0.13  # panels in a row, and inches of each and of a line of its title
NAME_LENGTH = 24  # characters of a line


def _rows(tables: SweepTables, metric: str) -> pd.DataFrame:
    table = tables.tables.get(TABLE)
    return pd.DataFrame() if table is None else with_levels(table)[lambda rows: rows["metric"] == metric]


def lacking(tables: SweepTables) -> str | None:
    return "no cell is a training with sink rates by step" if _rows(tables, "sink_rate").empty else None


def lacking_loss(tables: SweepTables) -> str | None:
    return "no cell is a training" if _rows(tables, "loss").empty else None


@declare("sweep-training-sink", "sink rate of each training by step, mean and range over seeds", TABLE, lacking=lacking)
def draw(tables: SweepTables) -> Figure:
    rows = _rows(tables, "sink_rate")
    figure, axes = _panels(rows.assign(value=100 * rows["value"]), f"sink rate at\n{measured_at(rows)} in %", SINK)
    for ax in axes:
        ax.axhline(SINK_RATE, color="0.55", linestyle="--", linewidth=0.8)
    top = max(1.5 * SINK_RATE, 100 * rows["value"].max())
    axes[0].set_ylim(-0.03 * top, 1.03 * top)  # of all panels
    figure.suptitle(heading(*_said_of_all(rows), f"above {SINK_RATE:g} % (dashed) a sink is there"))
    return figure


@declare("sweep-training-loss", "loss of each training by step, the same", TABLE, lacking=lacking_loss)
def draw_loss(tables: SweepTables) -> Figure:
    rows = _rows(tables, "loss")
    figure, _ = _panels(rows, METRICS["loss"].label, OTHERS)
    figure.suptitle(heading(*_said_of_all(rows)))
    return figure


def _panels(rows: pd.DataFrame, name: str, look: Look) -> tuple[Figure, list[Axes]]:
    levels = list(dict.fromkeys(rows[LEVEL]))
    across = min(ACROSS, len(levels))
    _, names = without_key(levels)
    titles = ["\n".join(escape(shorten(part, NAME_LENGTH)) for part in name.split()) for name in names]
    panel = HEIGHT + LINE * max(title.count("\n") + 1 for title in titles)
    figure = new_figure(WIDE, 0.9 + panel * -(-len(levels) // across))
    axes, lowest = panel_grid(figure, len(levels), across)
    for ax, level, title in zip(axes, levels, titles, strict=True):
        by_step = rows[rows[LEVEL] == level].groupby("step")["value"].agg(["mean", "min", "max"])
        curve(ax, by_step["mean"], 5, **look)
        ax.fill_between(by_step.index, by_step["min"], by_step["max"], color=look["color"], alpha=0.25, linewidth=0)
        ax.set_title(title)
        value_axis(ax)
    step_axis(lowest[0], sorted(rows["step"].unique()))
    figure.supxlabel("training step")
    figure.supylabel(name)
    return figure, axes


def _said_of_all(rows: pd.DataFrame) -> list[str]:
    """The setting that titles are values of, if it is one, and what curves are over."""
    key, _ = without_key(list(rows[LEVEL].unique()))
    counts = rows.groupby(LEVEL)["seed"].nunique()
    seeds = seeds_words(counts.max(), counts.min())
    return [f"by {key}", seeds] if key else [seeds]

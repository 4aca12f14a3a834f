"""Trainings of a sweep by step, a panel for each level of what differs: sink rate and loss (WSE figures 4 to 8)."""

import pandas as pd

from sinkscope.report.factor_study import LEVEL, TABLE, with_levels
from sinkscope.report.figures.axes import curve, panel_grid, value_axis
from sinkscope.report.figures.labels import escape, shorten
from sinkscope.report.figures.spec import declare
from sinkscope.report.figures.steps import step_axis
from sinkscope.report.figures.style import OTHERS, SINK, WIDE, Figure, Look, new_figure
from sinkscope.report.sweep_tables import SweepTables
from sinkscope.results.metrics import METRICS

ACROSS, HEIGHT = 4, 1.05  # panels in a row, and inches of each
NAME_LENGTH = 24  # characters of a level


def _rows(tables: SweepTables, metric: str) -> pd.DataFrame:
    table = tables.tables.get(TABLE)
    return pd.DataFrame() if table is None else with_levels(table)[lambda rows: rows["metric"] == metric]


def lacking(tables: SweepTables) -> str | None:
    return "no cell is a training with sink rates by step" if _rows(tables, "sink_rate").empty else None


def lacking_loss(tables: SweepTables) -> str | None:
    return "no cell is a training" if _rows(tables, "loss").empty else None


@declare("sweep-training-sink", "sink rate of each training by step, mean and range over seeds", TABLE, lacking=lacking)
def draw(tables: SweepTables) -> Figure:
    return _panels(_rows(tables, "sink_rate"), METRICS["sink_rate"].short, SINK, share=True)


@declare("sweep-training-loss", "loss of each training by step, the same", TABLE, lacking=lacking_loss)
def draw_loss(tables: SweepTables) -> Figure:
    return _panels(_rows(tables, "loss"), METRICS["loss"].short, OTHERS, share=False)


def _panels(rows: pd.DataFrame, name: str, look: Look, share: bool) -> Figure:
    levels = list(dict.fromkeys(rows[LEVEL]))
    across = min(ACROSS, len(levels))
    figure = new_figure(WIDE, 0.7 + HEIGHT * -(-len(levels) // across))
    axes, lowest = panel_grid(figure, len(levels), across)
    for ax, level in zip(axes, levels, strict=True):
        by_step = rows[rows[LEVEL] == level].groupby("step")["value"].agg(["mean", "min", "max"])
        curve(ax, by_step["mean"], 5, **look)
        ax.fill_between(by_step.index, by_step["min"], by_step["max"], color=look["color"], alpha=0.25, linewidth=0)
        ax.set_title(escape(shorten(level, NAME_LENGTH)))
        value_axis(ax, share=share)
    step_axis(lowest[0], sorted(rows["step"].unique()))
    figure.supxlabel("training step")
    figure.supylabel(name)
    return figure

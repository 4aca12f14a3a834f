"""The Bigram-Backcopy lab by training step, a column an arm: VGA figure 5, and figure 6 on the right.

Others are tokens that are neither <s> nor triggers. Rows share their scale across the arms. A line is the mean over
seeds, its band reaches from the lowest to the highest. Not one run's figure, so `sinkscope list` does not show it.
"""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from sinkscope.errors import InputError
from sinkscope.measuring.summary import WHOLE_MODEL
from sinkscope.report.backcopy_table import sinking_layer
from sinkscope.report.figures.axes import value_axis
from sinkscope.report.figures.labels import escape, shorten
from sinkscope.report.figures.style import HIGHEST, OTHERS, SINK, WIDE, Figure, in_style, new_figure
from sinkscope.report.figures.training import step_label

NAME_LENGTH = 20  # characters of an arm's name
FEW_MARKERS = 5  # of one line, in a narrow panel
TICKS = 15  # of all panels in a row
ROWS: dict[str, dict[str, tuple[str, dict[str, Any]]]] = {  # what a row shows: metric → its name, its look
    "loss above\nthe optimum": {"backcopy_risk": ("backcopy", SINK), "bigram_risk": ("bigram", OTHERS)},
    "attention\nof others": {
        "attention_to_start": ("on <s>", SINK),
        "attention_to_triggers": ("on triggers", OTHERS),
        "early_attention_to_start": ("on <s>, before\nany trigger", HIGHEST),
    },
    "norm of\nvalue": {
        "start_value_norm": ("<s>", SINK),
        "other_value_norm": ("others", OTHERS),
        "start_attended_norm": ("<s>, gated", HIGHEST),
    },
    "Δlogit\nof <s>": {"delta_logit": ("", SINK)},
}


def draw_backcopy_training(training: pd.DataFrame) -> Figure:
    """`training`: model, condition (the arm), layer, seed, step, metric, value, of all arms and seeds.

    Of a model of several layers, the one whose attention the first arm sinks most. Errors: InputError where the table
    has none of the lab's metrics.
    """
    table = training[training["metric"].isin(metric for row in ROWS.values() for metric in row)]
    if table.empty:
        raise InputError("nothing of the Bigram-Backcopy lab is in the training table")
    arms = list(table["condition"].unique())
    layer = sinking_layer(table)
    with in_style():
        figure = new_figure(WIDE, 4.1)
        axes = figure.subplots(len(ROWS), len(arms), sharex=True, sharey="row", squeeze=False)
        for column, arm in enumerate(arms):
            rows = table[(table["condition"] == arm) & table["layer"].isin((WHOLE_MODEL, layer))]
            for ax, curves in zip(axes[:, column], ROWS.values(), strict=True):
                _panel(ax, rows, curves)
            axes[0, column].set_title(escape(shorten(arm, NAME_LENGTH)))
        _finish(axes)
        figure.supxlabel("training step")
        figure.suptitle(_title(table, layer))
    return figure


def _panel(ax: Axes, rows: pd.DataFrame, curves: dict[str, tuple[str, dict[str, Any]]]) -> None:
    for metric, (name, look) in curves.items():
        by_step = rows[rows["metric"] == metric].groupby("step")["value"].agg(["mean", "min", "max"])
        every = 1 + (len(by_step) - 1) // (FEW_MARKERS)
        ax.plot(by_step.index, by_step["mean"], label=name, markevery=every, **look)
        ax.fill_between(by_step.index, by_step["min"], by_step["max"], color=look["color"], alpha=0.25, linewidth=0)


def _finish(axes: Any) -> None:
    for row, (name, curves) in zip(axes, ROWS.items(), strict=True):
        for ax in row:
            value_axis(ax, log="backcopy_risk" in curves, share="attention_to_start" in curves)
        row[0].set_ylabel(name)
        if len(curves) > 1:
            row[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), handlelength=1.8, borderaxespad=0.2)
    ticks = max(2, min(5, TICKS // axes.shape[1]))  # of a panel: steps are logged evenly
    axes[-1, 0].xaxis.set_major_locator(MaxNLocator(ticks, integer=True))
    axes[-1, 0].xaxis.set_major_formatter(FuncFormatter(lambda step, _: step_label(step)))


def _title(table: pd.DataFrame, layer: int) -> str:
    """«model · layer 1 · 3 seeds»."""
    layers = table.loc[table["layer"] != WHOLE_MODEL, "layer"].nunique()
    seeds = table["seed"].nunique()
    model = shorten(str(table["model"].iloc[0]).rstrip("/").split("/")[-1], 40)
    parts = [model, f"layer {layer}" if layers > 1 else "", f"{seeds} seeds" if seeds > 1 else ""]
    return escape(" · ".join(part for part in parts if part))

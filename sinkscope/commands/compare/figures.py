"""The figure of several runs, side by side."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter

from sinkscope.figures import plot, style
from sinkscope.figures.labels import (
    escape,
    heading,
)
from sinkscope.figures.plot import ACROSS, arm_looks, signs_of
from sinkscope.figures.spec import needs
from sinkscope.figures.style import WIDE, Figure, new_figure
from sinkscope.results.metrics import METRICS, UNITS
from sinkscope.results.run import RunData
from sinkscope.results.side_by_side import labels, model_name
from sinkscope.results.tables import WHOLE_MODEL

COMPARED = ("sink_rate", "value_drain", "norm_ratio", "massive_count")  # metrics of `summary`


def draw_by_layer(runs: Sequence[RunData]) -> Figure:
    names, common = labels(runs)
    depths = [max(0, int(run.tables["summary"]["layer"].max())) + 1 for run in runs]
    is_relative = len(set(depths)) > 1
    across = max(1, min(4, 108 // (max(map(len, names)) + 8)))  # 108 characters in a row
    figure = new_figure(WIDE, 3.6 + 0.15 * -(-len(runs) // across))
    axes = figure.subplots(2, 2)
    for ax, metric in zip(axes.flat, COMPARED, strict=True):
        for run, label, depth, look in zip(runs, names, depths, style.line_looks(), strict=False):
            summary = run.tables["summary"]
            rows = summary[(summary["metric"] == metric) & (summary["layer"] != WHOLE_MODEL)]
            line = plot.line_by_layer(ax, rows.set_index("layer")["value"], label=label, **look)
            if is_relative:
                line.set_xdata(np.asarray(line.get_xdata()) / max(depth - 1, 1))
        unit = METRICS[metric].unit
        ax.set(title=METRICS[metric].short, xlabel="relative depth" if is_relative else "layer")
        if is_relative:
            ax.set_xlim(-0.03, 1.03)
        else:
            plot.whole_numbers(ax, "x")
        plot.value_axis(ax, UNITS.get(unit, unit) or "count", log=unit == "ratio", share=unit == "share")
        if ax.get_yscale() == "log":
            ax.axhline(1, **style.NEUTRAL)
    counts = plot.drawn(axes[1, 1], "y")
    counts = counts[np.isfinite(counts)]
    if np.any(counts > 10):  # a linear scale would hide the other runs: linear up to 1, logarithmic above
        axes[1, 1].set_yscale("symlog", linthresh=1)
        axes[1, 1].set_ylim(-0.15, 1.5 * counts.max())
        axes[1, 1].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    figure.legend(axes[0, 0].lines, [escape(name) for name in names], loc="outside lower center", ncols=across)
    if common:
        figure.suptitle(heading(common))
    return figure


CURVES = ("sink_rate", "largest_activation", "largest_logit", "value_drain", "kurtosis", "float16_headroom")


@needs(lambda table: table["metric"].isin(CURVES).any(), "nothing was measured")
def draw_training_curves(table: pd.DataFrame) -> Figure:
    whole = table[table["layer"] == WHOLE_MODEL]
    shown = [METRICS[name] for name in CURVES if (whole["metric"] == name).any()]
    across = min(ACROSS, len(shown))
    figure = new_figure(WIDE * max(across, 2) / ACROSS, 0.5 + 1.8 * -(-len(shown) // across))
    axes = plot.panel_grid(figure, len(shown), across, "training step", sharey=False)
    looks = arm_looks(whole["condition"].unique())
    for ax, metric in zip(axes, shown, strict=True):
        for name, look in looks.items():
            rows = whole[(whole["metric"] == metric.name) & (whole["condition"] == name)]
            plot.curve(ax, rows.set_index("step")["value"], **look)
        is_share = metric.unit == "share"
        unit = "share of heads" if is_share else metric.unit or "value"
        plot.panel(ax, metric.short, unit, None, share=is_share)
    plot.step_axis(axes[0], sorted(whole["step"].unique().tolist()))
    return figure.finish(heading(*dict.fromkeys(map(model_name, whole["model"]))), signs_of(looks), ncols=4)

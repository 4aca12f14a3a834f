"""Several runs side by side, by layer, or by relative depth where their numbers of layers differ."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from sinkscope.figures.axes import drawn, layer_axis, line_by_layer, value_axis
from sinkscope.figures.labels import escape, heading, model_name, shorten
from sinkscope.figures.spec import declare
from sinkscope.figures.style import NEUTRAL, WIDE, Figure, line_looks, new_figure
from sinkscope.measuring.summary import WHOLE_MODEL
from sinkscope.results.metrics import METRICS, UNITS, Metric
from sinkscope.results.run import RunData

PANELS = ("sink_rate", "value_drain", "norm_ratio", "massive_count")  # metrics of `summary`
LEGEND = 108  # characters across
MANY = 10  # massive activations per sequence: with more than this, a linear scale would hide the other models


@declare("by-layer", "sink rate, value norm, residual norm and massive activations of all runs", "summary")
def draw(runs: Sequence[RunData]) -> Figure:
    names, common = labels(runs)
    depths = [max(0, int(run.tables["summary"]["layer"].max())) + 1 for run in runs]
    is_relative = len(set(depths)) > 1
    across = max(1, min(4, LEGEND // (max(map(len, names)) + 8)))
    figure = new_figure(WIDE, 3.6 + 0.15 * -(-len(runs) // across))
    axes = figure.subplots(2, 2)
    for ax, metric in zip(axes.flat, PANELS, strict=True):
        for run, label, depth, look in zip(runs, names, depths, line_looks(), strict=False):
            line = line_by_layer(ax, _by_layer(run, metric), label=label, **look)
            if is_relative:
                line.set_xdata(np.asarray(line.get_xdata()) / max(depth - 1, 1))
        _finish(ax, METRICS[metric], is_relative)
    _spread(axes[1, 1])
    figure.legend(axes[0, 0].lines, [escape(name) for name in names], loc="outside lower center", ncols=across)
    if common:
        figure.suptitle(heading(common))
    return figure


def _finish(ax: Axes, metric: Metric, is_relative: bool) -> None:
    ax.set_title(metric.short)
    if is_relative:
        ax.set_xlim(-0.03, 1.03)
        ax.set_xlabel("relative depth")
    else:
        layer_axis(ax)
    if value_axis(ax, log=metric.unit == "ratio", share=metric.unit == "share"):
        ax.set_ylabel(UNITS.get(metric.unit, metric.unit) or "count")
    if ax.get_yscale() == "log":
        ax.axhline(1, **NEUTRAL)


def _spread(ax: Axes) -> None:
    """Counts from 0 to hundreds: linear up to 1, logarithmic above."""
    counts = drawn(ax, "y")
    counts = counts[np.isfinite(counts)]
    if np.any(counts > MANY):
        ax.set_yscale("symlog", linthresh=1)
        ax.set_ylim(-0.15, 1.5 * counts.max())
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _by_layer(run: RunData, metric: str) -> pd.Series:
    summary = run.tables["summary"]
    rows = summary[(summary["metric"] == metric) & (summary["layer"] != WHOLE_MODEL)]
    return rows.set_index("layer")["value"]


def labels(runs: Sequence[RunData]) -> tuple[list[str], str]:
    """A label for each run, of what differs in model, revision and condition; and what all runs have in common."""
    parts = [(model_name(run.model), run.manifest["model"].get("revision") or "", run.condition) for run in runs]
    if len(set(parts)) == 1:  # one run, or several that differ in other options
        name = " · ".join(part for part in parts[0] if part)
        return ([name] if len(runs) == 1 else [f"run {place}" for place in range(1, len(runs) + 1)]), name
    differ = [len(set(column)) > 1 for column in zip(*parts, strict=True)]
    names = [" · ".join(part for part, keep in zip(row, differ, strict=True) if keep and part) for row in parts]
    common = " · ".join(part for part, keep in zip(parts[0], differ, strict=True) if part and not keep)
    names = [shorten(name, 48) for name in names]
    if len(set(names)) < len(names):
        names = [f"{name} ({place})" for place, name in enumerate(names, 1)]
    return names, common

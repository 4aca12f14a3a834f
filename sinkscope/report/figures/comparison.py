"""Several runs side by side, by layer. Not one run's figure, so `sinkscope list` does not show it."""

from itertools import cycle

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from sinkscope.measuring.summary import WHOLE_MODEL
from sinkscope.report.figures.axes import layer_axis, line_by_layer, value_axis
from sinkscope.report.figures.labels import escape, shorten
from sinkscope.report.figures.style import GREY, WIDE, Figure, in_style, new_figure
from sinkscope.results.run import RunData

PANELS = (  # metric of `summary`, name, and of a ratio (on a log scale) its value without an effect
    ("sink_rate", "sink rate", None),
    ("value_drain", "value drain, ‖v₀‖ ÷ others", 1.0),
    ("norm_ratio", "norm of token 0 ÷ others", 1.0),
    ("massive_count", "massive activations per sequence", None),
)
COLOURS = ("#10315c", "#c8501e", "#6fb1dc", "#1b7a5a", "#e3a82b", "#8d4a86", "#555555")
DASHES: tuple = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)), (0, (7, 2)))
MARKERS = "os^Dv<>P"
LEGEND = 108  # characters across
MANY = 10  # massive activations per sequence; beyond, one model would flatten all others


def draw_comparison(runs: list[RunData]) -> dict[str, Figure]:
    """By name: sink rate, value drain, norm ratio and number of massive activations of all runs, by layer.

    Where the numbers of layers differ, the axis is the relative depth.
    """
    with in_style():
        return {"by-layer": _by_layer(runs)}


def _by_layer(runs: list[RunData]) -> Figure:
    names, common = labels(runs)
    depths = [_layers(run) for run in runs]
    relative = len(set(depths)) > 1
    across = max(1, min(4, LEGEND // (max(map(len, names)) + 8)))
    figure = new_figure(WIDE, 3.6 + 0.15 * -(-len(runs) // across))
    axes = figure.subplots(2, 2)
    for ax, (metric, name, neutral) in zip(axes.flat, PANELS, strict=True):
        looks = zip(cycle(COLOURS), cycle(DASHES), cycle(MARKERS), strict=False)
        for run, label, depth, (colour, dashes, marker) in zip(runs, names, depths, looks, strict=False):
            line = line_by_layer(
                ax, _by_metric(run, metric), label=label, color=colour, linestyle=dashes, marker=marker
            )
            if relative:
                line.set_xdata(np.asarray(line.get_xdata()) / max(depth - 1, 1))
        _finish(ax, name, neutral, relative)
    _spread(axes[1, 1])
    figure.legend(axes[0, 0].lines, [escape(name) for name in names], loc="outside lower center", ncols=across)
    if common:
        figure.suptitle(escape(shorten(common, 90)))
    return figure


def _finish(ax: Axes, name: str, neutral: float | None, relative: bool) -> None:
    ax.set_title(name)
    if relative:
        ax.set_xlim(-0.03, 1.03)
        ax.set_xlabel("relative depth")
    else:
        layer_axis(ax)
    value_axis(ax, log=neutral is not None, share=name == "sink rate")
    if neutral is not None and ax.get_yscale() == "log":
        ax.axhline(neutral, color=GREY, linewidth=0.6, zorder=0)


def _spread(ax: Axes) -> None:
    """Counts from 0 to hundreds: linear up to 1, logarithmic above."""
    drawn = np.concatenate([np.asarray(line.get_ydata(), float) for line in ax.lines])
    counts = drawn[np.isfinite(drawn)]
    if np.any(counts > MANY):
        ax.set_yscale("symlog", linthresh=1)
        ax.set_ylim(-0.15, 1.5 * counts.max())
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _by_metric(run: RunData, metric: str) -> pd.Series:
    summary = run.tables["summary"]
    rows = summary[(summary["metric"] == metric) & (summary["layer"] != WHOLE_MODEL)]
    return rows.set_index("layer")["value"]


def _layers(run: RunData) -> int:
    """Of the model, as far as `summary` knows them."""
    return max(0, int(run.tables["summary"]["layer"].max())) + 1


def labels(runs: list[RunData]) -> tuple[list[str], str]:
    """A label a run, of what differs in model, revision and condition; and what all runs have in common."""
    parts = [
        (run.model.rstrip("/").split("/")[-1], run.manifest["model"].get("revision") or "", run.condition)
        for run in runs
    ]
    if len(set(parts)) == 1:  # one run, or equal ones but for other options
        name = " · ".join(part for part in parts[0] if part)
        return ([name] if len(runs) == 1 else [f"run {place}" for place in range(1, len(runs) + 1)]), name
    differ = [len(set(column)) > 1 for column in zip(*parts, strict=True)]
    names = [" · ".join(part for part, keep in zip(row, differ, strict=True) if keep and part) for row in parts]
    common = " · ".join(part for part, keep in zip(parts[0], differ, strict=True) if part and not keep)
    names = [shorten(name, 48) for name in names]
    if len(set(names)) < len(names):
        names = [f"{name} ({place})" for place, name in enumerate(names, 1)]
    return names, common

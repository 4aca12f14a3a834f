"""Several runs side by side, by layer. Not one run's figure, so `sinkscope list` does not show it."""

from itertools import cycle

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from sinkscope.figures.axes import layer_axis, line_by_layer, value_axis
from sinkscope.figures.labels import escape, shorten
from sinkscope.figures.style import GREY, WIDE, Figure, new_figure, style
from sinkscope.run import Run
from sinkscope.summary import WHOLE_MODEL

PANELS = (  # metric of `summary`, name, log scale, the value that means «no difference»
    ("sink_rate", "sink rate", False, None),
    ("value_drain", "value drain, ‖v₀‖ ÷ others", True, 1.0),
    ("norm_ratio", "norm of token 0 ÷ others", True, 1.0),
    ("massive_count", "massive activations per sequence", False, None),
)
COLOURS = ("#10315c", "#c8501e", "#6fb1dc", "#1b7a5a", "#e3a82b", "#8d4a86", "#555555")
DASHES: tuple = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)), (0, (7, 2)))
MARKERS = "os^Dv<>P"
LEGEND = 108  # characters across
MANY = 10  # massive activations per sequence; beyond, one model would flatten all others


def draw_comparison(runs: list[Run]) -> dict[str, Figure]:
    """By name: sink rate, value drain, norm ratio and number of massive activations of all runs, by layer.

    Where the numbers of layers differ, the axis is the relative depth.
    """
    with style():
        return {"by-layer": _by_layer(runs)}


def _by_layer(runs: list[Run]) -> Figure:
    names, common = labels(runs)
    depths = [_layers(run) for run in runs]
    relative = len(set(depths)) > 1
    across = max(1, min(4, LEGEND // (max(map(len, names)) + 8)))
    figure = new_figure(WIDE, 3.6 + 0.15 * -(-len(runs) // across))
    axes = figure.subplots(2, 2)
    for ax, (metric, name, log, neutral) in zip(axes.flat, PANELS, strict=True):
        looks = zip(cycle(COLOURS), cycle(DASHES), cycle(MARKERS), strict=False)
        for run, label, depth, (colour, dashes, marker) in zip(runs, names, depths, looks, strict=False):
            line = line_by_layer(
                ax, _by_metric(run, metric), label=label, color=colour, linestyle=dashes, marker=marker
            )
            if relative:
                line.set_xdata([layer / max(depth - 1, 1) for layer in line.get_xdata()])
        _finish(ax, name, log, neutral, relative)
    axes[0, 0].set_ylim(-0.03, 1.03)
    _spread(axes[1, 1])
    handles, _ = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, [escape(name) for name in names], loc="outside lower center", ncols=across)
    if common:
        figure.suptitle(escape(shorten(common, 90)))
    return figure


def _finish(ax: Axes, name: str, log: bool, neutral: float | None, relative: bool) -> None:
    ax.set_title(name)
    value_axis(ax, log)
    if relative:
        ax.set_xlim(-0.03, 1.03)
        ax.set_xlabel("relative depth")
    else:
        layer_axis(ax)
    if neutral is not None and ax.get_yscale() == "log":
        ax.axhline(neutral, color=GREY, linewidth=0.6, zorder=0)


def _spread(ax: Axes) -> None:
    """Counts from 0 to hundreds: linear up to 1, logarithmic above."""
    highest = max((np.nanmax([*line.get_ydata(), 0.0]) for line in ax.lines), default=0.0)
    if highest > MANY:
        ax.set_yscale("symlog", linthresh=1)
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _by_metric(run: Run, metric: str) -> pd.Series:
    summary = run.tables["summary"]
    rows = summary[(summary["metric"] == metric) & (summary["layer"] != WHOLE_MODEL)]
    return rows.set_index("layer")["value"]


def _layers(run: Run) -> int:
    """Of the model, as far as `summary` knows them."""
    return max(0, int(run.tables["summary"]["layer"].max())) + 1


def labels(runs: list[Run]) -> tuple[list[str], str]:
    """A label a run, and what all have in common: of model, revision and condition those that differ, and the rest."""
    parts = [
        (run.model.rstrip("/").split("/")[-1], run.manifest["model"].get("revision") or "", run.condition)
        for run in runs
    ]
    differ = [len(set(column)) > 1 for column in zip(*parts, strict=True)]
    names = [" · ".join(part for part, keep in zip(row, differ, strict=True) if keep and part) for row in parts]
    common = " · ".join(part for part, keep in zip(parts[0], differ, strict=True) if part and not keep)
    names = [shorten(name, 48) for name in names]
    if len(set(names)) < len(names):  # equal runs, or of other options: by number
        names = [f"{name} ({place})".strip() for place, name in enumerate(names, 1)]
    return names, common

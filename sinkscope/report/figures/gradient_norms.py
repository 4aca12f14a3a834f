"""The sink of the forward pass is a sink of gradients too (GS figure 2).

Gradient norms of query, key and value by token position, of all heads together: each layer's, and their mean, which
the paper draws. Where the mean lies above most layers, the first few carry the gradient.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from sinkscope.measuring.summary import pathway_norms
from sinkscope.report.figures.axes import curve, finite, value_axis, whole_numbers
from sinkscope.report.figures.labels import title
from sinkscope.report.figures.spec import declare
from sinkscope.report.figures.style import GRADUAL, SINK, WIDE, Figure, Look, new_figure
from sinkscope.results.run import RunData

PATHWAYS = ("query", "key", "value")
# Of a curve's largest value. Below it lies what is 0 except for round-off, as the first query's gradient.
OFF_SCALE = 1e-5
FLOOR = "below the scale"  # identifies the marks on a panel's floor
OFF: Look = {"color": "black", "linestyle": "none", "marker": "v", "ms": 4.5, "mfc": "white", "mew": 0.8}
MEAN = SINK | {"color": "black", "linewidth": 1.4, "zorder": 4}


@declare("gradient-norms", "gradient norms of query, key and value by token position (GS fig. 2)", "gradient")
def draw(run: RunData) -> Figure:
    figure = new_figure(WIDE, 2.3)
    axes = figure.subplots(1, 3, sharex=True, sharey=True)
    norms = [layer_norms(run, pathway) for pathway in PATHWAYS]
    depth = Normalize(0, max(table.index.max() for table in norms))
    for ax, table in zip(axes, norms, strict=True):
        mean = table.mean()
        for layer, norm in table.iterrows():
            draw_curve(ax, norm, least=OFF_SCALE * mean.max(), color=GRADUAL(depth(layer)), linewidth=0.5)
        draw_curve(ax, mean, color="white", linewidth=3, zorder=3)  # an outline
        draw_curve(ax, mean, **MEAN)
        mark_off_scale(ax, [mean])
    finish(axes)
    if depth.vmax:
        bar = figure.colorbar(ScalarMappable(depth, GRADUAL), ax=axes, label="layer", aspect=30, pad=0.01)
        bar.ax.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    add_legend(figure, axes, "mean over layers")
    figure.suptitle(title(run, WIDE))
    return figure


def layer_norms(run: RunData, pathway: str) -> pd.DataFrame:
    """Gradient norms of all heads together: layers × positions."""
    return finite(pathway_norms(run.tables["gradient"], pathway))


def draw_curve(ax: Axes, norms: pd.Series, least: float | None = None, **look: Any) -> None:
    """Norms by position, as far as they are above `least`."""
    curve(ax, norms.where(norms > (OFF_SCALE * norms.max() if least is None else least)), **look)


def mark_off_scale(ax: Axes, curves: Iterable[pd.Series]) -> None:
    """A mark on the panel's floor where a curve is off the scale, with the largest value there.

    Of neighboring positions, only the first has its value written out.
    """
    hidden = pd.concat([curve[(curve <= OFF_SCALE * curve.max()) & (curve.max() > 0)] for curve in curves])
    values = hidden.groupby(level=0).max()
    if len(values):  # not as a line, as the lines decide the scale
        floor = np.full(len(values), 0.012)
        look: Look = {"s": 20, "marker": "v", "facecolors": "white", "edgecolors": "black", "linewidths": 0.8}
        place: Look = {"transform": ax.get_xaxis_transform(), "clip_on": False, "zorder": 5}
        ax.scatter(values.index, floor, gid=FLOOR, **look, **place)
    for position, value in values.items():
        if position - 1 not in values.index:
            text = "0" if value == 0 else f"≈ 0 ({_scientific(value)})"
            align = "center" if value == 0 else "left" if position <= max(ax.get_xlim()) / 2 else "right"
            place = {"xycoords": ax.get_xaxis_transform(), "textcoords": "offset points", "fontsize": 6}
            ax.annotate(text, (position, 0), (0, 5), ha=align, **place)


def finish(axes: np.ndarray) -> None:
    """Titles and common scales of the three panels, once all is drawn."""
    last = max(max(line.get_xdata()) for ax in axes for line in ax.lines)
    margin = max(0.5, 0.04 * last)
    axes[0].set_xlim(-margin, last + margin)  # also where there is only a mark on the floor
    for ax, pathway in zip(axes, PATHWAYS, strict=True):
        ax.set_title(pathway)
        whole_numbers(ax, "x")
        ax.set_xlabel("token position")
    drawn = [ax for ax in axes if value_axis(ax, log=True)]
    if drawn:
        drawn[0].set_ylabel("gradient, L2 norm")
        drawn[0].tick_params(labelleft=True)
        low, high = drawn[0].get_ylim()
        drawn[0].set_ylim(low / (high / low) ** 0.09, high)  # room for the marks


def add_legend(figure: Figure, axes: np.ndarray, mean: str | None = None) -> None:
    handles = [] if mean is None else [Line2D([], [], label=mean, **MEAN)]
    if any(marks.get_gid() == FLOOR for ax in axes for marks in ax.collections):
        handles.append(Line2D([], [], label="off the scale", **OFF))
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=2)


def _scientific(value: float) -> str:
    digits, exponent = f"{value:.0e}".split("e")
    return rf"${digits}\cdot 10^{{{int(exponent)}}}$"

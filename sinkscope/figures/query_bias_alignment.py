"""Does the query bias point at the position that is the sink? cos(W_k EPE_i, b_Q) by layer (NU figures 2 and 5).

Left: all heads together, a dot for each later position, in their order within a layer's strip. Right: each head, a dot
for each at position 0, and the 10 % to 90 % quantiles of the later positions' cosines over heads.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sinkscope.figures.axes import finite, layer_axis, line_by_layer, value_axis
from sinkscope.figures.labels import title
from sinkscope.figures.spec import declare
from sinkscope.figures.style import GRAY, NAVY, SINK, VERMILION, WIDE, Figure, Look, new_figure
from sinkscope.measuring.observables.query_bias import ALL_HEADS
from sinkscope.results.run import RunData

LATER: Look = {"color": VERMILION, "linestyle": "none", "marker": "s", "markersize": 1.6, "mew": 0}
HEADS: Look = {"color": NAVY, "linestyle": "none", "marker": "o", "markersize": 2.2, "mfc": "none", "mew": 0.6}
SPAN: Look = {"color": VERMILION, "alpha": 0.3, "linewidth": 0}
SPREAD = 0.5  # of a layer's width: the dots of its positions lie side by side
QUANTILES = (0.1, 0.9)


def lacking(run: RunData) -> str | None:
    table = run.tables["query_bias"]
    if table["key_alignment"].notna().any():
        return None
    if (table["delta_mean"] == 0).all():
        return "its query bias is zero, at an angle to nothing"
    return "its positions are not learned vectors, so that no position has a key of its own"


@declare(
    "query-bias-alignment", "cosine of keys and query bias, by layer (NU figs. 2 and 5)", "query_bias", lacking=lacking
)
def draw(run: RunData) -> Figure:
    table = finite(run.tables["query_bias"])
    together, by_head = table[table["head"] == ALL_HEADS], table[table["head"] != ALL_HEADS]
    figure = new_figure(WIDE, 2.7)
    left, right = figure.subplots(1, 2, sharey=True)
    _all_heads(left, together)
    _each_head(right, by_head)
    for ax in (left, right):
        layer_axis(ax)
        if value_axis(ax):
            ax.axhline(0, color=GRAY, linewidth=0.6, zorder=1)
    low, high = np.nanmin([ax.dataLim.y0 for ax in (left, right)]), np.nanmax([ax.dataLim.y1 for ax in (left, right)])
    if np.isfinite([low, high]).all():
        left.set_ylim(max(low - 0.05, -1.03), min(high + 0.05, 1.03))
    left.set_ylabel(r"$\cos(W_k\,\mathrm{EPE}_i,\ b_Q)$")
    handles = [
        Line2D([], [], label="position 0, all heads", **SINK),
        Line2D([], [], label="later positions, in order", **LATER | {"markersize": 3}),
        Line2D([], [], label="position 0, one head", **HEADS | {"markersize": 3}),
        Patch(label="later positions, 10–90 % over heads", **SPAN),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, columnspacing=1.4, handletextpad=0.6)
    figure.suptitle(title(run, WIDE))
    return figure


def _all_heads(ax: Axes, together: pd.DataFrame) -> None:
    ax.set_title("all heads together")
    later = together[together["position"] > 0]
    beside = (later["position"] - 1) / max(1, later["position"].max() - 1) - 0.5 if len(later) else 0.0
    ax.plot(later["layer"] + SPREAD * beside, later["key_alignment"], rasterized=len(later) > 5000, **LATER)
    line_by_layer(ax, together[together["position"] == 0].set_index("layer")["key_alignment"], **SINK)


def _each_head(ax: Axes, by_head: pd.DataFrame) -> None:
    ax.set_title("each head")
    later = by_head[by_head["position"] > 0].groupby("layer")["key_alignment"]
    low, high = later.quantile(QUANTILES[0]), later.quantile(QUANTILES[1])
    ax.bar(low.index, high - low, bottom=low, width=SPREAD, **SPAN)
    first = by_head[by_head["position"] == 0]
    ax.plot(first["layer"], first["key_alignment"], **HEADS)

"""Why the first key is a sink: its norm is small, and its angle to the queries decides (WSE figure 2).

Norms of query, key and value, cosine and norm product of query and key, and the logit gap that they make (VGA §4.1), of
position 0 and the mean over the other positions. Lines are means over heads, bands their 10 % to 90 % quantiles.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from sinkscope.figures.axes import band_by_layer, layer_axis, line_by_layer, value_axis
from sinkscope.figures.labels import title
from sinkscope.figures.spec import declare
from sinkscope.figures.style import GRAY, NEUTRAL, OTHERS, SINK, WIDE, Figure, new_figure
from sinkscope.results.run import RunData

PANELS = (  # column, name, unit, log scale
    ("query_norm", "query ‖q‖", "L2 norm", True),
    ("key_norm", "key ‖k‖", "L2 norm", True),
    ("value_norm", "value ‖v‖", "L2 norm", True),
    ("qk_cosine", "cos(q, k)", "cosine", False),
    ("qk_norm_product", "‖q‖ ‖k‖", "product of L2 norms", True),
    ("sink_logit_gap", "gap to the other keys", "logits", False),
)
BAND = (0.1, 0.9)


@declare("query-key-geometry", "norms and angles of queries, keys and values by layer (WSE fig. 2)", "geometry")
def draw(run: RunData) -> Figure:
    geometry = run.tables["geometry"]
    figure = new_figure(WIDE, 3.7)
    axes = figure.subplots(2, 3, sharex=True)
    for ax, (column, name, unit, log) in zip(axes.flat, PANELS, strict=True):
        ax.set_title(name)
        _lines(ax, geometry, column)
        layer_axis(ax, "layer" if ax in axes[-1] else "")
        if value_axis(ax, log):
            ax.set_ylabel(unit)
        if not log:
            ax.axhline(0, **NEUTRAL)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    handles.append(Patch(color=GRAY, alpha=0.35, linewidth=0))
    figure.legend(handles, [*labels, "10–90 % of heads"], loc="outside lower center", ncols=3)
    figure.suptitle(title(run, WIDE))
    return figure


def _lines(ax: Axes, geometry: pd.DataFrame, column: str) -> None:
    at_first = geometry["position"] == 0
    for rows, label, look in (
        (geometry[at_first], "position 0", SINK),
        (geometry[~at_first], "mean over the other positions", OTHERS),
    ):
        if rows.empty:  # --positions 1
            continue
        by_layer = rows.groupby(["layer", "head"])[column].mean().groupby("layer")
        low, high = by_layer.quantile(BAND[0]), by_layer.quantile(BAND[1])
        band_by_layer(ax, low, high, color=look["color"], alpha=0.2, linewidth=0)
        line_by_layer(ax, by_layer.mean(), label=label, **look)

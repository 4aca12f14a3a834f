"""Massive activations by layer (after the layer-wise figure of Sun et al. 2024).

The three largest magnitudes of each layer's output and the median magnitude, means over sequences. Layers where most
sequences have a massive activation are shaded: above 100, and above 1000 × the median, the two thin lines.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from sinkscope.figures.axes import has_values, layer_axis, line_by_layer, value_axis
from sinkscope.figures.labels import title
from sinkscope.figures.spec import declare
from sinkscope.figures.style import GUIDE, HIGHEST, OTHERS, SINK, TEXT, Figure, Look, new_figure
from sinkscope.measuring.observables.massive import RATIO, THRESHOLD
from sinkscope.results.run import RunData

LOOKS = (("largest", SINK), ("second", OTHERS), ("third", HIGHEST))
MEDIAN: Look = {"color": "0.45", "linestyle": "-.", "marker": "D"}
RULE = GUIDE | {"linestyle": (0, (1, 1))}
SHADE = "0.9"


@declare("massive-activations", "the three largest activations and the median by layer (Sun et al. 2024)", "massive")
def draw(run: RunData) -> Figure:
    massive = run.tables["massive"]
    figure = new_figure(TEXT, 2.7)
    ax = figure.subplots()
    for rank, (label, look) in enumerate(LOOKS):
        by_layer = top_magnitudes(massive, rank)
        if len(by_layer):
            line_by_layer(ax, by_layer, label=label, **look)
    sequences = massive.drop_duplicates(["layer", "sequence"])
    median = sequences.groupby("layer")["median"].mean()
    line_by_layer(ax, median, label="median", **MEDIAN)
    if has_values(ax, log=True):
        line_by_layer(ax, RATIO * median, label=f"{RATIO:g} × median", **RULE)
        ax.axhline(THRESHOLD, label=f"{THRESHOLD:g}", **GUIDE)
    layer_axis(ax)
    ax.set_ylabel("|activation|, mean over sequences")
    ax.margins(x=0.02)
    value_axis(ax, log=True)
    handles, labels = ax.get_legend_handles_labels()
    if _shade(ax, massive):
        handles.append(Patch(color=SHADE, linewidth=0))
        labels.append("massive in most sequences")
    figure.legend(handles, labels, loc="outside lower center", ncols=4, columnspacing=1.2)
    figure.suptitle(title(run, TEXT))
    return figure


def top_magnitudes(massive: pd.DataFrame, rank: int) -> pd.Series:
    """By layer: the mean over sequences of the largest (rank 0), second or third magnitude."""
    magnitude = massive.assign(value=massive["value"].abs()).sort_values("value", ascending=False)
    return magnitude.groupby(["layer", "sequence"]).nth(rank).groupby("layer")["value"].mean()


def _shade(ax: Axes, massive: pd.DataFrame) -> bool:
    """Shade the layers where most sequences have a massive activation, if there are any."""
    having = massive[massive["is_massive"].astype(bool)].groupby("layer")["sequence"].nunique()
    layers = sorted(having[having > massive["sequence"].nunique() / 2].index)
    for layer in layers:
        ax.axvspan(layer - 0.5, layer + 0.5, color=SHADE, linewidth=0, zorder=0)
    return bool(layers)

"""Which heads are sinks: window mass α₀ (GS eq. 1) of every layer and head, and the threshold of WSE."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from sinkscope.figures.axes import whole_numbers
from sinkscope.figures.labels import title
from sinkscope.figures.spec import declare
from sinkscope.figures.style import COLUMN, GRAY, SEQUENTIAL, WIDE, Figure, Look, new_figure
from sinkscope.results.metrics import METRICS
from sinkscope.results.run import RunData

MOST = 0.5  # share of the sequences in which a marked head is a sink
ASIDE = 1.3  # inches beside the map: axis and color bar
LOCAL = ("sliding_attention", "chunked_attention")


@declare("sink-map", "window mass at position 0 of every layer and head; dots: sinks in most sequences", "attention")
def draw(run: RunData) -> Figure:
    attention = run.tables["attention"]
    first = attention[attention["position"] == 0]
    layers, heads = range(int(first["layer"].max()) + 1), range(int(first["head"].max()) + 1)
    mass, share = (
        first.pivot(index="layer", columns="head", values=name).reindex(index=layers, columns=heads).to_numpy(float)
        for name in ("window_mass", "sink_rate")
    )
    width = float(np.clip(0.16 * len(heads), COLUMN - ASIDE, WIDE - ASIDE))  # inches, of the map
    height = float(np.clip(0.105 * len(layers), 1.5, 6.5))
    figure = new_figure(width + ASIDE, height + 1.1)
    ax = figure.subplots()
    ax.patch.set(facecolor="white", edgecolor="0.6", hatch="////", linewidth=0)  # seen where there is no attention
    image = ax.imshow(mass, cmap=SEQUENTIAL.with_extremes(bad="none"), vmin=0, vmax=1, aspect="auto")
    ax.spines[:].set_visible(False)
    ax.set_xlabel("head")
    ax.set_ylabel("layer")
    whole_numbers(ax, "x")
    whole_numbers(ax, "y")
    notes = _dots(ax, share, run, width, height) + _local_layers(ax, run)
    figure.colorbar(image, ax=ax, label=f"{METRICS['window_mass'].short} at position 0", aspect=30, pad=0.03)
    if notes:
        figure.legend(handles=notes, loc="outside lower center", handlelength=1.2)
    figure.suptitle(title(run, width + ASIDE))
    return figure


def _dots(ax: Axes, share: np.ndarray, run: RunData, width: float, height: float) -> list[Line2D]:
    """Mark the heads that are sinks in most sequences, with dots as large as the cells allow."""
    layer, head = np.nonzero(share > MOST)
    if not len(layer):
        return []
    cell = 72 * min(width / share.shape[1], height / share.shape[0])  # points
    look: Look = {"linestyle": "none", "marker": "o", "mfc": "white"}
    ax.plot(head, layer, markersize=float(np.clip(0.35 * cell, 0.8, 3)), mec="none", **look)
    label = f"sink (ε = {run.manifest['config']['epsilon']:g}) in most sequences"
    return [Line2D([], [], markersize=3, mec="0.3", mew=0.5, label=label, **look)]


def _local_layers(ax: Axes, run: RunData) -> list[Line2D]:
    """A bar beside the layers whose attention is limited to a window, which may leave the sink behind."""
    types = run.manifest["model"].get("layer_types") or []
    local = [layer for layer, kind in enumerate(types) if kind in LOCAL]
    if not local:
        return []
    edges = np.array(local)[:, None] + (-0.5, 0.5, np.nan)  # each layer's lower and upper edge, then a gap
    look: Look = {"color": GRAY, "linewidth": 2.5, "solid_capstyle": "butt"}
    ax.plot(np.full(edges.size, -0.015), edges.ravel(), transform=ax.get_yaxis_transform(), clip_on=False, **look)
    ax.tick_params(axis="y", length=0, pad=5)
    window = run.manifest["model"].get("sliding_window")
    label = "sliding-window layer" + (f" ({window} tokens)" if window else "")
    return [Line2D([], [], label=label, **look)]

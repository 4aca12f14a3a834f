"""Attention weights of telling heads on one sequence; details.telling_heads says how they are chosen."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.image import AxesImage

from sinkscope.report.figures.axes import whole_numbers
from sinkscope.report.figures.labels import title
from sinkscope.report.figures.style import SEQUENTIAL, WIDE, Figure, new_figure
from sinkscope.results.run import RunData

NAME = "attention-maps"
ABOUT = "attention weights on the first sequence, of heads from the strongest sink to the weakest"
TABLES = ("attention_maps",)
ACROSS = 3
FAINTEST = 1e-3  # the colour scale is logarithmic from here to 1: a sink's column and a diagonal can both be read


def draw(run: RunData) -> Figure:
    table = run.tables["attention_maps"]
    heads = [(int(layer), int(head)) for layer, head in sorted(set(zip(table["layer"], table["head"], strict=True)))]
    across = min(ACROSS, len(heads))
    down = -(-len(heads) // across)
    width = WIDE * (across + 0.45) / (ACROSS + 0.45)
    figure = new_figure(width, 1.98 * down + 0.65)
    axes = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
    for ax, (layer, head) in zip(axes.flat, heads, strict=False):
        image = _map(ax, table[(table["layer"] == layer) & (table["head"] == head)])
        ax.set_title(f"layer {layer}, head {head}")
        whole_numbers(ax, "x")
        whole_numbers(ax, "y")
    for place in range(len(heads), down * across):
        axes.flat[place].set_visible(False)
        axes.flat[place - across].tick_params(labelbottom=True)
    bar = figure.colorbar(image, ax=axes, label="attention weight", aspect=30, pad=0.02, extend="min")
    bar.outline.set_linewidth(0.5)
    figure.supxlabel("key position")
    figure.supylabel("query position")
    figure.suptitle(title(run, width, f"sequence {table['sequence'].iloc[0]}"))
    return figure


def _map(ax: Axes, table: pd.DataFrame) -> AxesImage:
    """Queries downwards. What the causal mask forbids stays white; weights that are not numbers are grey."""
    size = int(table["query"].max()) + 1
    weights = np.full((size, size), np.nan)
    weights[table["query"], table["key"]] = table["weight"]
    forbidden = np.triu(np.ones((size, size), bool), 1)
    image = ax.imshow(np.clip(weights, FAINTEST / 10, 1), cmap=SEQUENTIAL, norm=LogNorm(FAINTEST, 1))
    ax.imshow(np.where(forbidden, 1.0, np.nan), cmap="Greys_r", vmin=0, vmax=1)
    return image

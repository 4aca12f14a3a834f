"""The figure of decoding: one panel by step for the sink, and one for the activations."""

import numpy as np

from sinkscope.figures import plot, style
from sinkscope.figures.labels import title
from sinkscope.figures.style import COLUMN, GRADUAL, GUIDE, MEAN_LINE, Figure, new_figure
from sinkscope.results.run import RunData

LAYERS = 4  # layers with a curve of their own, evenly spread


def draw_decoding(run: RunData) -> Figure:
    """Draw means over sequences of the attention to position 0 and of the largest activation, by decoding step.

    The steps at which most sequences are in a thought of the chat template are shaded.
    """
    table = run.tables["decoding"]
    by_layer = table.groupby(["layer", "step"])[["sink_mass", "largest"]].mean()
    by_step = table.groupby("step").agg(uniform=("uniform", "mean"), thought=("is_thought", "mean"))
    layers = np.unique(table["layer"])
    spread = np.unique(np.linspace(0, len(layers) - 1, LAYERS).round().astype(int))
    figure = new_figure(COLUMN, 3.4)
    axes = figure.subplots(2, 1, sharex=True)
    for ax, column in zip(axes, ("sink_mass", "largest"), strict=True):
        for place in spread:
            color, layer = GRADUAL(place / max(1, len(layers) - 1)), layers[place]
            plot.curve(ax, by_layer.loc[layer, column], color=color, linewidth=0.7, label=f"layer {layer}")
        plot.curve(ax, by_layer[column].groupby("step").mean(), **MEAN_LINE, label="mean over layers")
        for step in by_step.index[by_step["thought"] > 0.5]:
            ax.axvspan(step - 0.5, step + 0.5, zorder=0, label="thought", **style.AREA, color="0.9")
    plot.curve(axes[0], by_step["uniform"], **GUIDE, label="uniform attention")
    plot.panel(axes[0], "attention to position 0", "share of attention", x=None, share=True)
    plot.panel(axes[1], "largest activation", "magnitude", x="decoded token", log=True)
    return figure.finish(title(run, COLUMN), plot.handles_of(axes), ncols=3)

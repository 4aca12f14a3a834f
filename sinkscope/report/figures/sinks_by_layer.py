"""Sinks and massive activations occur together: GS figure 1.

Four panels, as in a row of the paper's: sink mass, sink rate, norm of the residual stream after the layer, norm of the
MLP's output. Token 0 against the mean and the maximum over the other early tokens, all of them means over sequences
first, as the paper's are. Layers count from 0.
"""

import pandas as pd
from matplotlib.axes import Axes

from sinkscope.report.figures.axes import layer_axis, line_by_layer, say, value_axis
from sinkscope.report.figures.labels import title
from sinkscope.report.figures.style import HIGHEST, OTHERS, SINK, WIDE, Figure, new_figure
from sinkscope.results.run import RunData

NAME = "sinks-by-layer"
ABOUT = "sinks and norms by layer: token 0 against the other early tokens (GS fig. 1)"
TABLES = ("attention", "activation")


def draw(run: RunData) -> Figure:
    attention, activation = run.tables["attention"], run.tables["activation"]
    figure = new_figure(WIDE, 2.1)
    mass, rate, residual, mlp = figure.subplots(1, 4)
    epsilon = (run.manifest.get("config") or {}).get("epsilon")
    _panel(mass, "sink mass", attention, "sink_mass", share=True)
    name = "sink rate" if epsilon is None else f"sink rate (ε = {epsilon:g})"
    _panel(rate, name, attention, "sink_rate", share=True)
    for ax, site, name in (
        (residual, "layer_out", "norm of layer output"),
        (mlp, "mlp_out", "norm of MLP output"),
    ):
        _panel(ax, name, activation[activation["site"] == site], "norm_mean", log=True)
    handles, labels = mass.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    figure.suptitle(title(run, WIDE))
    return figure


def _panel(ax: Axes, name: str, table: pd.DataFrame, column: str, **scale: bool) -> None:
    ax.set_title(name)
    if table.empty:
        say(ax, "no such site\nin this family")
        return
    # heads first: a maximum over positions is meant of what the layer does, not of one head
    means = table.groupby(["layer", "position"])[[column]].mean().reset_index()
    later = means[means["position"] > 0]
    line_by_layer(ax, means[means["position"] == 0].set_index("layer")[column], label="token 0", **SINK)
    if len(later):
        most = int(later["position"].max())
        places = f"positions 1–{most}" if most > 1 else "position 1"
        by_layer = later.groupby("layer")
        line_by_layer(ax, by_layer[column].mean(), label=f"mean over {places}", **OTHERS)
        line_by_layer(ax, by_layer[column].max(), label=f"maximum over {places}", **HIGHEST)
    layer_axis(ax)
    value_axis(ax, **scale)

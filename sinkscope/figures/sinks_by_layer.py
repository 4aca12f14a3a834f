"""Sinks and massive activations occur together (GS figure 1).

Sink mass, sink rate, norm of the layer's output and norm of the MLP's output: token 0 against the mean and the maximum
over the other early tokens, all of them means over sequences, as in the paper. Beside the sink rate: how often a sink
is outside the text, in models that have something there. Layers count from 0. Sites that a family lacks have no panel.
"""

import pandas as pd
from matplotlib.axes import Axes

from sinkscope.figures.axes import layer_axis, line_by_layer, value_axis
from sinkscope.figures.labels import places, title
from sinkscope.figures.spec import declare
from sinkscope.figures.style import HIGHEST, OTHERS, OUTSIDE, SINK, WIDE, Figure, new_figure
from sinkscope.results.metrics import METRICS
from sinkscope.results.run import RunData

SITES = {"layer_out": "layer output", "mlp_out": "MLP output"}


@declare(
    "sinks-by-layer", "sinks and norms by layer: token 0 and other early tokens (GS fig. 1)", "attention", "activation"
)
def draw(run: RunData) -> Figure:
    attention, activation = run.tables["attention"], run.tables["activation"]
    norms = {name: activation[activation["site"] == site] for site, name in SITES.items()}
    norms = {name: rows for name, rows in norms.items() if len(rows)}
    figure = new_figure(WIDE, 2.1)
    axes = figure.subplots(1, 2 + len(norms), sharex=True)  # layers without attention are gaps on the left
    mass, rate = axes[:2]
    _panel(mass, METRICS["sink_mass"].short, "share of attention", attention, "sink_mass", share=True)
    name = f"{METRICS['sink_rate'].short} (ε = {run.manifest['config']['epsilon']:g})"
    _panel(rate, name, "share of heads", attention, "sink_rate", share=True)
    if "attention_outside" in run.tables:
        outside = run.tables["attention_outside"].groupby("layer")["sink_rate_outside"].mean()
        line_by_layer(rate, outside, label="outside the text", **OUTSIDE)
    for ax, (name, rows) in zip(axes[2:], norms.items(), strict=True):
        _panel(ax, name, "L2 norm", rows, "norm_mean", log=True)
    handles, labels = rate.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(handles))
    figure.suptitle(title(run, WIDE))
    return figure


def _panel(ax: Axes, name: str, unit: str, table: pd.DataFrame, column: str, **scale: bool) -> None:
    ax.set_title(name)
    # over heads first: the maximum over positions is of the layer, not of one head
    means = table.groupby(["layer", "position"])[[column]].mean().reset_index()
    later = means[means["position"] > 0]
    line_by_layer(ax, means[means["position"] == 0].set_index("layer")[column], label="token 0", **SINK)
    if len(later):
        others = places(1, int(later["position"].max()))
        by_layer = later.groupby("layer")
        line_by_layer(ax, by_layer[column].mean(), label=f"mean over {others}", **OTHERS)
        line_by_layer(ax, by_layer[column].max(), label=f"maximum over {others}", **HIGHEST)
    layer_axis(ax)
    if value_axis(ax, **scale):
        ax.set_ylabel(unit)

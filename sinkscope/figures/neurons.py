"""Figures of super weights, scores of dormant heads, and over-mixing."""

import numpy as np
from matplotlib.ticker import MaxNLocator

from sinkscope.figures import plot, style
from sinkscope.figures.labels import title, wrapped
from sinkscope.figures.style import COLUMN, OTHERS, REFERENCE, SINK, TEXT, WIDE, Figure, Look, new_figure
from sinkscope.interventions.heads import AblateHeads, dormant
from sinkscope.interventions.super_weight import usual_pairs
from sinkscope.measuring.experiment import BEFORE
from sinkscope.results.run import RunData

PANELS = (  # column, name, unit
    ("written", "largest entry added", "|entry|"),
    ("input", "largest input to W", "|u|"),
    ("share", "written by one weight", "share of output"),
)
STAR: Look = OTHERS | {"linestyle": "none", "marker": "*", "markersize": 7, "zorder": 5}
BAND: Look = {"color": "0.75", "linewidth": 0, "alpha": 0.7}


def draw_super_weights(run: RunData) -> Figure:
    """Draw the largest entry that each layer adds, the largest input, and what the weight between them writes."""
    usual = usual_pairs(run.tables["super_weights"]).set_index("layer")
    figure = new_figure(WIDE, 2.2)
    chosen = usual[usual["is_early"]]["written"].idxmax()
    for ax, (column, name, unit) in zip(figure.subplots(1, 3, sharex=True), PANELS, strict=True):
        plot.line_by_layer(ax, usual[column], **SINK)
        ax.plot([chosen], [usual[column][chosen]], **STAR)
        plot.panel(ax, name, unit, log=column != "share")
    place = f"layer {chosen}, row {usual['row'][chosen]:.0f}, column {usual['column'][chosen]:.0f}"
    return figure.finish(title(run, WIDE), {f"super weight: {place}": STAR})


def draw_head_scores(run: RunData) -> Figure:
    """Draw every head by its two scores, with the heads that each score flags."""
    table, share = run.tables["head_scores"], AblateHeads().share
    numbers = table["layer"] * (table["head"].max() + 1) + table["head"]
    figure = new_figure(COLUMN, 2.9)
    ax = figure.subplots()
    image = ax.scatter(table["first_mass"], table["relative_norm"], c=table["layer"], cmap=style.GRADUAL, s=9, zorder=3)
    rings = {"output-norm": "o", "first-mass": "s"}
    signs: dict[str, Look] = {}
    for by, marker in rings.items():
        own = table[np.isin(numbers, dormant(table, by, share))]
        look: Look = {"linestyle": "none", "marker": marker, "mfc": "none", "mec": "0.2", "mew": 0.6, "markersize": 5.5}
        ax.plot(own["first_mass"], own["relative_norm"], **look)
        signs[f"{share:.0%} flagged by {by}"] = look
    ax.set(xlabel="attention to position 0", ylabel="output norm ÷ mean of the layer", ylim=(0, None))
    figure.colorbar(image, ax=ax, label="layer", aspect=30, pad=0.03, ticks=MaxNLocator(5, integer=True))
    return figure.finish(title(run, COLUMN), signs, ncols=1)


def draw_over_mixing(run: RunData) -> Figure:
    """Draw the change of later tokens by layer and by distance, before and under each arm, with its controls."""
    table = run.tables["over_mixing"]
    figure = new_figure(TEXT, 2.1 + 0.1 * len(run.manifest["arms"]))
    left, right = figure.subplots(1, 2, sharey=True)
    by_layer = run.tables["over_mixing_by_sequence"].groupby(["condition", "layer"])["change"].mean()
    by_distance = table.groupby(["condition", "distance"])["change"].mean()
    labels = [label for label in (BEFORE, *run.manifest["arms"]) if label in by_layer.index.levels[0]]
    for label, look in zip(labels, style.line_looks(), strict=False):
        look = REFERENCE | {"zorder": 3} if label == BEFORE else look
        drawn = [name for name in by_layer.index.levels[0] if name.startswith(f"{label} control ")]
        for ax, values in ((left, by_layer), (right, by_distance)):
            if drawn:
                every = values[drawn].unstack(0)
                ax.fill_between(every.index, every.min(axis=1), every.max(axis=1), label="range of controls", **BAND)
            plot.curve(ax, values[label], label=wrapped(label, 34, 1), **look)
    plot.panel(left, "mean over later tokens", "‖h − h′‖ ÷ ‖h‖")
    plot.panel(right, "mean over layers", "", x="tokens after the changed one")
    right.set_xscale("log", base=2)
    right.set_xticks(distances := sorted(table["distance"].unique()), [str(distance) for distance in distances])
    once = {label: handle for handle, label in zip(*left.get_legend_handles_labels(), strict=True)}
    return figure.finish(title(run, TEXT), list(once.values()), ncols=2)

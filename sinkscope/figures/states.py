"""Figures of the residual stream (entropy, sink tokens, residual sinks and spikes), and of weights and heads."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from sinkscope.figures import plot, style
from sinkscope.figures.labels import title, token_labels
from sinkscope.figures.style import COLUMN, GUIDE, HIGHEST, OTHERS, SINK, WIDE, Figure, Look, new_figure
from sinkscope.interventions.heads import AblateHeads, dormant
from sinkscope.interventions.super_weight import usual_pairs
from sinkscope.measuring.observables.spikes import FIRST_SINK, RESIDUAL_SINK
from sinkscope.results.metrics import METRICS
from sinkscope.results.run import RunData


def _legend(ax: Axes, columns: int = 1) -> None:
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.24), ncols=columns, columnspacing=0.8)


# --- Compression valleys (2510.06477), next to the sink rate of the layer that reads the states


def draw_entropy_by_layer(run: RunData) -> Figure:
    table = run.tables["entropy"].set_index("layer")
    figure = new_figure(WIDE, 2.4)
    left, right = figure.subplots(1, 2)
    for ax, column, label, look in (
        (left, "entropy", "all tokens", SINK),
        (left, "entropy_without_first", "without position 0", OTHERS),
        (left, "entropy_rescaled", "position 0 at the median norm", HIGHEST),
        (left, "entropy_bound", "upper bound by norm and alignment", GUIDE),
        (right, "anisotropy", "anisotropy", SINK),
        (right, "anisotropy_bound", "lower bound by norm and alignment", GUIDE),
    ):
        plot.line_by_layer(ax, table[column], label=label, **look)
    if "attention" in run.tables:
        rate = run.tables["attention"].query("position == 0").groupby("layer")["sink_rate"].mean()
        rate = rate.rename(lambda layer: layer - 1).drop(-1, errors="ignore")
        plot.line_by_layer(right, rate, label="sink rate of the next layer", **OTHERS)
    plot.panel(left, METRICS["state_entropy"].short, "share of the largest", share=True)
    plot.panel(right, "anisotropy and sinks", "share", share=True)
    for ax in (left, right):
        _legend(ax)
    return figure.finish(title(run, WIDE))


# --- Tokens that join the first sink (2512.22213), and tokens that are only parallel to it


def draw_sink_tokens(run: RunData) -> Figure:
    shares = run.tables["parallel_tokens"].groupby("layer")[["parallel", "sinks"]].mean()
    figure = new_figure(WIDE, 2.5)
    left, right = figure.subplots(1, 2, width_ratios=(1.3, 1))
    plot.line_by_layer(left, shares["parallel"], label="parallel to the first sink", **OTHERS)
    plot.line_by_layer(left, shares["sinks"], label="and with 3 × the median norm", **SINK)
    is_rare = 0 < shares["parallel"].max() <= 0.1  # then the axis ends at the largest
    plot.panel(left, "tokens but the first sink", "share of tokens", share=not is_rare)
    _legend(left, 2)
    table = run.tables["sink_tokens"]
    others = table[table["kind"] != FIRST_SINK]
    counts = others.groupby(["token_id", "token"], dropna=False).size().sort_values(ascending=False, kind="stable")
    counts = counts.head(12)
    if counts.empty:
        plot.say(right, "no other token is a sink")
    else:
        plot.name_rows(right, token_labels(*zip(*counts.index, strict=True)), shaded=False)
        right.barh(range(len(counts)), counts, color=style.NAVY, height=0.65)
        right.set_ylim(max(len(counts), 4) - 0.4, -0.6)
        right.set_xlabel("number of sinks, secondary or lasting")
        plot.whole_numbers(right, "x")
    return figure.finish(title(run, WIDE))


# --- Residual sinks (2601.22966) and spikes (2603.05498)


def draw_residual_sinks(run: RunData) -> Figure:
    coordinates, spikes = run.tables["residual_sinks"], run.tables["spikes"].set_index("layer")
    figure = new_figure(WIDE, 2.6)
    left, middle, right = figure.subplots(1, 3)
    frequent = coordinates.query(f"kind == {RESIDUAL_SINK!r}")["coordinate"].value_counts()
    for coordinate, look in zip(frequent.index[:6], style.line_looks(), strict=False):
        share = coordinates[coordinates["coordinate"] == coordinate].set_index("layer")["share"]
        plot.line_by_layer(left, share, label=f"{coordinate}", **look)
    plot.line_by_layer(left, spikes["rotated_share"], label="rotated", **GUIDE)
    plot.panel(left, "coordinates with residual sinks", "share of tokens", share=True)
    plot.line_by_layer(middle, spikes["norm_ratio"], **SINK)
    plot.panel(middle, "norm of the largest token ÷ median", "ratio", log=True)
    for step, dashes in (("up", "-"), ("down", ":")):
        for layer in spikes.index[spikes["step"] == step]:
            label = f"step {step}: layer {layer}"
            middle.axvline(layer, color=style.GRAY, linewidth=0.9, linestyle=dashes, label=label)
    plot.line_by_layer(right, spikes["cosine"], label="largest tokens", **SINK)
    plot.line_by_layer(right, spikes["cosine_of_others"], label="tokens of the median norm", **OTHERS)
    plot.panel(right, "cosine of two sequences", "mean over pairs", share=True)
    for ax, columns in ((left, 3), (middle, 1), (right, 1)):
        _legend(ax, columns)
    return figure.finish(title(run, WIDE))


# --- Super weights (Yu et al. 2024), and the scores of dormant heads (Sandoval-Segura et al. 2025)

STAR: Look = OTHERS | {"linestyle": "none", "marker": "*", "markersize": 7, "zorder": 5}


def draw_super_weights(run: RunData) -> Figure:
    """Draw the largest entry that each layer adds, the largest input, and what the weight between them writes."""
    usual = usual_pairs(run.tables["super_weights"]).set_index("layer")
    figure = new_figure(WIDE, 2.2)
    chosen = usual[usual["is_early"]]["written"].idxmax()
    panels = (
        ("written", "largest entry added", "|entry|"),
        ("input", "largest input to W", "|u|"),
        ("share", "written by one weight", "share of output"),
    )
    for ax, (column, name, unit) in zip(figure.subplots(1, 3, sharex=True), panels, strict=True):
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
    signs: dict[str, Look] = {}
    for by, marker in (("output-norm", "o"), ("first-mass", "s")):
        flagged = table[np.isin(numbers, dormant(table, by, share))]
        look: Look = style.DOT | {"marker": marker, "mfc": "none", "mec": "0.2", "mew": 0.6, "markersize": 5.5}
        ax.plot(flagged["first_mass"], flagged["relative_norm"], **look)
        signs[f"{share:.0%} flagged by {by}"] = look
    ax.set(xlabel="attention to position 0", ylabel="output norm ÷ mean of the layer", ylim=(0, None))
    figure.colorbar(image, ax=ax, label="layer", aspect=30, pad=0.03, ticks=MaxNLocator(5, integer=True))
    return figure.finish(title(run, COLUMN), signs, ncols=1)

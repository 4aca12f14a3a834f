"""Figures of the query bias and of the effective positional encodings (NU)."""

import numpy as np
import pandas as pd

from sinkscope.errors import counted
from sinkscope.figures import plot, style
from sinkscope.figures.labels import title
from sinkscope.figures.spec import needs
from sinkscope.figures.style import COLUMN, DOT, GRAY, NAVY, OTHERS, SINK, VERMILION, WIDE, Figure, Look, new_figure
from sinkscope.measuring.observables.reductions import ALL_HEADS
from sinkscope.results.findings import OUTLIER
from sinkscope.results.run import RunData

# --- The shift Δ_j that the query bias adds to the logits of a key, over tokens of all heads (NU figures 1 and 4):
# position 0 among the later positions, in their standard deviations from their mean. NU's threshold is the broken line.

LATER_SPAN: Look = style.AREA | {"facecolor": VERMILION, "alpha": 0.35}
MEDIAN: Look = DOT | {"color": VERMILION, "marker": "_", "markersize": 5, "mew": 1.2}
QUANTILES = (0.1, 0.5, 0.9)


def draw_query_bias_distribution(run: RunData) -> Figure:
    later = run.tables["delta_distribution"].query("group == 'later'")
    by_layer = {layer: standard_quantiles(bins) for layer, bins in later.groupby("layer")}
    ends = {layer: quantiles for layer, quantiles in by_layer.items() if quantiles is not None}
    gaps = run.tables["summary"].query("metric == 'delta_gap' and layer >= 0").set_index("layer")["value"]
    figure = new_figure(COLUMN, 2.5)
    ax = figure.subplots()
    low, median, high = np.array(list(ends.values())).T if ends else np.empty((3, 0))
    ax.bar(list(ends), high - low, bottom=low, width=0.7, **LATER_SPAN)
    ax.plot(list(ends), median, **MEDIAN)
    plot.line_by_layer(ax, plot.finite(gaps), **SINK | {"linestyle": "none"})
    ax.use_sticky_edges = False  # otherwise the bars would have no margin
    if plot.panel(ax, "", "Δ: std above the later mean"):
        ax.axhline(0, color=GRAY, linewidth=0.6, zorder=1)
        ax.axhline(OUTLIER, **style.REFERENCE)
    signs = {"position 0": SINK | {"linestyle": "none"}, "later positions, 10–90 %": LATER_SPAN, "median": MEDIAN}
    signs |= {f"{OUTLIER:g} std": style.REFERENCE}
    return figure.finish(title(run, COLUMN), signs, ncols=2)


def standard_quantiles(bins: pd.DataFrame) -> np.ndarray | None:
    """Return QUANTILES of a histogram in its standard deviations from its mean; None if all tokens are in one bin."""
    bins = bins.sort_values("delta")
    centers, counts = bins["delta"].to_numpy(float), bins["count"].to_numpy(float)
    if not (np.isfinite(centers).all() and counts.any()):
        return None
    mean = np.average(centers, weights=counts)
    deviation = np.sqrt(np.average((centers - mean) ** 2, weights=counts))
    if not deviation > 0:
        return None
    edges = np.concatenate([[centers[0]], (centers[1:] + centers[:-1]) / 2, [centers[-1]]])
    shares = np.concatenate([[0.0], counts.cumsum() / counts.sum()])
    return (np.interp(QUANTILES, shares, edges) - mean) / deviation


# --- Alignment of the query bias with the key of each position, cos(W_k EPE_i, b_Q), by layer (NU figures 2 and 5).
# Left: all heads together, with a dot for each later position, in order within a layer's strip. Right: each head, with
# a dot for position 0, and the 10 % to 90 % quantiles of the later positions' cosines over heads.

LATER_DOTS: Look = DOT | {"color": VERMILION, "marker": "s", "markersize": 1.6, "mew": 0}
HEADS: Look = DOT | {"color": NAVY, "marker": "o", "markersize": 2.2, "mfc": "none", "mew": 0.6}
HEADS_SPAN: Look = style.AREA | {"color": VERMILION, "alpha": 0.3}
STRIP = 0.5  # share of a layer's width over which the dots of its positions are spread


def _is_aligned(run: RunData) -> bool:
    return bool(run.tables["query_bias"]["key_alignment"].notna().any())


@needs(
    lambda run: _is_aligned(run) or (run.tables["query_bias"]["delta_mean"] != 0).any(),
    "its query bias is zero, so that it has no angle to the keys",
)
@needs(_is_aligned, "its positions are not learned vectors, so that no position has its own key")
def draw_query_bias_alignment(run: RunData) -> Figure:
    table = plot.finite(run.tables["query_bias"])
    together, by_head = table[table["head"] == ALL_HEADS], table[table["head"] != ALL_HEADS]
    figure = new_figure(WIDE, 2.7)
    left, right = figure.subplots(1, 2, sharey=True)
    later = together[together["position"] > 0]
    offset = (later["position"] - 1) / max(1, later["position"].max() - 1) - 0.5 if len(later) else 0.0
    left.plot(later["layer"] + STRIP * offset, later["key_alignment"], rasterized=len(later) > 5000, **LATER_DOTS)
    plot.line_by_layer(left, together[together["position"] == 0].set_index("layer")["key_alignment"], **SINK)
    cosines = by_head[by_head["position"] > 0].groupby("layer")["key_alignment"]
    low, high = cosines.quantile(0.1), cosines.quantile(0.9)
    right.bar(low.index, high - low, bottom=low, width=STRIP, **HEADS_SPAN)
    first = by_head[by_head["position"] == 0]
    right.plot(first["layer"], first["key_alignment"], **HEADS)
    for ax in (left, right):
        name, label = ("all heads together", r"$\cos(W_k\,\mathrm{EPE}_i,\ b_Q)$") if ax is left else ("each head", "")
        if plot.panel(ax, name, label):
            ax.axhline(0, color=GRAY, linewidth=0.6, zorder=1)
    lowest, highest = np.nanmin([left.dataLim.y0, right.dataLim.y0]), np.nanmax([left.dataLim.y1, right.dataLim.y1])
    if np.isfinite([lowest, highest]).all():
        left.set_ylim(max(lowest - 0.05, -1.03), min(highest + 0.05, 1.03))
    signs = {
        "position 0, all heads": SINK,
        "later positions, in order": LATER_DOTS | {"markersize": 3},
        "position 0, one head": HEADS | {"markersize": 3},
        "later positions, 10–90 % over heads": HEADS_SPAN,
    }
    return figure.finish(title(run, WIDE), signs, ncols=4, columnspacing=1.4, handletextpad=0.6)


# --- |γ| at the coordinates where EPE₀ is massive, and at all coordinates (NU tables 1 and 2)

ALL_SPREAD: Look = style.AREA | {"color": GRAY, "alpha": 0.3}
MEAN_OF_ALL: Look = {"color": "0.35", "linewidth": 0.9}
FOURTH: Look = {"color": style.GREEN, "linestyle": "-.", "marker": "D", "markersize": 2.4, "zorder": 5}


def _has_vectors(run: RunData) -> bool:
    return bool(run.tables["gamma"]["epe_0"].notna().any())


@needs(_has_vectors, "its positions are not learned vectors, so that there is no EPE_0")
@needs(lambda run: run.tables["gamma"]["is_massive_epe"].any(), "its EPE_0 has no massive coordinate")
def draw_gamma(run: RunData) -> Figure:
    gamma = plot.finite(run.tables["gamma"])
    gamma = gamma.assign(magnitude=gamma["gamma"].abs())
    by_layer = gamma.groupby("layer")["magnitude"]
    mean, spread = by_layer.mean(), 2 * by_layer.std(ddof=0)
    massive = gamma[gamma["is_massive_epe"]]
    largest = massive.groupby("coordinate")["epe_0"].first().abs().sort_values(ascending=False).index
    width = COLUMN * 1.25
    figure = new_figure(width, 2.5)
    ax = figure.subplots()
    low = (mean - spread).clip(lower=0)
    ax.bar(mean.index, mean + spread - low, bottom=low, width=0.6, **ALL_SPREAD)
    plot.line_by_layer(ax, mean, **MEAN_OF_ALL)
    signs: dict[str, Look] = {}
    for coordinate, look in zip(largest, (SINK, OTHERS, style.HIGHEST, FOURTH), strict=False):
        signs[f"d = {coordinate}"] = look
        plot.line_by_layer(ax, massive[massive["coordinate"] == coordinate].set_index("layer")["magnitude"], **look)
    if plot.panel(ax, "", "|γ|"):
        ax.set_ylim(bottom=0)
    beyond = len(largest) - len(signs)
    signs |= {"mean of all" + f" ({beyond} massive not drawn)" * (beyond > 0): MEAN_OF_ALL, "mean ± 2 std": ALL_SPREAD}
    columns = len(signs) if len(signs) <= 4 else 3
    return figure.finish(title(run, width), signs, ncols=columns, columnspacing=1.0, handlelength=2)


# --- The effective positional vector of a learned position 0 (EPE₀), with names of massive coordinates (NU figure 6)


@needs(_has_vectors, "its positions are not learned vectors")
def draw_epe_coordinates(run: RunData) -> Figure:
    table = run.tables["gamma"]
    vector = table[table["layer"] == table["layer"].min()]  # the vector is the same in the rows of every layer
    figure = new_figure(WIDE, 2.2)
    ax = figure.subplots()
    entries = vector[np.isfinite(vector["epe_0"])]
    massive, usual = entries[entries["is_massive_epe"]], entries[~entries["is_massive_epe"]]
    ax.axhline(0, color=GRAY, linewidth=0.5, zorder=1)
    ax.vlines(usual["coordinate"], 0, usual["epe_0"], color=NAVY, linewidth=0.8)
    ax.vlines(massive["coordinate"], 0, massive["epe_0"], color=VERMILION, linewidth=1.4)
    ax.plot(massive["coordinate"], massive["epe_0"], color=VERMILION, linestyle="none", marker="s", markersize=3)
    named = massive.reindex(massive["epe_0"].abs().sort_values(ascending=False).index[:12])
    for coordinate, entry in zip(named["coordinate"], named["epe_0"], strict=True):
        plot.write_beside(ax, f"{coordinate}", coordinate, entry, space=5, size=7)
    ax.set(xlabel="coordinate", ylabel=r"$\mathrm{EPE}_0$")
    ax.set_xlim(-0.01 * len(vector), 1.03 * len(vector))
    ax.margins(y=0.08)
    if entries.empty:
        plot.say(ax, "no values")
    return figure.finish(title(run, WIDE, counted(len(massive) or "no", "massive coordinate")))

"""Figures of one run, and metrics by layer of several runs."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.colors import LogNorm
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from sinkscope.errors import InputError
from sinkscope.figures import plot, style
from sinkscope.figures.labels import escape, heading, places, title, token_labels
from sinkscope.figures.plot import ACROSS
from sinkscope.figures.style import COLUMN, GRAY, GUIDE, HIGHEST, OTHERS, SINK, TEXT, WIDE, Figure, Look, new_figure
from sinkscope.measuring.observables.massive import RATIO, THRESHOLD
from sinkscope.measuring.summary import clear_sinks
from sinkscope.results.findings import FEWEST_QUERIES
from sinkscope.results.metrics import METRICS, UNITS
from sinkscope.results.run import RunData
from sinkscope.results.side_by_side import labels
from sinkscope.results.tables import WHOLE_MODEL

# --- Window mass α₀ (GS eq. 1) of every layer and head, and the threshold of WSE for a sink

ASIDE = 1.3  # inches next to the map: axis and color bar


def draw_sink_map(run: RunData, position: int = 0) -> Figure:
    attention = run.tables["attention"]
    first = attention[attention["position"] == position]
    if first.empty:
        raise InputError(f"there is no position {position}: the table attention has 0 to {attention['position'].max()}")
    layers, heads = range(int(first["layer"].max()) + 1), range(int(first["head"].max()) + 1)
    mass, share = (
        first.pivot(index="layer", columns="head", values=name).reindex(index=layers, columns=heads).to_numpy(float)
        for name in ("window_mass", "sink_rate")
    )
    width = float(np.clip(0.16 * len(heads), COLUMN - ASIDE, WIDE - ASIDE))  # width of the map in inches
    height = float(np.clip(0.105 * len(layers), 1.5, 6.5))
    figure = new_figure(width + ASIDE, height + 1.1)
    ax = figure.subplots()
    ax.patch.set(facecolor="white", edgecolor="0.6", hatch="////", linewidth=0)  # visible in layers without attention
    image = ax.imshow(mass, cmap=style.SEQUENTIAL.with_extremes(bad="none"), vmin=0, vmax=1, aspect="auto")
    ax.spines[:].set_visible(False)
    ax.set(xlabel="head", ylabel="layer")
    plot.whole_numbers(ax, "x")
    plot.whole_numbers(ax, "y")
    notes: dict[str, Look] = {}
    layer, head = np.nonzero(share > 0.5)  # a sink in most sequences
    if len(layer):  # dots are as large as the cells allow
        cell = 72 * min(width / share.shape[1], height / share.shape[0])  # points
        dot: Look = {"linestyle": "none", "marker": "o", "mfc": "white"}
        ax.plot(head, layer, markersize=float(np.clip(0.35 * cell, 0.8, 3)), mec="none", **dot)
        epsilon = run.manifest["config"]["epsilon"]
        notes[f"sink (ε = {epsilon:g}) in most sequences"] = dot | {"markersize": 3, "mec": "0.3", "mew": 0.5}
    kinds = run.manifest["model"].get("layer_types") or []
    local = [layer for layer, kind in enumerate(kinds) if kind in ("sliding_attention", "chunked_attention")]
    if local:  # a bar next to layers with a sliding window, which may exclude the sink
        edges = np.array(local)[:, None] + (-0.5, 0.5, np.nan)  # lower and upper edge of each layer, then a gap
        bar: Look = {"color": GRAY, "linewidth": 2.5, "solid_capstyle": "butt"}
        ax.plot(np.full(edges.size, -0.015), edges.ravel(), transform=ax.get_yaxis_transform(), clip_on=False, **bar)
        ax.tick_params(axis="y", length=0, pad=5)
        window = run.manifest["model"].get("sliding_window")
        notes["sliding-window layer" + (f" ({window} tokens)" if window else "")] = bar
    figure.colorbar(image, ax=ax, label=f"{METRICS['window_mass'].short} at position {position}", aspect=30, pad=0.03)
    return figure.finish(title(run, width + ASIDE), notes, handlelength=1.2)


# --- Sinks and massive activations occur together (GS figure 1).
# Sink mass, sink rate, norm of the layer's output and norm of the MLP's output: position 0, and the mean and
# maximum over the other early tokens. All are means over sequences, as in the paper. The panel of the sink rate also
# has the rate of sinks outside the text, in models with keys there. Layers count from 0. A site that a family lacks
# has no panel.


def draw_sinks_by_layer(run: RunData) -> Figure:
    attention, activation = run.tables["attention"], run.tables["activation"]
    rate = f"{METRICS['sink_rate'].short} (ε = {run.manifest['config']['epsilon']:g})"
    panels: list[tuple[str, str, pd.DataFrame, str]] = [
        (METRICS["sink_mass"].short, "share of attention", attention, "sink_mass"),
        (rate, "share of heads", attention, "sink_rate"),
    ]
    for site, name in (("layer_out", "layer output"), ("mlp_out", "MLP output")):
        if len(rows := activation[activation["site"] == site]):
            panels.append((name, "L2 norm", rows, "norm_mean"))
    figure = new_figure(WIDE, 2.1)
    axes = figure.subplots(1, len(panels), sharex=True)  # layers without attention leave gaps in the panels on the left
    for ax, (name, unit, table, column) in zip(axes, panels, strict=True):
        # first the mean over heads, because the maximum over positions is taken for the layer
        means = table.groupby(["layer", "position"])[[column]].mean().reset_index()
        later = means[means["position"] > 0]
        first = means[means["position"] == 0].set_index("layer")[column]
        plot.line_by_layer(ax, first, label="position 0", **SINK)
        if len(later):
            others = places(1, int(later["position"].max()))
            by_layer = later.groupby("layer")[column]
            plot.line_by_layer(ax, by_layer.mean(), label=f"mean over {others}", **OTHERS)
            plot.line_by_layer(ax, by_layer.max(), label=f"maximum over {others}", **HIGHEST)
        plot.panel(ax, name, unit, log=table is not attention, share=table is attention)
        if name == rate and "attention_outside" in run.tables:
            outside = run.tables["attention_outside"].groupby("layer")["sink_rate_outside"].mean()
            plot.line_by_layer(ax, outside, label="outside the text", **style.OUTSIDE)
    handles = plot.handles_of([axes[1]])
    return figure.finish(title(run, WIDE), handles, ncols=len(handles))


# --- Sinks that are not at position 0, such as delimiters (S2M §3; WSE, open question 1).
# Only positions with at least 16 queries after them count: with fewer, a head in which tokens attend to themselves
# would look like a sink. In an encoder all tokens are queries of every position.

PERCENT = FuncFormatter(lambda share, _: percent(share))
SINK_TOKENS = 6  # tokens that are named


def percent(share: float) -> str:
    """Return a share as a percentage with two significant digits."""
    return f"{float(f'{100 * share:.2g}'):g} %"


def draw_sink_positions(run: RunData) -> Figure:
    """Draw shares of heads, means over sequences: by layer, and of later sinks also by position and by token."""
    heads = run.tables["attention"].drop_duplicates(["layer", "head"]).groupby("layer").size()
    by_layer, pairs = heads * run.manifest["input"]["sequences"], heads.sum() * run.manifest["input"]["sequences"]
    longest = run.manifest["input"]["longest"]
    last = max(0, longest - FEWEST_QUERIES) if run.is_causal else longest - 1
    sinks = clear_sinks(run.tables["sink_positions"])
    if sinks.empty:
        figure = new_figure(COLUMN, 0.9).finish(title(run, COLUMN))
        plot.say(figure.subplots(), f"no head has a sink at {places(0, last)}, in any sequence")
        return figure
    first, later = sinks[sinks["position"] == 0], sinks[sinks["position"] > 0]
    having = later.drop_duplicates(["layer", "head", "sequence"])
    once = later.drop_duplicates(["layer", "head", "sequence", "token_id"])  # a repeated token counts once
    tokens = once.groupby(["token_id", "token"], dropna=False).size().sort_values(ascending=False, kind="stable")
    tokens = tokens.head(SINK_TOKENS) / pairs
    heights = [1.2] if later.empty else [1.2, 0.9, 0.15 * (len(tokens) + 1)]
    figure = new_figure(COLUMN, 0.9 + sum(heights) + 0.45 * (len(heights) - 1))
    axes = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for rows, look in ((first, SINK), (having, OTHERS)):
        plot.line_by_layer(axes[0], (rows.groupby("layer").size() / by_layer).fillna(0), **look)
    nowhere = f"no sink at {places(1, last)}" if last else "too few queries after later ones"
    rates = f"later: {percent(len(having) / pairs)}" if len(later) else nowhere
    plot.panel(axes[0], f"position 0: {percent(len(first) / pairs)}; {rates}", "share of heads", share=True)
    axes[0].yaxis.set_major_formatter(PERCENT)
    if len(later):
        by_position = later.groupby("position").size() / pairs
        axes[1].bar(by_position.index, by_position, color=style.VERMILION, width=0.8)
        plot.grid(axes[1], "y")
        axes[1].yaxis.set(major_locator=MaxNLocator(3), major_formatter=PERCENT)
        plot.whole_numbers(axes[1], "x")
        note = f" (with ≥ {FEWEST_QUERIES} queries after it)" * run.is_causal
        axes[1].set(xlabel=f"later position{note}", ylabel="share of heads", xlim=(0, last + 1))
        plot.name_rows(axes[2], token_labels(*zip(*tokens.index, strict=True)), shaded=False)
        axes[2].barh(range(len(tokens)), tokens, color=style.VERMILION, height=0.65)
        axes[2].set(xlabel="share of heads with a later sink at a token", xlim=(0, tokens.max() * 1.25))
        axes[2].xaxis.set(major_locator=MaxNLocator(4), major_formatter=PERCENT)
        for row, share in enumerate(tokens):
            plot.write_beside(axes[2], percent(share), share, row)
    return figure.finish(title(run, COLUMN), {"position 0": SINK, "a later position": OTHERS}, ncols=2)


# --- Attention weights of selected heads on one sequence, from the strongest sink to the weakest

FAINTEST_OF_HEAD = 1e-3  # lower end of the color scale, on which both a sink and a diagonal are visible


def draw_attention_maps(run: RunData, heads: Sequence[tuple[int, int]] | None = None) -> Figure:
    table = run.tables["attention_maps"]
    if heads is not None:
        of_rows = table.set_index(["layer", "head"]).index
        if missing := [pair for pair in heads if tuple(pair) not in of_rows]:
            stored = ", ".join(f"{layer}.{head}" for layer, head in of_rows.unique())
            layer, head = missing[0]
            raise InputError(f"the map of head {head} of layer {layer} is not stored; stored: {stored}")
        table = table[of_rows.isin([tuple(pair) for pair in heads])]
    maps = table.groupby(["layer", "head"])
    across = min(ACROSS, len(maps))
    width = WIDE * (across + 0.45) / (ACROSS + 0.45)
    figure = new_figure(width, 1.98 * -(-len(maps) // across) + 0.65)
    axes = plot.panel_grid(figure, len(maps), across)
    for ax, ((layer, head), rows) in zip(axes, maps, strict=True):
        image = plot.draw_weights(ax, plot.square(rows, int(rows["query"].max()) + 1), FAINTEST_OF_HEAD)
        ax.set_title(f"layer {layer}, head {head}")
        plot.whole_numbers(ax, "x")
        plot.whole_numbers(ax, "y")
    figure.colorbar(image, ax=figure.axes, label="attention weight", aspect=30, pad=0.02, extend="min")
    figure.supxlabel("key position")
    figure.supylabel("query position")
    return figure.finish(title(run, width, f"one sequence ({table['sequence'].iloc[0]})"))


# --- Geometry of the first key: its norm is small, and its angle to the queries decides (WSE figure 2).
# Norms of query, key and value, cosine and norm product of query and key, and the resulting logit gap (VGA §4.1), at
# position 0 and on average over the other positions. Lines are means over heads, bands their 10 % to 90 % quantiles.

OF_HEADS: Look = style.AREA | {"color": GRAY, "alpha": 0.35}


def draw_query_key_geometry(run: RunData) -> Figure:
    geometry = run.tables["geometry"]
    figure = new_figure(WIDE, 3.7)
    axes = figure.subplots(2, 3, sharex=True)
    panels = (
        ("query_norm", "query ‖q‖", "L2 norm", True),
        ("key_norm", "key ‖k‖", "L2 norm", True),
        ("value_norm", "value ‖v‖", "L2 norm", True),
        ("qk_cosine", "cos(q, k)", "cosine", False),
        ("qk_norm_product", "‖q‖ ‖k‖", "product of L2 norms", True),
        ("sink_logit_gap", "gap to the other keys", "logits", False),
    )
    for ax, (column, name, unit, log) in zip(axes.flat, panels, strict=True):
        plot.first_and_others(ax, geometry, column)
        plot.panel(ax, name, unit, "layer" if ax in axes[-1] else "", log=log)
        if not log:
            ax.axhline(0, **style.NEUTRAL)
    handles = [*plot.handles_of(axes[0, :1]), Patch(label="10–90 % of heads", **OF_HEADS)]
    return figure.finish(title(run, WIDE), handles, ncols=3)


# --- Gates at position 0 and elsewhere, of a retrofit or of the model itself (VGA §3.2; GS §5.1).
# Left: by layer, means over heads with bands from their 10 % to their 90 % quantiles, for position 0 and for the mean
# over the other positions. Right: by position, a thin line for each layer. A gate of 1 changes nothing.


def draw_gates_by_layer(run: RunData) -> Figure:
    figure = new_figure(WIDE, 2.3)
    by_layer, by_position = figure.subplots(1, 2, sharey=True)
    gate = plot.finite(run.tables["gate"])
    plot.first_and_others(by_layer, gate, "gate")
    by_layer.fill_between([], [], label="10–90 % of heads", **OF_HEADS)
    # up to the last layer of the model, which may have no attention, if the run measured all layers
    last = max(int(run.tables[name]["layer"].max()) for name in ("gate", "activation") if name in run.tables)
    plot.panel(by_layer, "", "gate, a factor")
    by_layer.set_xlim(-0.3, last + 0.3)
    means = gate.groupby(["layer", "position"])["gate"].mean().unstack("layer")
    for place, layer in enumerate(means):
        by_position.plot(means.index, means[layer], color=style.SKY, linewidth=0.7, label="" if place else "one layer")
    by_position.plot(means.index, means.mean(axis=1), label="mean over layers", **style.MEAN_LINE)
    plot.panel(by_position, "", "", "position")
    return figure.finish(title(run, WIDE), plot.handles_of([by_layer, by_position]), ncols=5, columnspacing=1.2)


# --- Massive activations by layer (after the layer-wise figure of Sun et al. 2024).
# The three largest magnitudes of each layer's output and the median magnitude, means over sequences. Layers where most
# sequences have a massive activation are shaded: above 100, and above 1000 × the median, the two thin lines.


def draw_massive_activations(run: RunData) -> Figure:
    massive = run.tables["massive"]
    figure = new_figure(TEXT, 2.7)
    ax = figure.subplots()
    magnitude = massive.assign(value=massive["value"].abs()).sort_values("value", ascending=False)
    for rank, (label, look) in enumerate((("largest", SINK), ("second", OTHERS), ("third", HIGHEST))):
        means = magnitude.groupby(["layer", "sequence"]).nth(rank).groupby("layer")["value"].mean()
        if len(means):
            plot.line_by_layer(ax, means, label=label, **look)
    sequences = massive.drop_duplicates(["layer", "sequence"])
    median = sequences.groupby("layer")["median"].mean()
    plot.line_by_layer(ax, median, label="median", color="0.45", linestyle="-.", marker="D")
    values = plot.drawn(ax, "y")
    if np.any(np.isfinite(values) & (values > 0)):
        rule = GUIDE | {"linestyle": (0, (1, 1))}
        plot.line_by_layer(ax, RATIO * median, label=f"{RATIO:g} × median", **rule)
        ax.axhline(THRESHOLD, label=f"{THRESHOLD:g}", **GUIDE)
    ax.margins(x=0.02)
    plot.panel(ax, "", "|activation|, mean over sequences", log=True)
    having = massive[massive["is_massive"].astype(bool)].groupby("layer")["sequence"].nunique()
    shaded = sorted(having[having > massive["sequence"].nunique() / 2].index)
    for layer in shaded:
        ax.axvspan(layer - 0.5, layer + 0.5, zorder=0, label="massive in most sequences", **style.AREA, color="0.9")
    return figure.finish(title(run, TEXT), plot.handles_of([ax]), ncols=4, columnspacing=1.2)


# --- Massive activations in one hidden state: tokens × coordinates (Sun et al. 2024, fig. 1).
# The layer with the largest activation on the first sequence. The upper panel has the coordinates with the largest
# magnitudes, the lower one evenly spaced coordinates for comparison.


def draw_massive_map(run: RunData) -> Figure:
    table = run.tables["massive_map"]
    is_top = table["is_top"].astype(bool)
    top, spaced = (  # coordinates × positions; in `top`, by decreasing magnitude
        rows.pivot(index="coordinate", columns="position", values="magnitude")
        for rows in (table[is_top], table[~is_top])
    )
    top = top.loc[top.max(axis=1).sort_values(ascending=False, kind="stable").index]
    named = {"largest\ncoordinates": top, "evenly spaced\ncoordinates": spaced}
    parts = [(part, name) for name, part in named.items() if part.size]
    rows = [max(6, len(part)) for part, _ in parts]  # high enough for the name of the panel
    text = title(run, WIDE, f"one sequence ({table['sequence'].iloc[0]})", f"output of layer {table['layer'].iloc[0]}")
    figure = new_figure(WIDE, 0.12 * sum(rows) + 1.5).finish(text)
    axes = figure.subplots(len(parts), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    positive = table["magnitude"][np.isfinite(table["magnitude"]) & (table["magnitude"] > 0)]
    if positive.empty:
        for ax in axes:
            plot.say(ax, "no positive values")
        return figure
    high = float(positive.max())
    scale = LogNorm(min(float(positive.quantile(0.25)), high / 10), high)  # so that usual magnitudes stay pale
    for ax, (part, name) in zip(axes, parts, strict=True):
        ax.spines[:].set_visible(False)
        ax.set_ylabel(name)
        image = ax.imshow(part.clip(lower=scale.vmin), cmap=style.SEQUENTIAL, norm=scale, aspect="auto")
        ax.set_yticks(range(len(part)), [str(coordinate) for coordinate in part.index])
        ax.tick_params(length=0, labelsize=6)
    figure.colorbar(image, ax=list(axes), label="|activation|", aspect=25, pad=0.015, extend="min")
    tokens = table.drop_duplicates("position").sort_values("position")
    names = token_labels(tokens["token_id"], tokens["token"])
    axes[-1].set_xticks(range(len(tokens)), names, rotation=90, fontsize=5.5)
    axes[-1].tick_params(axis="x", pad=1)
    axes[-1].set_xlabel("token, from position 0")
    return figure


# --- Several runs by layer, or by relative depth if their numbers of layers differ


def draw_by_layer(runs: Sequence[RunData]) -> Figure:
    names, common = labels(runs)
    depths = [max(0, int(run.tables["summary"]["layer"].max())) + 1 for run in runs]
    is_relative = len(set(depths)) > 1
    across = max(1, min(4, 108 // (max(map(len, names)) + 8)))  # 108 characters in a row
    figure = new_figure(WIDE, 3.6 + 0.15 * -(-len(runs) // across))
    axes = figure.subplots(2, 2)
    for ax, metric in zip(axes.flat, ("sink_rate", "value_drain", "norm_ratio", "massive_count"), strict=True):
        for run, label, depth, look in zip(runs, names, depths, style.line_looks(), strict=False):
            summary = run.tables["summary"]
            rows = summary[(summary["metric"] == metric) & (summary["layer"] != WHOLE_MODEL)]
            line = plot.line_by_layer(ax, rows.set_index("layer")["value"], label=label, **look)
            if is_relative:
                line.set_xdata(np.asarray(line.get_xdata()) / max(depth - 1, 1))
        unit = METRICS[metric].unit
        ax.set(title=METRICS[metric].short, xlabel="relative depth" if is_relative else "layer")
        if is_relative:
            ax.set_xlim(-0.03, 1.03)
        else:
            plot.whole_numbers(ax, "x")
        plot.value_axis(ax, UNITS.get(unit, unit) or "count", log=unit == "ratio", share=unit == "share")
        if ax.get_yscale() == "log":
            ax.axhline(1, **style.NEUTRAL)
    counts = plot.drawn(axes[1, 1], "y")
    counts = counts[np.isfinite(counts)]
    if np.any(counts > 10):  # a linear scale would hide the other runs: linear up to 1, logarithmic above
        axes[1, 1].set_yscale("symlog", linthresh=1)
        axes[1, 1].set_ylim(-0.15, 1.5 * counts.max())
        axes[1, 1].yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    figure.legend(axes[0, 0].lines, [escape(name) for name in names], loc="outside lower center", ncols=across)
    return figure.finish(heading(common))

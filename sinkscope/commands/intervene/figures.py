"""Figures of intervention arms and their controls, and of perplexity with a short cache."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator, NullLocator

from sinkscope.commands.intervene.findings import (
    NO_POSITION,
    SPREAD,
    ArmEffect,
    arms,
    effect_of,
    interval,
    interval_by_layer,
)
from sinkscope.figures import plot, style
from sinkscope.figures.labels import title, wrapped
from sinkscope.figures.style import COLUMN, TEXT, WIDE, Figure, Look, new_figure
from sinkscope.results.metrics import METRICS
from sinkscope.results.run import BEFORE, RunData

PAGE_HEIGHT = 9.0  # inches, at most
OVER_SEQUENCES = "change, 95 % over sequences"


def _watched(run: RunData) -> dict[str, list[int]]:
    """Return the positions that each arm watches; a streaming arm watches none and is not drawn."""
    return {label: arm["watched"] for label, arm in arms(run).items() if arm["watched"]}


# --- The effect of every arm and of random changes of the same kind: a row for each arm, a panel for each metric.
# The change has its 95 % interval over sequences if the run has tables by sequence.

LETTERS = 24  # characters in a line of an arm's name
OFFSET = 0.17  # the arm is drawn above the middle of a row of height 1, its controls below
AFTER_ARM: Look = {"color": style.NAVY, "linewidth": 0.8, "marker": "o", "markersize": 4, "markevery": [-1]}
# metric, which of the positions that an arm watches (its sink first), may be logarithmic, width
EFFECT_PANELS: tuple[tuple[str, slice | None, bool, float], ...] = (
    ("sink_rate", slice(1), False, 1.0),
    ("window_mass", slice(1, None), False, 0.75),
    ("perplexity", None, True, 1.0),
    ("massive_magnitude", None, True, 1.0),
)


def draw_effects(run: RunData) -> Figure:
    watched = _watched(run)
    panels = []
    for metric, which, may_be_log, width in EFFECT_PANELS:
        positions = {label: [NO_POSITION] if which is None else some[which] for label, some in watched.items()}
        if any(positions.values()):
            panels.append((metric, positions, may_be_log, width))
    figure = new_figure(WIDE, min(0.3 * len(watched) + 1.15, PAGE_HEIGHT))
    widths = [width for *_, width in panels]
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False, width_ratios=widths)[0]
    plot.name_rows(axes[0], [wrapped(label, LETTERS, 2) for label in watched], shaded=False)
    for ax, (metric, positions, may_be_log, _) in zip(axes, panels, strict=True):
        plot.shade_rows(ax, len(watched))
        ax.tick_params(axis="y", length=0)
        _draw_metric(ax, run, metric, positions, may_be_log)
    signs = {"before": style.REFERENCE, "after": AFTER_ARM | {"markevery": None}}
    if "attention_by_sequence" in run.tables:
        signs[OVER_SEQUENCES] = style.INTERVAL
    draws = run.tables["effect"]["draw"].max() + 1
    if draws > 0:
        signs[f"random control, {draws} draws"] = style.CONTROL_DRAWS
    if draws > 1:
        signs[f"their mean ± {SPREAD:g} standard deviations"] = style.CONTROL_SPREAD
    return figure.finish(title(run, WIDE), signs, ncols=3)


def _draw_metric(ax: Axes, run: RunData, metric: str, positions: dict[str, list[int]], may_be_log: bool) -> None:
    """Draw one metric of all arms, a row for each arm; several positions of an arm are drawn one below the other."""
    different = {position for some in positions.values() for position in some}
    where = f"\nat position {min(different)}" if len(different) == 1 else "\nat @position"
    where = "" if different == {NO_POSITION} else where
    ax.set_xlabel(METRICS[metric].axis.replace(" (", "\n(") + where)  # panels are narrow
    effects = {
        (label, position): (effect_of(run, label, metric, position), interval(run, label, metric, position) or ())
        for label, some in positions.items()
        for position in some
    }
    values = [x for one, ends in effects.values() for x in (one.before, one.after, *one.controls, *ends)]
    positive = _plottable(values, log=True)
    # a linear axis finds its own range, and a log axis over less than a power of ten could not be read
    log = bool(may_be_log and len(positive) and positive.max() >= 10 * positive.min())
    across = ax.get_yaxis_transform()
    for row, (label, some) in enumerate(positions.items()):
        if not some:
            ax.text(0.5, row, "–", transform=across, ha="center", va="center", color="0.5")
        for place, position in enumerate(some):
            height = 1 / len(some)
            middle = row - 0.5 + height * (place + 0.5)
            _draw_effect(ax, *effects[label, position], middle, height, log)
            if len(different) > 1:
                ax.text(1.02, middle, f"@{position}", transform=across, va="center", fontsize=6)
    drawn = plot.drawn(ax, "x")
    if not len(drawn):
        ax.set_xticks([])
        ax.text(0.5, 0.5, "no values", transform=ax.transAxes, ha="center", va="center", color="0.4", fontsize=7)
        return
    low, high = drawn.min(), drawn.max()
    if log:
        plot.wide_x_axis(ax, low, high, room=1.04)
        return
    if may_be_log:  # limits close to the values
        room = 0.08 * ((high - low) or abs(high) or 1.0)
        ax.set_xlim(low - room, high + room)
    else:  # shares begin at 0
        ax.set_xlim(min(low, 0) - 0.05 * max(high, 0.01), 1.1 * max(high, 0.01))
    ax.xaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))  # numbers may be long


def _draw_effect(ax: Axes, effect: ArmEffect, ends: Sequence[float], middle: float, height: float, log: bool) -> None:
    """Draw interval, controls, before and after around `middle`. Lines of the value before join across rows."""
    above, under = middle - OFFSET * height, middle + OFFSET * height
    change = _plottable(ends, log)
    if len(change) == 2:
        ax.plot(change, [above] * 2, **style.INTERVAL)
    before, after = _plottable([effect.before], log), _plottable([effect.after], log)
    controls = _plottable(effect.controls, log)
    if len(controls) > 1:  # mean ± 2 standard deviations; on a log axis, those of the logarithms
        values = np.log(controls) if log else controls
        spread = values.mean() + SPREAD * values.std(ddof=1) * np.array([-1, 1])
        ax.plot(np.exp(spread) if log else spread, [under, under], **style.CONTROL_SPREAD)
    ax.plot(controls, np.full(len(controls), under), **style.CONTROL_DRAWS)
    for value in before:
        ax.plot([value, value], [middle - height / 2, middle + height / 2], **style.REFERENCE)
    if len(after):
        both = np.concatenate([before, after])
        ax.plot(both, np.full(len(both), above), **AFTER_ARM)
    else:
        across = ax.get_yaxis_transform()
        ax.text(0.98, above, f"after: {effect.after:g}", transform=across, ha="right", va="center", fontsize=6)


def _plottable(values: Sequence[float], log: bool) -> np.ndarray:
    array = np.array(values, float)
    return array[np.isfinite(array) & (array > 0 if log else True)]


# --- The layers in which an arm acts: sink rate by layer before and after, with the spread of the control.
# The change has its 95 % interval over sequences if the run has tables by sequence.

ARMS_ACROSS = 4  # panels in a row
CONTROL_BAND: Look = {"color": "0.75", "linewidth": 1.5, "zorder": 1}  # its edge is visible without a spread


def draw_effects_by_layer(run: RunData) -> Figure:
    table = run.tables["effect"].query("metric == 'sink_rate' and layer >= 0")
    by_layer = {key: rows.set_index("layer") for key, rows in table.groupby(["condition", "arm", "position"])}
    watched = _watched(run)
    sinks = {positions[0] for positions in watched.values()}
    all_targets = {position for positions in watched.values() for position in positions[1:]}
    across = min(ARMS_ACROSS, len(watched))
    width = max(WIDE * across / ARMS_ACROSS, COLUMN)
    down = -(-len(watched) // across)
    figure = new_figure(width, min(1.3 * down + 0.75, PAGE_HEIGHT))
    axes = plot.panel_grid(figure, len(watched), across)
    for place, (ax, (label, positions)) in enumerate(zip(axes, watched.items(), strict=True)):
        sink, *targets = positions
        before = by_layer[label, "before", sink]["value"]
        plot.line_by_layer(ax, before, label="before", **style.REFERENCE | {"zorder": 3})
        plot.line_by_layer(ax, by_layer[label, "after", sink]["value"], label="after", **style.SINK)
        for target in targets:
            where = f"after, at position {target}" if len(all_targets) == 1 else "after, at the target"
            plot.line_by_layer(ax, by_layer[label, "after", target]["value"], label=where, **style.OTHERS)
        if (label, "control", sink) in by_layer:  # layers without draws leave a gap
            controls = by_layer[label, "control", sink]
            mean = controls["value"].groupby("layer").mean()
            deviation = SPREAD * controls["value"].groupby("layer").std().fillna(0)
            draws = controls["draw"].nunique()
            several = f"random control: mean ± {SPREAD:g} std of {draws} draws"
            several = several if draws > 1 else "random control, 1 draw"
            plot.band_by_layer(ax, mean - deviation, mean + deviation, label=several, **CONTROL_BAND)
        for position in positions:
            ends = interval_by_layer(run, label, "sink_rate", position)
            color, name = (style.SINK["color"], OVER_SEQUENCES) if position == sink else (style.OTHERS["color"], None)
            band: Look = {"color": color, "alpha": 0.3, "linewidth": 0, "zorder": 1.5, "label": name}
            plot.band_by_layer(ax, ends["low"], ends["high"], **band)
        text = wrapped(label, LETTERS, 2) + (f"\nposition {sink}" if len(sinks) > 1 else "")
        plot.panel(ax, text, "", "layer" if place >= across * (down - 1) else "", share=True)
    where = f" at position {sinks.pop()}" if len(sinks) == 1 else ""
    figure.supylabel(METRICS["sink_rate"].short + where)
    handles = sorted(plot.handles_of(axes), key=lambda handle: str(handle.get_label()).startswith("random"))
    return figure.finish(title(run, width), handles, ncols=3 if width == WIDE else 2)


# --- Over-mixing (Barbero et al. 2025) before and under each arm


def draw_over_mixing(run: RunData) -> Figure:
    """Draw the change of later tokens by layer and by distance, before and under each arm, with its controls."""
    table = run.tables["over_mixing"]
    figure = new_figure(TEXT, 2.1 + 0.1 * len(run.manifest["arms"]))
    left, right = figure.subplots(1, 2, sharey=True)
    by_layer = run.tables["over_mixing_by_sequence"].groupby(["condition", "layer"])["change"].mean()
    by_distance = table.groupby(["condition", "distance"])["change"].mean()
    labels = [label for label in (BEFORE, *run.manifest["arms"]) if label in by_layer.index.levels[0]]
    for label, look in zip(labels, style.line_looks(), strict=False):
        look = style.REFERENCE | {"zorder": 3} if label == BEFORE else look
        controls = [name for name in by_layer.index.levels[0] if name.startswith(f"{label} control ")]
        for ax, values in ((left, by_layer), (right, by_distance)):
            if controls:
                every = values[controls].unstack(0)
                low, high = every.min(axis=1), every.max(axis=1)
                ax.fill_between(every.index, low, high, label="range of controls", **CONTROL_BAND | style.AREA)
            plot.curve(ax, values[label], label=wrapped(label, 34, 1), **look)
    plot.panel(left, "mean over later tokens", "‖h − h′‖ ÷ ‖h‖")
    plot.panel(right, "mean over layers", "", x="tokens after the changed one")
    right.set_xscale("log", base=2)
    right.set_xticks(distances := sorted(table["distance"].unique()), [str(distance) for distance in distances])
    return figure.finish(title(run, TEXT), plot.handles_of([left]), ncols=2)


# --- Attention maps under every arm: of one layer (NU figure 3), or of all (NU figures 7 to 13, on one page).
# The maps of a condition are one image, because hundreds of axes would take long to save.

MAPS_NOTE = "mean over heads and sequences"
CONTROL_NAME = "random control"
FAINTEST_MEAN = 1e-2  # lower end of the color scale: means over heads and sequences are seldom smaller

MAPS_ACROSS = 8  # maps of one layer in a row
SMALLEST, ASIDE = 0.79, 0.8  # inches: a map of one layer with its margin, and what is next to the maps
GAP, GAP_OF_LAYERS = 0.06, 0.06  # between conditions, in inches; between the maps of layers, as a share of a map
LETTER = 0.053  # inches: a letter of an arm's name
SMALL_FONT = 6.5  # points

Maps = dict[str, dict[int, np.ndarray]]  # condition → layer → (query, key) weights, NaN where there are none


def _maps_by_condition(run: RunData) -> Maps:
    table = run.tables["arm_maps"]
    maps: Maps = {}
    for (condition, layer), rows in table.groupby(["condition", "layer"], sort=False):
        maps.setdefault(condition, {})[int(layer)] = plot.square(rows, int(table["query"].max()) + 1)
    return maps


def _control_of(label: str) -> str:
    """Return the condition of an arm's control. Only its first draw has maps."""
    return f"{label} control 0"


def _to_sink(weights: np.ndarray, sink: int) -> float:
    """Return the mean weight on the sink over the other queries that see it; NaN if the map has no such weight."""
    others = np.delete(weights[:, sink], sink) if sink < len(weights) else np.empty(0)
    others = others[np.isfinite(others)]  # in a causal model, the queries after the sink
    return float(others.mean()) if len(others) else float("nan")


def _draw_map(ax: Axes, weights: np.ndarray, masked: np.ndarray | None = None) -> AxesImage:
    image = plot.draw_weights(ax, weights, FAINTEST_MEAN, masked)
    ax.spines[:].set(color="0.6", linewidth=0.4)
    ax.xaxis.set_major_locator(NullLocator())
    ax.yaxis.set_major_locator(NullLocator())
    return image


def draw_arm_maps(run: RunData) -> Figure:
    """Draw the layer in which the sink changes most, with the mean weight on the sink in each map."""
    maps = _maps_by_condition(run)
    # The change of a layer is the median over arms, so that an arm that masks the sink does not decide the layer.
    changes: dict[int, list[float]] = {layer: [] for layer in maps[BEFORE]}
    sinks = {label: arm["watched"][0] for label, arm in arms(run).items() if label in maps}
    for label, sink in sinks.items():
        for layer in maps[label].keys() & changes.keys():
            before, after = (_to_sink(maps[name][layer], sink) for name in (BEFORE, label))
            changes[layer].append(abs(after - before))
    layer = max(changes, key=lambda layer: np.nan_to_num(np.median(changes[layer])) if changes[layer] else 0.0)
    # A few maps are in one row, with each arm's random control next to it; of many, each control is below its arm.
    columns = [[(BEFORE, BEFORE, next(iter(sinks.values()), 0))]]
    for label, sink in sinks.items():
        control = [(_control_of(label), CONTROL_NAME, sink)] if _control_of(label) in maps else []
        columns.append([(label, label, sink), *control])
    if sum(map(len, columns)) <= MAPS_ACROSS:
        columns = [[cell] for column in columns for cell in column]
    across = -(-len(columns) // -(-len(columns) // MAPS_ACROSS))  # rows of about equal length
    deep = max(map(len, columns))
    size = max((COLUMN - ASIDE) / across, SMALLEST)
    cells = {
        (deep * (place // across) + below, place % across): (condition, wrapped(name, int(size / LETTER)), sink)
        for place, column in enumerate(columns)
        for below, (condition, name, sink) in enumerate(column)
    }
    rows = deep * -(-len(columns) // across)
    lines = [max(name.count("\n") + 1 for (y, _), (_, name, _) in cells.items() if y == row) for row in range(rows)]
    width = across * size + ASIDE
    text = title(run, width, f"layer {layer} (sink changes most)", MAPS_NOTE)
    figure = new_figure(width, rows * size + 0.1 * sum(lines) + 0.13 * text.count("\n") + 0.4, "compressed")
    grid = figure.subplots(rows, across, squeeze=False)
    for place, ax in np.ndenumerate(grid):
        if place not in cells:
            ax.set_visible(False)
            continue
        condition, name, sink = cells[place]
        weights = maps[condition].get(layer, np.full((1, 1), np.nan))
        image = _draw_map(ax, weights)
        ax.set_title(name, fontsize=SMALL_FONT, pad=2, linespacing=1.0)
        weight = _to_sink(weights, sink)
        if np.isfinite(weight):
            ax.text(0.98, 0.96, f"sink {weight:.2f}", transform=ax.transAxes, ha="right", va="top", fontsize=SMALL_FONT)
    ends = [0, int(grid[0, 0].get_xlim()[1])]
    grid[0, 0].set(xticks=ends, yticks=ends)
    grid[0, 0].tick_params(labelsize=SMALL_FONT, pad=1)
    grid[0, 0].set_xlabel("key", fontsize=SMALL_FONT, labelpad=-6)
    grid[0, 0].set_ylabel("query", fontsize=SMALL_FONT, labelpad=-6)
    _color_bar(figure, image, grid, location="right", aspect=12 * rows)
    return figure.finish(text)


def _color_bar(figure: Figure, image: AxesImage, axes: np.ndarray, **place: Any) -> None:
    bar = figure.colorbar(image, ax=axes, extend="min", pad=0.02, **place)
    bar.set_ticks([FAINTEST_MEAN, 0.1, 1], labels=[f"{FAINTEST_MEAN:g}", "0.1", "1"])
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=SMALL_FONT, pad=1)
    bar.set_label("attention weight", fontsize=SMALL_FONT, labelpad=1)


NAMES, BELOW = 1.09, 0.85  # inches: next to the maps of all layers, and above and below them
SMALLEST_OF_LAYER = 0.24  # inches: a smaller map could not be read
LAYER_NUMBER: Look = {"fontsize": 6, "ha": "center", "va": "bottom"}
NUMBER_BOX: Look = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}


def draw_arm_maps_by_layer(run: RunData) -> Figure:
    """Draw every layer's map, in reading order; controls are left out where maps would be too small."""
    maps = _maps_by_condition(run)
    layers = sorted({layer for by_layer in maps.values() for layer in by_layer})
    alone = {label: wrapped(label, 18, 2) for label in (BEFORE, *arms(run)) if label in maps}  # condition → its name
    named: dict[str, str] = {}
    for label, name in alone.items():
        named |= {label: name} | ({_control_of(label): CONTROL_NAME} if _control_of(label) in maps else {})
    note, (rows, across, size) = "every layer", _largest_maps(len(named), len(layers))
    if alone != named and size < SMALLEST_OF_LAYER:
        note, named = "every layer, controls left out", alone
        rows, across, size = _largest_maps(len(named), len(layers))
    width = max(NAMES + across * size, COLUMN)
    text = title(run, width, note, MAPS_NOTE)
    figure = new_figure(width, (rows * size + GAP) * len(named) + 0.13 * text.count("\n") + BELOW, "compressed")
    axes = figure.subplots(len(named), 1, squeeze=False)[:, 0]
    tokens = len(next(iter(maps[BEFORE].values())))
    pitch = tokens + max(1, round(GAP_OF_LAYERS * tokens))  # pixels from map to map
    for ax, (condition, name) in zip(axes, named.items(), strict=True):
        weights = np.full((rows * pitch, across * pitch), np.nan)
        masked = np.ones_like(weights, bool)  # cells without a layer are white
        for place, layer in enumerate(layers):
            row, column = divmod(place, across)
            spot = np.s_[row * pitch : row * pitch + tokens, column * pitch : column * pitch + tokens]
            weights[spot] = maps[condition].get(layer, np.nan)  # a layer without a map is gray below its diagonal
            masked[spot] = plot.above_diagonal(weights[spot])
            if rows > 1:  # in the upper right corners, which a causal mask leaves empty
                look = LAYER_NUMBER | {"ha": "right", "va": "top", "bbox": NUMBER_BOX}
                ax.text(column * pitch + tokens, row * pitch, str(layer), **look)
            elif condition == BEFORE:
                ax.text((column + 0.5) * pitch, -0.06 * pitch, str(layer), **LAYER_NUMBER)
        image = _draw_map(ax, weights, masked)
        ax.spines[:].set_visible(False)
        color = "0.4" if name == CONTROL_NAME else "black"
        ax.set_ylabel(name, fontsize=SMALL_FONT, color=color, rotation=0, ha="right", va="center", labelpad=3)
    if rows == 1:
        axes[0].text(-0.3 * pitch, -0.06 * pitch, "layer", **LAYER_NUMBER | {"ha": "right"})
    _color_bar(figure, image, axes, location="bottom", shrink=1.1 / (across * size), aspect=15)
    words = f"down: {tokens} queries, across: {tokens} keys" + (", number: layer" if rows > 1 else "")
    figure.supxlabel(words, fontsize=SMALL_FONT, color="0.3")
    return figure.finish(text)


def _largest_maps(conditions: int, layers: int) -> tuple[int, int, float]:
    """Return the fewest rows of a condition with which maps are nearly as large as possible, maps in a row, inches."""
    height = (PAGE_HEIGHT - BELOW) / conditions - GAP
    pages = []
    for rows in range(1, layers + 1):
        across = -(-layers // rows)
        most = 0.71 if rows == 1 else 0.48  # inches
        pages.append((rows, across, min((WIDE - NAMES) / across, height / rows, most)))
    largest = max(size for *_, size in pages)
    return next(page for page in pages if page[2] >= 0.85 * largest)


# --- Perplexity of a long text read through a short cache (StreamingLLM, Xiao et al. 2024, figure 3 and table 1).
# Left, by token, for the shortest window: dense attention, only the last tokens, and the last tokens with the largest
# number of first tokens. Right, over all tokens, by the number of first tokens kept, for every window.


def draw_streaming_perplexity(run: RunData) -> Figure:
    table = run.tables["streaming"]
    dense_look: Look = style.SINK | {"marker": "", "label": "dense"}
    figure = new_figure(WIDE, 2.4)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    buckets, totals = table[table["bucket"] >= 0], table[table["bucket"] < 0]
    window, most = int(buckets.loc[buckets["window"] > 0, "window"].min()), int(buckets["keep"].max())
    ways = [("dense", -1, 0, dense_look), ("window", window, 0, style.OTHERS | {"label": f"last {window}"})]
    if most:
        ways.append(("sinks kept", window, most, style.HIGHEST | {"label": f"first {most} and last {window}"}))
    for method, last, keep, look in ways:
        of_method = (buckets["method"] == method) & (buckets["window"] == last) & (buckets["keep"] == keep)
        by_bucket = buckets[of_method].set_index("bucket")["perplexity"].sort_index()
        starts = by_bucket.index.to_numpy(float)
        width = np.diff(starts).min() if len(starts) > 1 else 1.0  # the last bucket may be shorter
        plot.curve(left, by_bucket.set_axis(starts + (width - 1) / 2), **look)
    left.set_title(f"by token; the window of {window} slides from the dotted line on")
    left.set_xlabel("token index")
    left.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    streams = totals[totals["window"] > 0]
    keeps = sorted(streams["keep"].unique())  # such as 0, 1, 2, 4, 8, drawn at equal distances
    windows = sorted(streams["window"].unique())
    dense = float(totals.loc[totals["method"] == "dense", "perplexity"].iloc[0])
    right.plot([-0.3, len(keeps) - 0.7], [dense, dense], **dense_look)
    for nth, window_ in enumerate(windows):
        by_keep = streams[streams["window"] == window_].set_index("keep")["perplexity"].reindex(keeps)
        look = {
            "color": style.GRADUAL(1 - 0.65 * nth / max(len(windows) - 1, 1)),
            "marker": style.MARKERS[nth % len(style.MARKERS)],
            "linestyle": style.PLAIN_DASHES[nth % len(style.PLAIN_DASHES)],
        }
        right.plot(range(len(keeps)), by_keep.to_numpy(float), zorder=3, label=f"last {window_}", **look)
    right.set_title("over all tokens")
    right.set_xticks(range(len(keeps)), [str(keep) for keep in keeps])
    right.set_xlabel("first tokens kept")
    values = plot.drawn(right, "y")
    values = values[np.isfinite(values)]
    is_wide = bool(len(values) and values.max() > 10 * values.min())
    for ax, log, columns in ((left, True, 3), (right, is_wide, 2)):
        if plot.value_axis(ax, "perplexity", log=log):
            # the legend is above the lines, where the y axis is extended
            low, high = ax.get_ylim()
            room = 0.1 + 0.12 * -(-len(ax.get_legend_handles_labels()[1]) // columns)
            ax.set_ylim(low, high * (high / low) ** room if ax.get_yscale() == "log" else high + room * (high - low))
            ax.legend(loc="upper center", ncols=columns, columnspacing=1.2, borderaxespad=0.1)
    if left.get_legend():
        left.axvline(window, color=style.GRAY, linewidth=0.7, linestyle=(0, (1, 2)), zorder=1)
    return figure.finish(title(run, WIDE))

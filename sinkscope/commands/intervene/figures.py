"""Figures of intervention arms and their controls."""

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator, NullLocator

from sinkscope.commands.intervene.findings import (
    NO_POSITION,
    SPREAD,
    Effect,
    arms,
    effect_of,
    interval,
    interval_by_layer,
)
from sinkscope.figures import plot, style
from sinkscope.figures.labels import title, wrapped
from sinkscope.figures.style import COLUMN, NAVY, OTHERS, REFERENCE, SINK, TEXT, WIDE, Figure, Look, new_figure
from sinkscope.results.metrics import METRICS
from sinkscope.results.run import RunData

PAGE = 9.0  # inches, at most
BEFORE, CONTROL = "before", "random control"

# --- The effect of every arm and of random changes of the same kind: a row for each arm, a panel for each metric.
# The change has its 95 % interval over sequences if the run has tables by sequence.

LETTERS = 24  # characters in a line of an arm's name
ABOVE, UNDER = -0.17, 0.17  # offsets of the arm and of its controls in a row of height 1

AFTER: Look = {"color": NAVY, "linewidth": 0.8, "marker": "o", "markersize": 4, "markevery": [-1]}
INTERVAL: Look = {"color": NAVY, "linewidth": 2.2, "solid_capstyle": "butt"}
DRAWS: Look = {"color": "black", "linestyle": "none", "marker": "|", "markersize": 4.5, "markeredgewidth": 0.6}
SPREAD_BAR: Look = {"color": "0.72", "linewidth": 3.5, "solid_capstyle": "butt"}
# metric, choice among the positions that an arm watches (its sink first), may be logarithmic, width
PANELS: tuple[tuple[str, Callable[[list[int]], list[int]], bool, float], ...] = (
    ("sink_rate", lambda watched: watched[:1], False, 1.0),
    ("window_mass", lambda watched: watched[1:], False, 0.75),
    ("perplexity", lambda watched: [NO_POSITION], True, 1.0),
    ("massive_magnitude", lambda watched: [NO_POSITION], True, 1.0),
)


def draw_effects(run: RunData) -> Figure:
    watched = _watched(run)
    panels = [panel for panel in PANELS if any(panel[1](positions) for positions in watched.values())]
    figure = new_figure(WIDE, min(0.3 * len(watched) + 1.15, PAGE))
    widths = [width for *_, width in panels]
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False, width_ratios=widths)[0]
    plot.name_rows(axes[0], [wrapped(label, LETTERS, 2) for label in watched], shaded=False)
    for ax, (metric, positions_of, may_be_log, _) in zip(axes, panels, strict=True):
        plot.shade_rows(ax, len(watched))
        ax.tick_params(axis="y", length=0)
        _draw_metric(ax, run, metric, {label: positions_of(some) for label, some in watched.items()}, may_be_log)
    signs = {"before": REFERENCE, "after": AFTER | {"markevery": None}}
    if "attention_by_sequence" in run.tables:
        signs["change, 95 % over sequences"] = INTERVAL
    draws = run.tables["effect"]["draw"].max() + 1
    if draws > 0:
        signs[f"random control, {draws} draws"] = DRAWS
    if draws > 1:
        signs[f"their mean ± {SPREAD:g} standard deviations"] = SPREAD_BAR
    return figure.finish(title(run, WIDE), signs, ncols=3)


def _watched(run: RunData) -> dict[str, list[int]]:
    """Return the positions that each arm watches; a streaming arm watches none and is not drawn."""
    return {label: arm["watched"] for label, arm in arms(run).items() if arm["watched"]}


def _draw_metric(ax: Axes, run: RunData, metric: str, positions: dict[str, list[int]], may_be_log: bool) -> None:
    """Draw one metric of all arms, a row for each arm; several positions of an arm are drawn one below the other."""
    different = {position for some in positions.values() for position in some}
    where = f"\nat position {min(different)}" if len(different) == 1 else "\nat @position"
    where = "" if different == {NO_POSITION} else where
    ax.set_xlabel(METRICS[metric].axis.replace(" (", "\n(") + where)  # panels are narrow
    effects = {
        (label, at): (effect_of(run, label, metric, at), interval(run, label, metric, at) or ())
        for label, some in positions.items()
        for at in some
    }
    values = [x for one, ends in effects.values() for x in (one.before, one.after, *one.controls, *ends)]
    found = _drawable(values, log=True)
    # a linear axis finds its own range, and a log axis over less than a power of ten could not be read
    log = bool(may_be_log and len(found) and found.max() >= 10 * found.min())
    for row, (label, some) in enumerate(positions.items()):
        if not some:
            ax.text(0.5, row, "–", transform=ax.get_yaxis_transform(), ha="center", va="center", color="0.5")
        for place, position in enumerate(some):
            height = 1 / len(some)
            middle = row - 0.5 + height * (place + 0.5)
            _draw_effect(ax, *effects[label, position], middle, height, log)
            if len(different) > 1:
                ax.text(1.02, middle, f"@{position}", transform=ax.get_yaxis_transform(), va="center", fontsize=6)
    _value_axis(ax, log, from_zero=not may_be_log)


def _draw_effect(ax: Axes, effect: Effect, ends: Sequence[float], middle: float, height: float, log: bool) -> None:
    """Draw interval, controls, before and after around `middle`. Lines of the value before join across rows."""
    above, under = middle + ABOVE * height, middle + UNDER * height
    change = _drawable(ends, log)
    if len(change) == 2:
        ax.plot(change, [above] * 2, **INTERVAL)
    before, after = _drawable([effect.before], log), _drawable([effect.after], log)
    controls = _drawable(effect.controls, log)
    if len(controls) > 1:  # mean ± 2 standard deviations; on a log axis, those of the logarithms
        values = np.log(controls) if log else controls
        spread = values.mean() + SPREAD * values.std(ddof=1) * np.array([-1, 1])
        ax.plot(np.exp(spread) if log else spread, [under, under], **SPREAD_BAR)
    ax.plot(controls, np.full(len(controls), under), **DRAWS)
    for value in before:
        ax.plot([value, value], [middle - height / 2, middle + height / 2], **REFERENCE)
    if len(after):
        both = np.concatenate([before, after])
        ax.plot(both, np.full(len(both), above), **AFTER)
    else:
        transform = ax.get_yaxis_transform()
        ax.text(0.98, above, f"after: {effect.after:g}", transform=transform, ha="right", va="center", fontsize=6)


def _drawable(values: Sequence[float], log: bool) -> np.ndarray:
    array = np.array(values, float)
    return array[np.isfinite(array) & (array > 0 if log else True)]


def _value_axis(ax: Axes, log: bool, from_zero: bool) -> None:
    """Set the scale after drawing: logarithmic, from 0 on, or as narrow as the values."""
    values = plot.drawn(ax, "x")
    if not len(values):
        ax.set_xticks([])
        ax.text(0.5, 0.5, "no values", transform=ax.transAxes, ha="center", va="center", color="0.4", fontsize=7)
        return
    low, high = values.min(), values.max()
    if log:
        plot.wide_x_axis(ax, low, high, room=1.04)
        return
    if from_zero:
        ax.set_xlim(min(low, 0) - 0.05 * max(high, 0.01), 1.1 * max(high, 0.01))
    else:
        room = 0.08 * ((high - low) or abs(high) or 1.0)
        ax.set_xlim(low - room, high + room)
    ax.xaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))  # numbers may be long


# --- The layers in which an arm acts: sink rate by layer before and after, with the spread of the control.
# The change has its 95 % interval over sequences if the run has tables by sequence.

ACROSS = 4
BAND: Look = {"color": "0.75", "linewidth": 1.5, "zorder": 1}  # its edge is visible without a spread


def draw_effects_by_layer(run: RunData) -> Figure:
    table = run.tables["effect"]
    rates = table[(table["metric"] == "sink_rate") & (table["layer"] >= 0)]
    watched = _watched(run)
    sinks = {positions[0] for positions in watched.values()}
    targets = {position for positions in watched.values() for position in positions[1:]}
    across = min(ACROSS, len(watched))
    width = max(WIDE * across / ACROSS, COLUMN)
    down = -(-len(watched) // across)
    figure = new_figure(width, min(1.3 * down + 0.75, PAGE))
    axes = plot.panel_grid(figure, len(watched), across)
    for place, (ax, (label, positions)) in enumerate(zip(axes, watched.items(), strict=True)):
        _draw_arm(ax, rates[rates["condition"] == label], positions, targets)
        for nth, position in enumerate(positions):
            ends = interval_by_layer(run, label, "sink_rate", position)
            if len(ends):
                look = {"color": (OTHERS if nth else SINK)["color"], "alpha": 0.3, "linewidth": 0, "zorder": 1.5}
                name = None if nth else "change, 95 % over sequences"
                plot.band_by_layer(ax, ends["low"], ends["high"], label=name, **look)
        name = wrapped(label, LETTERS, 2) + (f"\nposition {positions[0]}" if len(sinks) > 1 else "")
        plot.panel(ax, name, "", "layer" if place >= across * (down - 1) else "", share=True)
    where = f" at position {sinks.pop()}" if len(sinks) == 1 else ""
    figure.supylabel(METRICS["sink_rate"].short + where)
    once = {label: handle for ax in axes for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    handles = [once[label] for label in sorted(once, key=lambda label: label.startswith("random"))]
    return figure.finish(title(run, width), handles, ncols=3 if width == WIDE else 2)


def _draw_arm(ax: Axes, rates: pd.DataFrame, positions: list[int], all_targets: set[int]) -> None:
    """Draw before, after, and the mean ± 2 standard deviations of the controls; layers without draws leave a gap."""

    def by_layer(arm: str, position: int) -> pd.Series:
        return rates[(rates["arm"] == arm) & (rates["position"] == position)].set_index("layer")["value"]

    sink, *targets = positions
    plot.line_by_layer(ax, by_layer("before", sink), label="before", **REFERENCE | {"zorder": 3})
    plot.line_by_layer(ax, by_layer("after", sink), label="after", **SINK)
    for target in targets:
        where = f"position {target}" if len(all_targets) == 1 else "the target"
        plot.line_by_layer(ax, by_layer("after", target), label=f"after, at {where}", **OTHERS)
    controls = rates[(rates["arm"] == "control") & (rates["position"] == sink)]
    if controls.empty:
        return
    values = controls.groupby("layer")["value"]
    mean, deviation = values.mean(), SPREAD * values.std().fillna(0)
    draws = controls["draw"].nunique()
    name = f"random control: mean ± {SPREAD:g} std of {draws} draws" if draws > 1 else "random control, 1 draw"
    plot.band_by_layer(ax, mean - deviation, mean + deviation, label=name, **BAND)


# --- Over-mixing (Barbero et al. 2025) before and under each arm

RANGE: Look = {"color": "0.75", "linewidth": 0, "alpha": 0.7}


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
                ax.fill_between(every.index, every.min(axis=1), every.max(axis=1), label="range of controls", **RANGE)
            plot.curve(ax, values[label], label=wrapped(label, 34, 1), **look)
    plot.panel(left, "mean over later tokens", "‖h − h′‖ ÷ ‖h‖")
    plot.panel(right, "mean over layers", "", x="tokens after the changed one")
    right.set_xscale("log", base=2)
    right.set_xticks(distances := sorted(table["distance"].unique()), [str(distance) for distance in distances])
    once = {label: handle for handle, label in zip(*left.get_legend_handles_labels(), strict=True)}
    return figure.finish(title(run, TEXT), list(once.values()), ncols=2)


# --- One layer's attention maps under every arm of an experiment (NU figure 3).
# A few maps are in one row, with each arm's random control next to it. Many maps are in several rows, with each control
# below its arm and without a name, and the color bar below the map of the unchanged model, which has no control. The
# number in a map is the mean attention weight on the sink.

MEAN = "mean over heads and sequences"
FAINTEST = 1e-2  # lower end of the color scale: means over heads and sequences are seldom smaller

ARM_MAPS_ACROSS = 8  # maps in a row
SMALLEST, GAP = 0.745, 0.045  # inches: a map, and the space between maps
LEFT, RIGHT, BELOW = 0.32, 0.05, 0.2  # inches: margins
BAR = 0.42  # inches: the color bar, if it is next to the maps
TITLE, LINE = 0.17, 0.13  # inches: the first line of the title, and each further line
NAME_LINE, LETTER = 0.1, 0.053  # inches: a line of an arm's name, and a letter
SMALL = 6.5  # points

Maps = dict[str, dict[int, np.ndarray]]  # condition → layer → (query, key) weights, NaN where there are none


def draw_arm_maps(run: RunData) -> Figure:
    maps = _maps_by_condition(run)
    # The change of a layer is the median over arms, so that an arm that masks the sink does not decide the layer.
    changes: dict[int, list[float]] = {layer: [] for layer in maps[BEFORE]}
    for label, arm in arms(run).items():
        for layer in maps.get(label, {}).keys() & changes.keys():
            before, after = (_to_sink(maps[name][layer], arm["watched"][0]) for name in (BEFORE, label))
            changes[layer].append(abs(after - before))
    layer = max(changes, key=lambda layer: np.nan_to_num(np.median(changes[layer])) if changes[layer] else 0.0)
    cells = _cells(run, maps)
    down, across = (1 + max(places) for places in zip(*cells, strict=True))
    has_room = any(not name for _, name, _ in cells.values())  # room for the color bar, below the first map
    bar_width = 0.0 if has_room else BAR
    size = max((COLUMN - LEFT - RIGHT - bar_width) / across - GAP, SMALLEST)
    names = {place: wrapped(name, int(size / LETTER)) for place, (_, name, _) in cells.items()}
    lines = [max(len(names[place].splitlines()) for place in cells if place[0] == row) for row in range(down)]
    width = LEFT + across * (size + GAP) + bar_width + RIGHT
    text = title(run, width, f"layer {layer} (sink changes most)", MEAN)
    tops = TITLE + LINE * text.count("\n") + np.cumsum(np.array(lines) * NAME_LINE + size + GAP) - size

    figure = _placed_figure(width, tops[-1] + size + (0.05 if has_room else BELOW), text)
    for (row, column), (condition, name, sink) in cells.items():
        ax = _axes_at(figure, LEFT + column * (size + GAP), tops[row], size, size)
        weights = maps[condition].get(layer, np.full((1, 1), np.nan))
        image = _draw_map(ax, weights)
        ax.set_title(names[row, column], fontsize=SMALL, pad=2, linespacing=1.0)
        weight = _to_sink(weights, sink)
        if np.isfinite(weight):
            ax.text(0.98, 0.96, f"sink {weight:.2f}", transform=ax.transAxes, ha="right", va="top", fontsize=SMALL)
        if column == 0 and row == (0 if has_room else down - 1):  # the map has room below
            _name_axes(ax)
        if not name and column == (row == 1):  # the first of its row
            ax.set_ylabel("random\ncontrol", fontsize=SMALL)
    if has_room:
        bar = _axes_at(figure, LEFT, tops[1] + 0.45 * size, 0.6 * size, 0.07)
    else:
        bar = _axes_at(figure, width - BAR - RIGHT + 0.02, tops[0], 0.07, size)
    _color_bar(figure, image, bar)
    return figure


def _cells(run: RunData, maps: Maps) -> dict[tuple[int, int], tuple[str, str, int]]:
    """Return (row, column) of a map → its condition, its name (empty for a control below its arm) and its sink."""
    labels = [label for label in arms(run) if label in maps]
    controlled = {label for label in labels if _control_of(label) in maps}
    sinks = {label: arms(run)[label]["watched"][0] for label in labels}
    shown = {BEFORE: next(iter(sinks.values()), 0)} | sinks
    in_one_row = len(shown) + len(controlled) <= ARM_MAPS_ACROSS
    across = -(-len(shown) // -(-len(shown) // ARM_MAPS_ACROSS))  # rows of about equal length
    cells: dict[tuple[int, int], tuple[str, str, int]] = {}
    for place, (label, sink) in enumerate(shown.items()):
        row, column = (2 if controlled else 1) * (place // across), place % across
        if in_one_row:
            row, column = 0, len(cells)
        cells[row, column] = label, label, sink
        if label in controlled:
            below = (0, column + 1) if in_one_row else (row + 1, column)
            cells[below] = _control_of(label), CONTROL if in_one_row else "", sink
    return cells


def _name_axes(ax: Axes) -> None:
    ends = [0, int(ax.get_xlim()[1])]
    ax.set(xticks=ends, yticks=ends)
    first, *last = ax.get_xticklabels()
    first.set_horizontalalignment("left")
    for label in last:
        label.set_horizontalalignment("right")  # so that the label does not reach into the next map
    ax.tick_params(labelsize=SMALL, pad=1)
    ax.set_xlabel("key", fontsize=SMALL, labelpad=-6)
    ax.set_ylabel("query", fontsize=SMALL, labelpad=-6)


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


def _placed_figure(width: float, height: float, text: str) -> Figure:
    """Make a figure whose parts are placed in inches, closer together than a layout engine places them."""
    figure = new_figure(width, height)
    figure.set_layout_engine("none")
    return figure.finish(text, y=1 - 0.04 / figure.get_figheight(), va="top")


def _axes_at(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Add axes placed in inches from the left and from the top."""
    across, down = figure.get_size_inches()
    return figure.add_axes((left / across, 1 - (top + height) / down, width / across, height / down))


def _draw_map(ax: Axes, weights: np.ndarray, masked: np.ndarray | None = None) -> AxesImage:
    image = plot.draw_weights(ax, weights, FAINTEST, masked)
    ax.spines[:].set(color="0.6", linewidth=0.4)
    ax.xaxis.set_major_locator(NullLocator())
    ax.yaxis.set_major_locator(NullLocator())
    return image


def _color_bar(figure: Figure, image: AxesImage, ax: Axes) -> None:
    """Draw the color bar along the longer side of `ax`."""
    box = ax.get_window_extent()
    along = "horizontal" if box.width > box.height else "vertical"
    bar = figure.colorbar(image, cax=ax, orientation=along, extend="min")
    bar.set_ticks([FAINTEST, 0.1, 1], labels=[f"{FAINTEST:g}", "0.1", "1"])
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=SMALL, pad=1)
    bar.set_label("attention weight", fontsize=SMALL, labelpad=1)


# --- The attention maps of all layers under every arm (NU figures 7 to 13, on one page).
# The maps of an arm are one image, because hundreds of axes would take long to save. If its layers do not fit in one
# row, it has several rows, and maps are as large as the page allows.

ALL_LAYERS_LEFT, ALL_LAYERS_RIGHT = 1.05, 0.04  # inches: margin with the names, empty margin
TOP, ALL_LAYERS_BELOW = 0.36, 0.4  # inches: margin with title and layers, margin with the color bar
ALL_LAYERS_GAP = 0.06  # between maps, as a share of a map
NUMBER: Look = {"fontsize": 6, "ha": "center", "va": "bottom"}
NUMBER_BOX: Look = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}


def draw_arm_maps_by_layer(run: RunData) -> Figure:
    maps = _maps_by_condition(run)
    layers = sorted({layer for by_layer in maps.values() for layer in by_layer})
    labels = [BEFORE, *(label for label in arms(run) if label in maps)]
    alone = {label: wrapped(label, 18, 2) for label in labels}  # condition → name next to its maps
    named: dict[str, str] = {}
    for label in labels:
        named |= {label: alone[label]} | ({_control_of(label): CONTROL} if _control_of(label) in maps else {})
    note, (rows, across, size) = "every layer", _largest(named, len(layers))
    if alone != named and size < 0.24:  # inches, which could not be read
        note, named, (rows, across, size) = "every layer, controls left out", alone, _largest(alone, len(layers))
    width = max(ALL_LAYERS_LEFT + across * size + ALL_LAYERS_RIGHT, COLUMN)
    text = title(run, width, note, MEAN)
    top = TOP + 0.13 * text.count("\n") - (0.13 if rows > 1 else 0)  # layers are named above a single row
    tops = np.cumsum([0.0, *(gap + rows * size for gap in [*_gaps(named)[1:], 0.0])])  # of each condition; the end
    figure = _placed_figure(width, top + tops[-1] + ALL_LAYERS_BELOW, text)
    for (condition, name), above in zip(named.items(), tops, strict=False):
        ax = _axes_at(figure, ALL_LAYERS_LEFT, top + above, across * size, rows * size)
        image = _mosaic(ax, maps[condition], layers, rows, across)
        if rows > 1 or condition == BEFORE:
            _number(ax, layers, rows, across)
        color = "0.4" if name == CONTROL else "black"
        ax.set_ylabel(name, fontsize=SMALL, color=color, rotation=0, ha="right", va="center", labelpad=3)
    bar = _axes_at(figure, ALL_LAYERS_LEFT, figure.get_figheight() - ALL_LAYERS_BELOW + 0.04, 1.1, 0.07)
    _color_bar(figure, image, bar)
    tokens = len(next(iter(maps[BEFORE].values())))
    words = f"down: {tokens} queries\nacross: {tokens} keys" + ("\nnumber: layer" if rows > 1 else "")
    bar.text(1.1, 1, words, transform=bar.transAxes, va="top", fontsize=SMALL, color="0.3")
    return figure


def _largest(conditions: dict[str, str], layers: int) -> tuple[int, int, float]:
    """Return the fewest rows of a condition with which maps are nearly as large as possible, maps in a row, inches."""
    height = (PAGE - TOP - 0.13 - ALL_LAYERS_BELOW - sum(_gaps(conditions))) / len(conditions)
    pages = []
    for rows in range(1, layers + 1):
        across = -(-layers // rows)
        most = 0.71 if rows == 1 else 0.48  # inches
        size = min((WIDE - ALL_LAYERS_LEFT - ALL_LAYERS_RIGHT) / across, height / rows, most)
        pages.append((rows, across, size))
    largest = max(size for *_, size in pages)
    return next(page for page in pages if page[2] >= 0.85 * largest)


def _gaps(conditions: dict[str, str]) -> list[float]:
    """Return the inches of space above each condition."""
    return [0.0, *(0.03 if name == CONTROL else 0.1 for name in list(conditions.values())[1:])]


def _mosaic(ax: Axes, by_layer: dict[int, np.ndarray], layers: list[int], rows: int, across: int) -> AxesImage:
    """Draw maps in reading order. A layer without a map is gray below its diagonal; cells without a layer are white."""
    size = len(next(iter(by_layer.values())))
    pitch = size + max(1, round(ALL_LAYERS_GAP * size))
    weights = np.full((rows * pitch, across * pitch), np.nan)
    masked = np.ones_like(weights, bool)
    for place, layer in enumerate(layers):
        row, column = divmod(place, across)
        spot = np.s_[row * pitch : row * pitch + size, column * pitch : column * pitch + size]
        weights[spot] = by_layer.get(layer, np.nan)
        masked[spot] = plot.above_diagonal(weights[spot])
    image = _draw_map(ax, weights, masked)
    ax.spines[:].set_visible(False)
    return image


def _number(ax: Axes, layers: list[int], rows: int, across: int) -> None:
    """Number the layers: above a single row, else in the upper right corners, which a causal mask leaves empty."""
    width = ax.get_xlim()[1] / across
    if rows == 1:
        ax.text(-0.3 * width, -0.06 * width, "layer", **NUMBER | {"ha": "right"})
    for place, layer in enumerate(layers):
        row, column = divmod(place, across)
        if rows == 1:
            ax.text((column + 0.5) * width, -0.06 * width, str(layer), **NUMBER)
        else:
            look = NUMBER | {"ha": "right", "va": "top", "bbox": NUMBER_BOX}
            ax.text((column + 1 - ALL_LAYERS_GAP) * width, row * width, str(layer), **look)

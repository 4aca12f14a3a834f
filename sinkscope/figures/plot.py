"""Helpers that several figures share: curves, axes, training steps, rows, grids of panels, heat maps, texts."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from matplotlib.text import Annotation
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from sinkscope.figures import style
from sinkscope.figures.labels import escape
from sinkscope.figures.style import OTHERS, SEQUENTIAL, SINK, Figure, Look
from sinkscope.results.side_by_side import shorten

ACROSS = 3  # panels in a row
MOST_MARKERS = 20  # markers on one line; more would overlap

# --- curves


def curve(ax: Axes, values: pd.Series, markers: int = MOST_MARKERS, **look: Any) -> Line2D:
    """Draw `values` by their index, with at most `markers` markers."""
    every = 1 + (len(values) - 1) // markers
    (line,) = ax.plot(values.index, values.to_numpy(float), markevery=every, **look)
    return line


def curve_with_range(ax: Axes, rows: pd.DataFrame, markers: int = MOST_MARKERS, **look: Any) -> None:
    """Draw the mean of `value` by `step`, with a band from the lowest to the highest value."""
    by_step = rows.groupby("step")["value"].agg(["mean", "min", "max"])
    curve(ax, by_step["mean"], markers, **look)
    ax.fill_between(by_step.index, by_step["min"], by_step["max"], color=look["color"], alpha=0.25, linewidth=0)


def line_by_layer(ax: Axes, values: pd.Series, **look: Any) -> Line2D:
    """Draw `values` by layer (their index). Layers without a value leave a gap."""
    if len(values):
        values = values.reindex(range(int(values.index.min()), int(values.index.max()) + 1))
    return curve(ax, values, **look)


def band_by_layer(ax: Axes, low: pd.Series, high: pd.Series, **look: Any) -> None:
    """Draw a band from `low` to `high` by layer. Layers without a value are gaps; a layer between two gaps is a bar."""
    if low.empty:
        return
    layers = range(int(low.index.min()), int(low.index.max()) + 1)
    low, high = low.reindex(layers), high.reindex(layers)
    ax.fill_between(layers, low, high, **look)
    there = low.notna()
    alone = there & ~there.shift(1, fill_value=False) & ~there.shift(-1, fill_value=False)
    if len(layers) > 1:
        for layer in low.index[alone]:
            ax.fill_between([layer - 0.15, layer + 0.15], low[layer], high[layer], **look)


def first_and_others(ax: Axes, table: pd.DataFrame, column: str) -> None:
    """Draw position 0 and the mean over the others by layer: means over heads, with bands of 10 % to 90 % of heads."""
    at_first = table["position"] == 0
    looks = ("position 0", SINK), ("mean over the other positions", OTHERS)
    for rows, (label, look) in zip((table[at_first], table[~at_first]), looks, strict=True):
        if rows.empty:  # with --positions 1
            continue
        by_layer = rows.groupby(["layer", "head"])[column].mean().groupby("layer")
        low, high = by_layer.quantile(0.1), by_layer.quantile(0.9)
        band_by_layer(ax, low, high, color=look["color"], alpha=0.2, linewidth=0)
        line_by_layer(ax, by_layer.mean(), label=label, **look)


def handles_of(axes: Iterable[Axes]) -> list[Artist]:
    """Return one artist for each label in the panels, for a common legend."""
    named = (zip(*ax.get_legend_handles_labels(), strict=True) for ax in axes)
    return list({label: handle for panel in named for handle, label in panel}.values())


def finite(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table with NaN in place of infinite values."""
    return table.replace([np.inf, -np.inf], np.nan)


def drawn(ax: Axes, which: str) -> np.ndarray:
    """Return the x or y values of all lines of a panel."""
    values = [np.asarray(line.get_data()[which == "y"], float) for line in ax.lines]
    return np.concatenate(values) if values else np.empty(0)


# --- axes


def panel(ax: Axes, title: str, unit: str, x: str | None = "layer", **scale: Any) -> bool:
    """Name a panel after drawing, with whole numbers across and values upwards as in `value_axis`.

    `x` is None in a panel whose x axis is labeled already.
    """
    ax.set_title(title)
    whole_numbers(ax, "x")
    if x is not None:
        ax.set_xlabel(x)
    return value_axis(ax, unit, **scale)


def whole_numbers(ax: Axes, which: str) -> None:
    """Put ticks at whole numbers only, and leave some room around a single value."""
    axis = ax.xaxis if which == "x" else ax.yaxis
    axis.set_major_locator(MaxNLocator(nbins="auto", integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    values = drawn(ax, which)
    if len(values) and values.min() == values.max():
        (ax.set_xlim if which == "x" else ax.set_ylim)(values[0] - 0.5, values[0] + 0.5)


def value_axis(ax: Axes, unit: str, log: bool = False, share: bool = False, lacking: str = "") -> bool:
    """Set label and scale of the y axis after drawing: linear, logarithmic, or a share from 0 to 1.

    Return whether any value can be shown; if not, the panel says that there are none, or what `lacking` says.
    """
    values = drawn(ax, "y")
    if not np.any(np.isfinite(values) & (values > 0 if log else True)):
        say(ax, lacking or ("no positive values" if log else "no values"))
        return False
    ax.set_ylabel(unit)
    grid(ax, "y")
    if share:
        ax.set_ylim(-0.03, 1.03)
        ax.set_yticks([0, 0.5, 1])
    elif log:
        log_axis(ax, "y")
    return True


def grid(ax: Axes, which: Literal["x", "y"]) -> None:
    ax.grid(True, axis=which, color="0.9", linewidth=0.4)


def log_axis(ax: Axes, which: Literal["x", "y"], *reached: float) -> None:
    """Make an axis logarithmic, with two powers of ten at least; it spans its values and those that have to be reached.

    Ticks are at powers of ten, with as many numbers as fit; short numbers are written out.
    """
    axis = ax.xaxis if which == "x" else ax.yaxis
    getattr(ax, f"set_{which}scale")("log", nonpositive="mask")  # this also resets the ticks
    ends = (*axis.get_view_interval(), *reached)
    low, high = min(ends), max(ends)
    if 0 < low < high < np.inf:  # the ends are moved apart as little as needed
        down, up = np.log10(low), np.log10(high)
        first, last = np.ceil(down - 1e-9), np.floor(up + 1e-9)  # the tolerance of a logarithm
        while last - first < 1:
            if down - (first - 1) <= last + 1 - up:
                first -= 1
            else:
                last += 1
        low, high = min(low, 10**first), max(high, 10**last)
    getattr(ax, f"set_{which}lim")(low, high)
    low, high = axis.get_view_interval()
    many = high / low > 1e5  # the ticks between powers of ten would be a gray bar
    axis.set_major_locator(LogLocator())
    axis.set_minor_locator(LogLocator(subs=(1.0,) if many else tuple(range(2, 10)), numticks=99))
    axis.set_minor_formatter(NullFormatter())
    if low >= 1e-3 and high < 5e4:
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def wide_x_axis(ax: Axes, low: float, high: float, room: float) -> None:
    """Make the x axis logarithmic if the values span a power of ten, else linear and narrow, for small changes.

    `room` is the smallest factor beyond both ends.
    """
    room *= (high / low) ** 0.06
    if high / low < 10:
        ax.set_xlim(low - (room - 1) * high, room * high)
        ax.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
        return
    ax.set_xlim(low / room, high * room)
    log_axis(ax, "x")


def step_axis(ax: Axes, steps: Sequence[int]) -> None:
    """Make the axis linear for evenly spread steps, else logarithmic, with room for step 0."""
    if min(steps) == max(steps):
        ax.set_xlim(steps[0] - 0.5, steps[0] + 0.5)
        ax.set_xticks([steps[0]])
    elif min(steps) < 0 or max(steps) <= 5 * np.median(steps):
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    else:
        least = min(step for step in steps if step > 0)
        if least == min(steps):
            ax.set_xscale("log")
        else:
            ax.set_xscale("symlog", linthresh=least, linscale=0.5)
            ax.set_xlim(-0.3 * least, 2 * max(steps))
        decades = range(math.floor(math.log10(least)), math.ceil(math.log10(max(steps))) + 1)
        within = [10**decade for decade in decades if least <= 10**decade <= max(steps)]
        ticks = within[:: 1 + len(within) // 5] if len(within) > 1 else [least, max(steps)]
        ax.set_xticks([0, *ticks] if 0 in steps else ticks)
        ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda step, _: step_label(step)))


def step_label(step: float) -> str:
    """Return a short form of a step, for example «143k»."""
    for size, sign in ((10**6, "M"), (10**3, "k")):
        if abs(step) >= size:
            return f"{step / size:g}{sign}"
    return f"{step:g}"


# --- panels


def panel_grid(figure: Figure, count: int, across: int, x: str = "", sharey: bool = True) -> list[Axes]:
    """Make panels with a common x axis, and by default a common y axis, in rows of `across`.

    The lowest panel of each column has the numbers and the label of the x axis.
    """
    grid = figure.subplots(-(-count // across), across, sharex=True, sharey=sharey, squeeze=False)
    axes: list[Axes] = list(grid.flat[:count])
    for ax in grid.flat[count:]:
        ax.set_visible(False)
    for ax in axes[-across:]:
        ax.tick_params(labelbottom=True)
        ax.set_xlabel(x)
    return axes


def name_rows(ax: Axes, names: Sequence[str], shaded: bool = True) -> None:
    """Make a row for each name, from the top, with every second row shaded."""
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
    if shaded:
        shade_rows(ax, len(names))


def shade_rows(ax: Axes, rows: int) -> None:
    for row in range(0, rows, 2):
        ax.axhspan(row - 0.5, row + 0.5, color="0.955", linewidth=0)


def write_beside(ax: Axes, text: str, x: float, y: float, space: float = 2, size: float = 6) -> Annotation:
    """Write a number to the right of a mark at x, y; `space` and `size` are in points."""
    return ax.annotate(text, (x, y), (space, 0), textcoords="offset points", va="center", fontsize=size)


def note(ax: Axes, text: str) -> None:
    """Write numbers into the lower left corner of a panel."""
    ax.text(0.04, 0.05, text, transform=ax.transAxes, fontsize=7, linespacing=1.4)


def hide_y(ax: Axes) -> None:
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)


def say(ax: Axes, text: str) -> None:
    """Write a text in place of data. Ticks are hidden and not removed, because other panels may share them."""
    for line in ax.lines:
        line.set_data([], [])
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color="0.4", fontsize=7)
    ax.tick_params(which="both", left=False, labelleft=False, bottom=False, labelbottom=False)
    ax.set(xlabel="", ylabel="")
    ax.spines[:].set_visible(False)


# --- heat maps of attention weights: queries downwards, keys across, white where a causal mask forbids a key


def square(table: pd.DataFrame, size: int) -> np.ndarray:
    """Return rows with query, key and weight as a matrix (size, size), with NaN for missing rows."""
    weights = np.full((size, size), np.nan)
    weights[table["query"], table["key"]] = table["weight"]
    return weights


def above_diagonal(weights: np.ndarray) -> np.ndarray:
    """Return (T,T) bool: the entries above the diagonal, or none if some of them have weights, as in an encoder."""
    above = np.triu(np.ones_like(weights, bool), 1)
    return above & bool(np.isnan(weights[above]).all())


def draw_weights(ax: Axes, weights: np.ndarray, faintest: float, masked: np.ndarray | None = None) -> AxesImage:
    """Draw weights on a logarithmic color scale from `faintest` to 1, gray for NaN.

    Entries in `masked` are white; by default these are the entries above the diagonal, unless some have weights.
    """
    masked = above_diagonal(weights) if masked is None else masked
    image = ax.imshow(np.clip(weights, faintest / 10, 1), cmap=SEQUENTIAL, norm=LogNorm(faintest, 1))
    ax.imshow(np.where(masked, 1.0, np.nan), cmap="Greys_r", vmin=0, vmax=1)
    return image


# --- arms: a line for each


def arm_looks(arms: Iterable[str], untouched: str = "") -> dict[str, Look]:
    """Return arm → label, color, dashes, marker and width of its line; `untouched`: the arm of the unchanged model."""
    # It is gray and uses up no color, so that figures of only the trained arms have the same colors.
    # Later lines are thinner and on top, so that equal lines are all visible.
    arms = list(arms)
    looks = style.line_looks()
    gray: Look = {"color": "0.6", "linestyle": "-", "marker": "P"}
    return {
        arm: (gray if arm == untouched else next(looks)) | {"label": escape(shorten(arm, 40)), "linewidth": width}
        for arm, width in zip(arms, np.linspace(2.0, 0.9, len(arms)), strict=True)
    }


def signs_of(looks: dict[str, Look]) -> dict[str, Look]:
    """Return the entries of arms in a legend."""
    return {look["label"]: {key: entry for key, entry in look.items() if key != "label"} for look in looks.values()}

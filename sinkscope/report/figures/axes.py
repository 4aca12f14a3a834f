"""What several figures draw: lines by layer, whole-number axes, and a word where there is nothing to draw."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

MOST_MARKERS = 20  # of one line; more would run into one another


def line_by_layer(ax: Axes, values: pd.Series, **look: Any) -> Line2D:
    """`values` by layer (its index). Layers that have none leave a gap."""
    if len(values):
        values = values.reindex(range(int(values.index.min()), int(values.index.max()) + 1))
    every = 1 + (len(values) - 1) // MOST_MARKERS
    (line,) = ax.plot(values.index, values.to_numpy(float), markevery=every, **look)
    return line


def layer_axis(ax: Axes, label: str = "layer") -> None:
    whole_numbers(ax, "x")
    ax.set_xlabel(label)


def whole_numbers(ax: Axes, which: str) -> None:
    """Ticks at whole numbers only, and room for a lone one."""
    axis = ax.xaxis if which == "x" else ax.yaxis
    axis.set_major_locator(MaxNLocator(nbins="auto", integer=True, steps=[1, 2, 5, 10], min_n_ticks=1))
    values = [value for line in ax.lines for value in np.asarray(line.get_data()[which == "y"], float)]
    if values and min(values) == max(values):
        (ax.set_xlim if which == "x" else ax.set_ylim)(values[0] - 0.5, values[0] + 0.5)


def value_axis(ax: Axes, log: bool = False, share: bool = False) -> bool:
    """A log scale, or that of a share from 0 to 1, if asked for. Call it last, as it goes by what is drawn:
    where no line has a value that the scale can show, the panel says so. → whether one has.
    """
    if not has_values(ax, log):
        say(ax, "no positive values" if log else "no values")
        return False
    ax.grid(True, axis="y", color="0.9", linewidth=0.4)
    if share:
        ax.set_ylim(-0.03, 1.03)
        ax.set_yticks([0, 0.5, 1])
    elif log:
        ax.set_yscale("log", nonpositive="mask")
        log_ticks(ax.yaxis, *ax.get_ylim())
    return True


def has_values(ax: Axes, log: bool = False) -> bool:
    drawn = [np.asarray(line.get_ydata(), float) for line in ax.lines]
    values = np.concatenate(drawn) if drawn else np.empty(0)
    return bool(np.any(np.isfinite(values) & (values > 0 if log else True)))


def log_ticks(axis: Axis, low: float, high: float) -> None:
    """At least two ticks on a log axis, by decades if they give as many; short numbers are written out."""
    few = high / low < 50 or np.floor(np.log10(high)) - np.ceil(np.log10(low)) < 1
    if few:
        narrow = high / low < 5
        axis.set_major_locator(MaxNLocator(4) if narrow else LogLocator(subs=(1, 2, 5), numticks=7))
        axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())
    if few or (low >= 1e-3 and high < 5e4):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def widen(ax: Axes, low: float, high: float) -> None:
    """A log axis of values that spans at least this, with ticks to fit."""
    known = ax.get_ylim()
    ax.set_yscale("log", nonpositive="mask")  # anew, and with it the ticks
    ax.set_ylim(min(low, known[0]), max(high, known[1]))
    log_ticks(ax.yaxis, *ax.get_ylim())


def say(ax: Axes, text: str) -> None:
    """In place of data. Ticks may be shared with other panels: they are hidden, not removed."""
    for line in ax.lines:
        line.set_data([], [])
    ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", color="0.4", fontsize=7)
    ax.tick_params(which="both", left=False, labelleft=False, bottom=False, labelbottom=False)
    ax.set(xlabel="", ylabel="")
    ax.spines[:].set_visible(False)

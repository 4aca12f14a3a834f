"""Perplexity, outliers and sinks as bars: a bar for each arm, a panel for each metric.

A bar is the mean over seeds, a dot one seed, the whisker one standard deviation (n − 1). The broken line is the first
arm: the model as it was, or the plain training. A metric that is 0 in every arm, or was not measured, has no panel.
"""

import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, PercentFormatter

from sinkscope.figures.arms import Arms, arm_looks
from sinkscope.figures.axes import name_rows, write_beside
from sinkscope.figures.labels import escape, shorten, wrapped
from sinkscope.figures.spec import declare
from sinkscope.figures.style import REFERENCE, WIDE, Figure, Look, new_figure
from sinkscope.results.metrics import METRICS, Metric

# metrics of the table `retrofit`
PANELS = ("perplexity", "perplexity_quantized", "max_inf_norm", "kurtosis", "sink_rate", "massive_count")
ACROSS = 3
ROW, PANEL, AROUND = 0.24, 0.42, 0.5  # inches: a bar, what is around a row of panels, and around the figure
LETTERS = 18  # of a line of an arm's name
ROOM = {False: 1.45, True: 1.8}  # times the longest bar, for its number, and with its spread
BEHIND_NUMBER: Look = {"facecolor": "white", "edgecolor": "none", "pad": 0.4}  # over the line of the first arm
SEED: Look = {"color": "black", "linestyle": "none", "marker": "o", "markersize": 2.4, "mfc": "white", "mew": 0.6}
WHISKER: Look = {"color": "black", "linestyle": "none", "elinewidth": 0.8, "capsize": 2, "capthick": 0.8}


def lacking(arms: Arms) -> str | None:
    return None if arms.rows("retrofit") else "no arm of this retrofit has been measured"


@declare("retrofit-bars", "perplexity, outliers and sinks of every arm, over seeds", "retrofit", lacking=lacking)
def draw(arms: Arms) -> Figure:
    table = arms.tables["retrofit"]
    looks = arm_looks(table["condition"].unique())
    values = {name: table[table["metric"] == name] for name in PANELS}
    shown = [name for name, rows in values.items() if (rows["value"] != 0).any()]
    across = min(ACROSS, max(len(shown), 1))
    down = -(-max(len(shown), 1) // across)
    figure = new_figure(WIDE * max(across, 2) / ACROSS, down * (ROW * len(looks) + PANEL) + AROUND)
    axes = figure.subplots(down, across, sharey=True, squeeze=False)
    for ax, name in zip(axes.flat, shown, strict=False):
        _bars(ax, METRICS[name], values[name], looks)
    for ax in list(axes.flat)[len(shown) :]:
        ax.set_visible(False)
    name_rows(axes[0, 0], [wrapped(arm, LETTERS, 2) for arm in looks], shaded=False)
    figure.legend(handles=_legend(arms, next(iter(looks))), loc="outside lower center", ncols=3)
    nothing = [METRICS[name].short for name, rows in values.items() if len(rows) and name not in shown]
    figure.suptitle(arms.title(arms.seeds_text(), f"{', '.join(nothing)}: 0" if nothing else ""))
    return figure


def _bars(ax: Axes, metric: Metric, rows: pd.DataFrame, looks: dict[str, Look]) -> None:
    """In the arms' order, from the top. An infinite value has its sign but no bar."""
    by_arm = rows.groupby("condition")["value"]
    means, spreads = by_arm.mean().reindex(list(looks)), by_arm.std().reindex(list(looks))
    lengths = np.where(np.isfinite(means), means, 0.0)
    has_spread = bool(spreads.notna().any())
    ax.set_xlabel(metric.axis)
    ax.tick_params(axis="y", length=0)
    ax.barh(range(len(looks)), lengths, height=0.66, color=[look["color"] for look in looks.values()])
    ax.axvline(float(lengths[0]), **REFERENCE | {"zorder": 3})
    if has_spread:
        ax.errorbar(lengths, range(len(looks)), xerr=spreads.fillna(0), zorder=4, **WHISKER)
    ends = []
    for row, (arm, length) in enumerate(zip(looks, lengths, strict=True)):
        single = rows.loc[(rows["condition"] == arm) & np.isfinite(rows["value"]), "value"]
        if len(single) > 1:
            ax.plot(single, np.full(len(single), row), zorder=5, **SEED)
        text = "∞" if np.isinf(means[arm]) else metric.text_with_spread(means[arm], spreads[arm])
        ends.append(float(max([length + np.nan_to_num(spreads[arm]), *single])))
        write_beside(ax, text, ends[-1], row, space=4, size=6.5).set_bbox(BEHIND_NUMBER)
    ax.set_xlim(0, ROOM[has_spread] * (max(ends) or 1.0))
    ax.xaxis.set_major_locator(MaxNLocator(3))
    if metric.unit == "share":
        ax.xaxis.set_major_formatter(PercentFormatter(1))
    ax.grid(True, axis="x", color="0.9", linewidth=0.4)


def _legend(arms: Arms, first: str) -> list[Artist]:
    handles: list[Artist] = [Line2D([], [], label=escape(shorten(first, LETTERS)), **REFERENCE)]
    if arms.seeds > 1:
        handles.append(Line2D([], [], label="one seed", **SEED))
        handles.append(Line2D([], [], color="black", linewidth=0.8, marker="|", label="± standard deviation of seeds"))
    return handles

"""Perplexity, outliers and sinks as bars: a bar for each arm, a panel for each metric, means over seeds."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from sinkscope.report.figures.arms import Arms, arm_looks
from sinkscope.report.figures.axes import name_rows, say, write_beside
from sinkscope.report.figures.labels import wrapped
from sinkscope.report.figures.spec import declare
from sinkscope.report.figures.style import WIDE, Figure, new_figure
from sinkscope.results.metrics import METRICS, Metric

# metrics of the table `retrofit`
PANELS = ("perplexity", "perplexity_quantized", "max_inf_norm", "kurtosis", "sink_rate", "massive_count")
ROW, AROUND = 0.24, 1.15  # inches: a bar, and what is above, between and below the two rows of panels
LETTERS = 18  # of a line of an arm's name
ROOM = 1.45  # times the longest bar, for its number


def lacking(arms: Arms) -> str | None:
    return None if arms.rows("retrofit") else "no arm of this retrofit has been measured"


@declare("retrofit-bars", "perplexity, outliers and sinks of every arm", "retrofit", lacking=lacking)
def draw(arms: Arms) -> Figure:
    table = arms.tables["retrofit"]
    looks = arm_looks(table["condition"].unique())
    figure = new_figure(WIDE, 2 * ROW * len(looks) + AROUND)
    axes = figure.subplots(2, 3, sharey=True)
    for ax, metric in zip(axes.flat, PANELS, strict=True):
        values = table[table["metric"] == metric].groupby("condition")["value"].mean().reindex(list(looks))
        _bars(ax, METRICS[metric], values.to_numpy(float), [look["color"] for look in looks.values()])
    name_rows(axes[0, 0], [wrapped(arm, LETTERS, 2) for arm in looks], shaded=False)
    figure.suptitle(arms.title())
    return figure


def _bars(ax: Axes, metric: Metric, values: np.ndarray, colors: Sequence[str]) -> None:
    """In the arms' order, from the top. An infinite value has its sign but no bar."""
    ax.set_title(metric.short)
    ax.tick_params(axis="y", length=0)
    if np.isnan(values).all():
        say(ax, "not measured")
        return
    lengths = np.where(np.isfinite(values), values, 0.0)
    ax.barh(range(len(values)), lengths, height=0.66, color=colors)
    for row, (value, length) in enumerate(zip(values, lengths, strict=True)):
        write_beside(ax, "∞" if np.isinf(value) else metric.text(value), length, row, size=7)
    ax.set_xlim(0, ROOM * (lengths.max() or 1.0))
    ax.xaxis.set_major_locator(MaxNLocator(3))
    if metric.unit == "share":
        ax.xaxis.set_major_formatter(PercentFormatter(1))
    ax.grid(True, axis="x", color="0.9", linewidth=0.4)

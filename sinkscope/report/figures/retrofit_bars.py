"""What VGA's tables 1 to 3 hold, as bars: an arm of a retrofit a bar, a metric a panel, every number written out.

Bars begin at 0, and are means over seeds where there are several. Not one run's figure, so `sinkscope list` does not
show it.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from sinkscope.errors import InputError
from sinkscope.report.figures.arms import arm_looks
from sinkscope.report.figures.axes import say
from sinkscope.report.figures.labels import escape, shorten, wrapped
from sinkscope.report.figures.style import WIDE, Figure, in_style, new_figure

PANELS = {  # metric of the table `retrofit` → name
    "perplexity": "perplexity",
    "perplexity_quantized": "perplexity in W8A8",
    "max_inf_norm": "max infinity norm",
    "kurtosis": "average kurtosis",
    "sink_rate": "sink rate",
    "massive_count": "massive activations per sequence",
}
ROW, AROUND = 0.24, 1.15  # inches: a bar, and what is above, between and below the two rows of panels
LETTERS = 18  # of a line of an arm's name
ROOM = 1.45  # behind the longest bar, for its number


def draw_retrofit_bars(table: pd.DataFrame) -> Figure:
    """`table`: the one called `retrofit`, of all arms (their `condition`). Errors: InputError where it is empty."""
    if table.empty:
        raise InputError("no arm of this retrofit has been measured")
    looks = arm_looks(table["condition"].unique())
    with in_style():
        figure = new_figure(WIDE, 2 * ROW * len(looks) + AROUND)
        axes = figure.subplots(2, 3, sharey=True)
        for ax, (metric, name) in zip(axes.flat, PANELS.items(), strict=True):
            values = table[table["metric"] == metric].groupby("condition")["value"].mean().reindex(list(looks))
            ax.set_title(name)
            _bars(ax, values.to_numpy(float), [look["color"] for look in looks.values()])
        axes[0, 0].set_yticks(range(len(looks)), [wrapped(arm, LETTERS, 2) for arm in looks])
        axes[0, 0].set_ylim(len(looks) - 0.5, -0.5)
        figure.suptitle(escape(shorten(str(table["model"].iloc[0]).rstrip("/").split("/")[-1], 80)))
    return figure


def _bars(ax: Axes, values: np.ndarray, colours: list[str]) -> None:
    """From the top, in the arms' order; what is infinite has no bar but its sign."""
    ax.tick_params(axis="y", length=0)
    if np.isnan(values).all():
        say(ax, "not measured")
        return
    drawn = np.where(np.isfinite(values), values, 0.0)
    ax.barh(range(len(values)), drawn, height=0.66, color=colours)
    for row, (value, length) in enumerate(zip(values, drawn, strict=True)):
        ax.annotate(_written(value), (length, row), (2, 0), textcoords="offset points", va="center", fontsize=7)
    ax.set_xlim(0, ROOM * (drawn.max() or 1.0))
    ax.xaxis.set_major_locator(MaxNLocator(3))
    ax.grid(True, axis="x", color="0.9", linewidth=0.4)


def _written(value: float) -> str:
    if not np.isfinite(value):
        return "–" if np.isnan(value) else "∞"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value < 1 else f"{value:.2f}"

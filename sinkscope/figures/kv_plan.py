"""The figure of plans for the KV cache: perplexity and retrieval against the memory that is kept."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from sinkscope.figures import plot
from sinkscope.figures.labels import title
from sinkscope.figures.style import NAVY, REFERENCE, SKY, VERMILION, WIDE, Figure, Look, new_figure
from sinkscope.measuring.kv_plan import COMBINED, FIRST_AND_LAST, PREDICTED, RANDOM
from sinkscope.results.run import RunData

POINTS: Look = {"linestyle": "none", "markersize": 4.5}
MARKS: dict[str, Look] = {  # shapes differ, so that colors are not needed
    COMBINED: POINTS | {"marker": "*", "color": VERMILION, "markersize": 8},
    "output-loss": POINTS | {"marker": "o", "color": NAVY},
    "beyond-window": POINTS | {"marker": "s", "color": SKY},
    "retrieval": POINTS | {"marker": "^", "color": NAVY, "mfc": "white"},
    RANDOM: POINTS | {"marker": "x", "color": "0.45"},
    FIRST_AND_LAST: POINTS | {"marker": "D", "color": "0.45", "mfc": "white"},
    "bits alone": POINTS | {"marker": "P", "color": "black"},
}
APART = 0.008  # of the dense cache, between marks of equal memory, so that all are visible
FAR = 3.0  # a ratio above this needs a logarithmic axis
DENSE_LINE = REFERENCE | {"zorder": 1}


def draw_kv_plan(run: RunData) -> Figure:
    table = run.tables["kv_plan"]
    figure = new_figure(WIDE, 2.7)
    left, right = figure.subplots(1, 2)
    kinds = {name: table[table["plan"].str.split().str[0] == name] for name in MARKS if name != "bits alone"}
    kinds["bits alone"] = table[table["plan"].str.fullmatch(r"\d+ bits") & (table["sinks"] == PREDICTED)]
    for ax, column, name in ((left, "ratio", "perplexity ÷ dense"), (right, "kept", "retrieval ÷ dense")):
        for place, (kind, rows) in enumerate(kinds.items()):
            _draw(ax, rows[rows[column].notna()], column, MARKS[kind], (place - len(kinds) // 2) * APART)
        ax.axhline(1, **DENSE_LINE)
        ax.set_xlabel("memory ÷ dense cache")
        ax.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        ax.set_ylabel(name)
    if table["ratio"].max() > FAR:
        plot.log_axis(left, "y", *table["ratio"])
    right.set_ylim(bottom=0)
    right.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    shown = {kind: MARKS[kind] for kind, rows in kinds.items() if len(rows)}
    return figure.finish(title(run, WIDE), shown | {"dense": DENSE_LINE}, ncols=4)


def _draw(ax: Axes, rows: pd.DataFrame, column: str, look: Look, nudge: float) -> None:
    """Draw values with their intervals, if these are finite."""
    reach = [(rows[f"{column}_{end}"] - rows[column]).abs() for end in ("low", "high")]
    reach = [each.where(np.isfinite(each), 0.0) for each in reach]
    ax.errorbar(rows["memory"] + nudge, rows[column], reach, elinewidth=0.8, **look)

"""The sink rate at the end of each training of a sweep, a row for each level of what differs, beside WSE's."""

import numpy as np
import pandas as pd
from pandas.core.groupby import DataFrameGroupBy

from sinkscope.figures.axes import name_rows
from sinkscope.figures.labels import escape, shorten
from sinkscope.figures.spec import declare
from sinkscope.figures.style import HIGHEST, SINK, WIDE, Figure, new_figure
from sinkscope.results.papers import TRANSCRIBED
from sinkscope.verdict.factor_study import LEVEL, TABLE, at_the_end, measured_at, published, with_levels, without_key
from sinkscope.verdict.sweep_tables import SweepTables

NAME_LENGTH = 40  # characters of a level
ROW = 0.17  # inches
SPREAD = 0.8  # of a row, over which its seeds stand
SUMS_TO_ONE = 0.1  # what a learned bias takes is less
PUBLISHED = {"": ("D", "WSE, 60M"), TRANSCRIBED: ("s", "WSE, 60M, transcribed")}  # by the mark of a rate


def _ends(tables: SweepTables) -> pd.DataFrame:
    table = tables.tables.get(TABLE)
    end = pd.DataFrame() if table is None else at_the_end(with_levels(table))
    return end if "sink_rate" in end else pd.DataFrame()


def lacking(tables: SweepTables) -> str | None:
    return "no cell is a training with sink rates by step" if _ends(tables).empty else None


@declare("sweep-factor", "sink rate at the end of each training, every seed, beside WSE's", TABLE, lacking=lacking)
def draw(tables: SweepTables) -> Figure:
    end = _ends(tables)
    levels = list(dict.fromkeys(end.index.get_level_values(LEVEL)))
    figure = new_figure(WIDE, 0.9 + ROW * len(levels))
    ax = figure.subplots()
    place = {level: row for row, level in enumerate(levels)}
    rows = np.array([place[level] for level in end.index.get_level_values(LEVEL)])
    beside = _beside_each_other(end.groupby(level=LEVEL, sort=False))
    ax.plot(end["sink_rate"], rows + beside, "o", color=SINK["color"], markersize=2, label="each seed")
    means = end.groupby(level=LEVEL, sort=False)["sink_rate"].mean()
    look = {"color": SINK["color"], "markersize": 8, "markeredgewidth": 1.8}
    ax.plot(means, [place[level] for level in means.index], "|", label="mean", **look)
    known = [(rate, row) for row, level in enumerate(levels) if (rate := published(level))]
    for mark, (shape, name) in PUBLISHED.items():
        points = [(rate.value, row) for rate, row in known if rate.mark == mark]
        if points:
            look = {"color": HIGHEST["color"], "markersize": 4, "fillstyle": "none"}
            ax.plot(*zip(*points, strict=True), shape, label=name, **look)
    key, names = without_key(levels)
    name_rows(ax, [escape(shorten(name, NAME_LENGTH)) for name in names])
    ax.set_ylabel(escape(key))
    ax.set_xlim(-3, 103)
    ax.set_xlabel(f"sink rate at {measured_at(tables.tables[TABLE])} in %{_by_proxy(end)}")
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    return figure


def _beside_each_other(seeds: DataFrameGroupBy) -> np.ndarray:
    """How far from the middle of its row each seed is drawn: those of one rate would be one tick."""
    steps = seeds.cumcount() - (seeds["sink_rate"].transform("size") - 1) / 2
    return (SPREAD * steps / seeds["sink_rate"].transform("size")).to_numpy()


def _by_proxy(end: pd.DataFrame) -> str:
    """Words for the axis, where weights that do not sum to 1 are among what is shown."""
    totals = end.get("total_weight", pd.Series(dtype=float)).dropna()
    return "; |sim| ÷ Σ|sim| where attention is not softmax" if ((totals - 1).abs() > SUMS_TO_ONE).any() else ""

"""The sink rate at the end of each training of a sweep, a row for each level of what differs, beside WSE's."""

import pandas as pd

from sinkscope.report.factor_study import LEVEL, TABLE, at_the_end, measured_at, published, with_levels
from sinkscope.report.figures.axes import name_rows
from sinkscope.report.figures.labels import escape, shorten
from sinkscope.report.figures.spec import declare
from sinkscope.report.figures.style import HIGHEST, SINK, WIDE, Figure, new_figure
from sinkscope.report.sweep_tables import SweepTables
from sinkscope.report.wse_trainings import TRANSCRIBED

NAME_LENGTH = 40  # characters of a level
ROW = 0.17  # inches
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
    rows = [place[level] for level in end.index.get_level_values(LEVEL)]
    ax.plot(end["sink_rate"], rows, "|", color=SINK["color"], markersize=7, label="each seed")
    means = end.groupby(level=LEVEL, sort=False)["sink_rate"].mean()
    ax.plot(means, [place[level] for level in means.index], "o", color=SINK["color"], markersize=3.5, label="mean")
    known = [(rate, row) for row, level in enumerate(levels) if (rate := published(level))]
    for mark, (shape, name) in PUBLISHED.items():
        points = [(rate.value, row) for rate, row in known if rate.mark == mark]
        if points:
            look = {"color": HIGHEST["color"], "markersize": 4, "fillstyle": "none"}
            ax.plot(*zip(*points, strict=True), shape, label=name, **look)
    name_rows(ax, [escape(shorten(level, NAME_LENGTH)) for level in levels])
    ax.set_xlim(-3, 103)
    ax.set_xlabel(f"sink rate at {measured_at(tables.tables[TABLE])} in %")
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    return figure

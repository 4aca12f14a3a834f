"""What the figures of sweeps share: sink rates as rows of dots, and as lines, with their intervals."""

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sinkscope.figures.axes import curve, name_rows, panel_grid
from sinkscope.figures.labels import escape, shorten
from sinkscope.figures.style import TEXT, Figure, Look, line_looks, new_figure
from sinkscope.verdict.sweep_tables import ENDS

ROW, AROUND = 0.34, 0.95  # inches
SPREAD = 0.28  # of a row's height, to both sides of its middle
PANEL, ACROSS = 1.5, 3  # inches, and panels in a row
LEGEND = 84  # characters across
LONGEST_NAME = 32
BAR = 1.1  # points: a bar through a dot
BAND: Look = {"alpha": 0.22, "linewidth": 0}
INTERVAL = "95 % over sequences"
RATE, LIMITS = "sink rate at position 0 in %", (-3, 103)


def model_names(models: Iterable[str]) -> list[str]:
    return [escape(shorten(model, LONGEST_NAME)) for model in models]


def dots_by_model(rows: pd.DataFrame, by: str, said: dict[str, Look] | None = None) -> tuple[Figure, Axes]:
    """A row for each model, in it a dot for each value of `by` at its sink rate, each a little lower. A bar through the
    dot is its 95 % interval over sequences.
    """
    models = list(rows["model"].unique())
    figure = new_figure(TEXT, ROW * len(models) + AROUND)
    ax = figure.subplots()
    looks = said or {}
    for (value, beside), look in zip(places_in_row(rows[by]).items(), line_looks(), strict=False):
        found = rows[rows[by] == value]
        where = [models.index(model) + beside for model in found["model"]]
        own = looks.get(value, look) | {"linestyle": "none"}
        ax.plot(100 * found["sink_rate"], where, label=escape(str(value)), **own)
        low, high = (100 * found.get(end, pd.Series(np.nan, found.index)) for end in ENDS)
        ax.hlines(where, low, high, color=own["color"], linewidth=BAR)
    name_rows(ax, model_names(models))
    rate_axis(ax, "x")
    handles = [*ax.lines, *([Line2D([], [], color="0.3", linewidth=BAR, label=INTERVAL)] if has_ends(rows) else [])]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    return figure, ax


def has_ends(rows: pd.DataFrame) -> bool:
    """Whether any rate has an interval."""
    return bool(np.isfinite(rows.reindex(columns=ENDS).to_numpy(float)).any())


def places_in_row(values: pd.Series) -> dict[str, float]:
    """Where each value's dots stand, from the middle of a row."""
    different = list(values.unique())
    places = np.linspace(-SPREAD, SPREAD, len(different)) if len(different) > 1 else np.zeros(len(different))
    return dict(zip(different, map(float, places), strict=True))


def lines_by_input(rows: pd.DataFrame, x: str, by: Sequence[str] = ("model",)) -> tuple[Figure, list[Axes], list[Axes]]:
    """The sink rate by the column `x`: a panel for each input, in it a line for each combination of `by`, which is the
    mean where several cells differ in nothing that is shown. Bands are those cells' lowest and highest rates, or a
    single one's 95 % interval over sequences.

    Returns:
        The figure, its panels, and those that are the lowest of their column.
    """
    inputs = list(rows["input"].unique())
    across = min(len(inputs), ACROSS)
    rows = rows.assign(line=_line_names(rows, by))
    looks = dict(zip(rows["line"].unique(), line_looks(), strict=False))
    legend_across = max(1, min(4, LEGEND // (max(map(len, looks)) + 8)))
    height = PANEL * -(-len(inputs) // across) + 0.55 + 0.16 * -(-len(looks) // legend_across)
    figure = new_figure(TEXT, height)
    axes, lowest = panel_grid(figure, len(inputs), across)
    for ax, reads in zip(axes, inputs, strict=True):
        for name, found in rows[rows["input"] == reads].groupby("line", sort=False):
            means = found.groupby(x)["sink_rate"].mean()
            curve(ax, 100 * means, label=escape(str(name)), markersize=2.4, **looks[name])
            ends = 100 * _ends(found, x)
            ax.fill_between(ends.index, ends["low"], ends["high"], color=looks[name]["color"], **BAND)
        ax.set_title(escape(str(reads)))
        rate_axis(ax, "y", label=False)
    figure.supylabel(RATE, fontsize=7)
    handles: dict[str, Line2D | Patch] = {str(line.get_label()): line for ax in axes for line in ax.lines}
    if rows.duplicated(["line", "input", x]).any():
        handles["lowest to highest"] = Patch(color="0.3", **BAND)
    elif has_ends(rows):
        handles[INTERVAL] = Patch(color="0.3", **BAND)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=legend_across)
    return figure, axes, lowest


def _ends(rows: pd.DataFrame, x: str) -> pd.DataFrame:
    """Rows values of `x`, columns low and high."""
    cells = rows.reindex(columns=[x, "sink_rate", *ENDS]).groupby(x)
    several = cells.size() > 1
    lowest, highest = cells["sink_rate"].min(), cells["sink_rate"].max()
    alone = cells[ENDS].mean()
    return pd.DataFrame({"low": lowest.where(several, alone["low"]), "high": highest.where(several, alone["high"])})


def _line_names(rows: pd.DataFrame, by: Sequence[str]) -> pd.Series:
    """Of each row's line: those columns that differ, at least the first."""
    differing = [name for name in by if rows[name].nunique() > 1] or list(by[:1])
    texts = rows[differing].astype(str).agg(" · ".join, axis=1)
    return texts.map(lambda text: shorten(text, LONGEST_NAME))


def rate_axis(ax: Axes, which: str, label: bool = True) -> None:
    if which == "x":
        ax.set(xlabel=RATE if label else "", xlim=LIMITS)
    else:
        ax.set(ylabel=RATE if label else "", ylim=LIMITS)
    ax.grid(True, axis="x" if which == "x" else "y", color="0.9", linewidth=0.4)

"""What the figures of sweeps share: sink rates as rows of dots, and as lines."""

from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from sinkscope.report.figures.axes import curve, name_rows, panel_grid
from sinkscope.report.figures.labels import escape, shorten
from sinkscope.report.figures.style import TEXT, Figure, Look, line_looks, new_figure

ROW, AROUND = 0.34, 0.95  # inches
SPREAD = 0.28  # of a row's height, to both sides of its middle
PANEL, ACROSS = 1.5, 3  # inches, and panels in a row
LEGEND = 84  # characters across
LONGEST_NAME = 32
RATE, LIMITS = "sink rate at position 0 in %", (-3, 103)


def model_names(models: Iterable[str]) -> list[str]:
    return [escape(shorten(model, LONGEST_NAME)) for model in models]


def dots_by_model(rows: pd.DataFrame, by: str, said: dict[str, Look] | None = None) -> tuple[Figure, Axes]:
    """A row for each model, in it a dot for each value of `by` at its sink rate, each a little lower."""
    models = list(rows["model"].unique())
    figure = new_figure(TEXT, ROW * len(models) + AROUND)
    ax = figure.subplots()
    looks = said or {}
    for (value, beside), look in zip(places_in_row(rows[by]).items(), line_looks(), strict=False):
        found = rows[rows[by] == value]
        where = [models.index(model) + beside for model in found["model"]]
        own = looks.get(value, look) | {"linestyle": "none"}
        ax.plot(100 * found["sink_rate"], where, label=escape(str(value)), **own)
    name_rows(ax, model_names(models))
    rate_axis(ax, "x")
    figure.legend(loc="outside lower center", ncols=4)
    return figure, ax


def places_in_row(values: pd.Series) -> dict[str, float]:
    """Where each value's dots stand, from the middle of a row."""
    different = list(values.unique())
    places = np.linspace(-SPREAD, SPREAD, len(different)) if len(different) > 1 else np.zeros(len(different))
    return dict(zip(different, map(float, places), strict=True))


def lines_by_input(rows: pd.DataFrame, x: str, by: Sequence[str] = ("model",)) -> tuple[Figure, list[Axes], list[Axes]]:
    """The sink rate by the column `x`: a panel for each input, in it a line for each combination of `by`, which is the
    mean where several cells differ in nothing that is shown.

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
        ax.set_title(escape(str(reads)))
        rate_axis(ax, "y", label=False)
    figure.supylabel(RATE, fontsize=7)
    handles = {str(line.get_label()): line for ax in axes for line in ax.lines}
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=legend_across)
    return figure, axes, lowest


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

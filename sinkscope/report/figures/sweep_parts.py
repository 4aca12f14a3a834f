"""What the figures of sweeps share: sink rates as rows of dots, and as lines."""

from collections.abc import Iterable, Sequence

import pandas as pd
from matplotlib.axes import Axes

from sinkscope.report.figures.axes import name_rows
from sinkscope.report.figures.labels import escape, shorten
from sinkscope.report.figures.style import TEXT, Figure, Look, line_looks, new_figure

ROW, AROUND = 0.2, 0.95  # inches
LONGEST_NAME = 32


def model_names(models: Iterable[str]) -> list[str]:
    return [escape(shorten(model, LONGEST_NAME)) for model in models]


def dots_by_model(rows: pd.DataFrame, by: str, said: dict[str, Look] | None = None) -> tuple[Figure, Axes]:
    """A row for each model, in it a dot for each value of `by` at its sink rate."""
    models = list(rows["model"].unique())
    figure = new_figure(TEXT, ROW * len(models) + AROUND)
    ax = figure.subplots()
    looks = said or {}
    for value, look in zip(rows[by].unique(), line_looks(), strict=False):
        found = rows[rows[by] == value]
        where = [models.index(model) for model in found["model"]]
        own = looks.get(value, look) | {"linestyle": "none"}
        ax.plot(100 * found["sink_rate"], where, label=escape(str(value)), **own)
    name_rows(ax, model_names(models))
    rate_axis(ax, "x")
    figure.legend(loc="outside lower center", ncols=4)
    return figure, ax


def lines_by_model(rows: pd.DataFrame, x: str, by: Sequence[str] = ("model",)) -> tuple[Figure, Axes]:
    """The sink rate by the column `x`, a line for each combination of `by`, the mean where several cells differ in
    nothing that is shown.
    """
    figure = new_figure(TEXT, 2.8)
    ax = figure.subplots()
    lines = rows.groupby(list(by), sort=False)
    differing = [name for name in by if rows[name].nunique() > 1] or list(by[:1])
    for (key, found), look in zip(lines, line_looks(), strict=False):
        values = dict(zip(by, key if isinstance(key, tuple) else (key,), strict=True))
        label = " · ".join(str(values[name]) for name in differing)
        means = found.groupby(x)["sink_rate"].mean()
        ax.plot(means.index, 100 * means, label=escape(shorten(label, LONGEST_NAME)), markersize=3, **look)
    rate_axis(ax, "y")
    figure.legend(loc="outside lower center", ncols=3)
    return figure, ax


def rate_axis(ax: Axes, which: str) -> None:
    label, limits = "sink rate at position 0 in %", (-3, 103)
    if which == "x":
        ax.set(xlabel=label, xlim=limits)
    else:
        ax.set(ylabel=label, ylim=limits)
    ax.grid(True, axis="x" if which == "x" else "y", color="0.9", linewidth=0.4)

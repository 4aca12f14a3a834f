"""Which route carries the sink in which model: models × routes, the sink rate with and without each route."""

import textwrap

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sinkscope.figures.labels import escape, model_name, wrapped
from sinkscope.figures.spec import declare
from sinkscope.figures.style import NAVY, WIDE, Figure, Look, new_figure
from sinkscope.paper_claims.routes import ROUTES, Effect, measured_models

ROW, PUBLISHED, AROUND = 0.6, 0.3, 1.0  # inches: a model, what NU says of its own, and what is around them all
LETTERS, NAME = 22, 15  # of a line in a cell, and of a model's name
LINE, BELOW = 0.58, 0.24  # heights in a cell: of the arrow, and of the controls
NEAR = 14.0  # points: below this before and after have no arrow between them
BEFORE: Look = {"color": NAVY, "marker": "o", "markersize": 4, "markerfacecolor": "white", "linestyle": "none"}
AFTER: Look = {"color": NAVY, "marker": "o", "markersize": 4, "linestyle": "none"}
INTERVAL: Look = {"color": NAVY, "linewidth": 1.6}
CONTROLS: Look = {"color": "0.6", "linewidth": 3.5, "solid_capstyle": "butt"}
CONTROL: Look = {"color": "black", "marker": "|", "markersize": 5, "markeredgewidth": 0.8, "linestyle": "none"}
ARROW: Look = {
    "arrowstyle": "-|>",
    "color": NAVY,
    "linewidth": 0.9,
    "shrinkA": 2.5,
    "shrinkB": 2.5,
    "mutation_scale": 6,
}
SHADES = {Effect.FALLS: "#dfe9f2", Effect.GOES: "#a9c4dc"}  # behind a cell, by what becomes of the sink
ABSENT = (Effect.DOES_NOT_APPLY, Effect.NOT_MEASURED)


def lacking(table: pd.DataFrame) -> str | None:
    return None if len(measured_models(table)) else "no route was cut"


@declare("routes", "which route carries the sink in which model: before and after each is cut", "route",
    lacking=lacking)  # fmt: skip
def draw(table: pd.DataFrame) -> Figure:
    models = measured_models(table)
    figure = new_figure(WIDE, ROW * len(models) + PUBLISHED + AROUND)
    heights = [PUBLISHED, *[ROW] * len(models)]
    grid = figure.subplots(len(heights), len(ROUTES), squeeze=False, height_ratios=heights)
    _name(grid[0][0], "GPT-2 in NU,\nwithout rates")
    for row, model in enumerate(models, 1):
        _name(grid[row][0], wrapped(model_name(model), NAME, 3))
    for column, route in zip(grid.T, ROUTES, strict=True):
        column[0].set_title(f"{route.name}\n", fontsize=7.5, fontweight="bold", pad=2)
        column[0].annotate(escape(route.cut), (0.5, 1), (0, 3), xycoords="axes fraction",
            textcoords="offset points", fontsize=6, ha="center")  # fmt: skip
        _words(column[0], route.published or "not tested")
        _shade(column[0], route.published_effect)
        for ax, model in zip(column[1:], models, strict=True):
            _cell(ax, _row(table, model, route.name))
            _percent_axis(ax, is_lowest=model == models[-1])
    figure.suptitle("Sink rate at position 0 as it is, and without one route at a time")
    figure.legend(handles=_legend(), loc="outside lower center", ncols=4, fontsize=6.5, columnspacing=1.5)
    return figure


def _row(table: pd.DataFrame, model: str, route: str) -> pd.Series:
    found = table[(table["model"] == model) & (table["route"] == route)]
    return found.iloc[0] if len(found) else pd.Series({"effect": str(Effect.NOT_MEASURED), "note": ""})  # older tables


def _name(ax: Axes, text: str) -> None:
    ax.set_ylabel(text, rotation=0, ha="right", va="center", fontsize=7, labelpad=6)


def _words(ax: Axes, text: str) -> None:
    """In place of numbers."""
    lines = textwrap.wrap(text, LETTERS, max_lines=4, placeholder=" …")
    ax.text(0.5, 0.5, escape("\n".join(lines)), transform=ax.transAxes, ha="center", va="center", fontsize=5.8)
    ax.set(xticks=[], yticks=[])


def _shade(ax: Axes, effect: str) -> None:
    ax.set_facecolor(SHADES.get(Effect(effect), "white"))
    ax.spines[:].set_visible(True)
    ax.spines[:].set_color("0.75")


def _percent_axis(ax: Axes, is_lowest: bool) -> None:
    ax.set(xlim=(-9, 109), ylim=(0, 1.15), yticks=[])
    ax.set_xticks([0, 50, 100], labels=["0", "50", "100 %"] if is_lowest else [])
    ax.tick_params(axis="x", labelsize=6, color="0.6")


def _cell(ax: Axes, row: pd.Series) -> None:
    _shade(ax, row["effect"])
    if row["effect"] in ABSENT:
        reason = row["note"].partition(":")[0] if row["effect"] == Effect.DOES_NOT_APPLY else ""
        _words(ax, f"{row['effect']}: {reason}" if reason else row["effect"])
        return
    if row["draws"] > 1:
        ax.plot([row["control_low"], row["control_high"]], [BELOW, BELOW], **CONTROLS)
    ax.plot([row["control"]], [BELOW], **CONTROL)
    if abs(row["after"] - row["before"]) > NEAR:
        ax.annotate("", (row["after"], LINE), (row["before"], LINE), arrowprops=ARROW)
    for name, look in (("after", AFTER), ("before", BEFORE)):
        ax.plot([row[f"{name}_low"], row[f"{name}_high"]], [LINE, LINE], **INTERVAL)
        ax.plot([row[name]], [LINE], **look)
    text = f"{row['before']:.1f} → {row['after']:.1f}"
    ax.text(0.5, 0.95, text, transform=ax.transAxes, ha="center", va="top", fontsize=6.5)


def _legend() -> list[Line2D | Patch]:
    return [
        Line2D([], [], label="as it is", **BEFORE),
        Line2D([], [], label="without the route", **AFTER),
        Line2D([], [], label="95 % over sequences", **INTERVAL),
        Line2D([], [], label="mean of random controls", **CONTROL),
        Line2D([], [], label="one more control would fall here (95 %)", **CONTROLS),
        Patch(facecolor=SHADES[Effect.FALLS], edgecolor="0.75", label="falls beyond the controls"),
        Patch(facecolor=SHADES[Effect.GOES], edgecolor="0.75", label="and less than half is left"),
    ]

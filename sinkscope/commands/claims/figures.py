"""Figures of scorecards, and of the routes by which the first token can become a sink."""

import textwrap
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from sinkscope.commands.claims.register import CLAIMS
from sinkscope.commands.claims.routes import ROUTES, RouteEffect, models_with_routes
from sinkscope.commands.claims.scorecard import Scorecard, headline, value_text
from sinkscope.figures import style
from sinkscope.figures.labels import escape, heading, wrapped
from sinkscope.figures.plot import hide_y
from sinkscope.figures.spec import needs
from sinkscope.figures.style import DOT, GRAY, NAVY, REFERENCE, VERMILION, WIDE, Figure, Look, new_figure
from sinkscope.output.drawing import Drawings
from sinkscope.results.findings import Outcome
from sinkscope.results.papers import paper_of
from sinkscope.results.side_by_side import model_name
from sinkscope.verdict.report import spans

# --- The claims that were decided on one model: a line for each number, with its interval and the threshold

LETTERS = 98  # of the words and the numbers of a line
REACH = 4.0  # length of the axis to both sides of the threshold
OUTCOME_LOOKS: dict[str, Look] = {
    Outcome.HOLDS: DOT | {"color": NAVY, "marker": "o", "markersize": 3.4},
    Outcome.INCONCLUSIVE: DOT | {"color": GRAY, "marker": "o", "markersize": 3.4, "markerfacecolor": "white"},
    Outcome.NOT_ENOUGH_SEEDS: DOT | {"color": GRAY, "marker": "s", "markersize": 3, "markerfacecolor": "white"},
    Outcome.FAILS: DOT | {"color": VERMILION, "marker": "X", "markersize": 4},
}
PUBLISHED_LOOK: Look = DOT | {"color": GRAY, "marker": "|", "markersize": 5}
NULL_LOOK: Look = DOT | {"color": "0.45", "marker": "D", "markersize": 2.6, "markerfacecolor": "white"}

NULL_TELLS = {"no": " (and so does its null)", "undefined": " (its null is not defined)"}  # by `tells`


@needs(lambda card: len(card.models) < 2, "several models have figures of their own")
@needs(lambda card: len(_decided(card.table)), "no claim was decided")
def draw_scorecard(card: Scorecard) -> Figure:
    """Draw each number at its distance from the threshold; the claim holds on the right."""
    # Distances are in powers of two if the threshold and the complete interval are positive, else in units of a
    # quarter.
    rows = _decided(card.table)
    figure = new_figure(7.2, 0.145 * (len(rows) + rows["paper"].nunique()) + 0.9)
    text, ax = figure.subplots(1, 2, sharey=True, width_ratios=[1.75, 1])
    ax.axvline(0, **REFERENCE)
    height = 0
    for paper, of_paper in rows.groupby("paper", sort=False):
        # a title may be longer than the column of the claims, which the layout would narrow, and continues in the plot
        text.text(0, height, paper, fontsize=6.5, fontweight="bold", va="center", in_layout=False)
        for line, row in enumerate(of_paper.itertuples(), height + 1):
            first = row.part == 0
            too = NULL_TELLS.get(row.tells, "") * (row.outcome == Outcome.HOLDS)
            words = f"{row.claim}{too}  {row.statement if first else '… ' + row.quantity}"
            numbers = f"{value_text(row)}  {row.test}"
            words = textwrap.shorten(words, LETTERS - len(numbers), placeholder=" …")
            text.text(0, line, escape(words), fontsize=5.6, va="center")
            text.text(1, line, numbers, fontsize=5.6, va="center", ha="right")
            look = OUTCOME_LOOKS[Outcome(row.passes)]
            low, middle, high = (_distance(value, row) for value in (row.low, row.value, row.high))
            if np.isfinite(middle):
                ax.plot([low, high], [line, line], color=look["color"], linewidth=1.1)
                ax.plot([middle], [line], **look)
            published = [_distance(item.value, row) for item in CLAIMS[row.claim].published] if first else []
            ax.plot(published, [line] * len(published), **PUBLISHED_LOOK)
            ax.plot([_distance(row.null, row)], [line], **NULL_LOOK)
            drawn = [_distance(end, row) for end in (row.null_low, row.null_high)]
            ax.plot(drawn, [line, line], color=NULL_LOOK["color"], linewidth=0.6)
            ax.axhline(line, color="0.93", linewidth=0.4, zorder=0)
        height += len(of_paper) + 1
    text.set_xlim(0, 1)
    text.set_axis_off()
    ax.set(ylim=(height - 0.3, -0.7), xlim=(-REACH * 1.08, REACH * 1.08))
    hide_y(ax)
    ax.patch.set_visible(False)
    ax.set_xticks([-REACH, -2, 0, 2, REACH], ["≤ ÷16", "÷4", "threshold", "×4", "≥ ×16"])
    ax.set_xlabel("does not pass  ←  value  →  passes")
    signs = {str(outcome): look for outcome, look in OUTCOME_LOOKS.items() if (rows["passes"] == outcome).any()}
    text = heading(model_name(card.models[0]), headline(card.table), "95 % intervals")
    return figure.finish(text, signs | {"null": NULL_LOOK, "published": PUBLISHED_LOOK}, ncols=5)


def _decided(table: pd.DataFrame) -> pd.DataFrame:
    """Return the rows that were decided; a precondition that several claims share is drawn once."""
    rows = table[table["outcome"].isin(list(OUTCOME_LOOKS))]
    return rows[(rows["part"] == 0) | ~rows.duplicated(["quantity", "value"])]


def _distance(value: float, row: Any) -> float:
    """Return the position of a value on the axis: the nearer threshold is 0, and values on the right pass."""
    if np.isnan(value):
        return float("nan")
    distances = []
    for threshold, sign in ((row.least, 1), (row.most, -1)):
        if np.isinf(threshold):
            continue
        if threshold > 0 and not row.low <= 0 and row.value > 0:
            distance = np.log2(value / threshold) if value > 0 else -np.inf
        else:
            distance = REACH * (value - threshold) / max(1.0, abs(threshold))
        distances.append(sign * distance)
    return float(np.clip(min(distances), -REACH, REACH))


# --- Claims on several models, by paper: a row for each claim that does not hold in every model that decides it, those
# on which models differ first, and a line with all others. A column for each model.

NAMES, CELL, LINE_HEIGHT = 4.5, 0.75, 0.15  # inches
UNDECIDED_LOOK: Look = {"color": "0.7", "marker": "_", "markersize": 4, "linestyle": "none"}


@needs(lambda card: len(card.models) > 1, "there is one model")
def draw_scorecard_by_model(card: Scorecard) -> Figure:
    lines: list[tuple[str, pd.Series | None]] = []  # texts, and the outcomes in the models; None for a line of words
    for paper in dict.fromkeys(card.table["paper"]):
        of_paper = card.by_model[[paper_of(name) == paper for name in card.by_model.index]]
        decided = of_paper.where(of_paper.isin(list(OUTCOME_LOOKS))).dropna(how="all")
        if decided.empty:
            continue
        lines.append((paper, None))
        holds = (decided.isna() | (decided == Outcome.HOLDS)).all(axis=1)
        others = decided[~holds]
        for name in (-others.nunique(axis=1)).sort_values(kind="stable").index:  # those on which models differ first
            text = textwrap.shorten(f"{name}  {CLAIMS[name].statement.rstrip('.')}", 80, placeholder=" …")
            lines.append((text, of_paper.loc[name]))
        if holds.any():
            code = holds.index[0].partition("-")[0]
            numbers = [int(name.partition("-")[2]) for name in holds.index[holds]]
            lines.append((f"hold wherever they are decided: {code}-{spans(numbers)}", None))
    width = max(WIDE, NAMES + CELL * len(card.models))
    figure = new_figure(width, LINE_HEIGHT * len(lines) + 0.8)
    ax = figure.subplots()
    for row, (_, outcomes) in enumerate(lines):
        if outcomes is not None and row % 2:
            ax.axhspan(row - 0.5, row + 0.5, color="0.955", linewidth=0)
        for column, outcome in enumerate(() if outcomes is None else outcomes):
            ax.plot([column], [row], **OUTCOME_LOOKS.get(outcome, UNDECIDED_LOOK))
    ax.set_yticks(range(len(lines)), [escape(text) for text, _ in lines], fontsize=7, ha="left")
    for (text, _), label in zip(lines, ax.get_yticklabels(), strict=True):
        label.set_fontweight("bold" if text in set(card.table["paper"]) else "normal")
    ax.tick_params(axis="y", length=0, pad=72 * (width - CELL * len(card.models) - 0.1))
    ax.set(ylim=(len(lines) - 0.5, -0.5), xlim=(-0.5, len(card.models) - 0.5))
    ax.xaxis.tick_top()
    ax.set_xticks(range(len(card.models)), [wrapped(model_name(name), 14, 3) for name in card.models])
    ax.tick_params(axis="x", length=0)
    ax.spines[:].set_visible(False)
    signs = {str(outcome): look for outcome, look in OUTCOME_LOOKS.items() if (card.by_model == outcome).any(axis=None)}
    return figure.finish("", signs | {"does not apply, or not measured": UNDECIDED_LOOK}, ncols=5)


# --- The routes that carry the sink: models × routes, with the sink rate with and without each route

ROUTES_ROW, ROUTES_PUBLISHED = 0.6, 0.3  # inches: a model, and the row of NU's own model
LINE, LOW = 0.58, 0.24  # heights of the arrow and of the controls in a cell
NEAR = 14.0  # percentage points: no arrow is drawn between a before and an after that are nearer
ROUTE_BEFORE: Look = {"color": NAVY, "marker": "o", "markersize": 4, "markerfacecolor": "white", "linestyle": "none"}
ROUTE_AFTER: Look = {"color": NAVY, "marker": "o", "markersize": 4, "linestyle": "none"}
ARROW: Look = {
    "arrowstyle": "-|>", "color": NAVY, "linewidth": 0.9, "shrinkA": 2.5, "shrinkB": 2.5, "mutation_scale": 6
}  # fmt: skip
SHADES = {RouteEffect.FALLS: "#dfe9f2", RouteEffect.GOES: "#a9c4dc"}  # effect on the sink → background of the cell


@needs(models_with_routes, "no route was cut")
def draw_routes(table: pd.DataFrame) -> Figure:
    models = models_with_routes(table)
    figure = new_figure(WIDE, ROUTES_ROW * len(models) + ROUTES_PUBLISHED + 1)
    heights = [ROUTES_PUBLISHED, *[ROUTES_ROW] * len(models)]
    grid = figure.subplots(len(heights), len(ROUTES), squeeze=False, height_ratios=heights)
    names = ["GPT-2 in NU,\nwithout rates", *(wrapped(model_name(model), 15, 3) for model in models)]
    for ax, name in zip(grid[:, 0], names, strict=True):
        ax.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=7, labelpad=6)
    for column, route in zip(grid.T, ROUTES, strict=True):
        column[0].set_title(route.name.replace(" ", "\n") + "\n", fontsize=6.8, fontweight="bold", pad=2)
        column[0].annotate(escape(route.cut), (0.5, 1), (0, 3), xycoords="axes fraction",
            textcoords="offset points", fontsize=5.2, ha="center")  # fmt: skip
        _write(column[0], route.published or "not tested")
        _shade(column[0], route.published_effect)
        for ax, model in zip(column[1:], models, strict=True):
            row = table[(table["model"] == model) & (table["route"] == route.name)].iloc[0]
            _shade(ax, row["effect"])
            if row["effect"] in (RouteEffect.DOES_NOT_APPLY, RouteEffect.NOT_MEASURED):
                reason = row["note"].partition(":")[0] if row["effect"] == RouteEffect.DOES_NOT_APPLY else ""
                _write(ax, f"{row['effect']}: {reason}" if reason else row["effect"])
            else:
                if row["draws"] > 1:
                    ax.plot([row["control_low"], row["control_high"]], [LOW, LOW], **style.CONTROL_SPREAD)
                ax.plot([row["control"]], [LOW], **style.CONTROL_DRAWS)
                if abs(row["after"] - row["before"]) > NEAR:
                    ax.annotate("", (row["after"], LINE), (row["before"], LINE), arrowprops=ARROW)
                for name, look in (("after", ROUTE_AFTER), ("before", ROUTE_BEFORE)):
                    ax.plot([row[f"{name}_low"], row[f"{name}_high"]], [LINE, LINE], **style.INTERVAL)
                    ax.plot([row[name]], [LINE], **look)
                rates = f"{row['before']:.1f} → {row['after']:.1f}"
                ax.text(0.5, 0.95, rates, transform=ax.transAxes, ha="center", va="top", fontsize=6.5)
            ax.set(xlim=(-9, 109), ylim=(0, 1.15), yticks=[])
            ax.set_xticks([0, 50, 100], labels=["0", "50", "100 %"] if model == models[-1] else [])
            ax.tick_params(axis="x", labelsize=6, color="0.6")
    signs = {
        "as it is": ROUTE_BEFORE,
        "without the route": ROUTE_AFTER,
        "95 % over sequences": style.INTERVAL,
        "mean of random controls": style.CONTROL_DRAWS,
        "one more control would fall here (95 %)": style.CONTROL_SPREAD,
        "falls beyond the controls": {"facecolor": SHADES[RouteEffect.FALLS], "edgecolor": "0.75"},
        "and less than half is left": {"facecolor": SHADES[RouteEffect.GOES], "edgecolor": "0.75"},
    }
    text = "Sink rate at position 0 as it is, and without one route at a time"
    return figure.finish(text, signs, ncols=4, fontsize=6.5, columnspacing=1.5)


def _write(ax: Axes, text: str) -> None:
    """Write words in place of numbers."""
    lines = textwrap.wrap(text, 22, max_lines=4, placeholder=" …")
    ax.text(0.5, 0.5, escape("\n".join(lines)), transform=ax.transAxes, ha="center", va="center", fontsize=5)
    ax.set(xticks=[], yticks=[])


def _shade(ax: Axes, effect: str) -> None:
    ax.set_facecolor(SHADES.get(RouteEffect(effect), "white"))
    ax.spines[:].set_visible(True)
    ax.spines[:].set_color("0.75")


def drawings_by_model(tables: Mapping[str, pd.DataFrame]) -> Drawings:
    """Return the figures of the tables `claim` and `route` of several models; none for those of one model."""
    card = Scorecard({}, tables)
    return card.drawings if len(card.models) > 1 else {}

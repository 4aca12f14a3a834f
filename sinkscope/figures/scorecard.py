"""Every claim that was decided on one model: a line for each number, its interval against the threshold."""

import textwrap

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from sinkscope.figures.labels import escape, heading, model_name
from sinkscope.figures.spec import declare
from sinkscope.figures.style import GRAY, GREEN, NAVY, REFERENCE, VERMILION, Figure, Look, new_figure
from sinkscope.paper_claims.claim import Outcome
from sinkscope.paper_claims.register import CLAIMS
from sinkscope.verdict.scorecard import Scorecard, headline, value_text

PAGE_WIDTH, ROW, AROUND = 7.2, 0.145, 0.9  # inches
LETTERS = 62  # of a line's text
REACH = 4.0  # of the axis, to both sides of the threshold
LOOKS: dict[str, Look] = {
    Outcome.HOLDS: {"color": NAVY, "marker": "o", "markersize": 3.4},
    Outcome.INCONCLUSIVE: {"color": GREEN, "marker": "o", "markersize": 3.4, "markerfacecolor": "white"},
    Outcome.NOT_ENOUGH_SEEDS: {"color": GRAY, "marker": "s", "markersize": 3, "markerfacecolor": "white"},
    Outcome.FAILS: {"color": VERMILION, "marker": "X", "markersize": 4},
}
PUBLISHED: Look = {"color": GRAY, "marker": "|", "markersize": 5, "linestyle": "none"}


AT_RANDOM: Look = {"color": "0.45", "marker": "D", "markersize": 2.6, "markerfacecolor": "white", "linestyle": "none"}


def lacking(card: Scorecard) -> str | None:
    if len(card.models) > 1:
        return "several models have figures of their own"
    return None if len(_decided(card.table)) else "no claim was decided"


@declare("scorecard", "every claim's number against its threshold and what was published", "claim", lacking=lacking)
def draw(card: Scorecard) -> Figure:
    """A number's place is its distance from the threshold: in powers of two where this and the whole interval are
    positive, else in units of a quarter; the sign is such that the claim holds on the right.
    """
    rows = _decided(card.table)
    figure = new_figure(PAGE_WIDTH, ROW * (len(rows) + rows["paper"].nunique()) + AROUND)
    text, ax = figure.subplots(1, 2, sharey=True, width_ratios=[1.75, 1])
    ax.axvline(0, **REFERENCE)
    height = 0
    for paper, own in rows.groupby("paper", sort=False):
        text.text(0, height, paper, fontsize=6.5, fontweight="bold", va="center")
        for place, row in enumerate(own.itertuples(), height + 1):
            _line(text, ax, row, place)
            ax.axhline(place, color="0.93", linewidth=0.4, zorder=0)
        height += len(own) + 1
    text.set_xlim(0, 1)
    text.set_axis_off()
    ax.set(ylim=(height - 0.3, -0.7), xlim=(-REACH * 1.08, REACH * 1.08))
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    ax.set_xticks([-REACH, -2, 0, 2, REACH], ["≤ ÷16", "÷4", "threshold", "×4", "≥ ×16"])
    ax.set_xlabel("does not pass  ←  value  →  passes")
    figure.legend(handles=_legend(rows), loc="outside lower center", ncols=5)
    figure.suptitle(heading(model_name(card.models[0]), headline(card), "95 % intervals"))
    return figure


def _decided(table: pd.DataFrame) -> pd.DataFrame:
    """Preconditions that several claims share are drawn once."""
    rows = table[table["outcome"].isin(list(LOOKS))]
    return rows[(rows["part"] == 0) | ~rows.duplicated(["quantity", "value"])]


def _line(text: Axes, ax: Axes, row: tuple, place: int) -> None:
    first = row.part == 0  # type: ignore[attr-defined]
    too = " (and so does its null)" * (row.outcome == Outcome.HOLDS and row.tells == "no")  # type: ignore[attr-defined]
    words = f"{row.claim}{too}  {row.statement if first else '… ' + row.quantity}"  # type: ignore[attr-defined]
    short = textwrap.shorten(words, LETTERS, placeholder=" …")
    text.text(0, place, escape(short), fontsize=5.6, va="center")
    value = value_text(row.claim, row.part, row.value, row.low, row.high)  # type: ignore[attr-defined]
    text.text(1, place, f"{value}  {row.test}", fontsize=5.6, va="center", ha="right")  # type: ignore[attr-defined]
    look = LOOKS[Outcome(row.passes)]  # type: ignore[attr-defined]
    ends = [_place(end, row) for end in (row.low, row.high)]  # type: ignore[attr-defined]
    middle = _place(row.value, row)  # type: ignore[attr-defined]
    if np.isfinite(middle):
        ax.plot(ends, [place, place], color=look["color"], linewidth=1.1)
        ax.plot([middle], [place], linestyle="none", **look)
    published = CLAIMS[row.claim].published if first else ()  # type: ignore[attr-defined]
    ax.plot([_place(item.value, row) for item in published], [place] * len(published), **PUBLISHED)
    ax.plot([_place(row.null, row)], [place], **AT_RANDOM)  # type: ignore[attr-defined]
    drawn = [_place(end, row) for end in (row.null_low, row.null_high)]  # type: ignore[attr-defined]
    ax.plot(drawn, [place, place], color=AT_RANDOM["color"], linewidth=0.6)


def _place(value: float, row: tuple) -> float:
    """Where a value stands on the axis: 0 is the nearer threshold, and the right side passes."""
    if np.isnan(value):
        return float("nan")
    distances = []
    for threshold, sign in ((row.least, 1), (row.most, -1)):  # type: ignore[attr-defined]
        if np.isinf(threshold):
            continue
        if threshold > 0 and not row.low <= 0 and row.value > 0:  # type: ignore[attr-defined]
            distance = np.log2(value / threshold) if value > 0 else -np.inf
        else:
            distance = REACH * (value - threshold) / max(1.0, abs(threshold))
        distances.append(sign * distance)
    return float(np.clip(min(distances), -REACH, REACH))


def _legend(rows: pd.DataFrame) -> list[Line2D]:
    handles = [
        Line2D([], [], linestyle="none", label=str(outcome), **look)
        for outcome, look in LOOKS.items()
        if (rows["passes"] == outcome).any()
    ]
    marks = {"null": AT_RANDOM, "published": PUBLISHED}
    return [*handles, *(Line2D([], [], label=label, **look) for label, look in marks.items())]

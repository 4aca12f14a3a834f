"""The outcomes of all claims on several models: a row for each claim, a column for each model."""

import textwrap

from matplotlib.lines import Line2D

from sinkscope.figures.axes import shade_rows
from sinkscope.figures.labels import escape, model_name, wrapped
from sinkscope.figures.scorecard import LOOKS
from sinkscope.figures.spec import declare
from sinkscope.figures.style import Figure, Look, new_figure
from sinkscope.paper_claims.claim import Outcome
from sinkscope.paper_claims.register import CLAIMS
from sinkscope.verdict.scorecard import Scorecard

ROW, COLUMN_WIDTH, NAMES, AROUND = 0.135, 0.75, 4.2, 1.0  # inches
LETTERS = 84
NOTHING: Look = {"color": "0.7", "marker": "_", "markersize": 4, "linestyle": "none"}


def lacking(card: Scorecard) -> str | None:
    return None if len(card.models) > 1 else "there is one model"


@declare("scorecard-by-model", "the outcome of every claim, claims × models", "claim", lacking=lacking)
def draw(card: Scorecard) -> Figure:
    outcomes = card.by_model
    decided = outcomes[outcomes.isin(list(LOOKS)).any(axis=1)]
    figure = new_figure(NAMES + COLUMN_WIDTH * len(card.models), ROW * len(decided) + AROUND)
    ax = figure.subplots()
    shade_rows(ax, len(decided))
    for row, (_, found) in enumerate(decided.iterrows()):
        for column, outcome in enumerate(found):
            look = LOOKS.get(outcome, NOTHING) | {"linestyle": "none"}
            ax.plot([column], [row], **look)
    names = [
        escape(textwrap.shorten(f"{name}  {CLAIMS[name].statement}", LETTERS, placeholder=" …"))
        for name in decided.index
    ]
    ax.set_yticks(range(len(names)), names, fontsize=5.6, ha="left")
    ax.tick_params(axis="y", length=0, pad=NAMES * 66)
    ax.set(ylim=(len(decided) - 0.5, -0.5), xlim=(-0.5, len(card.models) - 0.5))
    ax.xaxis.tick_top()
    ax.set_xticks(range(len(card.models)), [wrapped(model_name(name), 14, 3) for name in card.models])
    ax.tick_params(axis="x", length=0)
    ax.spines[:].set_visible(False)
    figure.legend(handles=_legend(), loc="outside lower center", ncols=4)
    return figure


def _legend() -> list[Line2D]:
    handles = [Line2D([], [], label=str(Outcome(name)), **look | {"linestyle": "none"}) for name, look in LOOKS.items()]
    return [*handles, Line2D([], [], label="does not apply, or not measured", **NOTHING)]

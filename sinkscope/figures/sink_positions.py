"""Sinks that are not at position 0, such as delimiters (S2M §3; WSE, open question 1).

Only positions with at least 16 queries behind them count: with fewer, a head in which tokens attend to themselves would
look like a sink. In an encoder all tokens are queries of every position.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from sinkscope.figures.axes import say, whole_numbers, write_beside
from sinkscope.figures.labels import places, title, token_label
from sinkscope.figures.spec import declare
from sinkscope.figures.style import COLUMN, GUIDE, NAVY, VERMILION, WIDE, Figure, new_figure
from sinkscope.measuring.summary import clear_sinks
from sinkscope.results.findings import FEWEST_QUERIES
from sinkscope.results.run import RunData

MOST_TOKENS = 12
PERCENT = FuncFormatter(lambda share, _: percent(share))


def percent(share: float) -> str:
    """With two digits, however small the share is."""
    return f"{float(f'{100 * share:.2g}'):g} %"


@declare(
    "sink-positions", "heads with a sink at each position, and the tokens of later sinks", "sink_positions", "attention"
)
def draw(run: RunData) -> Figure:
    sinks = run.tables["sink_positions"]
    attention = run.tables["attention"]
    sequences = run.manifest["input"]["sequences"]
    heads = len(attention.drop_duplicates(["layer", "head"]))
    longest = run.manifest["input"]["longest"]
    last = max(0, longest - FEWEST_QUERIES) if run.is_causal else longest - 1
    sinks = clear_sinks(sinks)
    width = WIDE if sinks.empty or sinks["position"].any() else COLUMN
    figure = new_figure(width, 0.9 if sinks.empty else 2.5)
    figure.suptitle(title(run, width))
    if sinks.empty:
        say(figure.subplots(), f"no head has a sink at {places(0, last)}, in any sequence")
        return figure
    later = sinks[sinks["position"] > 0]
    widths = [1.0] if later.empty else [1.35, 1.0]
    left, *right = figure.subplots(1, len(widths), squeeze=False, width_ratios=widths)[0]
    _positions(left, sinks, last, heads * sequences)
    left.set_xlabel("position of the sink" + f" (with ≥ {FEWEST_QUERIES} queries behind it)" * run.is_causal)
    if right:
        _tokens(right[0], later, heads * sequences)
    else:
        left.set_title(f"no sink at {places(1, last)}" if last else "too few queries behind later positions")
    return figure


def _positions(ax: Axes, sinks: pd.DataFrame, last: int, pairs: int) -> None:
    """Logarithmic, as later sinks are rare; dots only, as a length on a log axis means nothing. The broken line is one
    pair: a position without a dot has none.
    """
    shares = sinks.groupby("position").size() / pairs
    ax.set_yscale("log")
    ax.set_ylim(0.6 * min(1 / pairs, 0.01), 1.3)
    ax.axhline(1 / pairs, **GUIDE)
    ax.annotate("one pair", (1, 1 / pairs), (0, 1), xycoords=ax.get_yaxis_transform(), textcoords="offset points",
        ha="right", va="bottom", fontsize=6, color="0.35")  # fmt: skip
    ax.grid(True, axis="y", color="0.9", linewidth=0.4)
    size = max(0.8, 2.6 * min(1.0, 50 / max(last, 1)))  # long sequences have many dots
    ax.plot(shares.index, shares, linestyle="none", marker="o", markersize=size, color=NAVY, clip_on=False)
    ax.yaxis.set_major_formatter(PERCENT)
    ax.yaxis.set_minor_formatter(NullFormatter())
    if 0 in shares.index:
        write_beside(ax, percent(shares[0]), 0, shares[0], space=5)
    ax.set_ylabel("share of (head, sequence) pairs")
    whole_numbers(ax, "x")
    ax.set_xlim(-0.03 * max(last, 20), max(last, 0.5) + 0.03 * max(last, 20))


def _tokens(ax: Axes, later: pd.DataFrame, pairs: int) -> None:
    ax.set_xlabel("share of (head, sequence) pairs")
    shares = token_shares(later, pairs).head(MOST_TOKENS)
    labels = [token_label(token, token_id) for token_id, token in shares.index]
    rows = range(len(shares))
    ax.barh(rows, shares, color=VERMILION, height=0.65)
    ax.set_yticks(rows, labels)
    ax.set_ylabel("token of a later sink")
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(max(len(shares), 4) - 0.4, -0.6)
    ax.set_xlim(0, shares.max() * 1.18)
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.xaxis.set_major_formatter(PERCENT)
    for row, share in zip(rows, shares, strict=True):
        write_beside(ax, percent(share), share, row)


def token_shares(later: pd.DataFrame, pairs: int) -> pd.Series:
    """By (token_id, token): the share of (head, sequence) pairs with that token as a later sink."""
    once = later.drop_duplicates(["layer", "head", "sequence", "token_id"])
    counts = once.groupby(["token_id", "token"], dropna=False).size()
    return (counts / pairs).sort_values(ascending=False, kind="stable")

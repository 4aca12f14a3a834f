"""Sinks that are not at position 0: delimiters and the like (S2M §3; WSE, open question 1).

A position counts if at least 16 queries stand behind it: with fewer, a head that looks at itself passes for a
sink.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from sinkscope.report.figures.axes import say, whole_numbers
from sinkscope.report.figures.labels import title, token_label
from sinkscope.report.figures.style import NAVY, VERMILION, WIDE, Figure, new_figure
from sinkscope.results.findings import FEWEST_QUERIES
from sinkscope.results.run import RunData

NAME = "sink-positions"
ABOUT = "share of heads with a sink at each position, and the tokens that carry sinks beyond position 0"
TABLES = ("sink_positions", "attention")
MOST_TOKENS = 12
PERCENT = FuncFormatter(lambda share, _: percent(share))


def percent(share: float) -> str:
    """Two digits of however small a share."""
    return f"{float(f'{100 * share:.2g}'):g} %"


def draw(run: RunData) -> Figure:
    sinks = run.tables["sink_positions"]
    attention = run.tables["attention"]
    sequences = run.manifest["input"]["sequences"]
    heads = len(attention.drop_duplicates(["layer", "head"]))
    last = _last_position(run)
    sinks = sinks[sinks["position"] <= last]
    figure = new_figure(WIDE, 0.9 if sinks.empty else 2.5)
    figure.suptitle(title(run, WIDE))
    if sinks.empty:
        say(figure.subplots(), f"no head has a sink at {_places(0, last)}, in any sequence")
        return figure
    left, right = figure.subplots(1, 2, width_ratios=[1.35, 1])
    _positions(left, sinks, last, heads * sequences)
    _tokens(right, sinks[sinks["position"] > 0], last, heads * sequences)
    return figure


def _last_position(run: RunData) -> int:
    """The last one with enough queries; where lengths differ, for a sequence of the mean length."""
    read = run.manifest["input"]
    return max(0, read["tokens"] // read["sequences"] - FEWEST_QUERIES)


def _positions(ax: Axes, sinks: pd.DataFrame, last: int, pairs: int) -> None:
    """Logarithmic: later sinks are rare beside the first. Stems stand on 1 % or, if less, on one pair."""
    shares = sinks.groupby("position").size() / pairs
    least = min(1 / pairs, 0.01)
    thin = min(1.0, 50 / max(last, 1))  # long sequences have many stems
    ax.set_yscale("log")
    ax.set_ylim(least, 1.3)
    ax.vlines(shares.index, least, shares, color=NAVY, linewidth=max(0.2, 0.8 * thin))
    size = max(0.8, 2.6 * thin)
    ax.plot(shares.index, shares, linestyle="none", marker="o", markersize=size, color=NAVY, clip_on=False)
    ax.yaxis.set_major_formatter(PERCENT)
    ax.yaxis.set_minor_formatter(NullFormatter())
    if 0 in shares.index:
        ax.annotate(percent(shares[0]), (0, shares[0]), (5, 0), textcoords="offset points", va="center", fontsize=6)
    ax.set_ylabel("share of (head, sequence) pairs")
    whole_numbers(ax, "x")
    ax.set_xlim(-0.03 * max(last, 20), max(last, 0.5) + 0.03 * max(last, 20))
    ax.set_xlabel(f"position of the sink (with ≥ {FEWEST_QUERIES} queries behind it)")


def _places(first: int, last: int) -> str:
    return f"positions {first}–{last}" if last > first else f"position {first}"


def _tokens(ax: Axes, later: pd.DataFrame, last: int, pairs: int) -> None:
    if later.empty:
        say(ax, f"no sink at {_places(1, last)}" if last else "too few queries behind later positions")
        return
    ax.set_xlabel("share of (head, sequence) pairs")
    shares = token_shares(later, pairs).head(MOST_TOKENS)
    labels = [token_label(token, token_id) for token_id, token in shares.index]
    places = np.arange(len(shares))
    ax.barh(places, shares, color=VERMILION, height=0.65)
    ax.set_yticks(places, labels)
    ax.tick_params(axis="y", length=0)
    ax.set_ylim(max(len(shares), 4) - 0.4, -0.6)
    ax.set_xlim(0, shares.max() * 1.18)
    ax.xaxis.set_major_locator(MaxNLocator(4))
    ax.xaxis.set_major_formatter(PERCENT)
    for place, share in zip(places, shares, strict=True):
        ax.annotate(percent(share), (share, place), (2, 0), textcoords="offset points", va="center", fontsize=6)


def token_shares(later: pd.DataFrame, pairs: int) -> pd.Series:
    """By (token_id, token): the share of (head, sequence) pairs with that token as a later sink."""
    once = later.drop_duplicates(["layer", "head", "sequence", "token_id"])
    counts = once.groupby(["token_id", "token"], dropna=False).size()
    return (counts / pairs).sort_values(ascending=False, kind="stable")

"""Has the value drain gone, and do gates close at the sink? (VGA figures 1 and 4, GS §5)

Values as the projection gives them out and as they are attended to, each head's norm ÷ its mean over the positions
behind 0, and the gates, all of them means over heads: above by position, the layers' median and quartiles; below by
layer, at position 0. Without gates both values are the same. With register tokens position 0 is the first register.

Not one run's figure, so `sinkscope list` does not show it.
"""

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from sinkscope.report.figures.arms import arm_looks, model_title
from sinkscope.report.figures.axes import has_values, layer_axis, line_by_layer, say, value_axis
from sinkscope.report.figures.style import GREY, WIDE, Figure, in_style, new_figure
from sinkscope.results.run import RunData

PANELS = ("raw value norm ÷ others", "attended value norm ÷ others", "gate")
LATER: dict[str, Any] = {"linestyle": (0, (3, 1.5)), "marker": "", "linewidth": 0.8, "alpha": 0.8}


def draw_retrofit_values(runs: Mapping[str, RunData]) -> Figure:
    """`runs`: arm → its run, with the table `geometry`, and `gate` where the arm has gates."""
    looks = arm_looks(runs)
    with in_style():
        figure = new_figure(WIDE, 3.9 + 0.15 * (1 + len(runs) // 4))
        axes = figure.subplots(2, 3)
        for arm, run in runs.items():
            for column, by_layer in enumerate(_measured(run)):
                _by_position(axes[0, column], by_layer, looks[arm])
                _at_first(axes[1, column], by_layer, looks[arm], with_later=column == 2)
        for column, name in enumerate(PANELS):
            axes[0, column].set_title(name)
            for ax in axes[:, column]:
                _finish(ax, "position" if ax is axes[0, column] else "layer, at position 0", log=column < 2)
        handles = [Line2D([], [], **look) for look in looks.values()]
        if any("gate" in run.tables for run in runs.values()):
            handles.append(Line2D([], [], color="0.3", label="gate, mean over later positions", **LATER))
        figure.legend(handles=handles, loc="outside lower center", ncols=4)
        model_title(figure, runs)
    return figure


def _measured(run: RunData) -> list[pd.DataFrame]:
    """One a panel: rows layers, columns positions; empty where the arm has no gates."""
    attended = run.tables["geometry"]
    if "gate" not in run.tables:
        return [to_others(attended, "value_norm"), to_others(attended, "value_norm"), pd.DataFrame()]
    gate = run.tables["gate"]
    gates = gate.groupby(["layer", "position"])["gate"].mean().unstack()
    return [to_others(gate, "raw_value_norm"), to_others(attended, "value_norm"), gates]


def to_others(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """Each head's value ÷ its mean over the positions behind 0, mean over heads: rows layers, columns positions. At
    position 0 this is the `value_drain` of `summary`.
    """
    heads = table.pivot(index=["layer", "head"], columns="position", values=column)
    ratios = heads.div(heads.drop(columns=0).mean(axis=1), axis=0)
    return ratios.groupby("layer").mean()


def _by_position(ax: Axes, by_layer: pd.DataFrame, look: dict) -> None:
    if by_layer.empty:
        return
    ax.plot(by_layer.columns, by_layer.median(), **look)
    low, high = by_layer.quantile(0.25), by_layer.quantile(0.75)
    ax.fill_between(by_layer.columns, low, high, color=look["color"], alpha=0.12, linewidth=0)


def _at_first(ax: Axes, by_layer: pd.DataFrame, look: dict, with_later: bool) -> None:
    if by_layer.empty:
        return
    if with_later:
        line_by_layer(ax, by_layer.drop(columns=0).mean(axis=1), **look | LATER)
    line_by_layer(ax, by_layer[0], **look)


def _finish(ax: Axes, across: str, log: bool) -> None:
    if not has_values(ax, log):
        say(ax, "no gates")
        return
    layer_axis(ax, across)
    ax.axhline(1.0, color=GREY, linewidth=0.6, zorder=0)
    value_axis(ax, log=log)

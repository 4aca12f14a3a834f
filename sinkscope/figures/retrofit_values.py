"""Has the value drain gone, and do gates close at the sink? (VGA figures 1 and 4, GS §5)

Values as projected and as attended to, each head's norm ÷ its mean over the later positions, and the gates, means over
heads: above by position, the layers' median and quartiles; below by layer, at position 0. Without gates both values are
the same, and there is no third column; with one layer no second row. With register tokens, position 0 is the first
register.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from sinkscope.figures.arms import FAINT, Arms, arm_looks
from sinkscope.figures.axes import layer_axis, line_by_layer, value_axis
from sinkscope.figures.spec import declare
from sinkscope.figures.style import NEUTRAL, WIDE, Figure, Look, new_figure
from sinkscope.results.metrics import METRICS
from sinkscope.results.run import RunData

PANELS = {  # name → what is at the axis
    METRICS["raw_value_drain"].short: "ratio of L2 norms",
    "attended value norm ÷ others": "ratio of L2 norms",
    "gate": "factor",
}


def lacking(arms: Arms) -> str | None:
    return None if arms.all_have("geometry") else "not all arms have the table geometry"


@declare("retrofit-values", "value norms and gates of every arm (VGA figs. 1 and 4)", "geometry", lacking=lacking)
def draw(arms: Arms) -> Figure:
    looks = arm_looks(arms.runs)
    has_gates = any("gate" in run.tables for run in arms.runs.values())
    columns = len(PANELS) if has_gates else len(PANELS) - 1
    rows = 2 if any(run.tables["geometry"]["layer"].nunique() > 1 for run in arms.runs.values()) else 1
    figure = new_figure(WIDE * columns / len(PANELS), 1.95 * rows + 0.15 * (1 + len(looks) // 4))
    axes = figure.subplots(rows, columns, squeeze=False)
    for arm, run in arms.runs.items():
        for column, by_layer in enumerate(_measured(run)[:columns]):
            _by_position(axes[0, column], by_layer, looks[arm])
            if rows > 1:
                _at_first(axes[1, column], by_layer, looks[arm], with_later=column == 2)
    for column, (name, unit) in enumerate(list(PANELS.items())[:columns]):
        axes[0, column].set_title(name)
        for ax, across in zip(axes[:, column], ("position", "layer, at position 0"), strict=False):
            _finish(ax, across, unit, log=column < 2)
    handles = [Line2D([], [], **look) for look in looks.values()]
    if has_gates and rows > 1:
        handles.append(Line2D([], [], color="0.3", label="gate, mean over later positions", **FAINT))
    figure.legend(handles=handles, loc="outside lower center", ncols=4 if columns > 2 else 2)
    over = "by position: median and quartiles over layers" if rows > 1 else ""
    figure.suptitle(arms.title(arms.seeds_text(of_runs=True), over))
    return figure


def _measured(run: RunData) -> list[pd.DataFrame]:
    """A table for each panel: rows layers, columns positions; empty where the arm has no gates."""
    attended = to_others(run.tables["geometry"], "value_norm")
    if "gate" not in run.tables:
        return [attended, attended, pd.DataFrame()]
    gate = run.tables["gate"]
    gates = gate.groupby(["layer", "position"])["gate"].mean().unstack()
    return [to_others(gate, "raw_value_norm"), attended, gates]


def to_others(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """Each head's value ÷ its mean over the later positions, mean over heads: rows layers, columns positions.

    At position 0 this is the metric `value_drain`.
    """
    heads = table.pivot(index=["layer", "head"], columns="position", values=column)
    return heads.div(heads.drop(columns=0).mean(axis=1), axis=0).groupby("layer").mean()


def _by_position(ax: Axes, by_layer: pd.DataFrame, look: Look) -> None:
    if by_layer.empty:
        return
    ax.plot(by_layer.columns, by_layer.median(), **look)
    low, high = by_layer.quantile(0.25), by_layer.quantile(0.75)
    ax.fill_between(by_layer.columns, low, high, color=look["color"], alpha=0.12, linewidth=0)


def _at_first(ax: Axes, by_layer: pd.DataFrame, look: Look, with_later: bool) -> None:
    if by_layer.empty:
        return
    if with_later:
        line_by_layer(ax, by_layer.drop(columns=0).mean(axis=1), **look | FAINT)
    line_by_layer(ax, by_layer[0], **look)


def _finish(ax: Axes, across: str, unit: str, log: bool) -> None:
    layer_axis(ax, across)
    ax.axhline(1.0, **NEUTRAL)
    if value_axis(ax, log=log):
        ax.set_ylabel(unit)

"""Sinks and norms by layer, the arms of a retrofit side by side: GS figure 5.

Sink rate, and the norms of the layer's, the MLP's and the attention's output: position 0 (solid) against the mean over
the other early tokens (broken). With register tokens position 0 is the first register. Layers count from 0.

Not one run's figure, so `sinkscope list` does not show it.
"""

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from sinkscope.report.figures.arms import arm_looks, model_title
from sinkscope.report.figures.axes import layer_axis, line_by_layer, say, value_axis
from sinkscope.report.figures.style import WIDE, Figure, in_style, new_figure
from sinkscope.results.run import RunData

# table, its site, column, name
PANELS = (
    ("attention", None, "sink_rate", "sink rate"),
    ("activation", "layer_out", "norm_mean", "norm of layer output"),
    ("activation", "mlp_out", "norm_mean", "norm of MLP output"),
    ("activation", "attn_out", "norm_mean", "norm of attention output"),
)
OTHERS: dict[str, Any] = {"linestyle": (0, (3, 1.5)), "marker": "", "linewidth": 0.8, "alpha": 0.8}


def draw_retrofit_layers(runs: Mapping[str, RunData]) -> Figure:
    """`runs`: arm → its run, with the tables `attention` and `activation`."""
    looks = arm_looks(runs)
    with in_style():
        figure = new_figure(WIDE, 4.2 + 0.15 * (1 + len(runs) // 4))
        axes = figure.subplots(2, 2, sharex=True)
        for ax, (table, site, column, name) in zip(axes.flat, PANELS, strict=True):
            for arm, run in runs.items():
                rows = run.tables[table]
                _lines(ax, rows if site is None else rows[rows["site"] == site], column, looks[arm])
            ax.set_title(name)
            _finish(ax, share=site is None)
        most = max(int(run.tables["attention"]["position"].max()) for run in runs.values())
        ways = [
            Line2D([], [], color="0.3", label="position 0"),
            Line2D([], [], color="0.3", label=f"mean over positions 1–{most}", **OTHERS | {"alpha": 1}),
        ]
        arms = [Line2D([], [], **look | {"linestyle": "-"}) for look in looks.values()]
        figure.legend(handles=[*arms, *ways], loc="outside lower center", ncols=4)
        model_title(figure, runs)
    return figure


def _lines(ax: Axes, rows: pd.DataFrame, column: str, look: dict) -> None:
    """Means over heads, where there are several."""
    first = rows["position"] == 0
    others = rows[~first].groupby("layer")[column].mean()
    line_by_layer(ax, others, zorder=2, **look | OTHERS)
    line_by_layer(ax, rows[first].groupby("layer")[column].mean(), zorder=3, **look | {"linestyle": "-"})


def _finish(ax: Axes, share: bool) -> None:
    if not any(len(line.get_xdata()) for line in ax.lines):  # type: ignore[arg-type]
        say(ax, "no such site\nin this family")
        return
    layer_axis(ax, "layer" if ax.get_subplotspec().is_last_row() else "")  # type: ignore[union-attr]
    value_axis(ax, log=not share, share=share)

"""Sinks and norms by layer, the arms of a training side by side (GS figure 5).

Sink rate, and the norms of the outputs of layer, MLP and attention: position 0 (solid) against the mean over the other
early tokens (broken). With register tokens, position 0 is the first register. Layers count from 0.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from sinkscope.report.figures.arms import FAINT, Arms, arm_looks
from sinkscope.report.figures.axes import drawn, layer_axis, line_by_layer, say, value_axis
from sinkscope.report.figures.labels import places
from sinkscope.report.figures.spec import declare
from sinkscope.report.figures.style import WIDE, Figure, Look, new_figure
from sinkscope.results.metrics import METRICS

# table, its site, column, name
PANELS = (
    ("attention", None, "sink_rate", METRICS["sink_rate"].short),
    ("activation", "layer_out", "norm_mean", "norm of layer output"),
    ("activation", "mlp_out", "norm_mean", "norm of MLP output"),
    ("activation", "attn_out", "norm_mean", "norm of attention output"),
)


def lacking(arms: Arms) -> str | None:
    if not arms.all_have("attention", "activation"):
        return "not all arms have the tables attention and activation"
    layers = next(iter(arms.runs.values())).tables["activation"]["layer"].nunique()
    return None if layers > 1 else "the model has only one layer"


@declare(
    "retrofit-layers",
    "sink rate and norms of every arm by layer (GS fig. 5)",
    "attention",
    "activation",
    lacking=lacking,
)
def draw(arms: Arms) -> Figure:
    looks = arm_looks(arms.runs)
    figure = new_figure(WIDE, 4.2 + 0.15 * (1 + len(looks) // 4))
    axes = figure.subplots(2, 2, sharex=True)
    for place, (ax, (table, site, column, name)) in enumerate(zip(axes.flat, PANELS, strict=True)):
        for arm, run in arms.runs.items():
            rows = run.tables[table]
            _lines(ax, rows if site is None else rows[rows["site"] == site], column, looks[arm])
        ax.set_title(name)
        if not len(drawn(ax, "x")):
            say(ax, "no such site\nin this family")
            continue
        layer_axis(ax, "layer" if place > 1 else "")
        value_axis(ax, log=site is not None, share=site is None)
    most = max(int(run.tables["attention"]["position"].max()) for run in arms.runs.values())
    handles = [
        *(Line2D([], [], **look | {"linestyle": "-"}) for look in looks.values()),
        Line2D([], [], color="0.3", label="position 0"),
        Line2D([], [], color="0.3", label=f"mean over {places(1, most)}", **FAINT | {"alpha": 1}),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    figure.suptitle(arms.title())
    return figure


def _lines(ax: Axes, rows: pd.DataFrame, column: str, look: Look) -> None:
    """Means over heads, where there are several."""
    first = rows["position"] == 0
    line_by_layer(ax, rows[~first].groupby("layer")[column].mean(), zorder=2, **look | FAINT)
    line_by_layer(ax, rows[first].groupby("layer")[column].mean(), zorder=3, **look | {"linestyle": "-"})

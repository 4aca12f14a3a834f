"""Sinks and norms by layer, the arms of a training side by side (GS figure 5).

Sink rate, and the norms of the outputs of layer, MLP and attention: position 0 (with markers) against the mean over the
other early tokens (thin). With register tokens, position 0 is the first register. Layers count from 0. Sites that a
family lacks have no panel.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from sinkscope.figures.arms import FAINT, Arms, arm_looks
from sinkscope.figures.axes import layer_axis, line_by_layer, panel_grid, value_axis
from sinkscope.figures.labels import places
from sinkscope.figures.spec import declare
from sinkscope.figures.style import WIDE, Figure, Look, new_figure
from sinkscope.results.metrics import METRICS

# table, its site, column, name, unit
PANELS = (
    ("attention", None, "sink_rate", METRICS["sink_rate"].short, "share of heads"),
    ("activation", "layer_out", "norm_mean", "layer output", "L2 norm"),
    ("activation", "mlp_out", "norm_mean", "MLP output", "L2 norm"),
    ("activation", "attn_out", "norm_mean", "attention output", "L2 norm"),
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
    sites = {site for run in arms.runs.values() for site in run.tables["activation"]["site"]}
    panels = [panel for panel in PANELS if panel[1] is None or panel[1] in sites]
    axes, lowest = panel_grid(figure, len(panels), 2, sharey=False)
    for ax, (table, site, column, name, unit) in zip(axes, panels, strict=True):
        for arm, run in arms.runs.items():
            rows = run.tables[table]
            _lines(ax, rows if site is None else rows[rows["site"] == site], column, looks[arm])
        ax.set_title(name)
        layer_axis(ax, "layer" if ax in lowest else "")
        if value_axis(ax, log=site is not None, share=site is None):
            ax.set_ylabel(unit)
    most = max(int(run.tables["attention"]["position"].max()) for run in arms.runs.values())
    handles = [
        *(Line2D([], [], **look) for look in looks.values()),
        Line2D([], [], color="0.3", marker="o", label="position 0"),
        Line2D([], [], color="0.3", label=f"mean over {places(1, most)}", **FAINT | {"alpha": 1}),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4)
    figure.suptitle(arms.title(arms.seeds_text(of_runs=True)))
    return figure


def _lines(ax: Axes, rows: pd.DataFrame, column: str, look: Look) -> None:
    """Means over heads, where there are several."""
    first = rows["position"] == 0
    line_by_layer(ax, rows[~first].groupby("layer")[column].mean(), zorder=2, **look | FAINT)
    line_by_layer(ax, rows[first].groupby("layer")[column].mean(), zorder=3, **look)

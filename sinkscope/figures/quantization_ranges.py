"""The range that 8 bits must cover: largest and median entry of every site by layer, and half a step of its grid.

Entries below half a step round to zero: where the median lies below it, most of the tensor is lost.
"""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from sinkscope.errors import counted
from sinkscope.figures.axes import layer_axis, line_by_layer, panel_grid, value_axis
from sinkscope.figures.labels import escape, shorten, title
from sinkscope.figures.spec import declare
from sinkscope.figures.style import HIGHEST, OTHERS, SINK, VERMILION, WIDE, Figure, Look, new_figure
from sinkscope.quantization.sites import NO_LAYER, WEIGHT
from sinkscope.results.run import RunData

COLUMNS, MOST = 4, 24  # panels in a row, and in all
HEIGHT = 1.3  # inches of a row
LONGEST = 30  # letters of a title

LARGEST = SINK | {"label": "largest entry"}
MEDIAN = OTHERS | {"label": "median entry"}
HALF_STEP = HIGHEST | {"label": "half a step: less rounds to zero"}
MASSIVE: Look = {
    "label": "massive activations",
    "linestyle": "none",
    "marker": "o",
    "markersize": 7,
    "markerfacecolor": "none",
    "markeredgecolor": VERMILION,
    "zorder": 5,
}


def lacking(run: RunData) -> str | None:
    return None if len(_sites(run)) else "none of its linear layers is in one of the model's layers"


@declare(
    "quantization-ranges", "range and median of every linear layer by layer", "quantization_sites", lacking=lacking
)
def draw(run: RunData) -> Figure:
    sites = _sites(run)
    kinds = list(_kinds(sites).items())[:MOST]
    across = min(COLUMNS, len(kinds))
    figure = new_figure(WIDE, HEIGHT * -(-len(kinds) // across) + 0.7)
    axes, lowest = panel_grid(figure, len(kinds), across)
    for ax, (name, table) in zip(axes, kinds, strict=True):
        _draw_kind(ax, table)
        ax.set_title(escape(name), fontsize=7)
        ax.margins(y=0.12)  # rings have a size
    for ax in axes:
        layer_axis(ax, "layer" if ax in lowest else "")
        value_axis(ax, log=True)
    for ax in axes[::across]:
        ax.set_ylabel("|entry|")
    shown = [Line2D([], [], **look) for look in (LARGEST, MEDIAN, HALF_STEP)]
    shown += [Line2D([], [], **MASSIVE)] * bool(sites["is_massive"].any())
    figure.legend(handles=shown, loc="outside lower center", ncols=4)
    calibration = run.manifest["quantization"]["calibration"]
    figure.suptitle(title(run, WIDE, f"{counted(calibration, 'sequence')} of calibration"))
    return figure


def _sites(run: RunData) -> pd.DataFrame:
    """Inputs and outputs in the layers. Where a layer has several of a kind, as of experts, the widest."""
    table = run.tables["quantization_sites"]
    table = table[(table["layer"] != NO_LAYER) & (table["part"] != WEIGHT)]
    widest = table.sort_values("max_abs", ascending=False).drop_duplicates(["layer", "site", "part"])
    return widest.sort_index()


def _kinds(sites: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Title → rows. Linear layers that read the same tensor, as of query, key and value, share a panel."""
    alike: dict[tuple, tuple[list[str], str, pd.DataFrame]] = {}
    for (site, part), table in sites.groupby(["site", "part"], sort=False):
        same = (part, *table["layer"], *table["low"], *table["high"], *table["median_abs"])
        names, *_ = alike.setdefault(same, ([], str(part), table))
        names.append(str(site))
    return {f"{_joined(names)}\n{part}": table for names, part, table in alike.values()}


def _joined(names: list[str]) -> str:
    """The name; of several names, their last parts."""
    return shorten(names[0] if len(names) == 1 else ", ".join(name.split(".")[-1] for name in names), LONGEST)


def _draw_kind(ax: Axes, table: pd.DataFrame) -> None:
    table = table.set_index("layer").sort_index()
    line_by_layer(ax, table["max_abs"], **LARGEST)
    line_by_layer(ax, table["median_abs"], **MEDIAN)
    line_by_layer(ax, table["step"] / 2, **HALF_STEP)
    massive = table[table["is_massive"]]
    ax.plot(massive.index, massive["max_abs"].to_numpy(float), **MASSIVE)

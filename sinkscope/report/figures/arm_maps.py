"""One layer's attention maps under every arm of an experiment: NU figure 3, in less space.

Few maps stand in one row, each arm's random control beside it. Many stand in columns, each control below its arm: then
its name is not repeated, and the colour bar has its place below the model as it is, which has no control. The number
in a map is the mean weight that its queries give the sink.
"""

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.image import AxesImage
from matplotlib.ticker import NullLocator

from sinkscope.report.effects import arms
from sinkscope.report.figures.labels import title, wrapped
from sinkscope.report.figures.style import COLUMN, SEQUENTIAL, Figure, new_figure
from sinkscope.results.run import RunData

NAME = "arm-maps"
ABOUT = "attention maps of one layer under every arm and its control (NU fig. 3)"
TABLES = ("arm_maps",)
BEFORE = "before"
FAINTEST = 1e-2  # the colour scale is logarithmic from here to 1: means over heads and sequences are seldom below it

ACROSS = 8  # maps in a row
SMALLEST, GAP = 0.745, 0.045  # inches: a map, and the space between maps
LEFT, RIGHT, BELOW = 0.32, 0.05, 0.2  # inches: margins
BAR = 0.42  # inches: the colour bar, where it stands beside the maps
HEADING, LINE = 0.17, 0.13  # inches: the title's first line, and another
NAME_LINE, LETTER = 0.1, 0.053  # inches: a line of an arm's name, and a letter
SMALL = 6.5  # points

Maps = dict[str, dict[int, np.ndarray]]  # condition → layer → (query, key) weights, NaN where there are none


@dataclass(frozen=True)
class _Cell:
    row: int
    column: int
    condition: str
    name: str  # "": that of the cell above holds
    sink: int  # its position


def draw(run: RunData) -> Figure:
    maps = maps_by_condition(run)
    layer = telling_layer(run, maps)
    cells = _cells(run, maps)
    down, across = 1 + max(cell.row for cell in cells), 1 + max(cell.column for cell in cells)
    has_room = any(not cell.name for cell in cells)  # below the first map, for the colour bar
    beside = 0.0 if has_room else BAR
    size = max((COLUMN - LEFT - RIGHT - beside) / across - GAP, SMALLEST)  # few maps are larger
    names = {cell: wrapped(cell.name, int(size / LETTER)) for cell in cells}
    lines = [max(names[cell].count("\n") + bool(cell.name) for cell in cells if cell.row == row) for row in range(down)]
    width = LEFT + across * (size + GAP) + beside + RIGHT
    heading = title(run, width, f"layer {layer} (sink changes most)")
    tops = HEADING + LINE * heading.count("\n") + np.cumsum(np.array(lines) * NAME_LINE + size + GAP) - size

    figure = new_figure(width, tops[-1] + size + (0.05 if has_room else BELOW))
    figure.set_layout_engine("none")  # all is placed in inches, closer than an engine would
    figure.suptitle(heading, y=1 - 0.04 / figure.get_figheight(), va="top")
    for cell in cells:
        ax = axes_at(figure, LEFT + cell.column * (size + GAP), tops[cell.row], size, size)
        image = draw_map(ax, maps[cell.condition].get(layer))
        ax.set_title(names[cell], fontsize=SMALL, pad=2, linespacing=1.0)
        weight = to_sink(maps[cell.condition].get(layer), cell.sink)
        if np.isfinite(weight):
            ax.text(0.98, 0.96, f"sink {weight:.2f}", transform=ax.transAxes, ha="right", va="top", fontsize=SMALL)
        if cell.column == 0 and cell.row == (0 if has_room else down - 1):  # where there is room below
            _label(ax)
        if not cell.name and cell.column == (cell.row == 1):  # the first of its row
            ax.set_ylabel("random\ncontrol", fontsize=SMALL)
    if has_room:
        bar = axes_at(figure, LEFT, tops[1] + 0.45 * size, 0.6 * size, 0.07)
    else:
        bar = axes_at(figure, width - BAR - RIGHT + 0.02, tops[0], 0.07, size)
    colour_bar(figure, image, bar)
    return figure


def _cells(run: RunData, maps: Maps) -> list[_Cell]:
    """Where each condition's map stands."""
    labels = [label for label in arms(run) if label in maps]
    controlled = {label for label in labels if control_of(label) in maps}
    sinks = {label: arms(run)[label]["watched"][0] for label in labels}
    shown = {BEFORE: next(iter(sinks.values()), 0)} | sinks
    cells: list[_Cell] = []
    if len(shown) + len(controlled) <= ACROSS:
        for label, sink in shown.items():
            cells.append(_Cell(0, len(cells), label, label, sink))
            if label in controlled:
                cells.append(_Cell(0, len(cells), control_of(label), "random control", sink))
        return cells
    across = -(-len(shown) // -(-len(shown) // ACROSS))  # rows as long as one another
    for place, (label, sink) in enumerate(shown.items()):
        row, column = (2 if controlled else 1) * (place // across), place % across
        cells.append(_Cell(row, column, label, label, sink))
        if label in controlled:
            cells.append(_Cell(row + 1, column, control_of(label), "", sink))
    return cells


def _label(ax: Axes) -> None:
    """What the axes are, and their ends."""
    ends = [0, int(ax.get_xlim()[1])]
    ax.set_xticks(ends)
    ax.set_yticks(ends)
    first, *last = ax.get_xticklabels()
    first.set_horizontalalignment("left")
    for label in last:
        label.set_horizontalalignment("right")  # not into the next map
    ax.tick_params(labelsize=SMALL, pad=1)
    ax.set_xlabel("key", fontsize=SMALL, labelpad=-6)
    ax.set_ylabel("query", fontsize=SMALL, labelpad=-6)


# --- what the figures of maps share


def maps_by_condition(run: RunData) -> Maps:
    table = run.tables["arm_maps"]
    size = int(table["query"].max()) + 1
    maps: Maps = {}
    for (condition, layer), rows in table.groupby(["condition", "layer"], sort=False):
        weights = np.full((size, size), np.nan)
        weights[rows["query"], rows["key"]] = rows["weight"]
        maps.setdefault(condition, {})[int(layer)] = weights
    return maps


def control_of(label: str) -> str:
    """The condition of an arm's control: of its draws, the first has maps."""
    return f"{label} control 0"


def telling_layer(run: RunData, maps: Maps) -> int:
    """Where attention to the sink changes most, median over arms: one that masks the sink is not to decide. An arm's
    sink is the first position that it watches.
    """
    changes: dict[int, list[float]] = {layer: [] for layer in maps[BEFORE]}
    for label, arm in arms(run).items():
        for layer in maps.get(label, {}).keys() & changes.keys():
            before, after = (to_sink(maps[name][layer], arm["watched"][0]) for name in (BEFORE, label))
            changes[layer].append(abs(after - before))
    return max(changes, key=lambda layer: np.nan_to_num(np.median(changes[layer])) if changes[layer] else 0.0)


def to_sink(weights: np.ndarray | None, sink: int) -> float:
    """Mean over the queries behind the sink, as far as the map reaches; NaN where it does not."""
    behind = np.empty(0) if weights is None or sink >= len(weights) else weights[sink + 1 :, sink]
    return float(behind.mean()) if len(behind) else float("nan")


def axes_at(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes placed in inches, from the left and from the top."""
    across, down = figure.get_size_inches()
    return figure.add_axes((left / across, 1 - (top + height) / down, width / across, height / down))


def draw_map(ax: Axes, weights: np.ndarray | None, blank: np.ndarray | None = None) -> AxesImage:
    """Queries downwards, without ticks. What the causal mask forbids (`blank`) is white, what is not known grey."""
    weights = np.full((1, 1), np.nan) if weights is None else weights
    blank = np.triu(np.ones_like(weights, bool), 1) if blank is None else blank
    image = ax.imshow(np.clip(weights, FAINTEST / 10, 1), cmap=SEQUENTIAL, norm=LogNorm(FAINTEST, 1))
    ax.imshow(np.where(blank, 1.0, np.nan), cmap="Greys_r", vmin=0, vmax=1)
    ax.spines[:].set(color="0.6", linewidth=0.4)
    ax.xaxis.set_major_locator(NullLocator())
    ax.yaxis.set_major_locator(NullLocator())
    return image


def colour_bar(figure: Figure, image: AxesImage, ax: Axes) -> None:
    """Along the longer side of `ax`."""
    box = ax.get_window_extent()
    across = box.width > box.height
    bar = figure.colorbar(image, cax=ax, orientation="horizontal" if across else "vertical", extend="min")
    bar.outline.set_linewidth(0.5)
    bar.set_ticks([FAINTEST, 0.1, 1], labels=[f"{FAINTEST:g}", "0.1", "1"])
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=SMALL, pad=1)
    bar.set_label("attention weight", fontsize=SMALL, labelpad=1)

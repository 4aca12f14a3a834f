"""One layer's attention maps under every arm of an experiment (NU figure 3).

Few maps stand in one row, each arm's random control beside it. Many stand in several rows, each control below its arm
without repeating its name, and the color bar below the map of the unchanged model, which has no control. The number in
a map is the mean weight that its queries give the sink.
"""

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.image import AxesImage
from matplotlib.ticker import NullLocator

from sinkscope.figures.heatmaps import draw_weights, square
from sinkscope.figures.labels import title, wrapped
from sinkscope.figures.spec import declare
from sinkscope.figures.style import COLUMN, Figure, new_figure
from sinkscope.results.run import RunData
from sinkscope.verdict.effects import arms

BEFORE = "before"
MEAN = "mean over heads and sequences"
FAINTEST = 1e-2  # of the color scale: means over heads and sequences are seldom below it

ACROSS = 8  # maps in a row
SMALLEST, GAP = 0.745, 0.045  # inches: a map, and the space between maps
LEFT, RIGHT, BELOW = 0.32, 0.05, 0.2  # inches: margins
BAR = 0.42  # inches: the color bar, where it stands beside the maps
TITLE, LINE = 0.17, 0.13  # inches: the title's first line, and another
NAME_LINE, LETTER = 0.1, 0.053  # inches: a line of an arm's name, and a letter
SMALL = 6.5  # points

Maps = dict[str, dict[int, np.ndarray]]  # condition → layer → (query, key) weights, NaN where there are none


@dataclass(frozen=True)
class _Cell:
    """A map in the grid."""

    row: int
    column: int
    condition: str
    name: str  # empty for a control below its arm
    sink: int  # position


@declare("arm-maps", "attention maps of one layer under every arm and its control (NU fig. 3)", "arm_maps")
def draw(run: RunData) -> Figure:
    maps = maps_by_condition(run)
    layer = most_changed_layer(run, maps)
    cells = _cells(run, maps)
    down, across = 1 + max(cell.row for cell in cells), 1 + max(cell.column for cell in cells)
    has_room = any(not cell.name for cell in cells)  # for the color bar, below the first map
    beside = 0.0 if has_room else BAR
    size = max((COLUMN - LEFT - RIGHT - beside) / across - GAP, SMALLEST)
    names = {cell: wrapped(cell.name, int(size / LETTER)) for cell in cells}
    lines = [max(names[cell].count("\n") + bool(cell.name) for cell in cells if cell.row == row) for row in range(down)]
    width = LEFT + across * (size + GAP) + beside + RIGHT
    text = title(run, width, f"layer {layer} (sink changes most)", MEAN)
    tops = TITLE + LINE * text.count("\n") + np.cumsum(np.array(lines) * NAME_LINE + size + GAP) - size

    figure = placed_figure(width, tops[-1] + size + (0.05 if has_room else BELOW), text)
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
    color_bar(figure, image, bar)
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
    across = -(-len(shown) // -(-len(shown) // ACROSS))  # rows of about equal length
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
        label.set_horizontalalignment("right")  # so that it does not reach into the next map
    ax.tick_params(labelsize=SMALL, pad=1)
    ax.set_xlabel("key", fontsize=SMALL, labelpad=-6)
    ax.set_ylabel("query", fontsize=SMALL, labelpad=-6)


# --- shared with arm_maps_by_layer


def maps_by_condition(run: RunData) -> Maps:
    table = run.tables["arm_maps"]
    size = int(table["query"].max()) + 1
    maps: Maps = {}
    for (condition, layer), rows in table.groupby(["condition", "layer"], sort=False):
        maps.setdefault(condition, {})[int(layer)] = square(rows, size)
    return maps


def control_of(label: str) -> str:
    """The condition of an arm's control: of its draws, only the first has maps."""
    return f"{label} control 0"


def most_changed_layer(run: RunData, maps: Maps) -> int:
    """Where the weight of the sink, an arm's first watched position, changes most.

    This is the median over arms, so that one that masks the sink does not decide alone.
    """
    changes: dict[int, list[float]] = {layer: [] for layer in maps[BEFORE]}
    for label, arm in arms(run).items():
        for layer in maps.get(label, {}).keys() & changes.keys():
            before, after = (to_sink(maps[name][layer], arm["watched"][0]) for name in (BEFORE, label))
            changes[layer].append(abs(after - before))
    return max(changes, key=lambda layer: np.nan_to_num(np.median(changes[layer])) if changes[layer] else 0.0)


def to_sink(weights: np.ndarray | None, sink: int) -> float:
    """Mean weight over the other queries that see the sink; NaN where the map has none."""
    if weights is None or sink >= len(weights):
        return float("nan")
    others = np.delete(weights[:, sink], sink)
    others = others[np.isfinite(others)]  # of a causal model those behind it
    return float(others.mean()) if len(others) else float("nan")


def placed_figure(width: float, height: float, text: str) -> Figure:
    """A figure whose parts are placed in inches, closer together than a layout engine would."""
    figure = new_figure(width, height)
    figure.set_layout_engine("none")
    figure.suptitle(text, y=1 - 0.04 / figure.get_figheight(), va="top")
    return figure


def axes_at(figure: Figure, left: float, top: float, width: float, height: float) -> Axes:
    """Axes placed in inches, from the left and from the top."""
    across, down = figure.get_size_inches()
    return figure.add_axes((left / across, 1 - (top + height) / down, width / across, height / down))


def draw_map(ax: Axes, weights: np.ndarray | None, masked: np.ndarray | None = None) -> AxesImage:
    """Without ticks; all gray where there are no weights."""
    image = draw_weights(ax, np.full((1, 1), np.nan) if weights is None else weights, FAINTEST, masked)
    ax.spines[:].set(color="0.6", linewidth=0.4)
    ax.xaxis.set_major_locator(NullLocator())
    ax.yaxis.set_major_locator(NullLocator())
    return image


def color_bar(figure: Figure, image: AxesImage, ax: Axes) -> None:
    """Along the longer side of `ax`."""
    box = ax.get_window_extent()
    across = box.width > box.height
    bar = figure.colorbar(image, cax=ax, orientation="horizontal" if across else "vertical", extend="min")
    bar.set_ticks([FAINTEST, 0.1, 1], labels=[f"{FAINTEST:g}", "0.1", "1"])
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=SMALL, pad=1)
    bar.set_label("attention weight", fontsize=SMALL, labelpad=1)

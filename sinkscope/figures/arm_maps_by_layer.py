"""The attention maps of all layers under every arm (NU figures 7 to 13, on one page).

The maps of an arm are one image, as hundreds of axes would take long to save. Where its layers do not fit in one row,
it has several; maps are as large as the page then allows.
"""

from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.image import AxesImage

from sinkscope.figures.arm_maps import (
    BEFORE,
    MEAN,
    SMALL,
    Maps,
    axes_at,
    color_bar,
    control_of,
    draw_map,
    maps_by_condition,
    placed_figure,
)
from sinkscope.figures.heatmaps import above_diagonal
from sinkscope.figures.labels import title, wrapped
from sinkscope.figures.spec import declare
from sinkscope.figures.style import COLUMN, WIDE, Figure, Look
from sinkscope.results.run import RunData
from sinkscope.verdict.effects import arms

PAGE = 9.0  # inches, at most
LEFT, RIGHT, TOP, BELOW = 1.05, 0.04, 0.36, 0.4  # inches: for names; nothing; title and layers; color bar
BETWEEN, BEFORE_CONTROL = 0.1, 0.03  # inches between arms, and between an arm and its control
LETTERS = 18  # of a line of an arm's name
CONTROL = "random control"
LARGEST, LARGEST_WRAPPED = 0.71, 0.48  # inches a map, in a lone row and in one of several
WORTH = 0.85  # fewer rows are better, as long as maps are this share of the largest possible
READABLE = 0.24  # inches: controls are left out where maps would be smaller with them
GAP = 0.06  # between maps, as a share of a map
BEHIND_NUMBER = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}


@dataclass(frozen=True)
class _Page:
    """How the maps are laid out."""

    conditions: dict[str, str]  # → the name beside its maps
    rows: int  # of one condition
    across: int  # layers in a row
    size: float  # inches a map, with the gap behind it

    @property
    def tops(self) -> np.ndarray:
        """Inches from the first map to each condition's first, and to the end of the last."""
        gaps = _gaps(self.conditions)
        return np.cumsum([0.0, *(gap + self.rows * self.size for gap in [*gaps[1:], 0.0])])


@declare("arm-maps-by-layer", "attention maps of every layer under every arm (NU figs. 7–13 on one page)", "arm_maps")
def draw(run: RunData) -> Figure:
    maps = maps_by_condition(run)
    layers = sorted({layer for by_layer in maps.values() for layer in by_layer})
    page, note = _page(run, maps, len(layers))
    width = max(LEFT + page.across * page.size + RIGHT, COLUMN)
    text = title(run, width, note, MEAN)
    top = TOP + 0.13 * text.count("\n") - (0.13 if page.rows > 1 else 0)  # where no layers stand above the maps
    figure = placed_figure(width, top + page.tops[-1] + BELOW, text)
    for (condition, name), above in zip(page.conditions.items(), page.tops, strict=False):
        ax = axes_at(figure, LEFT, top + above, page.across * page.size, page.rows * page.size)
        image = _mosaic(ax, maps[condition], layers, page)
        color = "0.4" if name == CONTROL else "black"
        ax.set_ylabel(name, fontsize=SMALL, color=color, rotation=0, ha="right", va="center", labelpad=3)
        if page.rows > 1 or condition == BEFORE:
            _number(ax, layers, page)
    bar = axes_at(figure, LEFT, figure.get_figheight() - BELOW + 0.04, 1.1, 0.07)
    color_bar(figure, image, bar)
    tokens = len(next(iter(maps[BEFORE].values())))
    words = f"down: {tokens} queries\nacross: {tokens} keys" + ("\nnumber: layer" if page.rows > 1 else "")
    bar.text(1.1, 1, words, transform=bar.transAxes, va="top", fontsize=SMALL, color="0.3")
    return figure


def _page(run: RunData, maps: Maps, layers: int) -> tuple[_Page, str]:
    """The page, with the controls if that leaves the maps readable, and a note of what is shown."""
    labels = [BEFORE, *(label for label in arms(run) if label in maps)]
    alone, controlled = {}, {}
    for label in labels:
        alone[label] = controlled[label] = wrapped(label, LETTERS, 2)
        if control_of(label) in maps:
            controlled[control_of(label)] = CONTROL
    whole = _largest(controlled, layers)
    if alone == controlled or whole.size >= READABLE:
        return whole, "every layer"
    return _largest(alone, layers), "every layer, controls left out"


def _largest(conditions: dict[str, str], layers: int) -> _Page:
    """As few rows for each condition as leave the maps about as large as possible."""
    height = (PAGE - TOP - 0.13 - BELOW - sum(_gaps(conditions))) / len(conditions)
    pages = []
    for rows in range(1, layers + 1):
        across = -(-layers // rows)
        most = LARGEST if rows == 1 else LARGEST_WRAPPED
        pages.append(_Page(conditions, rows, across, min((WIDE - LEFT - RIGHT) / across, height / rows, most)))
    largest = max(page.size for page in pages)
    return next(page for page in pages if page.size >= WORTH * largest)


def _gaps(conditions: dict[str, str]) -> list[float]:
    """Inches above each condition."""
    return [0.0, *(BEFORE_CONTROL if name == CONTROL else BETWEEN for name in list(conditions.values())[1:])]


def _mosaic(ax: Axes, by_layer: dict[int, np.ndarray], layers: list[int], page: _Page) -> AxesImage:
    """Maps in reading order. A layer without one is gray below its diagonal; places without a layer are white."""
    size = len(next(iter(by_layer.values())))
    pitch = size + max(1, round(GAP * size))
    weights = np.full((page.rows * pitch, page.across * pitch), np.nan)
    masked = np.ones_like(weights, bool)
    for place, layer in enumerate(layers):
        row, column = divmod(place, page.across)
        spot = np.s_[row * pitch : row * pitch + size, column * pitch : column * pitch + size]
        weights[spot] = by_layer.get(layer, np.nan)
        masked[spot] = above_diagonal(weights[spot])
    image = draw_map(ax, weights, masked)
    ax.spines[:].set_visible(False)
    return image


def _number(ax: Axes, layers: list[int], page: _Page) -> None:
    """The layers' numbers: above a single row, else in the upper right corners, which a causal mask leaves empty."""
    pitch = ax.get_xlim()[1] / page.across
    if page.rows == 1:
        ax.text(-0.3 * pitch, -0.06 * pitch, "layer", fontsize=6, ha="right", va="bottom")
    for place, layer in enumerate(layers):
        row, column = divmod(place, page.across)
        if page.rows == 1:
            look: Look = {"x": (column + 0.5) * pitch, "y": -0.06 * pitch, "ha": "center", "va": "bottom"}
        else:
            look = {
                "x": (column + 1 - GAP) * pitch,
                "y": row * pitch,
                "ha": "right",
                "va": "top",
                "bbox": BEHIND_NUMBER,
            }
        ax.text(s=str(layer), fontsize=6, **look)

"""How the arms of a retrofit look: each the same in every figure."""

from collections.abc import Iterable, Mapping
from itertools import cycle
from typing import Any

import numpy as np

from sinkscope.report.figures.comparison import COLOURS, DASHES, MARKERS
from sinkscope.report.figures.labels import escape, shorten
from sinkscope.report.figures.style import Figure
from sinkscope.report.retrofit_table import UNTOUCHED
from sinkscope.results.run import RunData

NAME_LENGTH = 40  # characters of an arm's name
WIDEST, THINNEST = 2.0, 0.9  # lines: the later and thinner ones lie on top, so that lines that coincide are all seen


def arm_looks(arms: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Arm → label, colour, dashes, marker and width of its line. The model as it is is black, and counts for no colour:
    a figure of the trained arms alone has the same ones.
    """
    arms = list(arms)
    looks = zip(cycle(COLOURS), cycle(DASHES), cycle(MARKERS), strict=False)
    found = {}
    for arm, width in zip(arms, np.linspace(WIDEST, THINNEST, len(arms)), strict=True):
        colour, dashes, marker = ("black", "-", "P") if arm == UNTOUCHED else next(looks)
        name = escape(shorten(arm, NAME_LENGTH))
        found[arm] = {"label": name, "color": colour, "linestyle": dashes, "marker": marker, "linewidth": width}
    return found


def model_title(figure: Figure, runs: Mapping[str, RunData]) -> None:
    """The model that all arms were made from."""
    name = next(iter(runs.values())).model.rstrip("/").split("/")[-1]
    figure.suptitle(escape(shorten(name, 2 * NAME_LENGTH)))

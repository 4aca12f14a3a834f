"""How figures look: one style for all, that reads in print, in greyscale and with any colour vision.

Nothing here touches pyplot or matplotlib's global settings: figures leak nothing and open no window.
"""

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib.style
import numpy as np
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure as MatplotlibFigure

TEXT, WIDE = 5.5, 6.75  # inches: the text width of one-column and of two-column proceedings
COLUMN = 3.25  # one of the two columns
DPI = 200
FONT = "DejaVu Sans"  # comes with matplotlib: the same figure on every machine

SETTINGS: dict[str, Any] = {
    "font.family": FONT,
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "figure.titlesize": 8,
    "figure.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "legend.handlelength": 2.6,
    "axes.linewidth": 0.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.titlepad": 4,
    "axes.labelpad": 2,
    "lines.linewidth": 1.1,
    "lines.markersize": 2.6,
    "lines.solid_capstyle": "round",
    "lines.dash_capstyle": "round",
    "xtick.major.width": 0.5,
    "ytick.major.width": 0.5,
    "xtick.minor.width": 0.35,
    "ytick.minor.width": 0.35,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.minor.size": 1.5,
    "ytick.minor.size": 1.5,
    "xtick.major.pad": 2,
    "ytick.major.pad": 2,
    "hatch.linewidth": 0.4,
    "image.interpolation": "nearest",
    "savefig.dpi": DPI,
    "pdf.fonttype": 42,  # TrueType: publishers refuse Type 3
    "ps.fonttype": 42,
    "svg.hashsalt": "sinkscope",  # else every SVG has other ids
}

# Lines differ in colour, lightness, dashes and marker, so that any one of them is enough.
NAVY, VERMILION, SKY, GREY = "#10315c", "#c8501e", "#6fb1dc", "#8a8a8a"
# The broken and thinner ones lie on top, so that lines that coincide are all seen.
SINK: dict[str, Any] = {"color": NAVY, "linestyle": "-", "marker": "o", "linewidth": 1.3, "markersize": 3, "zorder": 2}
OTHERS: dict[str, Any] = {"color": VERMILION, "linestyle": "--", "marker": "s", "markersize": 2.4, "zorder": 3}
HIGHEST: dict[str, Any] = {"color": SKY, "linestyle": ":", "marker": "^", "markersize": 2.4, "zorder": 4}

SEQUENTIAL = colormaps["magma_r"].with_extremes(bad="#d9d9d9")  # perceptually uniform; dark is much
GRADUAL = ListedColormap(SEQUENTIAL(np.linspace(0.15, 0.8, 256)), "gradual")  # for lines: without what white swallows


@contextmanager
def in_style() -> Iterator[None]:
    """Our settings on top of matplotlib's own, whatever the user's are, and theirs again afterwards."""
    with matplotlib.style.context(["default", SETTINGS]):
        yield


class Figure(MatplotlibFigure):
    """A figure made without pyplot, that a notebook shows and that saves in our style from anywhere."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        FigureCanvasAgg(self)

    def savefig(self, fname: Any, **kwargs: Any) -> None:
        """As matplotlib's, with embedded fonts and no date: equal tables give equal files."""
        kind = str(kwargs.get("format") or os.path.splitext(str(fname))[1][1:]).lower()
        undated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind)
        if undated is not None:
            kwargs["metadata"] = undated | kwargs.get("metadata", {})
        if not kind or not isinstance(fname, str | os.PathLike):
            with in_style():
                super().savefig(fname, **kwargs)
            return
        drawn = io.BytesIO()  # at a full disk matplotlib's own writing ends in an error that says nothing of the disk
        self.savefig(drawn, **kwargs | {"format": kind})
        Path(fname).write_bytes(drawn.getvalue())

    def _repr_png_(self) -> bytes:
        """What a notebook shows: it knows only pyplot's figures by itself."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def new_figure(width: float, height: float) -> Figure:
    """Sizes in inches; saved at exactly this size, so that the fonts are as large as they say."""
    return Figure(figsize=(width, height), layout="constrained")

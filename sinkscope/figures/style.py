"""The style of figures, which can be read in print, in grayscale and with any color vision.

It does not use pyplot and does not change the global settings of matplotlib.
"""

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any, Self

import matplotlib
import matplotlib.style
import numpy as np
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure as MatplotlibFigure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from PIL import Image

TEXT, WIDE = 5.5, 6.75  # inches: the text width of one-column and of two-column proceedings
COLUMN = 3.25  # one of the two columns
FONT = "DejaVu Sans"  # part of matplotlib, so that figures are equal on every machine

SHEET = matplotlib.rc_params_from_file(Path(__file__).with_name("sinkscope.mplstyle"), use_default_template=False)
SETTINGS: dict[str, Any] = {str(name): value for name, value in SHEET.items()}

Look = dict[str, Any]  # keyword arguments of matplotlib's artists

# Lines differ in color, lightness, dashes and marker: any one of these is enough to distinguish them.
NAVY, VERMILION, SKY, GREEN, GRAY = "#10315c", "#c8501e", "#6fb1dc", "#4f9a6b", "#8a8a8a"
# Broken and thinner lines are on top, so that equal lines are all visible.
SINK: Look = {"color": NAVY, "linestyle": "-", "marker": "o", "linewidth": 1.3, "markersize": 3, "zorder": 2}
MEAN_LINE: Look = SINK | {"color": "black", "linewidth": 1.4, "zorder": 4}  # a mean among lines of layers
OTHERS: Look = {"color": VERMILION, "linestyle": "--", "marker": "s", "markersize": 2.4, "zorder": 3}
HIGHEST: Look = {"color": SKY, "linestyle": ":", "marker": "^", "markersize": 2.4, "zorder": 4}
REFERENCE: Look = {"color": "0.35", "linewidth": 0.9, "linestyle": (0, (3, 1.5))}
OUTSIDE: Look = {"color": "#8d4a86", "marker": "D", "linestyle": (0, (4, 1.5))}  # keys outside the text
GUIDE: Look = {"color": GRAY, "linewidth": 0.9, "linestyle": (0, (4, 2)), "zorder": 1.5}  # theory, or no effect
NEUTRAL: Look = {"color": GRAY, "linewidth": 0.6, "zorder": 0}  # no effect, drawn below the lines
DOT: Look = {"linestyle": "none"}  # marks without a line
AREA: Look = {"linewidth": 0}  # bands and bars have no edge
BAND: Look = AREA | {"alpha": 0.22}  # an interval around a line, in its color
INTERVAL: Look = {"color": NAVY, "linewidth": 1.6, "solid_capstyle": "butt"}  # 95 %, through a mark
CONTROL_DRAWS: Look = DOT | {"color": "black", "marker": "|", "markersize": 4.5, "markeredgewidth": 0.6}
CONTROL_SPREAD: Look = {"color": "0.72", "linewidth": 3.5, "solid_capstyle": "butt"}  # spread of random controls

# Looks for any number of lines: models, runs, arms.
COLORS = (NAVY, VERMILION, SKY, "#1b7a5a", "#e3a82b", "#8d4a86", "#555555")
DASHES = ("-", (0, (4, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)), (0, (7, 2)))
PLAIN_DASHES = ("--", ":", "-.", "-")
MARKERS = "os^Dv<>P"

SEQUENTIAL = colormaps["magma_r"].with_extremes(bad="#d9d9d9")  # perceptually uniform; dark is high
GRADUAL = ListedColormap(SEQUENTIAL(np.linspace(0.15, 0.8, 256)), "gradual")  # for lines on white


def line_looks() -> Iterator[Look]:
    """Yield looks that differ from one another, without end."""
    for color, dashes, marker in zip(cycle(COLORS), cycle(DASHES), cycle(MARKERS), strict=False):
        yield {"color": color, "linestyle": dashes, "marker": marker}


@contextmanager
def in_style() -> Iterator[None]:
    """Use this style on top of matplotlib's defaults, and restore the user's settings afterwards."""
    with matplotlib.style.context(["default", SETTINGS]):
        yield


class Figure(MatplotlibFigure):
    """A figure that is made without pyplot, can be shown in a notebook, and is always saved in this style."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        FigureCanvasAgg(self)

    def finish(self, title: str, signs: "Mapping[str, Look] | Sequence[Artist]" = (), **legend: Any) -> Self:
        """Add a title, and below the panels a legend of artists, or of lines and areas by label; return the figure."""
        if isinstance(signs, Mapping):
            areas = {label for label, look in signs.items() if "facecolor" in look or look.get("linewidth") == 0}
            signs = [
                Patch(label=label, **look) if label in areas else Line2D([], [], label=label, **look)
                for label, look in signs.items()
            ]
        if signs:
            self.legend(handles=signs, loc="outside lower center", **legend)
        if title:
            self.suptitle(title)
        return self

    def lay_out(self) -> None:
        """Fix the layout as in a PNG file: otherwise matplotlib would draw everything once more for each file."""
        engine = self.get_layout_engine()
        if engine is None:
            return
        with in_style():
            dpi, saved_at = self.get_dpi(), matplotlib.rcParams["savefig.dpi"]
            self.set_dpi(dpi if saved_at == "figure" else saved_at)
            engine.execute(self)
            self.set_dpi(dpi)
            self.set_layout_engine(None)

    def savefig(self, fname: Any, **kwargs: Any) -> None:
        """Save the figure with embedded fonts and without a date, so that equal tables give equal files."""
        kind = str(kwargs.get("format") or os.path.splitext(str(fname))[1][1:]).lower()
        undated = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind)
        if undated is not None:
            kwargs["metadata"] = undated | kwargs.get("metadata", {})
        if not kind or not isinstance(fname, str | os.PathLike):
            with in_style():
                super().savefig(fname, **kwargs)
            return
        drawn = io.BytesIO()  # in memory, because matplotlib's own error does not say that a disk is full
        once = {"pil_kwargs": {"compress_level": 1}} if kind == "png" else {}  # it is compressed better below
        self.savefig(drawn, **once | kwargs | {"format": kind})
        if kind == "png":  # without an alpha channel if it is opaque, in a tenth of the bytes
            image = Image.open(drawn)
            opaque = image.mode != "RGBA" or image.getchannel("A").getextrema() == (255, 255)
            drawn = io.BytesIO()
            (image.convert("RGB") if opaque else image).save(drawn, "PNG", dpi=image.info["dpi"])
        Path(fname).write_bytes(drawn.getvalue())

    def _repr_png_(self) -> bytes:
        """Return the PNG that a notebook shows."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def new_figure(width: float, height: float, layout: str = "constrained") -> Figure:
    """Make a figure with a size in inches. It is saved at this size, so that font sizes are true."""
    return Figure(figsize=(width, height), layout=layout)

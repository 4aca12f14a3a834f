"""The files of a run folder, one function for each kind of output, and how they are written.

A new kind of output is a file with a function `write(run, folder)`, and a line in OUTPUTS.
"""

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from rich.console import Console

from sinkscope.errors import InputError, unknown
from sinkscope.figures import FIGURES
from sinkscope.measuring.console import spinner
from sinkscope.output.result import draw, is_undrawn
from sinkscope.output.run import Run
from sinkscope.results.folders import new_folder
from sinkscope.results.manifest import write_manifest
from sinkscope.results.papers import paper_tables
from sinkscope.results.tables import write_tables
from sinkscope.verdict.quantization import write_spared
from sinkscope.verdict.table_formats import as_markdown


def _paper_tables(run: Run, folder: Path) -> None:
    for name, table in paper_tables(run).items():
        _write_text(as_markdown(table), folder / "tables" / f"{name}.md")


def _write_text(text: str, path: Path) -> None:
    path.write_text(text + "\n", encoding="utf-8")


def _of_model(run: Run, folder: Path) -> None:
    if run.further is not None:
        run.further(folder)


# in the order in which they are written; run.json follows, then figures and the page
OUTPUTS: dict[str, Callable[[Run, Path], None]] = {
    "tables": lambda run, folder: write_tables(run.tables, folder),
    "paper tables": _paper_tables,
    "verdict": lambda run, folder: _write_text(run.verdict, folder / "verdict.md"),
    "sites to spare": write_spared,
    "of the model": _of_model,
}


def write_run(run: Run, folder: Path, is_drawn: bool = True) -> None:
    """Write all outputs of a run except figures and the page into an empty folder; `is_drawn`: `draw_run` follows."""
    for write in OUTPUTS.values():
        write(run, folder)
    write_manifest(folder, run.manifest | ({"drawn": False} if is_drawn else {}))


def draw_run(run: Run, figures: Iterable[str] | None = None, page: bool = True) -> Run:
    """Draw the figures (all that apply, or the named ones) and the page into the folder of a written run.

    The manifest of the returned run names the figures that could not be drawn.
    """
    return draw(run, None if figures is None else {name: partial(run.figure, name) for name in figures}, page)


def redrawn(run: Run, figures: Iterable[str] | None = None, page: bool = True) -> Run:
    """Draw the figures and the page that a run folder lacks, because the command was killed or a figure failed."""
    return draw_run(run, figures, page) if is_undrawn(run.manifest) else run


def finished(run: Run, console: Console, figures: Iterable[str] | None = None, page: bool = True) -> Run:
    """Return the run, written to its folder if it has one; InputError for a figure that does not exist."""
    figures = None if figures is None else tuple(figures)
    for name in figures or ():
        if name not in FIGURES:
            raise InputError(f"figure {unknown(name, FIGURES)}")
    if run.folder is None:
        return run
    with new_folder(run.folder) as fresh:
        write_run(run, fresh)
    with spinner(console, "drawing the figures"):
        return draw_run(run, figures, page)

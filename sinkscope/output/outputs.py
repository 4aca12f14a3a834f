"""What a run folder holds, one function a kind of output, and how it is written.

A new kind of output is a file with a function `write(run, folder)`, and a line in OUTPUTS.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

from rich.console import Console

from sinkscope.html_page import write_page
from sinkscope.measuring.console import spinner
from sinkscope.output.drawing import save_all, save_figures
from sinkscope.output.run import Run
from sinkscope.results.folders import new_folder
from sinkscope.results.manifest import write_manifest
from sinkscope.results.papers import paper_tables
from sinkscope.results.tables import write_tables
from sinkscope.verdict.quantization import write_spared
from sinkscope.verdict.table_formats import as_markdown


def _tables(run: Run, folder: Path) -> None:
    write_tables(run.tables, folder)


def _paper_tables(run: Run, folder: Path) -> None:
    for name, table in paper_tables(run).items():
        (folder / "tables" / f"{name}.md").write_text(as_markdown(table) + "\n", encoding="utf-8")


def _verdict(run: Run, folder: Path) -> None:
    (folder / "verdict.md").write_text(run.verdict + "\n", encoding="utf-8")


# in the order in which they are written; figures and the page come behind them, and run.json last
OUTPUTS: dict[str, Callable[[Run, Path], None]] = {
    "tables": _tables,
    "paper tables": _paper_tables,
    "verdict": _verdict,
    "sites to spare": write_spared,
}


def write_run(run: Run, folder: Path, figures: Iterable[str] | None = None, page: bool = True) -> None:
    """Write all outputs of a run into an empty folder.

    Args:
        run: what was measured.
        folder: where.
        figures: names of the figures to draw; None: all that apply.
        page: whether to write index.html.
    """
    for write in OUTPUTS.values():
        write(run, folder)
    if figures is None:
        save_all(run, folder / "figures")
    else:
        save_figures({name: run.figure(name) for name in figures}, folder / "figures")
    if page:
        write_page(run.contents, folder)
    write_manifest(folder, run.manifest)


def finished(run: Run, console: Console, figures: Iterable[str] | None = None, page: bool = True) -> Run:
    """The run, written to its folder if it has one. `figures` and `page` as for `write_run`."""
    if run.folder is not None:
        with spinner(console, "drawing the figures"), new_folder(run.folder) as fresh:
            write_run(run, fresh, figures, page)
    return run

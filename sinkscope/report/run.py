"""A run with its figures and its verdict, and how it is written to a folder."""

import json
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

from rich.console import Console

from sinkscope.measuring.console import status
from sinkscope.report import verdict
from sinkscope.report.figures import draw, save_all
from sinkscope.report.figures.style import Figure
from sinkscope.report.markdown import as_markdown
from sinkscope.report.paper_tables import paper_tables
from sinkscope.results.folders import new_folder
from sinkscope.results.manifest import MANIFEST
from sinkscope.results.run import RunData
from sinkscope.results.tables import write_table


class Run(RunData):
    """What a command measured: `run.tables["attention"]`, `run.metric("sink_rate")`, `run.figure("sink-map")`."""

    def figure(self, name: str) -> Figure:
        """Draw one figure from the tables.

        Raises:
            InputError: the figure is unknown, or this run has no data for it.
        """
        return draw(name, self)

    @cached_property
    def verdict(self) -> str:
        """The findings as Markdown: the most important ones, a table, the rest by subject, and the files."""
        return verdict.verdict(self)

    def _repr_markdown_(self) -> str:  # what a notebook shows
        return self.verdict


def finished(run: Run, console: Console, figures: Iterable[str] | None = None) -> Run:
    """The run, written to its folder where it has one. `figures`: these, or all that apply."""
    if run.folder is not None:
        with status(console, "drawing the figures"), new_folder(run.folder) as fresh:
            write_run(run, fresh, figures)
    return run


def write_run(run: Run, folder: Path, figures: Iterable[str] | None = None) -> None:
    """Tables, figures (None: all that apply), verdict and manifest into an empty folder; the manifest last."""
    (folder / "tables").mkdir()
    for name, table in run.tables.items():
        write_table(table, folder / "tables" / f"{name}.parquet")
    (folder / "figures").mkdir()
    if figures is None:
        save_all(run, folder / "figures")
    else:
        save_figures({name: run.figure(name) for name in figures}, folder / "figures")
    for name, paper_table in paper_tables(run).items():
        (folder / "tables" / f"{name}.md").write_text(as_markdown(paper_table) + "\n", encoding="utf-8")
    (folder / "verdict.md").write_text(run.verdict + "\n", encoding="utf-8")
    (folder / MANIFEST).write_text(json.dumps(run.manifest, indent=2) + "\n", encoding="utf-8")


def save_figures(figures: Mapping[str, Figure], folder: Path) -> None:
    """Each as NAME.png and NAME.pdf."""
    for name, figure in figures.items():
        for kind in ("png", "pdf"):
            figure.savefig(folder / f"{name}.{kind}")

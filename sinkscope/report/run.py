"""A run with its figures and its verdict, and how it is written to a folder."""

import json
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path

from rich.console import Console

from sinkscope.measuring.console import status
from sinkscope.report import effects, figures, quantization, verdict
from sinkscope.report.figures.style import Figure
from sinkscope.report.paper_tables import as_markdown, paper_tables
from sinkscope.results.folders import new_folder
from sinkscope.results.manifest import MANIFEST
from sinkscope.results.run import RunData
from sinkscope.results.tables import write_table

# command that made a run → how its findings are written; any other has `analyze`'s
_VERDICTS: dict[str, Callable[[RunData], str]] = {"intervene": effects.verdict, "quantize": quantization.verdict}


class Run(RunData):
    """What a command measured: `run.tables["attention"]`, `run.metric("sink_rate")`, `run.figure("sink-map")`."""

    def figure(self, name: str) -> Figure:
        """Draw one figure from the tables.

        Raises:
            InputError: the figure is unknown, or this run has no data for it.
        """
        return figures.draw(name, self)

    @cached_property
    def verdict(self) -> str:
        """The findings as Markdown: a short table, and sentences."""
        return _VERDICTS.get(self.command, verdict.verdict)(self)

    def _repr_markdown_(self) -> str:  # what a notebook shows
        return self.verdict


def finished(run: Run, console: Console, names: Iterable[str] | None = None) -> Run:
    """The run, written to its folder where it has one, with the figures of these names, or all that apply."""
    if run.folder is not None:
        with status(console, "drawing the figures"), new_folder(run.folder) as fresh:
            write_run(run, fresh, names)
    return run


def write_run(run: Run, folder: Path, names: Iterable[str] | None = None) -> None:
    """Tables, figures (of these names, or all that apply), verdict and, last, manifest into an empty folder."""
    (folder / "tables").mkdir()
    for name, table in run.tables.items():
        write_table(table, folder / "tables" / f"{name}.parquet")
    (folder / "figures").mkdir()
    if names is None:
        figures.save_all(run, folder / "figures")
    else:
        figures.save_figures({name: run.figure(name) for name in names}, folder / "figures")
    for name, paper_table in paper_tables(run).items():
        (folder / "tables" / f"{name}.md").write_text(as_markdown(paper_table) + "\n", encoding="utf-8")
    (folder / "verdict.md").write_text(run.verdict + "\n", encoding="utf-8")
    (folder / MANIFEST).write_text(json.dumps(run.manifest, indent=2) + "\n", encoding="utf-8")

"""A run with its figures and its verdict."""

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Self

import pandas as pd

from sinkscope import figures
from sinkscope.errors import Known
from sinkscope.figures.style import Figure
from sinkscope.measuring.tables import all_tables
from sinkscope.output.drawing import Drawings
from sinkscope.output.result import Result
from sinkscope.results.findings import Finding
from sinkscope.results.papers import paper_tables
from sinkscope.results.run import RunData
from sinkscope.results.tables import Columns
from sinkscope.verdict import analysis
from sinkscope.verdict.kv_plan import plan_files
from sinkscope.verdict.quantization import spared_files
from sinkscope.verdict.register import REPORTS
from sinkscope.verdict.report import Report, report_markdown

ACROSS = 4  # names in a line of the tree


class Run(RunData, Result):
    """The result of `analyze`, `intervene`, `quantize` or `kv-plan`.

    `run.tables["attention"]`, `run.metric("sink_rate")`, `run.figure("sink-map")`, `run.verdict`.
    """

    columns: ClassVar[Mapping[str, Columns]] = all_tables() | {analysis.TABLE: analysis.COLUMNS}

    @classmethod
    def of_analysis(
        cls, manifest: dict[str, Any], tables: Mapping[str, pd.DataFrame], folder: Path | None = None
    ) -> Self:
        """Return a run of `analyze`, with the table of its findings."""
        own = Known("table", tables)
        run = cls(manifest | {"tables": sorted([*manifest["tables"], analysis.TABLE])}, own, folder)
        own[analysis.TABLE] = analysis.finding_table(run, run.report)
        return run

    def figure(self, name: str) -> Figure:
        """Draw one figure from the tables; InputError if it is unknown, or this run has no data for it."""
        return figures.draw(name, self)

    @property
    def drawings(self) -> Drawings:
        return {name: partial(self.figure, name) for name in figures.applicable(self)}

    @cached_property
    def report(self) -> Report:
        """The findings, as data."""
        return REPORTS[self.command](self)

    @cached_property
    def verdict(self) -> str:
        """The findings as Markdown: the most important ones, a table, the rest by subject, and the files."""
        parts = [report_markdown(self.report)]
        if self.folder is not None:
            parts += ["### Files", f"```\n{_files(self, self.folder)}\n```"]
        return "\n\n".join(parts)

    @property
    def findings(self) -> Sequence[Finding]:
        return self.report.findings

    @property
    def summary_tables(self) -> dict[str, pd.DataFrame]:
        """The table of the verdict, and the tables that papers print."""
        return {"": self.report.table, **paper_tables(self)}

    def _repr_markdown_(self) -> str:  # for notebooks
        return self.verdict


def _files(run: RunData, folder: Path) -> str:
    """Return the run folder as a tree, with names in columns, as `ls` prints them."""

    def columns(names: Sequence[str], indent: str) -> list[str]:
        width = max(map(len, names), default=0) + 2
        rows = [names[first : first + ACROSS] for first in range(0, len(names), ACROSS)]
        return [(indent + "".join(name.ljust(width) for name in row)).rstrip() for row in rows]

    recipe = run.manifest.get("recipe")  # a recipe draws only its own figures
    drawn = recipe["content"].get("figures", []) if recipe else figures.applicable(run)
    tables = [f"{name}.parquet" for name in sorted(run.tables)] + [f"{name}.md" for name in paper_tables(run)]
    first = ("run.json", "verdict.md", "index.html (except with --no-page)", *spared_files(run), *plan_files(run))
    lines = [f"{folder.name}/", *(f"├── {name}" for name in first), "├── tables/", *columns(tables, "│   ")]
    return "\n".join([*lines, "└── figures/ (each as .png and .pdf)", *columns(drawn, "    ")])

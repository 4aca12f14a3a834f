"""A run with its figures and its verdict."""

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import pandas as pd

from sinkscope import figures
from sinkscope.figures.style import Figure
from sinkscope.measuring.tables import all_tables
from sinkscope.page import Contents, Paged
from sinkscope.results.paper_tables import paper_tables
from sinkscope.results.run import RunData
from sinkscope.results.tables import Columns
from sinkscope.verdict import finding_table, verdict
from sinkscope.verdict.markdown import Report
from sinkscope.verdict.table_formats import Tabular


class Run(Paged, Tabular, RunData):
    """What a command measured: `run.tables["attention"]`, `run.metric("sink_rate")`, `run.figure("sink-map")`."""

    columns: ClassVar[Mapping[str, Columns]] = all_tables() | {finding_table.TABLE: finding_table.COLUMNS}

    @classmethod
    def of_analysis(
        cls, manifest: dict[str, Any], tables: Mapping[str, pd.DataFrame], folder: Path | None = None
    ) -> Self:
        """What `analyze` measured, with the table of its findings."""
        found = finding_table.finding_table(RunData(manifest, tables))
        listed = sorted([*manifest["tables"], finding_table.TABLE])
        return cls(manifest | {"tables": listed}, {**tables, finding_table.TABLE: found}, folder)

    def figure(self, name: str) -> Figure:
        """Draw one figure from the tables.

        Raises:
            InputError: the figure is unknown, or this run has no data for it.
        """
        return figures.draw(name, self)

    @cached_property
    def report(self) -> Report:
        """What the tables say, as data."""
        return verdict.REPORTS[self.command](self)

    @cached_property
    def verdict(self) -> str:
        """The findings as Markdown: the most important ones, a table, the rest by subject, and the files."""
        return verdict.verdict(self, self.report)

    @property
    def contents(self) -> Contents:
        """What its page shows."""
        return Contents(self.manifest, self.tables, findings=self.report.findings, folder=self.folder)

    @property
    def summary_tables(self) -> dict[str, pd.DataFrame]:
        """The table of the verdict, and those that papers print."""
        return {"": self.report.table, **paper_tables(self)}

    def _repr_markdown_(self) -> str:  # what a notebook shows
        return self.verdict

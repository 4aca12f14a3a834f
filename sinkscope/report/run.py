"""A run with its figures and its verdict."""

from functools import cached_property

from sinkscope.measuring.tables import all_tables
from sinkscope.report import figures, verdict
from sinkscope.report.figures.style import Figure
from sinkscope.results.run import RunData


class Run(RunData):
    """What a command measured: `run.tables["attention"]`, `run.metric("sink_rate")`, `run.figure("sink-map")`."""

    columns = all_tables()

    def figure(self, name: str) -> Figure:
        """Draw one figure from the tables.

        Raises:
            InputError: the figure is unknown, or this run has no data for it.
        """
        return figures.draw(name, self)

    @cached_property
    def verdict(self) -> str:
        """The findings as Markdown: the most important ones, a table, the rest by subject, and the files."""
        return verdict.verdict(self)

    def _repr_markdown_(self) -> str:  # what a notebook shows
        return self.verdict

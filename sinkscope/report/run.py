"""A run with its figures and its verdict."""

from collections.abc import Callable
from functools import cached_property

from sinkscope.report import effects, figures, quantization, verdict
from sinkscope.report.figures.style import Figure
from sinkscope.results.run import RunData

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

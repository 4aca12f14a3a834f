"""The report of a run, by the command that made the run."""

from collections.abc import Callable

from sinkscope.results.run import RunData
from sinkscope.verdict import analysis, effects, quantization
from sinkscope.verdict.markdown import Report

# command that made the run → its report
REPORTS: dict[str, Callable[[RunData], Report]] = {
    "analyze": analysis.report,
    "intervene": effects.report,
    "quantize": quantization.report,
}

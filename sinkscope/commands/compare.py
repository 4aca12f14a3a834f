"""`compare`: runs side by side, from their folders alone: no model is loaded."""

from sinkscope.commands.result import Result
from sinkscope.options.output import CompareOptions, OutputOptions
from sinkscope.report.comparison import compare


def command(options: CompareOptions, output: OutputOptions) -> Result:
    comparison = compare(*options.runs, out=output.out, overwrite=output.overwrite)
    return Result(comparison, numbers=comparison.table, notes=comparison.warnings, folder=output.out)

"""`compare`: runs or scorecards side by side, from their folders alone: no model is loaded."""

from sinkscope.commands.result import Result
from sinkscope.options.output import CompareOptions, OutputOptions
from sinkscope.report.comparison import Comparison, differing_lines
from sinkscope.report.side_by_side import compare


def command(options: CompareOptions, output: OutputOptions) -> Result:
    found = compare(*options.runs, out=output.out, overwrite=output.overwrite, page=not output.no_page)
    if isinstance(found, Comparison):
        return Result(found, numbers=found.table, notes=found.warnings, folder=output.out)
    return Result(found, found.markdown, notes=differing_lines(found.manifest["differing"]), folder=output.out)

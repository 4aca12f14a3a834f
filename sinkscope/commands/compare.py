"""`compare`: runs or scorecards side by side, from their folders alone: no model is loaded."""

from sinkscope.commands.result import Result
from sinkscope.options.output import CompareOptions, OutputOptions
from sinkscope.report.comparison import Comparison, differing_lines
from sinkscope.report.side_by_side import compare


def command(options: CompareOptions, output: OutputOptions) -> Result:
    found = compare(*options.runs, out=output.out, overwrite=output.overwrite, page=not output.no_page)
    text = "" if options.format == "text" else found.formatted(options.format)
    if isinstance(found, Comparison):
        numbers = None if text else found.table
        return Result(found, text=text, numbers=numbers, notes=found.warnings, folder=output.out)
    notes = differing_lines(found.manifest["differing"])
    return Result(found, "" if text else found.markdown, text, notes=notes, folder=output.out)

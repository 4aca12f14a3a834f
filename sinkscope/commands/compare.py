"""The command `compare`: puts runs or scorecards side by side. It reads only their folders, and loads no model.

For a single folder that is a comparison, such as the folder of a sweep, it prints the folder's own tables.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import pandas as pd

from sinkscope.commands.result import Result
from sinkscope.errors import InputError
from sinkscope.options.output import CompareOptions, OutputOptions
from sinkscope.output.comparison import Comparison, differing_lines
from sinkscope.output.result import figure_failure
from sinkscope.output.run import Run
from sinkscope.output.series import COMMAND as SERIES
from sinkscope.output.series import Series
from sinkscope.output.side_by_side import compare
from sinkscope.output.sweep import open_comparison, summary_tables
from sinkscope.output.trained import tables_of_arms
from sinkscope.results.cells import COMMAND as SWEEP
from sinkscope.results.manifest import FORMAT, folder_of, format_of, older, read_manifest, tables_folder
from sinkscope.verdict.scorecard import Scorecard
from sinkscope.verdict.table_formats import formatted
from sinkscope.verdict.trained import retrofit_summaries

# command whose folder is a comparison → its summary tables by title
_OF_ONE: Mapping[str, Callable[[Path], Mapping[str, pd.DataFrame]]] = {
    SERIES: lambda folder: Series.open(folder).summary_tables,
    SWEEP: lambda folder: summary_tables(open_comparison(tables_folder(folder))),
    **dict.fromkeys(("retrofit", "train"), lambda folder: retrofit_summaries(tables_of_arms(folder)[1]["retrofit"])),
    **dict.fromkeys(("intervene", "quantize", "doctor"), lambda folder: Run.open(folder).summary_tables),
    "claims": lambda folder: Scorecard.open(folder).summary_tables,
}


def command(options: CompareOptions, output: OutputOptions) -> Result:
    manifests = {folder_of(run): read_manifest(folder_of(run), None) for run in options.runs}
    old = [f"{folder} is of {older(found)}" for folder, found in manifests.items() if format_of(found) != FORMAT]
    if len(options.runs) == 1:
        ((folder, manifest),) = manifests.items()
        tables = _OF_ONE[manifest["command"]](folder) if manifest["command"] in _OF_ONE else {}
        if tables and output.out is not None:
            raise InputError(f"--out: {options.runs[0]} has its tables and figures already")
        if tables:
            parts = [formatted(table, options.format, title) for title, table in tables.items()]
            return Result(tables, text="\n\n".join(parts), notes=old)
    found = compare(*options.runs, out=output.out, overwrite=output.overwrite, page=not output.no_page)
    failure = figure_failure(found.manifest)
    text = "" if options.format == "text" else found.formatted(options.format)
    if isinstance(found, Comparison):
        numbers = None if text else found.table
        return Result(
            found, text=text, numbers=numbers, notes=[*old, *found.warnings], folder=output.out, failure=failure
        )
    notes = [*old, *differing_lines(found.manifest["differing"])]
    return Result(found, "" if text else found.markdown, text, notes=notes, folder=output.out, failure=failure)

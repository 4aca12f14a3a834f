"""`compare`: runs or scorecards side by side, from their folders alone: no model is loaded.

Of a single folder that compares something itself, as of a sweep or of interventions, its own tables are printed.
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

# command that wrote a folder which compares something itself → its summary tables by title
_OF_ONE: Mapping[str, Callable[[Path], Mapping[str, pd.DataFrame]]] = {
    SERIES: lambda folder: Series.open(folder).summary_tables,
    SWEEP: lambda folder: summary_tables(open_comparison(tables_folder(folder))),
    **dict.fromkeys(("retrofit", "train"), lambda folder: retrofit_summaries(tables_of_arms(folder)[1]["retrofit"])),
    **dict.fromkeys(("intervene", "quantize"), lambda folder: Run.open(folder).summary_tables),
    "claims": lambda folder: Scorecard.open(folder).summary_tables,
}


def command(options: CompareOptions, output: OutputOptions) -> Result:
    old = [line for run in options.runs if (line := _older(folder_of(run)))]
    if len(options.runs) == 1 and (tables := _tables_of(folder_of(options.runs[0]))):
        if output.out is not None:
            raise InputError(f"--out: {options.runs[0]} has its tables and figures already")
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


def _older(folder: Path) -> str:
    """A line on a folder of an older format; "" of others."""
    manifest = read_manifest(folder, None)
    return "" if format_of(manifest) == FORMAT else f"{folder} is of {older(manifest)}"


def _tables_of(folder: Path) -> Mapping[str, pd.DataFrame]:
    """The tables of a folder that holds a comparison of its own; empty for other folders."""
    command = str(read_manifest(folder, None)["command"])
    return _OF_ONE[command](folder) if command in _OF_ONE else {}

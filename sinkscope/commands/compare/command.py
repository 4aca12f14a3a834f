"""The command `compare`: puts runs or scorecards side by side. It reads only their folders, and loads no model.

For a single folder that is a comparison, such as the folder of a sweep, it prints the folder's own tables.
"""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinkscope.commands.compare.options import CompareOptions
from sinkscope.commands.printout import Printout
from sinkscope.errors import InputError
from sinkscope.options.output import OutputOptions
from sinkscope.results.manifest import CALLBACK_TRAINING, MANIFEST_KINDS, RUNS, folder_of, read_manifest
from sinkscope.results.side_by_side import (
    Summary,
    differing_lines,
    differing_settings,
    labels,
    metrics_of,
    pairing_lines,
)
from sinkscope.results.tables import blaming_tables

if TYPE_CHECKING:
    import pandas as pd


@blaming_tables()
def command(options: CompareOptions, output: OutputOptions) -> Printout:
    manifests = {folder_of(run): read_manifest(folder_of(run), None) for run in options.runs}
    is_printed = output.out is None and options.by is None and options.format == "text" and len(options.runs) > 1
    if is_printed and all(manifest["command"] == "analyze" for manifest in manifests.values()):
        runs = [Summary.open(run) for run in options.runs]
        names = labels(runs)[0]
        notes = differing_lines(differing_settings([run.manifest for run in runs], names).to_dict(orient="index"))
        return Printout(numbers=metrics_of(runs, names, options.metrics), notes=notes + pairing_lines(runs))
    return _compared(options, output, manifests)


def _compared(options: CompareOptions, output: OutputOptions, manifests: Mapping[Path, dict[str, Any]]) -> Printout:
    """Compare folders of any kind, by code that imports torch, as that of other commands does."""
    from sinkscope.commands.compare.curves import curves
    from sinkscope.commands.compare.side_by_side import compare
    from sinkscope.output.comparison import Comparison
    from sinkscope.output.result import figure_failure
    from sinkscope.output.run import Run
    from sinkscope.verdict.table_formats import formatted

    if len(options.runs) == 1:  # its own tables, by title, if it is a comparison; a run of `analyze` is none
        ((folder, manifest),) = manifests.items()
        command, tables = manifest["command"], dict[str, "pd.DataFrame"]()
        if command == CALLBACK_TRAINING.name:  # its folder has no figures: --out draws them
            tables = curves([folder], time.time()).summary_tables if output.out is None else {}
        elif MANIFEST_KINDS[command].summaries:
            tables = MANIFEST_KINDS[command].imported(MANIFEST_KINDS[command].summaries)(folder)
        elif command in RUNS and command != "analyze":
            tables = Run.open(folder).summary_tables
        if tables and (options.metrics or options.by):
            raise InputError("--metrics and --by are those of runs of `analyze`, of which there is none")
        if tables and output.out is not None:
            raise InputError(f"--out: {options.runs[0]} has its tables and figures already")
        if tables:
            parts = [formatted(table, options.format, title) for title, table in tables.items()]
            return Printout(tables, text="\n\n".join(parts))
    where: dict[str, Any] = {"out": output.out, "overwrite": output.overwrite, "page": not output.no_page}
    result = compare(*options.runs, **where, metrics=options.metrics, by=options.by)
    text, markdown, numbers = "", "", None
    if options.format != "text":
        text = result.formatted(options.format)
    elif isinstance(result, Comparison) and options.by == "head":
        markdown = "\n".join(f"- {finding.sentence}" for finding in result.findings)
        heads = result.summary_tables[""].set_index(["metric", "layer", "head"])
        numbers = heads if len(heads) else None
    elif isinstance(result, Comparison):
        numbers = result.table
    else:
        markdown = result.markdown
    notes = result.notes if isinstance(result, Comparison) else differing_lines(result.manifest["differing"])
    failure = figure_failure(result.manifest)
    return Printout(result, markdown, text, numbers, notes=notes, folder=output.out, failure=failure)

"""The command `show`: opens the page of a folder in the browser, and makes a missing page from the folder's tables.

With --metric, it prints a metric of a run with its intervals, without importing torch.

`page` does the same in notebooks, for a folder or for the object that a command's Python function returned.
"""

import os
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING

from sinkscope.commands.printout import Printout
from sinkscope.commands.show.options import ShowOptions
from sinkscope.errors import InputError, SinkscopeError, one_line
from sinkscope.options.output import OutputOptions
from sinkscope.results.folders import FileList, alone_in
from sinkscope.results.manifest import PAGE, RUNS, folder_of, is_undrawn, read_manifest, tables_folder, write_manifest

if TYPE_CHECKING:  # a page that exists is found in a moment; what makes one imports torch, and is imported when needed
    from sinkscope.html_page import Page
    from sinkscope.output.result import Displayable


def command(options: ShowOptions, output: OutputOptions) -> Printout:
    if options.metric is not None:
        return _estimates(options.metric, options)
    page = show(options.run, again=options.again)
    is_opened = not options.print and webbrowser.open(page.absolute().as_uri())
    return Printout(page, text="" if is_opened else str(page), data={"page": str(page)})


def _estimates(metric: str, options: ShowOptions) -> Printout:
    from sinkscope.results.metric_estimates import estimate_table  # imports scipy, and no torch
    from sinkscope.results.run import RunData
    from sinkscope.results.sequences import Sequences
    from sinkscope.results.tables import blaming_tables
    from sinkscope.verdict.table_formats import EstimateTable

    with blaming_tables():
        sequences = Sequences(RunData.open(options.run))
        null = None if options.null is None else Sequences(RunData.open(options.null))
        table = EstimateTable(estimate_table(sequences, metric, options.by, options.epsilon, null))
    if options.format == "text":
        return Printout(numbers=table.set_index([*table.columns[: table.columns.get_loc("value")]]))
    as_text = table.to_latex() if options.format == "latex" else table.to_csv(index=False).strip()
    return Printout(text=table.to_json(orient="records") if options.format == "json" else as_text)


def show(run: str | os.PathLike[str], *, again: bool = False) -> Path:
    """Return the page of a folder. It is made if it is missing; figures of a run that failed are drawn again.

    Args:
        run: the folder of any command, or its run.json. For a folder of runs, such as the folder of `sweep`,
            this is the page of their comparison.
        again: make the page again.

    Raises:
        InputError: it is not the folder of a command, a table in it is damaged, or it has no table.
        SinkscopeError: the page cannot be written.
    """
    folder = tables_folder(folder_of(run))
    page = folder / PAGE
    manifest = read_manifest(folder, None)
    if manifest["command"] in RUNS and is_undrawn(manifest):
        from sinkscope.output.result import draw
        from sinkscope.output.run import Run

        with alone_in(folder, option=""):
            recipe = manifest.get("recipe")  # only the figures that it names are drawn
            draw(Run.open(folder), recipe["content"].get("figures", []) if recipe else None)
    if page.is_file() and not again:
        return page
    from sinkscope.html_page import Contents, write_page
    from sinkscope.results.tables import blaming_tables

    with blaming_tables(), alone_in(folder, option=""):
        contents = Contents.of_folder(folder)
        if not contents.all_tables:
            raise InputError(f"{folder} has no table to show: the command that writes it has not finished")
        manifest = read_manifest(folder, None)
        files = FileList(folder, manifest["files"], lambda: write_manifest(folder, manifest | {"files": files.names}))
        try:
            files.add(PAGE)
            write_page(contents, folder)
        except OSError as error:
            raise SinkscopeError(f"writing {page} failed: {one_line(error)}") from error
    return page


def page(run: "Displayable | str | os.PathLike[str]") -> "Page":
    """Return the page of a run, a series, a training, a comparison or a scorecard, which a notebook displays.

    Args:
        run: the object that a command's Python function returned, or the folder of any command.

    Raises:
        InputError: it is not the folder of a command, or a table in it is damaged.
    """
    from sinkscope.html_page import Contents, page_of
    from sinkscope.output.result import Displayable
    from sinkscope.results.tables import blaming_tables

    if isinstance(run, Displayable):
        return run.page()
    with blaming_tables():
        return page_of(Contents.of_folder(tables_folder(folder_of(run))))

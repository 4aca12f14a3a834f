"""`show`: the page of a folder, in the browser. It is made where it is missing, from the folder's tables alone."""

import os
import webbrowser
from pathlib import Path

from sinkscope.commands.result import Result
from sinkscope.errors import InputError, SinkscopeError, one_line
from sinkscope.options.output import OutputOptions, ShowOptions
from sinkscope.report.page import PAGE, Contents, write_page
from sinkscope.results.folders import alone_in
from sinkscope.results.manifest import MANIFEST, folder_of, read_manifest, register

COMPARISON = "comparison"  # in a folder that holds runs alone


def command(options: ShowOptions, output: OutputOptions) -> Result:
    page = show(options.run, anew=options.anew)
    if not options.print and webbrowser.open(page.absolute().as_uri()):
        return Result(page)
    return Result(page, text=str(page))


def show(run: str | os.PathLike[str], *, anew: bool = False) -> Path:
    """The page of a folder, which is made where it is missing.

    Args:
        run: the folder of any command, or its run.json. Of one that holds runs alone, as of `sweep`, their comparison.
        anew: make it also where there is one.

    Raises:
        InputError: it is no such folder, a table in it is damaged, or it has no table.
        SinkscopeError: the page cannot be written.
    """
    folder = _shown(folder_of(run))
    page = folder / PAGE
    if page.is_file() and not anew:
        return page
    contents = Contents.of_folder(folder)
    if not contents.all_tables:
        raise InputError(f"{folder} has no table to show: the command that writes it has not finished")
    with alone_in(folder):
        try:
            register(folder, PAGE)
            write_page(contents, folder)
        except OSError as error:
            raise SinkscopeError(f"writing {page} failed: {one_line(error)}") from error
    return page


def _shown(folder: Path) -> Path:
    """The folder that has the tables: of runs side by side, that of their comparison."""
    manifest = read_manifest(folder, None)
    comparison = folder / COMPARISON
    return comparison if not manifest["tables"] and (comparison / MANIFEST).is_file() else folder

"""The result of a command, and how it is written: first tables, texts and run.json, then figures and the page.

The first part appears at once and complete, or not at all. Figures and the page are drawn into the finished folder, so
that a failure affects nothing else: a warning and `failed_figures` in run.json name the figure. Until they are drawn,
run.json has `"drawn": false`.
"""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from sinkscope.errors import Known, SinkscopeError, counted, described, one_line, printable, was_interrupted
from sinkscope.figures.style import Figure
from sinkscope.html_page import Contents, Page, page_of
from sinkscope.output.drawing import Drawings, save_figures
from sinkscope.results.findings import Finding
from sinkscope.results.folders import FileList, new_folder
from sinkscope.results.manifest import PAGE, read_manifest, write_manifest
from sinkscope.results.run import FolderData, RunData
from sinkscope.results.swap import new_file, remove
from sinkscope.results.tables import write_tables
from sinkscope.verdict.table_formats import TableFormat, formatted

FIGURES_FOLDER = "figures"
AnyResult = TypeVar("AnyResult", bound="Result")


class Displayable:
    """What a notebook displays: a page, and summary tables with texts, or numbers that are printed with four digits."""

    @property
    def contents(self) -> Contents:
        """The contents of the page."""
        raise NotImplementedError

    @property
    def summary_tables(self) -> Mapping[str, pd.DataFrame]:
        """Title → table; the title is "" for a table without one."""
        raise NotImplementedError

    def page(self) -> Page:
        """Return the page of index.html, which a notebook displays."""
        return page_of(self.contents)

    def formatted(self, format: TableFormat = "text") -> str:
        """Return all summary tables as text. Raises InputError for an unknown format."""
        return "\n\n".join(formatted(table, format, title) for title, table in self.summary_tables.items())


@dataclass(frozen=True)
class Result(FolderData, Displayable):
    """A manifest and tables, in memory or in a folder, with texts, figures and a page."""

    @property
    def texts(self) -> Mapping[str, str]:
        """Name of a file → its content."""
        return {}

    @property
    def drawings(self) -> Drawings:
        return {}

    @property
    def parts(self) -> Mapping[Any, RunData]:
        """The runs that the page shows side by side, by name."""
        return {}

    @property
    def findings(self) -> Sequence[Finding]:
        return ()

    @property
    def contents(self) -> Contents:
        return Contents(self.manifest, self.tables, self.parts, self.findings, self.folder)

    def figure(self, name: str) -> Figure:
        """Draw one figure. Raises InputError for a figure that the result does not have."""
        return Known("figure", self.drawings)[name]()

    def figures(self) -> dict[str, Figure]:
        """Draw all figures, by name."""
        return Known("figure", {name: draw() for name, draw in self.drawings.items()})

    def write_files(self, folder: Path) -> None:
        """Write all files but run.json, the figures and the page into a folder."""
        write_tables(self.tables, folder)
        for name, text in self.texts.items():
            with new_file(folder / name) as fresh:
                fresh.write_text(printable(text), encoding="utf-8")


def write_data(result: Result, folder: Path, is_drawn: bool = True) -> None:
    """Write tables, texts and, last, run.json into an empty folder; `is_drawn`: `draw` adds figures and page."""
    result.write_files(folder)
    write_manifest(folder, result.manifest | ({"drawn": False} if is_drawn else {}))


def written(result: AnyResult, page: bool = True, figures: Iterable[str] | None = None) -> AnyResult:
    """Return a result, written to its folder if it has one."""
    if result.folder is None:
        return result
    with new_folder(result.folder) as fresh:
        write_data(result, fresh)
    return draw(result, figures, page)


def draw(
    result: AnyResult, figures: Iterable[str] | None = None, page: bool = True, files: FileList | None = None
) -> AnyResult:
    """Draw figures (None: all; none of them: they are left as they are) and the page into the folder of `write_data`.

    Without `page`, an earlier page of the command is removed. A warning and the manifest of the returned result name
    the figures that could not be drawn. `files` is the list of a folder that is written step by step. SinkscopeError
    and KeyboardInterrupt say that the tables are complete.
    """
    folder = result.folder
    assert folder is not None
    if files is None:
        files = FileList(folder, read_manifest(folder, None)["files"], record=lambda: None)
    manifest = {name: value for name, value in result.manifest.items() if name not in ("drawn", "failed_figures")}
    files.record = lambda: write_manifest(folder, {**manifest, "drawn": False, "files": files.names})
    complete, failed = f"the tables in {folder} are complete", dict[str, str]()
    path = folder / PAGE
    try:
        drawings = result.drawings if figures is None else {name: partial(result.figure, name) for name in figures}
        if figures is None or drawings:
            with files.new_folder(folder / FIGURES_FOLDER) as fresh:
                failed |= save_figures(drawings, fresh)
        is_ours = PAGE in files.names
        if page and path.exists() and not is_ours:
            raise SinkscopeError(f"another process wrote {path} in the meantime: move it away, and repeat the command")
        if page:
            try:
                text = printable(page_of(result.contents).html)
            except Exception as error:
                if was_interrupted(error):
                    raise KeyboardInterrupt from None
                failed[PAGE] = described(error)
            else:
                files.add(PAGE)
                with new_file(path) as fresh:
                    fresh.write_text(text, encoding="utf-8")
        elif is_ours:
            remove(path)
        write_manifest(folder, manifest | ({"failed_figures": failed} if failed else {}) | {"files": files.names})
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{complete}, and its figures are not") from None
    except SinkscopeError as error:
        raise SinkscopeError(f"{error}; {complete}") from error
    except OSError as error:
        raise SinkscopeError(f"writing {folder} failed, but {complete}: {one_line(error)}") from error
    if failed:
        manifest["failed_figures"] = failed
        warnings.warn(figure_failure(manifest), stacklevel=2)
    return replace(result, manifest=manifest)


def figure_failure(*manifests: Mapping[str, Any]) -> str:
    """Return one line that names the figures that could not be drawn; "" if there are none."""
    failed = [item for manifest in manifests for item in (manifest.get("failed_figures") or {}).items()]
    named = "; ".join(f"{name} ({reason})" for name, reason in failed)
    return named and f"{counted(len(failed), 'figure')} could not be drawn, and all else is written: {named}"


def both(*failures: str) -> str:
    """Join messages of failures."""
    return "; ".join(filter(None, failures))

"""The result of a command, and how it is written: first tables, texts and run.json, then figures and the page.

The first part appears at once and complete, or not at all. Figures and the page are drawn into the finished folder, so
that a failure affects nothing else: a warning and `failed_figures` in run.json name the figure. Until they are drawn,
run.json has `"drawn": false`.
"""

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pandas as pd

from sinkscope.errors import Known, SinkscopeError, counted, described, one_line, was_interrupted
from sinkscope.figures.style import Figure
from sinkscope.html_page import PAGE, Contents, Paged, page_of
from sinkscope.output.drawing import Drawings, save_figures
from sinkscope.results.folders import FileList, new_folder
from sinkscope.results.manifest import read_manifest, write_manifest
from sinkscope.results.swap import new_file, remove
from sinkscope.results.tables import write_tables
from sinkscope.verdict.table_formats import Tabular

FIGURES = "figures"
Kind = TypeVar("Kind", bound="Result")


class Result(Paged, Tabular):
    """A manifest and tables, in memory or in a folder, with its texts, figures and page."""

    if TYPE_CHECKING:  # fields or properties of each kind of result

        @property
        def manifest(self) -> dict[str, Any]:
            """The content of run.json."""

        @property
        def tables(self) -> Mapping[str, pd.DataFrame]:
            """Name → table, as its folder has them."""

        @property
        def folder(self) -> Path | None:
            """Where it is written; None if it is in memory only."""

    @property
    def texts(self) -> Mapping[str, str]:
        """Name of a file → its content."""
        return {}

    @property
    def drawings(self) -> Drawings:
        """Name of each figure → the function that draws it."""
        return {}

    def figures(self) -> dict[str, Figure]:
        """Draw all figures, by name."""
        return Known("figure", {name: draw() for name, draw in self.drawings.items()})

    @property
    def contents(self) -> Contents:
        return Contents(self.manifest, self.tables, folder=self.folder)

    def write_files(self, folder: Path) -> None:
        """Write tables and texts into a folder."""
        write_tables(self.tables, folder)
        for name, text in self.texts.items():
            with new_file(folder / name) as fresh:
                fresh.write_text(text, encoding="utf-8")


def write_data(result: Result, folder: Path) -> None:
    """Write tables, texts and run.json, the last of them, into an empty folder. `draw` does the rest."""
    result.write_files(folder)
    write_manifest(folder, {**result.manifest, "drawn": False})


def written(result: Kind, page: bool = True) -> Kind:
    """Return a result, written to its folder if it has one."""
    if result.folder is None:
        return result
    with new_folder(result.folder) as fresh:
        write_data(result, fresh)
    return draw(result, page=page)


def draw(result: Kind, drawings: Drawings | None = None, page: bool = True, files: FileList | None = None) -> Kind:
    """Draw figures and the page into the folder that `write_data` has finished.

    The manifest of the returned result, and a warning, name the figures that could not be drawn, with the reasons.

    Args:
        drawings: The figures; None: all that the result has; empty: figures are left as they are.
        files: The list of the folder's files, if it was written step by step.

    Raises:
        SinkscopeError: Writing failed. The tables are complete.
        KeyboardInterrupt: Drawing was interrupted; the message says that the tables are complete.
    """
    folder = result.folder
    assert folder is not None
    if files is None:
        files = FileList(folder, read_manifest(folder, None).get("files"), record=lambda: None)
    manifest = {name: value for name, value in result.manifest.items() if name not in ("drawn", "failed_figures")}
    files.record = lambda: write_manifest(folder, {**manifest, "drawn": False, "files": files.names})
    kept = f"the tables in {folder} are complete"
    try:
        failed = {}
        if drawings is None or drawings:
            with files.new_folder(folder / FIGURES) as fresh:
                failed = save_figures(result.drawings if drawings is None else drawings, fresh)
        failed |= _write_page(result, files, page)
        if failed:
            manifest["failed_figures"] = failed
        write_manifest(folder, manifest | {"files": files.names})
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{kept}, and its figures are not") from None
    except SinkscopeError as error:
        raise SinkscopeError(f"{error}; {kept}") from error
    except OSError as error:
        raise SinkscopeError(f"writing {folder} failed, but {kept}: {one_line(error)}") from error
    if failed:
        warnings.warn(figure_failure(manifest), stacklevel=2)
    return replace(result, manifest=manifest)  # type: ignore[type-var]  # every kind of result is a dataclass


def _write_page(result: Result, files: FileList, wanted: bool) -> dict[str, str]:
    """Write index.html if `wanted`, else remove an earlier page of the command; return the failure, if any."""
    path = files.folder / PAGE
    is_ours = files.names is None or PAGE in files.names
    if not wanted:
        if is_ours:
            remove(path)
        return {}
    if path.exists() and not is_ours:
        raise SinkscopeError(f"another process wrote {path} in the meantime: move it away, and repeat the command")
    try:
        text = page_of(result.contents).html
    except Exception as error:
        if was_interrupted(error):
            raise KeyboardInterrupt from None
        return {PAGE: described(error)}
    files.add(PAGE)
    with new_file(path) as fresh:
        fresh.write_text(text, encoding="utf-8")
    return {}


def is_undrawn(manifest: Mapping[str, Any]) -> bool:
    """Return whether a folder lacks figures or its page: the command was killed, or one of them failed."""
    return manifest.get("drawn") is False or bool(manifest.get("failed_figures"))


def figure_failure(*manifests: Mapping[str, Any]) -> str:
    """Return one line that names the figures that could not be drawn; "" if there are none."""
    failed = [item for manifest in manifests for item in (manifest.get("failed_figures") or {}).items()]
    named = "; ".join(f"{name} ({reason})" for name, reason in failed)
    return named and f"{counted(len(failed), 'figure')} could not be drawn, and all else is written: {named}"


def both(*failures: str) -> str:
    """Join messages of failures."""
    return "; ".join(filter(None, failures))

"""The contents of a page: run.json, tables, findings in words, and the runs that the folder consists of."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from sinkscope.errors import InputError
from sinkscope.html_page.compact import BY_SEQUENCE
from sinkscope.measuring.tables import all_tables
from sinkscope.results.activations import FILE, Activations
from sinkscope.results.findings import Finding
from sinkscope.results.manifest import MANIFEST_KINDS, RUNS, folder_of, read_manifest
from sinkscope.results.run import RunData, TablesOnDisk
from sinkscope.results.tables import LEADING_COLUMNS, Column, Columns, names_of, read_table
from sinkscope.verdict.report import report_of

RUN = Column("run", "which of the runs side by side", kind="text")
STEP = Column("step", "of the training", kind="whole")
COLUMNS = all_tables()  # name of a table → its columns after the leading ones; without tables with a column per run


class PageParts:
    """The parts of a page that depend on the folder's command, which may derive its own class."""

    named_by: ClassVar[Column] = RUN  # the column that names the parts in their tables

    def places(self, folder: Path, manifest: Mapping[str, Any]) -> Mapping[Any, Path]:
        """Return the folders of the runs that the page shows side by side, by name."""
        return {}

    def linked(self, folder: Path, manifest: Mapping[str, Any]) -> Mapping[Any, Path]:
        """Return the folders whose pages it links to, by name."""
        return self.places(folder, manifest)

    def findings(self, manifest: Mapping[str, Any], tables: Mapping[str, pd.DataFrame]) -> Sequence[Finding]:
        """Return the findings of a folder whose command makes no report."""
        return ()

    def overviews(self, contents: "Contents") -> Mapping[str, pd.DataFrame]:
        """Return title → table of texts that sums up the folder, such as the models of a sweep."""
        return {}

    def data(self, contents: "Contents") -> Mapping[str, Any]:
        """Return entries for the command's script, and these for others: `first_table`, the beginning of the names of
        the tables that are shown first, and `spread`, False if the overviews have no ± and no intervals.
        """
        return {}


class _Part(RunData):
    columns: ClassVar[Mapping[str, Columns]] = COLUMNS


@dataclass(frozen=True)
class Contents:
    """The contents of a page."""

    manifest: Mapping[str, Any]  # the content of run.json
    tables: Mapping[str, pd.DataFrame]  # name → table of the folder itself
    parts: Mapping[Any, RunData] = field(default_factory=dict)  # name → run, for runs that are shown side by side
    findings: Sequence[Finding] = ()  # of the verdict; empty for a folder without a verdict
    folder: Path | None = None  # None for a page in a notebook
    absent: tuple[str, ...] = ()  # tables and runs that the folder lacks
    activations: Activations = field(default_factory=Activations)

    @classmethod
    def of_folder(cls, path: str | os.PathLike[str]) -> "Contents":
        """Open a folder of any command without its missing tables and runs; InputError for other or damaged ones."""
        folder = folder_of(path)
        manifest = read_manifest(folder, None)
        files = {name: folder / "tables" / f"{name}.parquet" for name in manifest["tables"]}
        schemas = {name: (*LEADING_COLUMNS, *COLUMNS[name]) if name in COLUMNS else () for name in files}
        tables = {name: read_table(file, schemas[name]) for name, file in files.items() if file.is_file()}
        of_command = parts_of(manifest)
        places = of_command.places(folder, manifest)
        parts: dict[Any, RunData] = {}
        for label, place in places.items():
            with suppress(InputError):  # missing or incomplete
                parts[label] = _Part.open(place)
        activations = Activations.of_folder(folder)
        absent = (
            *(f"table {name}" for name in files if name not in tables),
            *(f"run {label}" for label in places if label not in parts),
            *([FILE] if manifest.get("activations") and not activations else []),
        )
        findings: Sequence[Finding] = ()
        if len(tables) < len(files) or manifest["command"] not in RUNS:
            findings = of_command.findings(manifest, tables)
        else:
            findings = report_of(RunData(manifest, TablesOnDisk(folder, files, COLUMNS, tables), folder)).findings
        return cls(manifest, tables, parts, findings, folder, absent, activations)

    @property
    def of_command(self) -> PageParts:
        return parts_of(self.manifest)

    @cached_property
    def all_tables(self) -> dict[str, pd.DataFrame]:
        """The tables of the folder and of its runs by name; the first column names the run.

        Tables with rows for each sequence are only on the page of their own run, except for maps.
        """
        tables, part = dict(self.tables), self.of_command.named_by.name
        for name in dict.fromkeys(name for run in self.parts.values() for name in run.tables):
            columns = names_of(COLUMNS.get(name, ()))
            if name in tables or ("query" not in columns and not set(columns).isdisjoint(BY_SEQUENCE)):
                continue
            joined = {label: run.tables[name] for label, run in self.parts.items() if name in run.tables}
            table = pd.concat([table.assign(**{part: label}) for label, table in joined.items()])
            tables[name] = table[[part, *next(iter(joined.values())).columns]].reset_index(drop=True)
        return dict(sorted(tables.items()))

    @property
    def overviews(self) -> dict[str, pd.DataFrame]:
        """Title → table of texts that sums up the folder: the arms of an experiment, the models of a sweep, …"""
        if self.findings and self.manifest["command"] in RUNS and self.manifest["command"] != "analyze":
            return {"": report_of(RunData(dict(self.manifest), dict(self.tables), self.folder)).table}
        return dict(self.of_command.overviews(self))


def spreads(rows: pd.DataFrame, keys: list[str]) -> list[tuple]:
    """Return each group's keys, and the mean, standard deviation (n − 1) and number of its finite values."""
    known = rows[np.isfinite(rows["value"].astype(float))]
    spread = known.groupby(keys, sort=False)["value"].agg(["mean", "std", "count"]).reset_index()
    spread = spread.astype(object).where(spread.notna(), None)
    return [tuple(row) for row in spread.to_numpy().tolist()]


def parts_of(manifest: Mapping[str, Any]) -> PageParts:
    """Return what the command of a folder adds to its page."""
    record = MANIFEST_KINDS[manifest["command"]]
    return record.imported(record.page)() if record.page else PageParts()

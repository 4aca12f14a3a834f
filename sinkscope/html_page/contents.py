"""The contents of a page: run.json, tables, findings in words, and the runs that the folder consists of."""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote

import numpy as np
import pandas as pd

from sinkscope.commands.claims.columns import CLAIM
from sinkscope.commands.steps import onsets
from sinkscope.commands.sweep import factor_study
from sinkscope.commands.sweep.tables import SWEEP, SweepTables
from sinkscope.commands.train import findings as trained
from sinkscope.commands.train.tables import UNTOUCHED
from sinkscope.errors import InputError
from sinkscope.html_page.compact import BY_SEQUENCE, DIGITS
from sinkscope.results.activations import FILE, Activations
from sinkscope.results.findings import Finding
from sinkscope.results.manifest import PAGE, folder_of, format_of, read_manifest
from sinkscope.results.run import RunData, TablesOnDisk
from sinkscope.results.tables import LEADING_COLUMNS, WHOLE_MODEL, Column, Columns, names_of, newer_columns, read_table
from sinkscope.verdict import at_a_glance
from sinkscope.verdict.register import REPORTS, written_tables

RUN = Column("run", "which of the runs side by side", kind="text")
STEP = Column("step", "of the training", kind="whole")
COLUMNS = written_tables()  # name of a table → its columns after the leading ones; without tables with a column per run


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
    # tables and runs that the folder lacks, and columns (TABLE.COLUMN) that are newer than the folder's format
    absent: tuple[str, ...] = ()
    named_by: Column = RUN  # the column that names the parts in their tables
    activations: Activations = field(default_factory=Activations)

    @classmethod
    def of_folder(cls, path: str | os.PathLike[str]) -> "Contents":
        """Open a folder of any command without its missing tables and runs; InputError for other or damaged ones."""
        folder = folder_of(path)
        manifest = read_manifest(folder, None)
        form = format_of(manifest)
        files = {name: folder / "tables" / f"{name}.parquet" for name in manifest["tables"]}
        schemas = {name: (*LEADING_COLUMNS, *COLUMNS[name]) if name in COLUMNS else () for name in files}
        tables = {name: read_table(file, schemas[name], form) for name, file in files.items() if file.is_file()}
        places = _places(folder, manifest)
        parts: dict[Any, RunData] = {}
        for label, place in places.items():
            with suppress(InputError):  # missing or incomplete
                parts[label] = _Part.open(place)
        activations = Activations.of_folder(folder)
        absent = (
            *(f"table {name}" for name in files if name not in tables),
            *(f"run {label}" for label in places if label not in parts),
            *([FILE] if manifest.get("activations") and not activations else []),
            *(f"{name}.{each.name}" for name in tables for each in newer_columns(schemas[name], form)),
        )
        named_by = STEP if manifest["command"] == "analyze_steps" else RUN
        findings: Sequence[Finding] = ()
        if len(tables) == len(files) and manifest["command"] in REPORTS:
            on_disk = TablesOnDisk(folder, files, COLUMNS, form, tables)
            findings = REPORTS[manifest["command"]](RunData(manifest, on_disk, folder)).findings
        elif onsets.TABLE in tables:
            findings = onsets.findings(tables[onsets.TABLE])
        elif manifest["command"] == "claims" and CLAIM in tables:
            from sinkscope.commands.claims import scorecard  # other pages need no claims

            findings = scorecard.unusual(scorecard.Scorecard(dict(manifest), tables[CLAIM], pd.DataFrame()))
        elif len(tables) == len(files) and {"gates", "retrofit"} <= tables.keys():
            findings = trained.findings(tables, manifest["arms"])
        return cls(manifest, tables, parts, findings, folder, absent, named_by, activations)

    @cached_property
    def all_tables(self) -> dict[str, pd.DataFrame]:
        """The tables of the folder and of its runs by name; the first column names the run.

        Tables with rows for each sequence are only on the page of their own run, except for maps.
        """
        tables = dict(self.tables)
        for name in dict.fromkeys(name for run in self.parts.values() for name in run.tables):
            columns = names_of(COLUMNS.get(name, ()))
            if name in tables or ("query" not in columns and not set(columns).isdisjoint(BY_SEQUENCE)):
                continue
            own = {label: run.tables[name] for label, run in self.parts.items() if name in run.tables}
            joined = pd.concat([table.assign(**{self.named_by.name: label}) for label, table in own.items()])
            tables[name] = joined[[self.named_by.name, *next(iter(own.values())).columns]].reset_index(drop=True)
        return dict(sorted(tables.items()))

    @property
    def levels(self) -> list[tuple[str, str, str, float | None, str]]:
        """The settings, condition and level of each training of a sweep, and WSE's sink rate with its mark."""
        training = self.tables.get(factor_study.TABLE, pd.DataFrame())
        named = {} if training.empty else factor_study.levels(training)
        rates = {level: factor_study.published(level) for level in named.values()}
        shown = {level: (rate.value / 100, rate.mark) if rate else (None, "") for level, rate in rates.items()}
        return [(*pair, level, *shown[level]) for pair, level in named.items()]

    @property
    def glances(self) -> list[dict[str, str]]:
        """The numbers that a reader of a run of `analyze` sees first, with what they mean."""
        if self.manifest["command"] != "analyze" or "summary" not in self.tables:
            return []
        run = RunData(dict(self.manifest), dict(self.tables), self.folder)
        return [glance._asdict() for glance in at_a_glance.glances(run)]

    @property
    def overviews(self) -> dict[str, pd.DataFrame]:
        """Title → table of texts that sums up the folder: the arms of an experiment, the models of a sweep, …"""
        tables, command = dict(self.tables), self.manifest["command"]
        if "retrofit" in tables:
            return dict(reversed(trained.retrofit_summaries(tables["retrofit"]).items()))  # sinks first
        if SWEEP in tables and "token_zero" in tables[SWEEP]:
            return {"Sink rate at position 0, by model and input": SweepTables(tables, {}).overview}
        if self.findings and command in REPORTS and command != "analyze":
            return {"": REPORTS[command](RunData(dict(self.manifest), tables, self.folder)).table}
        return {}

    @property
    def controls(self) -> list[tuple]:
        """The mean, standard deviation and number of controls for every arm of `effect`, metric and position."""
        table = self.all_tables.get("effect", pd.DataFrame())
        if table.empty:
            return []
        rows = table[(table["layer"] == WHOLE_MODEL) & (table["arm"] == "control")]
        arm = "condition" if self.manifest.get("arms") else "name"  # as the page calls them
        return _spreads(rows, [arm, "metric", "position"])

    @property
    def last_steps(self) -> list[tuple]:
        """The mean, standard deviation and number of last values for every level of a factor study and metric."""
        training = self.tables.get(factor_study.TABLE, pd.DataFrame())
        if training.empty:
            return []
        rows = factor_study.with_levels(training[training["layer"] == WHOLE_MODEL])
        keys = [*factor_study.KEYS, "metric"]
        return _spreads(rows.loc[rows.groupby(keys)["step"].idxmax()], [factor_study.LEVEL, "metric"])

    @property
    def received(self) -> list[tuple]:
        """The mean weight of every key of the stored maps: layer, head, sequence, key, weight."""
        maps = self.tables.get("attention_maps", pd.DataFrame())
        if maps.empty or "head" not in maps:
            return []
        means = maps.groupby(["layer", "head", "sequence", "key"], sort=False)["weight"].mean()
        return [(*map(int, key), float(f"{weight:.{DIGITS}g}")) for key, weight in means.items()]

    @property
    def columns(self) -> dict[str, Columns]:
        """The columns of each table after the leading ones, by name."""
        own = (self.named_by,) if self.parts else ()
        return {name: (*own, *columns) for name, columns in COLUMNS.items()}

    @property
    def links(self) -> dict[str, str]:
        """The pages of runs relative to this page, by name of the run; only pages that exist."""
        if self.folder is None:
            return {}
        pages = {label: place / PAGE for label, place in _places(self.folder, self.manifest, linked=True).items()}
        return {
            # begins with `./`, because a name may look like a URL's scheme
            label: "./" + quote(Path(os.path.relpath(page.absolute(), self.folder.absolute())).as_posix())
            for label, page in pages.items()
            if page.is_file()
        }


def _spreads(rows: pd.DataFrame, keys: list[str]) -> list[tuple]:
    """Return each group's keys, and the mean, standard deviation (n − 1) and number of its finite values."""
    known = rows[np.isfinite(rows["value"].astype(float))]
    found = known.groupby(keys, sort=False)["value"].agg(["mean", "std", "count"]).reset_index()
    found = found.astype(object).where(found.notna(), None)
    return [tuple(row) for row in found.to_numpy().tolist()]


def _places(folder: Path, manifest: Mapping[str, Any], linked: bool = False) -> dict[Any, Path]:
    """Return the folders of the runs that a page shows side by side, or with `linked` only links to, by name.

    The pages of claims and sweeps only link to their runs, which may be hundreds.
    """
    match manifest["command"]:
        case "analyze_steps":
            return {at["step"]: folder / at["folder"] for at in manifest["steps"]}
        case "retrofit" | "train":
            labels = (UNTOUCHED, *manifest["arms"])
            return {label: place for label in labels if (place := folder / label / "run").is_dir()}
        case "compare":
            return {run["label"]: Path(run["folder"]) for run in manifest.get("runs", ()) if run.get("folder")}
        case "claims" if linked:
            return {place.name: place for place in sorted(folder.glob("runs/*")) if place.is_dir()}
        case "sweep" if linked:
            return {name: folder.parent / "cells" / name for name in manifest.get("cells", ())}
    return {}

"""A run: its tables and manifest, in memory or in a folder.

RUN/run.json          the manifest: all options, what was loaded, versions, time and memory
RUN/tables/*.parquet  one row per observation
RUN/figures/*.png|pdf
RUN/verdict.md        the findings
RUN/index.html        all of it, to look at in a browser
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import pandas as pd

from sinkscope.errors import InputError, Known, UnknownKey, unknown
from sinkscope.results.bos import policy_of
from sinkscope.results.manifest import folder_of, format_of, read_manifest
from sinkscope.results.metrics import METRICS
from sinkscope.results.tables import LEADING_COLUMNS, Columns, read_table


@dataclass(frozen=True)
class RunData:
    """What one command measured of one model.

    Attributes:
        manifest: the content of run.json.
        tables: name → DataFrame.
        folder: where it is written; None if it is in memory only.
    """

    columns: ClassVar[Mapping[str, Columns]] = {}  # of the tables that a folder may hold, after the leading ones

    manifest: dict[str, Any]
    tables: Mapping[str, pd.DataFrame] = field(repr=False)
    folder: Path | None = None

    def __post_init__(self) -> None:
        if type(self.tables) is dict:
            object.__setattr__(self, "tables", Known("table", self.tables))

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Self:
        """Open the folder of a run, given by its path or by that of its run.json. Tables are read on first access.

        Raises:
            InputError: it is no run, or incomplete.
        """
        folder = folder_of(folder)
        manifest = read_manifest(folder)
        tables = _TablesOnDisk(folder, manifest, cls.columns)
        missing = [str(path) for path in tables.paths if not path.is_file()]
        if missing:
            raise InputError(f"{folder} is incomplete: {missing[0]} is missing")
        return cls(manifest, tables, folder)

    @property
    def is_causal(self) -> bool:
        """Whether the model attends only to earlier tokens; False for an encoder."""
        return bool(self.manifest.get("family", {}).get("causal", True))

    @property
    def model(self) -> str:
        return self.manifest["model"]["name"]

    @property
    def condition(self) -> str:
        return self.manifest["condition"]

    @property
    def reads(self) -> str:
        """Its input or its arm, which distinguishes it from other runs of the model in a title."""
        text = self.manifest["input"].get("text")  # of an arm of a training
        if text or "arms" in self.manifest:
            return f"arm {self.condition}" + (f" on {text}" if text else "")
        return f"{self.condition} input"

    @property
    def bos(self) -> str:
        """Whether its sequences begin with a BOS (`results/bos.py`)."""
        return policy_of(self.manifest.get("input", {}).get("token_zero", ""))

    @property
    def command(self) -> str:
        """The command that made it."""
        return self.manifest.get("command", "analyze")

    @property
    def is_experiment(self) -> bool:
        """Whether it is of `intervene`: its tables hold several arms, each with a `condition` of its own."""
        return self.command == "intervene"

    def at(self, condition: str) -> Self:
        """Return one arm of an experiment as a run.

        Raises:
            InputError: no table has this condition.
        """
        tables = {name: table[table["condition"] == condition] for name, table in self.tables.items()}
        tables = {name: table for name, table in tables.items() if len(table)}
        if not tables:
            known = sorted({condition for table in self.tables.values() for condition in table["condition"].unique()})
            raise InputError(f"arm {unknown(condition, known)}")
        return type(self)(self.manifest | {"command": "analyze", "condition": condition}, tables, self.folder)

    def metric(self, name: str, layer: int = -1) -> float:
        """Return one value of the table `summary`.

        Args:
            name: a key of METRICS.
            layer: counted from 0; −1 for the whole model.

        Returns:
            NaN if this run, or this layer, has not measured the metric.

        Raises:
            InputError: there is no such metric or layer, or the run has no summary.
        """
        summary = self.tables["summary"]
        if name not in METRICS:
            raise InputError(f"metric {unknown(name, METRICS)}")
        kinds = self.manifest.get("family", {}).get("kinds") or ()  # of every layer, including those without a metric
        layers, names, values = (summary[column].to_numpy() for column in ("layer", "metric", "value"))
        last = max(int(layers.max(initial=-1)), len(kinds) - 1)
        if layer not in range(-1, last + 1):
            raise InputError(f"there is no layer {layer}: this run has 0 to {last}, and -1 for the whole model")
        found = values[(names == name) & (layers == layer)]
        return float(found[0]) if len(found) else float("nan")


class _TablesOnDisk(Mapping[str, pd.DataFrame]):
    """Tables that are read, and checked against their declared columns, on first access."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any], columns: Mapping[str, Columns]) -> None:
        self._folder, self._format, self._columns = folder, format_of(manifest), columns
        self._paths = {name: folder / "tables" / f"{name}.parquet" for name in manifest["tables"]}
        self._read: dict[str, pd.DataFrame] = {}

    @property
    def paths(self) -> Iterable[Path]:
        return self._paths.values()

    def __getitem__(self, name: str) -> pd.DataFrame:
        if name not in self._read:
            if name not in self._paths:
                raise UnknownKey(f"{self._folder}: table {unknown(name, self._paths)}")
            columns = (*LEADING_COLUMNS, *self._columns.get(name, ()))
            self._read[name] = read_table(self._paths[name], columns, self._format)
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)

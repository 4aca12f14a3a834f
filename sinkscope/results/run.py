"""A run: its tables and manifest, in memory or in a folder.

RUN/run.json          the manifest: all options, the loaded model, versions, time and memory
RUN/tables/*.parquet  one row per observation
RUN/figures/*.png|pdf
RUN/verdict.md        the findings
RUN/activations.safetensors  raw tensors of the first sequences: all heads' attention weights, and those of --keep
RUN/index.html        all results, to look at in a browser
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import pandas as pd

from sinkscope.errors import InputError, Known, UnknownKey, unknown
from sinkscope.results.activations import Activations
from sinkscope.results.manifest import folder_of, read_manifest
from sinkscope.results.metrics import METRICS
from sinkscope.results.tables import LEADING_COLUMNS, Columns, read_table, used

BEFORE = "before"  # the condition of the unchanged model in an experiment
WITH, WITHOUT = "with", "without"  # a BOS at the beginning of each sequence
BOS_OPTIONS = {WITH: "always", WITHOUT: "never"}  # the value of --bos that has this effect with every tokenizer


def policy_of(token_zero: str) -> str:
    """Return WITH or WITHOUT: whether sequences begin with a BOS, or with the [CLS] of encoders.

    Only runs of the same policy are comparable. `token_zero` is the description of position 0 in run.json, for example
    "bos <s> (id 1)" or "first text token".
    """
    return WITH if token_zero.startswith(("bos", "special token")) else WITHOUT


@dataclass(frozen=True)
class FolderData:
    """A manifest and tables, in memory or in a folder."""

    manifest: dict[str, Any] = field(repr=False)  # the content of run.json
    tables: Mapping[str, pd.DataFrame] = field(repr=False)  # by name, as its folder has them
    folder: Path | None = None  # None if it is in memory only

    def __post_init__(self) -> None:
        if type(self.tables) is dict:
            object.__setattr__(self, "tables", Known("table", self.tables))


@dataclass(frozen=True)
class RunData(FolderData):
    """The results of one command on one model."""

    columns: ClassVar[Mapping[str, Columns]] = {}  # columns of the tables of a folder, after the leading ones

    activations: Activations = field(default_factory=Activations, repr=False)  # raw tensors of the first sequences
    loaded: Callable[[], Any] | None = field(default=None, repr=False)  # returns the model while it is in memory
    further: Callable[[Path], None] | None = field(default=None, repr=False)  # writes files not made from tables
    drawn: tuple[str, ...] | None = field(default=None, repr=False)  # the figures in its folder; None: all that apply

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Self:
        """Open the folder of a run, given by its path or by the path of its run.json. Tables are read on first access.

        Raises:
            InputError: the folder is not a run, or is incomplete.
        """
        folder = folder_of(folder)
        manifest = read_manifest(folder)
        paths = {name: folder / "tables" / f"{name}.parquet" for name in manifest["tables"]}
        if missing := [path for path in paths.values() if not path.is_file()]:
            raise InputError(f"{folder} is incomplete: {missing[0]} is missing")
        folder = folder.absolute()  # tables are read later, perhaps after os.chdir
        paths = {name: path.absolute() for name, path in paths.items()}
        return cls(manifest, TablesOnDisk(folder, paths, cls.columns), folder, Activations.of_folder(folder))

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
    def text_numbers(self) -> np.ndarray:
        """(N,): the number of each sequence's text; copies of a text share it."""
        read = self.manifest["input"]
        return np.array(read.get("texts") or range(read["sequences"]), dtype=int)

    @property
    def reads(self) -> str:
        """The input or the arm, which distinguishes the run from other runs of the model in a title."""
        text = self.manifest["input"].get("text")  # only arms of a training have this entry
        if text or "arms" in self.manifest:
            return f"arm {self.condition}" + (f" on {text}" if text else "")
        return f"{self.condition} input"

    @property
    def bos(self) -> str:
        """WITH or WITHOUT: whether the sequences begin with a BOS."""
        return policy_of(self.manifest.get("input", {}).get("token_zero", ""))

    @property
    def command(self) -> str:
        return self.manifest.get("command", "analyze")

    @property
    def is_experiment(self) -> bool:
        """Whether it is a run of `intervene`: its tables have several arms, each with its own `condition`."""
        return self.command == "intervene"

    def at(self, condition: str) -> Self:
        """Return one arm of an experiment as a run.

        Raises:
            InputError: no table has this condition.
        """
        tables = {name: table[table["condition"] == condition] for name, table in self.tables.items()}
        tables = {name: table for name, table in tables.items() if len(table)}
        if not tables:
            arms = sorted({condition for table in self.tables.values() for condition in table["condition"].unique()})
            raise InputError(f"arm {unknown(condition, arms)}")
        return type(self)(self.manifest | {"command": "analyze", "condition": condition}, tables, self.folder)

    def metric(self, name: str, layer: int = -1, head: int | None = None) -> float:
        """Return one value of a metric; NaN if this run, or this layer, has not measured it.

        A sink rate is NaN where uniform attention alone exceeds ε (`uniform_mass`); a notice of the run says so.

        Args:
            name: a key of METRICS.
            layer: counted from 0; −1 for the whole model.
            head: counted from 0, in this layer; None: all heads.

        Raises:
            InputError: there is no such metric, layer or head, or the run has no summary, or no values by head.
        """
        if name not in METRICS:
            raise InputError(f"metric {unknown(name, METRICS)}")
        if head is not None:
            return self._of_head(name, layer, head)
        summary = self.tables["summary"]
        kinds = self.manifest.get("family", {}).get("kinds") or ()  # the kind of every layer
        layers, names, values = (summary[column].to_numpy() for column in ("layer", "metric", "value"))
        last = max(int(layers.max(initial=-1)), len(kinds) - 1)
        if layer not in range(-1, last + 1):
            raise InputError(f"there is no layer {layer}: this run has 0 to {last}, and -1 for the whole model")
        measured = values[(names == name) & (layers == layer)]
        return float(measured[0]) if len(measured) else float("nan")

    def _of_head(self, metric: str, layer: int, head: int) -> float:
        """Return the value of a head at position 0 from the table that has a column of this name."""
        table = next((self.tables[of] for of in ("attention", "geometry") if metric in self.tables.get(of, ())), None)
        if table is None or self.is_experiment:  # the arms of an experiment are runs of their own: `at`
            raise InputError(f"{metric} has no values by head in this run")
        row = table[(table["layer"] == layer) & (table["head"] == head) & (table["position"] == 0)]
        if row.empty:
            raise InputError(f"there is no head {head} in layer {layer} of this run")
        return float(row[metric].iloc[0])


@dataclass(eq=False, repr=False)
class TablesOnDisk(Mapping[str, pd.DataFrame]):
    """Tables that are read, and checked against their declared columns, on first access."""

    folder: Path
    paths: Mapping[str, Path]
    columns: Mapping[str, Columns]
    read: dict[str, pd.DataFrame] = field(default_factory=dict)

    def __getitem__(self, name: str) -> pd.DataFrame:
        if name not in self.read:
            if name not in self.paths:
                raise UnknownKey(f"{self.folder}: table {unknown(name, self.paths)}")
            columns = (*LEADING_COLUMNS, *self.columns.get(name, ()))
            self.read[name] = read_table(self.paths[name], columns)
        return used(self.paths[name], self.read[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)

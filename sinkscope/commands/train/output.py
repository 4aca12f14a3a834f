"""The result of `retrofit` or `train`: its runs, its tables with all arms together, and its figures."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from sinkscope.commands.train import findings as words
from sinkscope.commands.train.figures import TrainedArms
from sinkscope.errors import InputError, Known, unknown
from sinkscope.figures import KINDS
from sinkscope.measuring.tables import all_tables
from sinkscope.output.comparison import Comparison
from sinkscope.output.drawing import Drawings, drawings_of
from sinkscope.output.result import Result, figure_failure
from sinkscope.output.run import Run
from sinkscope.results.findings import Finding
from sinkscope.results.manifest import MANIFEST, folder_of, read_manifest
from sinkscope.results.tables import LEADING_COLUMNS, read_table
from sinkscope.results.trainings import UNTOUCHED, runs_by_seed
from sinkscope.verdict.analysis import packed_source

COMMANDS = ("retrofit", "train")


@dataclass(frozen=True, kw_only=True)
class Trained(Result):
    """The result of `retrofit` or `train`: the tables have all arms, a task adds its own."""

    folder: Path
    runs: Mapping[str, Run] = field(repr=False)  # arm → run on held-out text; with `retrofit` also "untouched"
    comparison: Comparison | None = None  # compares the runs of the first seed, if there are several

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "runs", Known("arm", self.runs))

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> "Trained":
        """Open what `retrofit` or `train` wrote, without its comparison; InputError as for `tables_of_arms`."""
        folder = folder_of(folder)
        manifest, tables = tables_of_arms(folder)
        labels = [label for label in (UNTOUCHED, *manifest["arms"]) if (folder / label / "run" / MANIFEST).exists()]
        if not set(labels) & manifest["arms"].keys():
            raise InputError(f"{folder} is damaged: it has no arm with a run")
        runs = {label: Run.open(folder / label / "run") for label in labels}
        return cls(manifest, tables, folder=folder.absolute(), runs=runs)

    @property
    def verdict(self) -> str:
        """The methods compared, the table `retrofit`, and the metrics of a task, as Markdown."""
        parts = [words.retrofit_markdown(self.tables["retrofit"], self.findings, self.manifest.get("sequences"))]
        if UNTOUCHED in self.runs:
            parts += [f"{finding.sentence}\n" for finding in packed_source(self.runs[UNTOUCHED], "W8A8")]
        if equal := words.equal_loss_markdown(self.tables["training"]):
            parts.append(equal)
        if "value_norms" in self.tables:
            note = words.without_start(self.runs.values())
            parts.append(words.backcopy_markdown(self.tables["training"], note))
        return "\n".join(parts)

    @property
    def summary_tables(self) -> dict[str, pd.DataFrame]:
        return words.retrofit_summaries(self.tables["retrofit"])

    @property
    def findings(self) -> list[Finding]:
        """Each method against plain training, and how far its new parameters have moved."""
        return words.findings(self.tables, self.manifest)

    @property
    def parts(self) -> Mapping[str, Run]:
        return self.runs

    @property
    def texts(self) -> Mapping[str, str]:
        return {"retrofit.md": self.verdict}

    @property
    def drawings(self) -> Drawings:
        first_runs = next(iter(runs_by_seed(self.manifest["arms"], self.runs).values()))
        return drawings_of(KINDS["arms of a training"], TrainedArms(self.tables, first_runs))

    @property
    def failure(self) -> str:
        """Return on one line which figures could not be drawn; "" if all could."""
        parts = [*self.runs.values(), *([self.comparison] if self.comparison else [])]
        return figure_failure(self.manifest, *(part.manifest for part in parts))

    @property
    def notes(self) -> list[str]:
        """A line for each finding, and for each setting in which the runs differ."""
        return [finding.sentence for finding in self.findings] + (self.comparison.warnings if self.comparison else [])

    def model(self, label: str) -> Path:
        """Return the folder of a trained model; InputError for an unknown arm, or one that was not kept."""
        if label not in self.manifest["arms"]:
            raise InputError(f"arm {unknown(label, self.manifest['arms'])}")
        if not (self.folder / label / "model").exists():
            raise InputError(f"{label} was trained with --save-models none: its model was not kept")
        return self.folder / label / "model"

    def _repr_markdown_(self) -> str:  # for notebooks
        return self.verdict


def tables_of_arms(folder: Path) -> tuple[dict[str, Any], dict[str, pd.DataFrame]]:
    """Return the manifest and the tables of all arms; InputError for another folder, an unfinished or a damaged one."""
    manifest = read_manifest(folder, COMMANDS)
    if not manifest["tables"]:
        raise InputError(f"{folder} is not finished: the same `sinkscope {manifest['command']}` resumes it")
    lacking = [name for name in ("training", "gates", "retrofit") if name not in manifest["tables"]]
    if lacking:
        raise InputError(f"{folder} is damaged: it has no {lacking[0]}")
    tables = {}
    for name in manifest["tables"]:
        columns = (*LEADING_COLUMNS, *all_tables().get(name, ()))
        tables[name] = read_table(folder / "tables" / f"{name}.parquet", columns)
    return manifest, tables


def summaries(folder: Path) -> Mapping[str, pd.DataFrame]:
    """Return the tables that `compare` prints of the folder of a training."""
    return words.retrofit_summaries(tables_of_arms(folder)[1]["retrofit"])

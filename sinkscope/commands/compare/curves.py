"""Trainings that `SinkCallback` measured, side by side by step."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from sinkscope.commands.compare.figures import CURVES
from sinkscope.errors import InputError
from sinkscope.figures import KINDS
from sinkscope.measuring.callback import FOLDER
from sinkscope.measuring.summary import WHOLE_MODEL
from sinkscope.output.drawing import Drawings, drawings_of
from sinkscope.output.result import Result
from sinkscope.results.manifest import TRAINING, folder_of, read_manifest
from sinkscope.results.metrics import METRICS
from sinkscope.results.tables import LEADING_COLUMNS, TRAINING_TABLES, read_table
from sinkscope.verdict.table_formats import as_markdown

TABLE = "training"


@dataclass(frozen=True, kw_only=True)
class Curves(Result):
    """The table `training` of one or several trainings; its `condition` is the training's name."""

    @property
    def table(self) -> pd.DataFrame:
        """Metrics by layer and step: model, condition, layer (−1: the whole model), seed, step, metric, value."""
        return self.tables[TABLE]

    @property
    def by_step(self) -> pd.DataFrame:
        """The best-known metrics of the whole model: a row for each training and step."""
        whole = self.table[(self.table["layer"] == WHOLE_MODEL) & self.table["metric"].isin(CURVES)]
        wide = whole.pivot(index=["condition", "step"], columns="metric", values="value")
        return wide[[name for name in CURVES if name in wide]]

    @property
    def summary_tables(self) -> dict[str, pd.DataFrame]:
        return {"": _named(self.by_step)}

    @property
    def drawings(self) -> Drawings:
        return drawings_of(KINDS["trainings of your own"], self.table)

    @property
    def texts(self) -> Mapping[str, str]:
        return {"curves.md": self.markdown + "\n"}

    @property
    def markdown(self) -> str:
        shown = self.by_step.apply(lambda column: column.map(METRICS[column.name].text))
        return as_markdown(_named(shown))


def _named(by_step: pd.DataFrame) -> pd.DataFrame:
    named = by_step.rename(columns=lambda name: METRICS[name].short).rename_axis(columns=None).reset_index()
    return named.rename(columns={"condition": "training"})


def curves_of(folder: Path, name: str = "") -> pd.DataFrame:
    """Return the table `training` of a folder of `SinkCallback`, with the training's name as `condition`."""
    folder = folder_of(folder)
    manifest = read_manifest(folder, (TRAINING.name,))
    if TABLE not in manifest["tables"]:
        raise InputError(f"{folder} has no curves: they are in the folder '{FOLDER}' that SinkCallback writes")
    columns = (*LEADING_COLUMNS, *TRAINING_TABLES[TABLE])
    table = read_table(folder / "tables" / f"{TABLE}.parquet", columns)
    return table.assign(condition=name or training_of(folder))


def training_of(folder: Path) -> str:
    """Return the name of the training: that of the Trainer's output_dir."""
    real = folder.resolve()
    return real.parent.name if real.name == FOLDER else real.name

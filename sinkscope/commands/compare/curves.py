"""Trainings that `SinkCallback` measured, side by side by step."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from sinkscope.commands.compare.figures import CURVES
from sinkscope.errors import InputError
from sinkscope.figures import KINDS
from sinkscope.measuring.callback import FOLDER
from sinkscope.measuring.summary import WHOLE_MODEL
from sinkscope.output.drawing import Drawings, drawings_of
from sinkscope.output.result import Result
from sinkscope.results.manifest import CALLBACK_TRAINING, folder_of, read_manifest
from sinkscope.results.metrics import METRICS
from sinkscope.results.side_by_side import comparison_manifest, distinct_names
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
        return {"": _with_headings(self.by_step)}

    @property
    def drawings(self) -> Drawings:
        return drawings_of(KINDS["trainings of your own"], self.table)

    @property
    def texts(self) -> Mapping[str, str]:
        return {"curves.md": self.markdown + "\n"}

    @property
    def markdown(self) -> str:
        return as_markdown(_with_headings(self.by_step.apply(lambda column: column.map(METRICS[column.name].text))))


def _with_headings(by_step: pd.DataFrame) -> pd.DataFrame:
    table = by_step.rename(columns=lambda name: METRICS[name].short).rename_axis(columns=None).reset_index()
    return table.rename(columns={"condition": "training"})


def curves(sources: Sequence[str | os.PathLike[str]], start: float) -> Curves:
    """Return the curves of the folders of `SinkCallback`; a training is named by the Trainer's output_dir."""
    folders, tables = [folder_of(source) for source in sources], []
    places = [folder.resolve() for folder in folders]
    trainings = [place.parent.name if place.name == FOLDER else place.name for place in places]
    names = distinct_names(list(zip(trainings, folders, strict=True)))
    for folder, name in zip(folders, names, strict=True):
        if TABLE not in read_manifest(folder, (CALLBACK_TRAINING.name,))["tables"]:
            raise InputError(f"{folder} has no curves: they are in the folder '{FOLDER}' that SinkCallback writes")
        table = read_table(folder / "tables" / f"{TABLE}.parquet", (*LEADING_COLUMNS, *TRAINING_TABLES[TABLE]))
        tables.append(table.assign(condition=name))
    facts = [{"label": name, "folder": folder} for name, folder in zip(names, folders, strict=True)]
    manifest = comparison_manifest(start, [TABLE], facts, pd.DataFrame())
    return Curves(manifest, {TABLE: pd.concat(tables, ignore_index=True)})

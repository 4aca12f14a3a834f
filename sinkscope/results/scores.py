"""Scores on benchmarks: their table, and which of a task's metrics is the one that is compared."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from sinkscope.results.tables import Column, Columns

COMMAND = TABLE = "benchmark"
COLUMNS: Columns = (
    Column("metric", "of the task", kind="text"),
    Column("filter", "what the harness makes of an answer first", kind="text"),
    Column("score", "mean over questions"),
    Column("error", "its standard error; NaN where the harness gives none"),
    Column("questions", "that were asked; 0 of a group, which has those of its tasks", kind="whole"),
    Column("shots", "examples in front of each; -1 where its tasks differ", kind="whole"),
    Column("version", "of the task", kind="text"),
    Column("is_asked", "whether it was named; else it is one of a group", kind="truth"),
)
# of several metrics of a task that which is compared; else its first
PREFERRED = ("acc_norm", "acc", "exact_match", "f1", "word_perplexity")


@dataclass(frozen=True)
class Scores:
    """What `benchmark` found.

    Attributes:
        manifest: as in run.json.
        table: a row for each task (its `condition`), metric and filter.
        folder: where it was written, if it was.
    """

    manifest: dict[str, Any]
    table: pd.DataFrame = field(repr=False)
    folder: Path | None = None

    @property
    def main(self) -> pd.DataFrame:
        """One row for each task that was named."""
        return main_scores(self.table)


def main_scores(table: pd.DataFrame) -> pd.DataFrame:
    """Of the tasks that were named the row of the metric that is compared: one for each model, revision, … and task.

    Args:
        table: `benchmark`, of one run or of all cells of a sweep.
    """
    rows = table[table["is_asked"].astype(bool)]
    place = rows["metric"].map({name: at for at, name in enumerate(PREFERRED)}).fillna(len(PREFERRED))
    within = [name for name in ("cell", "condition") if name in rows]
    return rows.assign(place=place).sort_values("place", kind="stable").drop_duplicates(within).sort_index()

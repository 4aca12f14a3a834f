"""Scores on benchmarks: their table, and the metric of each task that is compared."""

import pandas as pd

from sinkscope.results.tables import Column, Columns

BENCHMARK = SCORE_TABLE = "benchmark"
SCORE_COLUMNS: Columns = (
    Column("metric", "metric of the task", kind="text"),
    Column("filter", "filter of the harness for answers", kind="text"),
    Column("score", "mean over questions"),
    Column("error", "its standard error; NaN if the harness gives none"),
    Column("questions", "number of questions; 0 for a group of tasks", kind="whole"),
    Column("shots", "examples before each question; -1 if its tasks differ", kind="whole"),
    Column("version", "version of the task", kind="text"),
    Column("is_asked", "whether the task was named; otherwise it is part of a named group", kind="truth"),
)
SCORE_TABLES = {SCORE_TABLE: SCORE_COLUMNS}
# the compared metric of a task is the first of these that the task has, or else its first metric
PREFERRED = ("acc_norm", "acc", "exact_match", "f1", "word_perplexity")


def main_scores(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row for each named task, with its compared metric, from the table of a run or a sweep."""
    rows = table[table["is_asked"].astype(bool)]
    rank = rows["metric"].map({name: index for index, name in enumerate(PREFERRED)}).fillna(len(PREFERRED))
    within = [name for name in ("cell", "condition") if name in rows]
    return rows.assign(rank=rank).sort_values("rank", kind="stable").drop_duplicates(within).sort_index()

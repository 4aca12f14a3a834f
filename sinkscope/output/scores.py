"""Scores on benchmarks with their page, as they are written."""

import pandas as pd

from sinkscope.output.result import Result
from sinkscope.results.scores import TABLE, Scores


class DrawnScores(Scores, Result):
    """Scores that can be written."""

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        return {TABLE: self.table}

    @property
    def summary_tables(self) -> dict[str, pd.DataFrame]:
        return {"": self.main[["condition", "metric", "score", "error", "questions"]]}

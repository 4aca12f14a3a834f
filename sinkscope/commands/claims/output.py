"""Scorecards and scores on benchmarks, with the words, figures and page that are written with them."""

from collections.abc import Mapping

import pandas as pd

from sinkscope.commands.claims.scorecard import LEGEND, Scorecard
from sinkscope.figures import OF_CLAIMS, OF_ROUTES
from sinkscope.output.drawing import Drawings, drawings_of
from sinkscope.output.result import Result
from sinkscope.results.scores import TABLE, main_scores


class DrawnScorecard(Scorecard, Result):
    """A scorecard that can be written."""

    @classmethod
    def of(cls, card: Scorecard) -> "DrawnScorecard":
        return cls(card.manifest, card.table, card.routes, card.runs, card.folder)

    @property
    def texts(self) -> Mapping[str, str]:
        return {"scorecard.md": f"{self.markdown}\n\n{LEGEND}\n"}

    @property
    def drawings(self) -> Drawings:
        return scorecard_drawings(self)


def scorecard_drawings(card: Scorecard) -> Drawings:
    return {**drawings_of(OF_CLAIMS, card), **drawings_of(OF_ROUTES, card.routes)}


class Scores(Result):
    """The result of `benchmark`."""

    @property
    def table(self) -> pd.DataFrame:
        """A row for each task (its `condition`), metric and filter."""
        return self.tables[TABLE]

    @property
    def main(self) -> pd.DataFrame:
        """One row for each task that was named."""
        return main_scores(self.table)

    @property
    def summary_tables(self) -> dict[str, pd.DataFrame]:
        return {"": self.main[["condition", "metric", "score", "error", "questions"]]}

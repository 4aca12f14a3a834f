"""A scorecard with its words, figures and page, as it is written."""

from collections.abc import Mapping

from sinkscope.figures import OF_CLAIMS, OF_ROUTES
from sinkscope.output.drawing import Drawings, drawings_of
from sinkscope.output.result import Result
from sinkscope.verdict.scorecard import Scorecard, legend


class DrawnScorecard(Scorecard, Result):
    """A scorecard that can be written."""

    @classmethod
    def of(cls, card: Scorecard) -> "DrawnScorecard":
        return cls(card.manifest, card.table, card.routes, card.runs, card.folder)

    @property
    def texts(self) -> Mapping[str, str]:
        return {"scorecard.md": f"{self.markdown}\n\n{legend()}\n"}

    @property
    def drawings(self) -> Drawings:
        return scorecard_drawings(self)


def scorecard_drawings(card: Scorecard) -> Drawings:
    return {**drawings_of(OF_CLAIMS, card), **drawings_of(OF_ROUTES, card.routes)}

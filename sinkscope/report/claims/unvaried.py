"""Claims of which no command makes the models yet, each with what they would have to differ in."""

from typing import Never

from sinkscope.report.claims.claim import Claim, Part, above
from sinkscope.report.claims.evidence import Evidence


def _unread(evidence: Evidence) -> Never:
    raise NotImplementedError("no run plays this role")


CLAIMS = (
    Claim("W-23", "fig. 10", "Size raises the sink and HellaSwag within a family.",
        (Part("rank correlations", _unread, above(0.0)),), ("unvaried:HellaSwag of several sizes of a family",)),
)  # fmt: skip

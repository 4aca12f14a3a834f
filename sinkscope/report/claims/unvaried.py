"""Claims of which no command makes the models yet, each with what they would have to differ in."""

from typing import Any, Never

from sinkscope.report.claims.claim import Claim, Part, Test, above
from sinkscope.report.claims.evidence import Evidence
from sinkscope.report.claims.published import SCRATCH, published


def _unread(evidence: Evidence) -> Never:
    raise NotImplementedError("no run plays this role")


def _claim(
    id: str, reference: str, statement: str, quantity: str, test: Test, factor: str, values: Any = (), **more: Any
) -> Claim:
    """`values`: name → published value, all of one table."""
    paper = "WSE " if id.startswith("W") else ""
    printed = published(f"{paper}{reference}", dict(values), more.get("setting", SCRATCH), more.get("mark", ""))
    return Claim(id, reference, statement, (Part(quantity, _unread, test),), (f"unvaried:{factor}",), (), printed)


# fmt: off
CLAIMS = (
    _claim("W-23", "fig. 10", "Size raises the sink and HellaSwag within a family.", "rank correlations", above(0.0),
        "HellaSwag of several sizes of a family"),
)
# fmt: on

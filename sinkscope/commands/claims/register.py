"""All claims by id, paper after paper."""

from sinkscope.commands.claims.claim import Claim
from sinkscope.commands.claims.papers import gs, nu, s2m, states, vga, weights_and_heads, wse
from sinkscope.plugins import package_of
from sinkscope.results.papers import CLAIMS_PAPERS


def _place(claim: Claim) -> tuple[int, int]:
    paper, _, number = claim.id.partition("-")
    return list(CLAIMS_PAPERS).index(paper), int(number)


PAPERS = (gs, wse, s2m, nu, vga, states, weights_and_heads)
_CLAIMS: list[Claim] = [claim for paper in PAPERS for claim in paper.CLAIMS]
CLAIMS = {claim.id: claim for claim in sorted(_CLAIMS, key=_place)}


def listed() -> list[tuple[str, ...]]:
    """Return the rows of `sinkscope list claims`."""
    rows: list[tuple[str, ...]] = []
    for claim in CLAIMS.values():
        for part in claim.parts:
            test = part.test.text(part.form) + "‡" * claim.is_ours
            words = (claim.reference, claim.statement, part.quantity, test)
            rows.append((claim.id, claim.paper, *words, package_of(CLAIMS, claim.id)))
    return rows

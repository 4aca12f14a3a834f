"""All claims by id, paper after paper."""

from sinkscope.paper_claims.claim import Claim
from sinkscope.paper_claims.papers import (
    first_token,
    gated,
    gs,
    inactive_heads,
    nu,
    s2m,
    states,
    super_weight,
    vga,
    visual,
    wse,
)
from sinkscope.results.papers import CLAIMS_PAPERS

_PAPERS = list(CLAIMS_PAPERS)


def _place(claim: Claim) -> tuple[int, int]:
    paper, _, number = claim.id.partition("-")
    return _PAPERS.index(paper), int(number)


_OF_PAPERS = (
    *gs.CLAIMS, *wse.CLAIMS, *s2m.CLAIMS, *nu.CLAIMS, *vga.CLAIMS, *states.CLAIMS,
    *super_weight.CLAIMS, *inactive_heads.CLAIMS, *first_token.CLAIMS, *gated.CLAIMS, *visual.CLAIMS,
)  # fmt: skip
CLAIMS: dict[str, Claim] = {claim.id: claim for claim in sorted(_OF_PAPERS, key=_place)}

"""All claims by id, paper after paper."""

from sinkscope.report.claims import gs, nu, s2m, trained, vga, wse, wse_repeated
from sinkscope.report.claims.claim import PAPERS, Claim

FILES = (gs, wse, wse_repeated, s2m, nu, vga, trained)
_PAPERS = list(PAPERS)


def _place(claim: Claim) -> tuple[int, int]:
    paper, _, number = claim.id.partition("-")
    return _PAPERS.index(paper), int(number)


CLAIMS: dict[str, Claim] = {
    claim.id: claim for claim in sorted((claim for file in FILES for claim in file.CLAIMS), key=_place)
}

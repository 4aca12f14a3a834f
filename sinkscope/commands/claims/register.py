"""All claims by id, paper after paper."""

from sinkscope.commands.claims.claim import Claim
from sinkscope.commands.claims.papers import gs, nu, others, recent, s2m, vga, wse
from sinkscope.plugins import package_of
from sinkscope.results.papers import CLAIMS_PAPERS, paper_of

_CLAIMS: list[Claim] = [claim for paper in (gs, wse, s2m, nu, vga, others, recent) for claim in paper.CLAIMS]
_CLAIMS.sort(key=lambda claim: int(claim.id.partition("-")[2]))
CLAIMS = {claim.id: claim for paper in CLAIMS_PAPERS for claim in _CLAIMS if claim.id.startswith(f"{paper}-")}


def listed() -> list[tuple[str, ...]]:
    """Return the rows of `sinkscope list claims`."""
    return [
        (claim.id, paper_of(claim.id), claim.reference, claim.statement, part.quantity,
         part.test.text(part.form) + "‡" * claim.is_ours, package_of(CLAIMS, claim.id))
        for claim in CLAIMS.values()
        for part in claim.parts
    ]  # fmt: skip

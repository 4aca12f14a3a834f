"""All claims, by id: each paper's file holds its own."""

from sinkscope.report.claims import gs, nu, wse_repeated
from sinkscope.report.claims.claim import Claim

FILES = (gs, wse_repeated, nu)  # a paper each, in the order of the scorecard
CLAIMS: dict[str, Claim] = {claim.id: claim for file in FILES for claim in file.CLAIMS}

"""All claims, by id: each paper's file holds its own."""

from sinkscope.report.claims import gs, s2m, vga, wse
from sinkscope.report.claims.claim import Claim

FILES = (gs, wse, s2m, vga)  # a paper each, in the order of the scorecard
CLAIMS: dict[str, Claim] = {claim.id: claim for file in FILES for claim in file.CLAIMS}

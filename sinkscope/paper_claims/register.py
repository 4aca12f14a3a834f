"""All claims by id, paper after paper."""

from sinkscope.paper_claims.claim import PAPERS, Claim
from sinkscope.paper_claims.papers import (
    architectures_training,
    backcopy,
    factor_studies,
    families,
    fine_tuning,
    gate_training,
    gs,
    nu,
    operations_training,
    post_norm,
    s2m,
    sink_outside_training,
    starts_training,
    steps,
    valve_training,
    vga,
    wse,
    wse_repeated,
)

OF_RUNS = (gs, wse, wse_repeated, post_norm, architectures_training, s2m, nu, vga)
OF_ARMS = (valve_training, gate_training, fine_tuning, backcopy, sink_outside_training, operations_training)
OF_MODELS = (factor_studies, starts_training, steps, families)
FILES = (*OF_RUNS, *OF_ARMS, *OF_MODELS)
_PAPERS = list(PAPERS)


def _place(claim: Claim) -> tuple[int, int]:
    paper, _, number = claim.id.partition("-")
    return _PAPERS.index(paper), int(number)


CLAIMS: dict[str, Claim] = {
    claim.id: claim for claim in sorted((claim for file in FILES for claim in file.CLAIMS), key=_place)
}

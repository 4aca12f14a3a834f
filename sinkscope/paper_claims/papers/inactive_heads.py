"""Claims of Identifying and Evaluating Inactive Heads in Pretrained LLMs (IH)."""

import numpy as np

from sinkscope.measuring.experiment import BEFORE
from sinkscope.paper_claims.claim import Claim, Part
from sinkscope.paper_claims.evidence import Evidence
from sinkscope.paper_claims.studies import Need
from sinkscope.results.judgment import NotDefined, above
from sinkscope.results.statistics import Estimate, jackknife, one_more_run

BY_NORM, BY_MASS = Need("loss-do", "ablate-heads"), Need("loss-do", "ablate-heads:by=first-mass")


def _below_random(evidence: Evidence) -> Estimate:
    draws = evidence.controls(BY_MASS)
    if not draws:
        raise NotDefined("no random heads were ablated")
    before, after = evidence.sequences(BY_MASS, BEFORE).losses, evidence.sequences(BY_MASS).losses
    drawn = np.array([evidence.sequences(BY_MASS, draw).losses[0] for draw in draws])
    return one_more_run(drawn - before[0]) - jackknife(after - before)


CLAIMS = (
    Claim("IH-1", "§4", "Heads with a small output norm are more dormant than heads with much mass on the first token.",
        (Part("loss with as many heads ablated by first-token mass − by norm, nats",
            lambda e: jackknife(e.sequences(BY_MASS).losses - e.sequences(BY_NORM).losses), above(0.0)),),
        (BY_NORM, BY_MASS)),
    Claim("IH-2", "§4", "Heads with much mass on the first token are more dormant than random heads.",
        (Part("loss with as many random heads ablated − by first-token mass, nats", _below_random, above(0.0)),),
        (BY_MASS,)),
)  # fmt: skip

"""Claims of Why do LLMs attend to the first token? (FT)."""

from functools import partial

import numpy as np

from sinkscope.measuring.experiment import BEFORE
from sinkscope.paper_claims.claim import Claim, Part
from sinkscope.paper_claims.evidence import Evidence
from sinkscope.paper_claims.scopes import causal
from sinkscope.paper_claims.studies import Need
from sinkscope.results.judgment import above
from sinkscope.results.statistics import Estimate, bootstrap, one_more_run

MASKED = Need("mixing-do", "mask-sink:begin=massive")


def _change(evidence: Evidence, condition: str | None = None) -> np.ndarray:
    """Return the logarithm of ‖h − h′‖ ÷ ‖h‖ of later tokens, of the mean over layers and sequences, (R,)."""
    found = evidence.sequences(MASKED, condition).means("over_mixing_by_sequence", "change")
    return np.log(found.mean(1))


def _more_mixing(evidence: Evidence, beyond: bool) -> Estimate:
    before, after = _change(evidence, BEFORE), _change(evidence)
    controls = np.array([_change(evidence, draw)[0] - before[0] for draw in evidence.controls(MASKED)])
    found = bootstrap(after - before)
    drawn = np.exp(controls + before[0]).round(3).tolist()
    note = f"{np.exp(before[0]):.3g} → {np.exp(after[0]):.3g}; controls {drawn}"
    return (found - one_more_run(controls) if beyond else found).over(note)


CLAIMS = (
    Claim("FT-1", "§3", "Without the sink, a changed token changes later tokens more.",
        (Part("log of the relative change of later tokens, sink masked ÷ not", partial(_more_mixing, beyond=False),
            above(0.0)),
         Part("beyond another masked token's", partial(_more_mixing, beyond=True), above(0.0))),
        (MASKED,), (causal,)),
)  # fmt: skip

"""Claims of When Attention Sink Emerges (WSE §7.2) on models whose norms stand behind the residual sum."""

from sinkscope.paper_claims.arms import LARGE_NORM, SINK
from sinkscope.paper_claims.claim import Claim, Part, above, at_least, below
from sinkscope.paper_claims.evidence import Evidence
from sinkscope.paper_claims.quantities import norm_ratios, sink_rates
from sinkscope.paper_claims.scopes import causal
from sinkscope.results.papers import published
from sinkscope.results.statistics import Estimate, bootstrap

WIRING = "post-norm"


def _post_norm(evidence: Evidence) -> str | None:
    wiring = evidence.any_run.manifest["family"].get("wiring")
    return None if wiring == WIRING else f"its norms do not stand behind the residual sum: its wiring is {wiring}"


def _rate(evidence: Evidence) -> Estimate:
    return bootstrap(sink_rates(evidence))


def _in_front(evidence: Evidence) -> Estimate:
    return bootstrap(norm_ratios(evidence, "mid").max(1))


def _behind(evidence: Evidence) -> Estimate:
    return bootstrap(norm_ratios(evidence, "layer_out").max(1))


CLAIMS = (
    Claim("W-43", "§7.2", "Post-norm models have one, too.",
        (Part("sink rate at position 0 in %", _rate, above(SINK)),), scope=(causal, _post_norm),
        published=published("WSE §7.2", {"post-norm": 13.54})),
    Claim("W-44", "fig. 7", "There, states are massive before the norm, not behind it.",
        (Part("norm at 0 ÷ later in front of the norm, layer with the largest", _in_front, at_least(LARGE_NORM)),
         Part("behind it", _behind, below(LARGE_NORM))), scope=(causal, _post_norm)),
)  # fmt: skip

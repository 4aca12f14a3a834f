"""Claims of Visual Attention Sink (Kang et al. 2025), on runs with pictures; their null is φ on random coordinates."""

from sinkscope.measuring.estimates import visual_sink_attention, visual_sink_share
from sinkscope.paper_claims.claim import Claim, Null, Part
from sinkscope.paper_claims.evidence import MAIN, Evidence
from sinkscope.paper_claims.scopes import requires
from sinkscope.results.judgment import above
from sinkscope.results.statistics import Estimate


def _beyond_random(evidence: Evidence) -> Estimate:
    share = visual_sink_share(evidence.run(MAIN))
    return Estimate(share.value - share.null, share.low - share.null, share.high - share.null, null=0.0)


SEEING = (requires(lambda run: run.manifest["model"].get("text_tower"), "it reads no pictures"),)
CLAIMS = (
    Claim("VS-1", "§3.1", "Some visual tokens are large in the model's massive coordinates.",
        (Part("share of visual tokens with φ > 20 − the same for random coordinates", _beyond_random, above(0.0)),),
        scope=SEEING, set_against=Null.NONE),
    Claim("VS-2", "§3.2", "Visual sinks take the attention of the text.",
        (Part("attention to a visual sink ÷ to another visual token",
            lambda evidence: visual_sink_attention(evidence.run(MAIN)), above(1.0)),),
        scope=SEEING, set_against=Null.NONE),
)  # fmt: skip

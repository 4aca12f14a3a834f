"""Claims of Attention Sinks Induce Gradient Sinks (GS) on V-scale: an arm beside a plain training or fine-tune."""

from collections.abc import Mapping

from sinkscope.paper_claims.arms import NO_COST, SINK
from sinkscope.paper_claims.claim import Claim, Part, above, at_least, at_most, below
from sinkscope.paper_claims.evidence import table_of
from sinkscope.paper_claims.over_seeds import PERCENT, OfArm, difference, metric, of_one, ratio, together
from sinkscope.paper_claims.trainings import PLAIN, Arm

VALVE = "vscale"
ARMS = f"arms:{PLAIN},{VALVE}"


def largest_norm(site: str) -> OfArm:
    """The norm at position 0, mean over sequences, of the layer with the largest."""

    def of(arm: Arm) -> float:
        table = table_of(arm.run, "activation")
        return float(table[(table["site"] == site) & (table["position"] == 0)]["norm_mean"].max())

    return of


def _falls_more(arms: Mapping[str, Arm]) -> float:
    """By how much more of their norm MLP outputs lose than attention outputs."""
    left = [largest_norm(site)(arms[VALVE]) / largest_norm(site)(arms[PLAIN]) for site in ("mlp_out", "attn_out")]
    return (1 - left[0]) - (1 - left[1])


CLAIMS = (
    Claim("GS-21", "fig. 5", "V-scale keeps the sink.",
        (Part("sink rate, V-scale − plain", difference(ARMS, metric("sink_rate"), VALVE), at_least(-0.05)),
         Part("sink rate of plain training in %", of_one(ARMS, metric("sink_rate", 100), PLAIN, ends=PERCENT),
            above(SINK))),
        (ARMS,)),
    Claim("GS-22", "fig. 5", "V-scale lowers token 0's norm.",
        (Part("largest ‖h_out,0‖, V-scale ÷ plain", ratio(ARMS, largest_norm("layer_out"), VALVE), below(1.0)),),
        (ARMS,), is_ours=False),
    Claim("GS-23", "fig. 5", "V-scale lowers its MLP outputs.",
        (Part("largest ‖mlp_out₀‖, V-scale ÷ plain", ratio(ARMS, largest_norm("mlp_out"), VALVE), below(1.0)),),
        (ARMS,), is_ours=False),
    Claim("GS-24", "§5.2", "MLP outputs fall more than attention outputs.",
        (Part("(1 − ratio) of mlp_out − of attn_out", together(ARMS, _falls_more, PLAIN, VALVE), above(0.0)),),
        (ARMS,), is_ours=False),
    Claim("GS-25", "§5.2", "V-scale costs nothing.",
        (Part("held-out loss, V-scale − plain", difference(ARMS, metric("loss"), VALVE), at_most(NO_COST)),), (ARMS,)),
    Claim("GS-26", "§5.1", "The valve acts.",
        (Part("raw value gradient at 0, V-scale ÷ plain", ratio(ARMS, metric("value_gradient_norm"), VALVE),
            below(1.0)),),
        (ARMS,), is_ours=False),
)  # fmt: skip

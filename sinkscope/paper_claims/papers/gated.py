"""Claims of Gated Attention for Large Language Models (Qiu et al. 2025), on trainings with a plain twin."""

from sinkscope.paper_claims.claim import Claim, Part
from sinkscope.paper_claims.over_seeds import metric, of_one, ratio
from sinkscope.paper_claims.studies import PLAIN, Need
from sinkscope.results.judgment import above, at_least, at_most, below
from sinkscope.results.papers import published

GATE, ON_VALUES = "iga:placement=output,scale=1", "iga:placement=value,scale=1"
GATED, VALUES = Need("train", f"{PLAIN},{GATE}"), Need("train", f"{PLAIN},{ON_VALUES}")
SETTING = "15B mixture of experts"  # its tables are known from its abstract and reviews
FIRST, LARGEST = metric("sink_mass"), metric("max_inf_norm")
MASSIVE = ("massive activation: their number per sequence", metric("massive_count"), 0.0)

CLAIMS = (
    Claim("GA-1", "§4.2", "A gate on heads' outputs removes the sink.",
        (Part("attention to position 0, gated ÷ plain", ratio(GATED, FIRST, GATE), at_most(0.25)),), (GATED,),
        published=published("Qiu et al.", {"elementwise": 0.048 / 0.467, "headwise": 0.073 / 0.467}, SETTING)),
    Claim("GA-2", "§4.2", "The gate removes massive activations.",
        (Part("max infinity norm, gated ÷ plain", ratio(GATED, LARGEST, GATE, where=MASSIVE), below(0.5)),),
        (GATED,),
        published=published("Qiu et al.", {"elementwise": 94 / 1053, "headwise": 98 / 1053}, SETTING)),
    Claim("GA-3", "§4.2", "Gates are sparse, and depend on the query.",
        (Part("mean gate", of_one(GATED, metric("gate_mean"), GATE, ends=(0.0, 1.0)), below(0.5)),
         Part("standard deviation of gates over tokens ÷ their mean", of_one(GATED,
            lambda arm: metric("gate_deviation")(arm) / metric("gate_mean")(arm), GATE), above(0.5))), (GATED,),
        published=published("Qiu et al.", {"elementwise": 0.116, "headwise": 0.172}, SETTING)),
    Claim("GA-4", "§4.2", "A gate on values leaves the sink.",
        (Part("attention to position 0, gated ÷ plain", ratio(VALUES, FIRST, ON_VALUES), at_least(0.5)),), (VALUES,),
        published=published("Qiu et al.", {"on values": 0.297 / 0.467}, SETTING)),
)  # fmt: skip

"""Claims of When Attention Sink Emerges (WSE §7) on trained sink tokens and key biases, to which the sink moves."""

from sinkscope.report.claims.claim import Claim, Part, above, at_least, at_most, below
from sinkscope.report.claims.evidence import Lacks, table_of
from sinkscope.report.claims.over_seeds import difference, metric, of_one
from sinkscope.report.claims.published import published
from sinkscope.report.claims.trainings import PLAIN, Arm
from sinkscope.retrofits import make_retrofit
from sinkscope.retrofits.register_tokens import RegisterTokens

TOKEN, BIAS = RegisterTokens.name, "key-bias"
WITH_TOKEN, WITH_BIAS = f"train:{PLAIN},{TOKEN}", f"train:{PLAIN},{BIAS}"
LOSS = 0.02  # nats: less is no cost
MASSIVE = 2.0  # times the later positions' norm


def _moved(arm: Arm) -> float:
    """S* − S₀ in points, S₀ that of the text's first token, which stands behind the register tokens."""
    registers = int(getattr(make_retrofit(arm.method, arm.parameters), "count", 0))
    table = table_of(arm.run, "attention_by_sequence")
    first = table[table["position"] == registers]["sink_rate"]
    if first.empty:
        raise Lacks(f"the run of {arm.label} reports {registers} positions or fewer: --positions {registers + 1}")
    outside = metric("sink_rate_outside")(arm) if "attention_outside" in arm.run.tables else 0.0
    return 100 * (outside - float(first.mean()))


def _norm_ratio(arm: Arm) -> float:
    """At position 0 ÷ others, of the layer with the largest."""
    table = arm.run.tables["summary"]
    return float(table[(table["metric"] == "norm_ratio") & (table["layer"] >= 0)]["value"].max())


CLAIMS = (
    Claim("W-47", "table 4", "A sink token takes the sink.",
        (Part("S* − S₀ in points", of_one(WITH_TOKEN, _moved, TOKEN, PLAIN), above(10.0)),), (WITH_TOKEN,),
        published=published("WSE table 4", {"difference": 74.12}, "60M model: S* 74.12, S₀ 0.00 %")),
    Claim("W-48", "table 4", "So do key biases, at no cost.",
        (Part("S* − S₀ in points", of_one(WITH_BIAS, _moved, BIAS, PLAIN), above(10.0)),
         Part("held-out loss, key biases − plain", difference(WITH_BIAS, metric("loss"), BIAS), at_most(LOSS))),
        (WITH_BIAS,), published=published("WSE table 4", {"difference": 73.34}, "60M model: S* 73.34, S₀ 0.00 %")),
    Claim("W-52", "fig. 7", "Key biases end massive activations.",
        (Part("norm at 0 ÷ others, layer with the largest", of_one(WITH_BIAS, _norm_ratio, BIAS, PLAIN),
            below(MASSIVE)),
         Part("of plain training", of_one(WITH_BIAS, _norm_ratio, PLAIN), at_least(MASSIVE))), (WITH_BIAS,)),
)  # fmt: skip

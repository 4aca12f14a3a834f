"""Claims of When Attention Sink Emerges (WSE §7) on trained sink tokens and biases, to which the sink moves or not."""

from math import inf

from sinkscope.paper_claims.arms import LARGE_NORM, NO_COST, SINK
from sinkscope.paper_claims.claim import Claim, Part, above, at_least, at_most, below
from sinkscope.paper_claims.evidence import Lacks, table_of
from sinkscope.paper_claims.over_seeds import PERCENT, Measure, difference, metric, of_one, ranked, where_plain_has
from sinkscope.paper_claims.trainings import PLAIN, Arm
from sinkscope.results.papers import published
from sinkscope.retrofits import make_retrofit
from sinkscope.retrofits.register_tokens import RegisterTokens

TOKEN, BIAS, BIASES, VALUE = RegisterTokens.name, "key-bias:value=zero", "key-bias:value=learned", "value-bias"
WITH_TOKEN, WITH_BIAS, WITH_BIASES, WITH_VALUE = (f"train:{PLAIN},{arm}" for arm in (TOKEN, BIAS, BIASES, VALUE))
# v* = m·e₁ of table 5, by m
FIXED = {0.0: BIAS} | {float(norm): f"key-bias:value=axis,norm={norm}" for norm in (1, 5, 20)}
WITH_FIXED = f"train:{','.join(FIXED.values())}"


def _moved(arm: Arm) -> float:
    """S* − S₀ in points, S₀ that of the text's first token, which stands behind the register tokens."""
    registers = int(getattr(make_retrofit(arm.method, arm.parameters), "count", 0))
    table = table_of(arm.run, "attention_by_sequence")
    first = table[table["position"] == registers]["sink_rate"]
    if first.empty:
        raise Lacks(f"the run of {arm.label} reports {registers} positions or fewer: --positions {registers + 1}")
    outside = metric("sink_rate_outside")(arm) if "attention_outside" in arm.run.tables else 0.0
    return 100 * (outside - float(first.mean()))


def norm_ratio(arm: Arm) -> float:
    """At position 0 ÷ others, of the layer with the largest."""
    table = arm.run.tables["summary"]
    return float(table[(table["metric"] == "norm_ratio") & (table["layer"] >= 0)]["value"].max())


def where_sinks_are(role: str, measure: Measure) -> Measure:
    """Raises NotDefined where plain training has no sink that an arm could do without, or take."""
    return where_plain_has("sink: its sink rate in %", metric("sink_rate", 100), SINK, role, measure)


def where_norms_are(role: str, measure: Measure) -> Measure:
    """Raises NotDefined where plain training has no token of a large norm."""
    return where_plain_has("token of a large norm: that of position 0 ÷ others", norm_ratio, LARGE_NORM, role, measure)


def _moves(role: str, method: str) -> Measure:
    """S* − S₀ of an arm, beside that of plain training."""
    return where_sinks_are(role, of_one(role, _moved, method, PLAIN))


CLAIMS = (
    Claim("W-47", "table 4", "A sink token takes the sink.",
        (Part("S* − S₀ in points", _moves(WITH_TOKEN, TOKEN), above(SINK)),), (WITH_TOKEN,),
        published=published("WSE table 4", {"difference": 74.12}, "60M model: S* 74.12, S₀ 0.00† %")),
    Claim("W-48", "table 4", "So do key biases, at no cost.",
        (Part("S* − S₀ in points", _moves(WITH_BIAS, BIAS), above(SINK)),
         Part("held-out loss, key biases − plain", difference(WITH_BIAS, metric("loss"), BIAS), at_most(NO_COST))),
        (WITH_BIAS,), published=published("WSE table 4", {"difference": 73.34}, "60M model: S* 73.34, S₀ 0.00 %")),
    Claim("W-52", "fig. 7", "Key and key-value biases end massive activations, value biases and a sink token do not.",
        (*(Part(f"norm at 0 ÷ others, layer with the largest, {name}",
            where_norms_are(role, of_one(role, norm_ratio, arm, PLAIN)), test)
            for name, role, arm, test in (("key biases", WITH_BIAS, BIAS, below(LARGE_NORM)),
                ("key-value biases", WITH_BIASES, BIASES, below(LARGE_NORM)),
                ("value biases", WITH_VALUE, VALUE, at_least(LARGE_NORM)),
                ("sink token", WITH_TOKEN, TOKEN, at_least(LARGE_NORM)))),
         Part("of plain training", of_one(WITH_BIAS, norm_ratio, PLAIN), at_least(LARGE_NORM))),
        (WITH_BIAS, WITH_BIASES, WITH_VALUE, WITH_TOKEN)),
    Claim("W-49", "table 4", "And key-value biases.",
        (Part("S* − S₀ in points", _moves(WITH_BIASES, BIASES), above(SINK)),), (WITH_BIASES,),
        published=published("WSE table 4", {"difference": 72.72}, "60M model: S* 72.76, S₀ 0.04 %; shared by heads "
            "56.61, 12.44 %", "†")),
    Claim("W-50", "table 4", "Value biases do not.",
        (Part("sink rate in %", where_sinks_are(WITH_VALUE,
            of_one(WITH_VALUE, metric("sink_rate", 100), VALUE, PLAIN, PERCENT)),
            above(SINK)),),
        (WITH_VALUE,), published=published("WSE table 4", {"S₀": 17.53}, "60M model: 18.18 % without")),
    Claim("W-51", "table 5", "With a fixed value of the bias, S* falls and S₀ rises with its norm.",
        (Part("rank correlation of S₀ and m", ranked(WITH_FIXED, metric("sink_rate"), FIXED),
            above(0.0)),
         Part("of S* and m", ranked(WITH_FIXED, metric("sink_rate_outside"), FIXED),
            below(0.0))), (WITH_FIXED,),
        published=published("WSE table 5", {"S₀ and m": 1.0, "S* and m": -1.0}, "60M model: S* 73.34, 70.03, 44.43, "
            "1.51 % and S₀ 0, 0.06, 3.71, 25.88 % with m = 0, 1, 5, 20"), is_ours=False),
    Claim("S-14", "Sun et al.", "Key-value biases remove massive activations.",
        (Part("number of massive activations", where_plain_has("massive activation: their number",
            metric("massive_count"), 0.0, WITH_BIASES,
            of_one(WITH_BIASES, metric("massive_count"), BIASES, PLAIN, (0.0, inf))),
            at_most(0.0)),), (WITH_BIASES,)),
)  # fmt: skip

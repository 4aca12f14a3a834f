"""Claims of When Attention Sink Emerges (WSE §7.4) on other attention operations than softmax.

Their sink rates are of the proxy |sim| ÷ Σ|sim|.
"""

from sinkscope.paper_claims.arms import LARGE_NORM, NO_COST, SINK
from sinkscope.paper_claims.claim import Claim, Part, above, at_most, below
from sinkscope.paper_claims.evidence import Evidence
from sinkscope.paper_claims.over_seeds import (
    PERCENT,
    Measure,
    difference,
    largest_rate,
    metric,
    of_one,
    over_levels,
    ranked,
    sink_rates,
    study_of,
    with_a_sink,
)
from sinkscope.paper_claims.papers.factor_studies import RATE as PLAIN_RATE
from sinkscope.paper_claims.papers.sink_outside_training import norm_ratio, where_norms_are, where_sinks_are
from sinkscope.paper_claims.studies import FactorStudy
from sinkscope.paper_claims.trainings import PLAIN
from sinkscope.results.papers import published
from sinkscope.results.statistics import Estimate

NONE = 1.0  # percent: less is no sink
RATE = metric("sink_rate", 100)


def _arm(kind: str) -> str:
    return f"operation:kind={kind}"


def _role(*arms: str) -> str:
    return f"train:{','.join((PLAIN, *arms))}"


SIGMOID, ELU, IDENTITY, MLP = (_arm(kind) for kind in ("sigmoid", "elu", "identity", "mlp-kernel"))
WITHOUT_SUM = {"sigmoid": SIGMOID, "ELU + 1": ELU, "identity": IDENTITY, "MLP kernel": MLP}
WITH_SUM = {"sigmoid": _arm("sigmoid-normalized"), "ELU kernel": _arm("elu-kernel")}
OPEN, SUMMED, ONE = _role(*WITHOUT_SUM.values()), _role(*WITH_SUM.values()), _role(SIGMOID)
# Z = Σ/α of table 14, by α
SCALED = {1.0: PLAIN} | {alpha: f"operation:kind=softmax,factor={alpha:g}" for alpha in (2.0, 0.2, 0.1, 0.05)}
SCALES = _role(*(arm for arm in SCALED.values() if arm != PLAIN))


RATES, DECAYS = (f"factor:{name},{SIGMOID}" for name in ("learning-rate", "weight-decay"))
BILLION = 0.9e9  # parameters


def _largest_without(evidence: Evidence) -> Estimate:
    """Over learning rates. Raises NotDefined where softmax has no sink at any, which sigmoid could lack."""
    with_a_sink(sink_rates(study_of(evidence, PLAIN_RATE, FactorStudy))[1])
    return over_levels(RATES, largest_rate)(evidence)


def _rate(role: str, method: str) -> Measure:
    """The sink rate of an arm, beside softmax's."""
    return where_sinks_are(role, of_one(role, RATE, method, PLAIN, PERCENT))


def _of_a_billion(evidence: Evidence) -> str | None:
    count = evidence.any_run.manifest["model"].get("parameters") or 0
    return None if count >= BILLION else f"it has {count / 1e6:,.0f} M parameters, fewer than a billion"


CLAIMS = (
    Claim("W-54", "table 6", "Without normalization there is no sink, at no cost.",
        (*(Part(f"sink rate of the proxy in %, {name}", _rate(OPEN, arm), below(NONE))
            for name, arm in WITHOUT_SUM.items()),
         Part("softmax", of_one(OPEN, RATE, PLAIN, ends=PERCENT), above(SINK)),
         Part("held-out loss, sigmoid − softmax", difference(OPEN, metric("loss"), SIGMOID), at_most(NO_COST))),
        (OPEN,),
        published=published("WSE table 6", {"sigmoid": 0.44, "ELU+1": 0.80, "identity": 0.0, "MLP kernel": 0.74,
            "loss, sigmoid − softmax": -0.03}, "60M model: softmax 18.18 %")),
    Claim("W-55", "table 6", "With sum normalization there is one.",
        tuple(Part(f"sink rate of the proxy in %, {name}", _rate(SUMMED, arm), above(SINK))
            for name, arm in WITH_SUM.items()), (SUMMED,),
        published=published("WSE table 6", {"sigmoid": 30.24, "ELU kernel": 53.65, "MLP kernel": 0.19},
            "60M model: softmax 18.18 %")),
    Claim("W-56", "fig. 8", "Without normalization no massive activations either.",
        (Part("norm at 0 ÷ others, layer with the largest, sigmoid",
            where_norms_are(ONE, of_one(ONE, norm_ratio, SIGMOID, PLAIN)), below(LARGE_NORM)),), (ONE,)),
    Claim("W-57", "table 14", "Scaling the normalizer down weakens the sink.",
        (Part("rank correlation of the sink rate and α", ranked(SCALES, RATE, SCALED), above(0.0)),),
        (SCALES,), published=published("WSE table 14", {"correlation": 0.9},
            "60M model: 29.10, 18.18, 9.41, 3.59, 4.53 % at α = 2, 1, 0.2, 0.1, 0.05", "†"), is_ours=False),
    Claim("W-58", "table 14", "Sigmoid attention has none at any learning rate and weight decay.",
        (Part("sink rate of the proxy in %, rate with the most", _largest_without, below(NONE)),
         Part("weight decay with the most", over_levels(DECAYS, largest_rate), below(NONE))),
        (RATES, DECAYS, PLAIN_RATE),
        published=published("WSE table 14", {"lowest": 0.18, "highest": 0.81})),
    Claim("W-59", "§7.4", "Nor has it at 1 B.",
        (Part("sink rate of the proxy, sigmoid − softmax, in points", difference(ONE, RATE, SIGMOID), below(-SINK)),),
        (ONE,), (_of_a_billion,),
        published=published("WSE §7.4", {"sigmoid": 2.46, "softmax": 45.11}, "1 B model, sink rate in %")),
)  # fmt: skip

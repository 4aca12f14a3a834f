"""Claims of When Attention Sink Emerges (WSE §6 and §7.1) on models that see, or place, their tokens otherwise."""

import numpy as np

from sinkscope.measuring.summary import clear_sinks
from sinkscope.models.varied_llama import MODEL_TYPE
from sinkscope.paper_claims.arms import SINK
from sinkscope.paper_claims.claim import Claim, NotDefined, Part, above, at_least, below
from sinkscope.paper_claims.evidence import MAIN, Evidence, Lacks
from sinkscope.paper_claims.over_seeds import least_rate, over_levels
from sinkscope.paper_claims.scopes import causal
from sinkscope.results.papers import published
from sinkscope.results.statistics import Estimate, bootstrap

POSITIONS = "factor:positions"
FAR_BELOW = 0.1  # a third of ε = 0.3: uniform attention over 16 tokens gives 0.0625
SCHEMES = ("none", "absolute", "learned", "relative", "alibi", "rotary")  # WSE table 3


def _least_of_all(schemes: np.ndarray, rates: np.ndarray) -> Estimate:
    """The sink rate of the scheme that has the least, of the paper's six."""
    lacking = [scheme for scheme in SCHEMES if scheme not in schemes]
    if lacking:
        raise Lacks(f"no training has position_scheme={lacking[0]}")
    return least_rate(schemes, rates[:, np.isin(schemes, SCHEMES)])


def _prefix_lm(evidence: Evidence) -> str | None:
    return (
        None if evidence.any_run.manifest["family"].get("prefix") else f"it is no prefix LM ({MODEL_TYPE} can be one)"
    )


def _windowed(evidence: Evidence) -> str | None:
    return None if evidence.any_run.manifest["model"].get("sliding_window") else "it has no sliding window"


def _within_prefix(evidence: Evidence) -> Estimate:
    """The share of all sinks that are among the prefix, resampled by sequence; of keys that enough queries see."""
    prefix = evidence.any_run.manifest["family"]["prefix"]
    sequences, sinks = evidence.sequences(MAIN), clear_sinks(evidence.table(MAIN, "sink_positions"))
    if sinks.empty:
        raise NotDefined("it has no sink at any position that enough queries see")
    count = sequences.weights.shape[1]
    every, inside = (
        np.bincount(rows["sequence"], minlength=count) for rows in (sinks, sinks[sinks["position"] < prefix])
    )
    return bootstrap((sequences.weights @ inside) / (sequences.weights @ every))


def _at_the_edge(evidence: Evidence) -> Estimate:
    return bootstrap(evidence.sequences(MAIN).means("window_edge_by_sequence", "edge_mass").mean(1))


CLAIMS = (
    Claim("W-39", "fig. 5", "A prefix LM's sink is among the prefix.",
        (Part("share of sinks within the prefix", _within_prefix, at_least(0.9)),), scope=(causal, _prefix_lm)),
    Claim("W-41", "fig. 6", "The sink is the absolute first token, not the window's.",
        (Part("mean weight on the window's first token", _at_the_edge, below(FAR_BELOW)),), scope=(causal, _windowed)),
    Claim("W-42", "table 3", "Every positional scheme has a sink.",
        (Part("sink rate in %, scheme with the least", over_levels(POSITIONS, _least_of_all), above(SINK)),),
        (POSITIONS,),
        published=published("WSE table 3", {"NoPE": 20.35, "absolute": 32.73, "learned": 33.13, "relative": 35.53,
            "ALiBi": 20.78, "rotary": 18.18}, "60M model; its released code's relative bias is the number of T5's "
            "bucket, `bucket-number` here")),
)  # fmt: skip

"""Claims of Value-State Gated Attention (VGA) on any model; what training decides: `register.py`."""

import numpy as np
import pandas as pd

from sinkscope.measuring.observables.observable import LATER
from sinkscope.paper_claims.arms import perplexity_of_controls, perplexity_ratio
from sinkscope.paper_claims.claim import Claim, NotDefined, Part, above, at_most, below
from sinkscope.paper_claims.evidence import MAIN, Evidence
from sinkscope.paper_claims.quantities import (
    HAS_SINK_HEADS,
    by_head,
    in_front_of_valves,
    in_sink_heads,
    layers_of_heads,
    norm_ratios,
)
from sinkscope.paper_claims.scopes import causal, gated
from sinkscope.results.bos import WITH
from sinkscope.results.statistics import Estimate, bootstrap, exact, positive_jackknife, rank_correlation

TO_ZERO, TO_MEAN = "loss-do:scale-sink-value:where=sinks", "loss-do-alone:mean-sink-value:where=sinks"
STRONG = 0.9  # mean attention to position 0 in the heads of V-3


def _drain_follows(evidence: Evidence) -> Estimate:
    mass = by_head(evidence, "attention_heads_by_sequence", "window_mass")[0]
    first, later = (by_head(evidence, "geometry_by_sequence", name)[0] for name in ("value_norm", "value_norm_later"))
    return rank_correlation(mass, first / later, layers_of_heads(evidence))


def _peak(evidence: Evidence) -> Estimate:
    return bootstrap(norm_ratios(evidence, "layer_out").max(1))


def _starved(evidence: Evidence) -> Estimate:
    """Median over key/value heads that attend to position 0 alone."""
    attention = evidence.table("natural", "attention")
    mass = attention[attention["position"] == 0].groupby(["layer", "kv_head"])["window_mass"].mean()
    strong = mass.index[mass > STRONG]
    if strong.empty:
        raise NotDefined(f"no head gives position 0 more than {STRONG} of its attention")
    tables = [evidence.table("natural", "gradient")]
    tables += [rows for _, rows in evidence.table("natural", "gradient_by_group").groupby("group")]
    ratios = np.array([_later_over_first(table, strong) for table in tables])
    return positive_jackknife(ratios).over(f"{len(strong)} key/value head{'s' * (len(strong) > 1)}")


def _later_over_first(gradient: pd.DataFrame, heads: pd.MultiIndex) -> float:
    gradient = in_front_of_valves(gradient)
    value = gradient[(gradient["pathway"] == "value") & (gradient["head"] >= 0)]
    by_position = value.pivot(index=["layer", "head"], columns="position", values="grad_norm").loc[list(heads)]
    return float((by_position.iloc[:, LATER].mean(axis=1) / by_position[0]).median())


def _gate_closes(evidence: Evidence) -> Estimate:
    table = evidence.table("natural", "gate")
    later = table["position"].between(LATER.start, LATER.stop - 1)
    return exact(table[table["position"] == 0]["gate"].mean() / table[later]["gate"].mean())


def _no_op(evidence: Evidence) -> Estimate:
    """The note gives the effect of the sink's mean values: if only zeros do harm, the values are a constant bias."""
    controls = perplexity_of_controls(evidence, TO_ZERO)
    note = f"of other positions ×{controls.value:.3g}"
    if evidence.has(TO_MEAN):
        constant = perplexity_ratio(evidence, TO_MEAN)
        note += f"; with their mean over sequences in place of zero ×{constant.value:.3g}"
        note += f" [{constant.low:.3g}, {constant.high:.3g}]"
        if evidence.runs[MAIN].bos == WITH:
            note += ", the same BOS in every sequence: its values are constant anyway"
    return (perplexity_ratio(evidence, TO_ZERO) / controls).over(note)


CLAIMS = (
    Claim("V-1", "§1", "Sinks are drained.",
        (Part("rank correlation over heads of window mass and value norm ÷ later", _drain_follows, below(0.0)),
         Part("value norm at 0 ÷ later, median over sink heads", lambda e: in_sink_heads(e, "value_norm"),
            below(0.5)),
         HAS_SINK_HEADS)),
    Claim("V-2", "§1", "The residual stream peaks at the sink.",
        (Part("norm at 0 ÷ later, layer with the largest", _peak, above(1.0)),), is_ours=False),
    Claim("V-3", "§3.1", "A strong sink starves the other values of gradient.",
        (Part("value gradient later ÷ at 0, median over heads with window mass > 0.9", _starved, at_most(0.1)),),
        scope=(causal,)),
    Claim("V-12", "§3.3", "The gate closes at the sink.",
        (Part("gate at 0 ÷ later, means over heads and layers", _gate_closes, below(0.5)),), scope=(gated,)),
    Claim("V-24", "§1", "The sink is a no-op: its values can be set to zero.",
        (Part("perplexity with v = 0 at position 0 in the heads with a sink ÷ with v = 0 there at others", _no_op,
            at_most(1.05)),
         HAS_SINK_HEADS),
        ("natural", TO_ZERO), (causal,), beside=(TO_MEAN,)),
)  # fmt: skip

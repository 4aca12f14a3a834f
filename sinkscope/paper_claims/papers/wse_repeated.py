"""Claims of When Attention Sink Emerges in Language Models (WSE) on repeated tokens: its propositions, and table 7."""

from collections.abc import Callable

import numpy as np
import pandas as pd

from sinkscope.measuring.observables.equal_tokens import CLOSED_FORMS
from sinkscope.measuring.observables.massive import THRESHOLD
from sinkscope.paper_claims.arms import SINK, falls, had_a_sink, of_arm, share_left
from sinkscope.paper_claims.claim import Claim, NotDefined, Part, at_least, at_most, below
from sinkscope.paper_claims.evidence import MAIN, REPEATED, WITHOUT_BOS, Evidence
from sinkscope.paper_claims.nulls import Null
from sinkscope.paper_claims.quantities import massive_layers, norms, sink_rates
from sinkscope.paper_claims.scopes import causal, equal_tokens_stay_equal, learned_positions, some_positions
from sinkscope.results.findings import Published
from sinkscope.results.statistics import Estimate, bootstrap, exact, least_of

NO_POSITIONS, ALIBI = CLOSED_FORMS
REPLACED, EXCHANGED = "repeated-do:replace-epe", "repeated-do:transplant-epe"
TEXT, ALONE = f"{WITHOUT_BOS}:{MAIN}", f"{WITHOUT_BOS}:{REPEATED}"  # equal tokens have no BOS in front of them
ON_REPEATED = "T = 64 and ε = 0.3, repeated tokens"


def _equal_tokens(evidence: Evidence) -> pd.DataFrame:
    """Raises NotDefined."""
    if "equal_tokens" not in evidence.run(ALONE).tables:
        raise NotDefined("its sequences are not one token, repeated: something stands in front")
    return evidence.table(ALONE, "equal_tokens")


def _largest(column: str, kind: str | None = None) -> Callable[[Evidence], Estimate]:
    """Over all layers and sequences, or the layers with positions of one kind. Raises NotDefined."""

    def measure(evidence: Evidence) -> Estimate:
        table = _equal_tokens(evidence)
        rows = (table if kind is None else table[table["positions"] == kind]).dropna(subset=[column])
        if not len(rows):
            raise NotDefined("a further term in its softmax's denominator takes part of the weight")
        layers = rows["layer"].nunique()
        return exact(rows[column].max()).over(f"{layers} {'layer' if layers == 1 else 'layers'}")

    return measure


def _within_bound(evidence: Evidence) -> Estimate:
    table = _equal_tokens(evidence).dropna(subset=["bound_share"])
    if not len(table):
        raise NotDefined("its logits are not scaled products of queries and keys")
    note = f"{len(table)} pairs of layer and sequence; a ÷ bound ≤ {table['bound_ratio'].max():.3g}"
    return exact(table["bound_share"].min()).over(note)


def _all_massive(evidence: Evidence) -> Estimate:
    """The smallest ratio of any layer. Raises NotDefined."""
    _equal_tokens(evidence)
    rate = sink_rates(evidence, TEXT)[0]
    if rate <= SINK:
        raise NotDefined(f"its text has no sink without a BOS that could be dispersed ({rate:.1f} %)")
    layers = massive_layers(evidence, TEXT)
    if not len(layers):
        raise NotDefined(f"no layer has massive activations (above {THRESHOLD:.0f}) at position 0 without a BOS")
    repeated, natural = norms(evidence, "layer_out", "norm_smallest", ALONE), norms(evidence, "layer_out", role=TEXT)
    ratios = {layer: bootstrap(repeated[:, layer]) / bootstrap(natural[:, layer]) for layer in layers}
    weakest = min(ratios, key=lambda layer: ratios[layer].value)
    median = float(np.median([ratio.value for ratio in ratios.values()]))
    token = evidence.run(TEXT).manifest["input"]["token_zero"]
    return least_of(list(ratios.values())).over(
        f"layer {weakest}; median over {len(layers)} layers {median:.3g}; h_0 is of {token}"
    )


def _moved(evidence: Evidence) -> Estimate:
    return share_left(evidence, EXCHANGED, position=1)


_DIFFERENCE = "largest |a[t,s] − {0}| over layers, heads, queries and keys"
CLAIMS = (
    Claim("W-5", "eq. 10–17", "Equal tokens have equal states in every layer (positions not added to the embeddings).",
        (Part("largest ‖h_t − h_0‖ ÷ ‖h_0‖ over layers, tokens and sequences", _largest("state_difference"),
            below(1e-3), "{:.1e}"),),
        (ALONE,), (equal_tokens_stay_equal,), (Published("any", 0.0, "in exact arithmetic", "WSE eq. 10–17"),),
        set_against=Null.THEOREM),
    Claim("W-6", "§3.3", "All repeated tokens are massive, which disperses the sink.",
        (Part("smallest ‖h_t‖ on repeated ÷ ‖h_0‖ on natural tokens, over layers with massive activations",
            _all_massive, at_least(0.5)),),
        (TEXT, ALONE), (equal_tokens_stay_equal,)),
    Claim("W-7", "proposition 1", "Without positions, attention on repeated tokens is uniform.",
        (Part(_DIFFERENCE.format("1/(t + 1)"), _largest("weight_difference", NO_POSITIONS), below(1e-4), "{:.1e}"),),
        (ALONE,), (equal_tokens_stay_equal, some_positions(NO_POSITIONS)), set_against=Null.THEOREM),
    Claim("W-8", "proposition 3", "With ALiBi, attention on repeated tokens is that of its biases alone.",
        (Part(_DIFFERENCE.format("e^g ÷ Σ e^g"), _largest("weight_difference", ALIBI), below(1e-4), "{:.1e}"),),
        (ALONE,), (equal_tokens_stay_equal, some_positions(ALIBI)), set_against=Null.THEOREM),
    Claim("W-9", "proposition 4", "With rotary positions, attention to the first of repeated tokens is bounded.",
        (Part("smallest share, over layers and sequences, of heads and queries within e^{2ξ} ÷ (e^{2ξ} + t)",
            _within_bound, at_least(1.0)),),
        (ALONE,), (equal_tokens_stay_equal, some_positions("rotary")), is_ours=False, set_against=Null.THEOREM),
    Claim("W-10", "table 7", "Another vector in place of position 0's removes the sink on repeated tokens.",
        (Part("sink rate at position 0, after ÷ before", of_arm(share_left, REPLACED), at_most(0.5)),
         had_a_sink(REPLACED)),
        (REPLACED,), (causal, learned_positions),
        (Published("GPT2-XL", 62.28, f"sink rate before, {ON_REPEATED}", "WSE table 7", "†"),
         Published("GPT2-XL", 0.20, f"lowest sink rate after, {ON_REPEATED}", "WSE table 7", "†"),
         Published("GPT2-XL", 10.97, f"highest sink rate after, {ON_REPEATED}", "WSE table 7", "†"))),
    Claim("W-11", "table 7", "Exchanged with position t's, the vector takes the sink to t.",
        (Part("sink rate at position 1 after ÷ at position 0 before", _moved, at_least(0.5)),
         falls(EXCHANGED),
         had_a_sink(EXCHANGED)),
        (EXCHANGED,), (causal, learned_positions),
        (Published("GPT2-XL", 50.22, f"lowest sink rate at t, {ON_REPEATED}", "WSE table 7", "†"),
         Published("GPT2-XL", 57.63, f"highest sink rate at t, {ON_REPEATED}", "WSE table 7", "†"))),
)  # fmt: skip

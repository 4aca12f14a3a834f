"""Claims on single weights and heads: The Super Weight in Large Language Models (SW), Identifying and Evaluating
Inactive Heads in Pretrained LLMs (IH), and Why do LLMs attend to the first token? (FT).
"""

from functools import partial

import numpy as np

from sinkscope.commands.claims.arms import breaks, perplexity_ratio
from sinkscope.commands.claims.claim import Claim, Part
from sinkscope.commands.claims.evidence import MAIN, Evidence, Need, Null
from sinkscope.commands.claims.papers.s2m import coordinates_of_largest
from sinkscope.commands.claims.scopes import causal
from sinkscope.measuring.estimates import super_weight
from sinkscope.results.judgment import NotDefined, above, at_least, between
from sinkscope.results.papers import published
from sinkscope.results.run import BEFORE
from sinkscope.results.sequences import Sequences
from sinkscope.results.statistics import Estimate, bootstrap, jackknife, one_more_run, weighted_means

# --- super weights

TO_ZERO, LARGEST = Need("loss-do", "zero-super-weight"), Need("loss-do-alone", "zero-super-weight:which=largest")


def _unchanged(evidence: Evidence) -> Sequences:
    """Return a run of the unchanged model, with the table `super_weights` if there is one."""
    if "super_weights" not in evidence.natural.run.tables and evidence.has(TO_ZERO):
        return evidence.sequences(TO_ZERO, BEFORE)  # measured there to find the entry
    return evidence.natural


def _written(evidence: Evidence) -> Estimate:
    chosen, share = super_weight(_unchanged(evidence))
    return share.over(f"layer {chosen['layer']:.0f}, row {chosen['row']:.0f}, column {chosen['column']:.0f}")


def _is_massive(evidence: Evidence) -> Estimate:
    natural = _unchanged(evidence)
    chosen, _ = super_weight(natural)
    there = (coordinates_of_largest(natural) == chosen["row"]).reindex(range(natural.weights.shape[1]))
    return bootstrap(weighted_means(there.fillna(False).to_numpy(float), natural.weights))


# --- inactive heads

BY_NORM, BY_MASS = Need("loss-do", "ablate-heads"), Need("loss-do", "ablate-heads:by=first-mass")


def _below_random(evidence: Evidence) -> Estimate:
    draws = evidence.controls(BY_MASS)
    if not draws:
        raise NotDefined("no random heads were ablated")
    before, after = evidence.sequences(BY_MASS, BEFORE).losses, evidence.sequences(BY_MASS).losses
    drawn = np.array([evidence.sequences(BY_MASS, draw).losses[0] for draw in draws])
    return one_more_run(drawn - before[0]) - jackknife(after - before)


# --- the sink and over-mixing

MASKED = Need("mixing-do", "mask-sink:begin=massive")


def _change(evidence: Evidence, condition: str | None = None) -> np.ndarray:
    """Return the logarithm of ‖h − h′‖ ÷ ‖h‖ of later tokens, of the mean over layers and sequences, (R,)."""
    return np.log(evidence.sequences(MASKED, condition).means("over_mixing_by_sequence", "change").mean(1))


def _more_mixing(evidence: Evidence, beyond: bool) -> Estimate:
    before, after = _change(evidence, BEFORE), _change(evidence)
    controls = np.array([_change(evidence, draw)[0] - before[0] for draw in evidence.controls(MASKED)])
    change = bootstrap(after - before)
    drawn = np.exp(controls + before[0]).round(3).tolist()
    note = f"{np.exp(before[0]):.3g} → {np.exp(after[0]):.3g}; controls {drawn}"
    return (change - one_more_run(controls) if beyond else change).over(note)


CLAIMS = (
    Claim("SW-1", "table 1", "Setting the super weight alone to zero breaks the model.",
        breaks(TO_ZERO, "random entries of its row and column"), (TO_ZERO,),
        published=published("SW table 1", {"Llama-7B": 1211 / 5.67}, "Wikitext-2", "†")),
    Claim("SW-2", "§3", "Magnitude does not make a super weight.",
        (Part("perplexity with the largest entry of its matrix zeroed ÷ before",
            lambda e: perplexity_ratio(e, LARGEST), between(0.9, 1.1)),
         Part("with the super weight zeroed ÷ with that entry zeroed",  # it may be the same entry
            lambda e: perplexity_ratio(e, TO_ZERO, against=LARGEST), above(1.1))),
        (TO_ZERO, LARGEST)),
    Claim("SW-3", "§3", "One entry writes the massive activation.",
        (Part("share of the row's output that the entry writes", _written, at_least(0.5)),
         Part("share of sequences whose largest massive activation is at its row", _is_massive, at_least(0.9))),
        (MAIN, TO_ZERO), set_against=Null.RANDOM_WEIGHTS),
    Claim("IH-1", "§4", "Heads with a small output norm are more dormant than heads with much mass on the first token.",
        (Part("loss with as many heads ablated by first-token mass − by norm, nats",
            lambda e: jackknife(e.sequences(BY_MASS).losses - e.sequences(BY_NORM).losses), above(0.0)),),
        (BY_NORM, BY_MASS)),
    Claim("IH-2", "§4", "Heads with much mass on the first token are more dormant than random heads.",
        (Part("loss with as many random heads ablated − by first-token mass, nats", _below_random, above(0.0)),),
        (BY_MASS,)),
    Claim("FT-1", "§3", "Without the sink, a changed token changes later tokens more.",
        (Part("log of the relative change of later tokens, sink masked ÷ not", partial(_more_mixing, beyond=False),
            above(0.0)),
         Part("beyond another masked token's", partial(_more_mixing, beyond=True), above(0.0))),
        (MASKED,), (causal,)),
)  # fmt: skip

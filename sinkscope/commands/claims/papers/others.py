"""Claims of papers with few of them: compression valleys (CV), secondary sinks (SS), residual sinks and spikes (RS),
The Super Weight in Large Language Models (SW), Identifying and Evaluating Inactive Heads in Pretrained LLMs (IH), Why
do LLMs attend to the first token? (FT), The Structural Origin of Attention Sink (SO), and visual attention sinks (VS;
their null is φ on random coordinates).
"""

from functools import partial

import numpy as np
import pandas as pd

from sinkscope.commands.claims.arms import beyond_controls, breaks, falls, had_a_sink, leaves, perplexity_ratio
from sinkscope.commands.claims.claim import Claim, Part
from sinkscope.commands.claims.evidence import MAIN, STATES, Evidence, Need, Null, label_of
from sinkscope.commands.claims.papers.s2m import TO_ZERO, coordinates_of_largest
from sinkscope.commands.claims.scopes import causal, requires, varied_first_token
from sinkscope.measuring.estimates import (
    massive_layers,
    sink_rates,
    super_weight,
    visual_sink_attention,
    visual_sink_share,
)
from sinkscope.measuring.observables.spikes import SECONDARY
from sinkscope.results import statistics
from sinkscope.results.findings import SINK
from sinkscope.results.judgment import NotDefined, above, at_least, at_most, below, between
from sinkscope.results.papers import published
from sinkscope.results.run import BEFORE
from sinkscope.results.sequences import Sequences
from sinkscope.results.side_by_side import span
from sinkscope.results.statistics import Estimate, bootstrap, exact, jackknife, one_more_run, rank_correlation

# --- compression valleys


def _in_valley(evidence: Evidence) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return columns of `entropy`, (R, layers), and the layers with massive activations at position 0."""
    run = evidence.sequences(STATES)
    layers = massive_layers(run)
    if not len(layers):
        raise NotDefined("position 0 has no massive activation in any layer")
    columns = ("entropy", "entropy_rescaled", "anisotropy", "anisotropy_bound")
    return {name: run.means("entropy_by_sequence", name) for name in columns}, layers


def _bound_gap(evidence: Evidence) -> Estimate:
    columns, layers = _in_valley(evidence)
    loose = (columns["anisotropy"] - columns["anisotropy_bound"])[:, layers].max(1)
    return bootstrap(loose).over(f"layers {span((layers[0], layers[-1]))}")


def _against_largest(column: str, evidence: Evidence) -> Estimate:
    columns, layers = _in_valley(evidence)
    largest = columns["entropy"][0]
    ratio = columns[column][:, layers].mean(1) / columns["entropy"].max(1)
    return bootstrap(ratio).over(f"largest entropy {largest.max():.2f}, layer {largest.argmax()}")


def _valley_at_sinks(evidence: Evidence) -> Estimate:
    tables = evidence.run(STATES).tables
    rate = tables["attention"].query("position == 0").groupby("layer")["sink_rate"].mean()
    entropy = tables["entropy"].set_index("layer")["entropy"].rename(lambda layer: layer + 1)
    both = pd.concat([entropy, rate], axis=1).dropna()
    return rank_correlation(both["entropy"].to_numpy(), both["sink_rate"].to_numpy(), both.index.to_numpy())


# --- secondary sinks


def _secondary_sinks(evidence: Evidence) -> pd.DataFrame:
    table = evidence.sequences(STATES).table("sink_tokens")
    sinks = table[table["kind"] == SECONDARY]
    if sinks.empty:
        raise NotDefined("no token is a secondary sink")
    return sinks.assign(preferred=sinks["attention"] / sinks["attention_elsewhere"])


def _of_secondary(column: str, evidence: Evidence) -> Estimate:
    """Estimate a mean over secondary sinks, with sequences as units."""
    measured = _secondary_sinks(evidence).dropna(subset=column)
    if measured.empty:
        raise NotDefined("no secondary sink has the number")
    groups = measured.groupby("sequence")[column].agg(["sum", "count"]).astype(float)
    weights = statistics.resamplings_of(evidence.run(STATES).text_numbers[groups.index])
    means = statistics.weighted_means(groups.to_numpy(), weights)
    return bootstrap(means[:, 0] / means[:, 1]).over(f"{len(measured)} tokens of {len(groups)} sequences")


def _lifetime_follows_norm(evidence: Evidence) -> Estimate:
    sinks = _secondary_sinks(evidence)
    first = np.unique(evidence.run(STATES).text_numbers, return_index=True)[1]  # copies are not further units
    sinks = sinks[sinks["sequence"].isin(first)]
    return rank_correlation(*(sinks[name].to_numpy(float) for name in ("norm", "lifetime", "layer")))


def _parallel_are_sinks(evidence: Evidence) -> Estimate:
    run = evidence.sequences(STATES)
    sinks, parallel = (run.means("parallel_tokens", name).mean(1) for name in ("sinks", "parallel"))
    if not parallel.min():  # some resample has no such token
        raise NotDefined("other tokens are parallel to the first sink in few sequences or none")
    return bootstrap(sinks / parallel).over(f"parallel: {parallel[0]:.1%} of tokens, mean over layers")


# --- residual sinks and spikes


def _residual_share(column: str, evidence: Evidence) -> Estimate:
    by_layer = evidence.sequences(STATES).means("spikes_by_sequence", column)
    return bootstrap(by_layer.max(1)).over(f"layer {by_layer[0].argmax()}")


def _spike_cosine(column: str, evidence: Evidence) -> Estimate:
    """Return the cosine in the layer of the spike, where the norm of the largest tokens has risen most."""
    spike = evidence.run(STATES).tables["spikes"].query("step == 'up'").iloc[0]
    return exact(spike[column]).over(f"layer {spike['layer']}, all pairs of sequences")


# --- super weights

ENTRY_TO_ZERO, LARGEST_TO_ZERO = (
    Need("loss-do", "zero-super-weight"),
    Need("loss-do-alone", "zero-super-weight:which=largest"),
)


def _with_super_weights(evidence: Evidence) -> Sequences:
    """Return a run of the unchanged model, with the table `super_weights` if there is one."""
    if "super_weights" not in evidence.natural.run.tables and evidence.has(ENTRY_TO_ZERO):
        return evidence.sequences(ENTRY_TO_ZERO, BEFORE)  # measured there to find the entry
    return evidence.natural


def _written(evidence: Evidence) -> Estimate:
    chosen, share = super_weight(_with_super_weights(evidence))
    return share.over(f"layer {chosen['layer']:.0f}, row {chosen['row']:.0f}, column {chosen['column']:.0f}")


def _is_massive(evidence: Evidence) -> Estimate:
    natural = _with_super_weights(evidence)
    chosen, _ = super_weight(natural)
    there = (coordinates_of_largest(natural) == chosen["row"]).reindex(range(natural.weights.shape[1]))
    return bootstrap(statistics.weighted_means(there.fillna(False).to_numpy(float), natural.weights))


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

SINK_MASKED = Need("mixing-do", "mask-sink:begin=massive")


def _mixing(evidence: Evidence, condition: str | None = None) -> np.ndarray:
    """Return the logarithm of ‖h − h′‖ ÷ ‖h‖ of later tokens, of the mean over layers and sequences, (R,)."""
    return np.log(evidence.sequences(SINK_MASKED, condition).means("over_mixing_by_sequence", "change").mean(1))


def _more_mixing(evidence: Evidence, beyond: bool) -> Estimate:
    before, after = _mixing(evidence, BEFORE), _mixing(evidence)
    controls = np.array([_mixing(evidence, draw)[0] - before[0] for draw in evidence.controls(SINK_MASKED)])
    change = bootstrap(after - before)
    drawn = np.exp(controls + before[0]).round(3).tolist()
    note = f"{np.exp(before[0]):.3g} → {np.exp(after[0]):.3g}; controls {drawn}"
    return (change - one_more_run(controls) if beyond else change).over(note)


# --- a token that sees only itself

ALONE, WITHOUT_FIRST = Need("do", "isolate"), Need("loss-do-alone", "isolate:hidden=0")
DEVIATING, SCALED = Need("do", "scale-head-outputs"), Need("loss-do-alone", "scale-head-outputs:around=zero")


def _edited_position(evidence: Evidence, role: Need) -> int:
    """Return the position of the token that an arm isolates, or whose heads' outputs it scales."""
    run = evidence.run(role)
    return run.manifest["arms"][label_of(run, role.of)]["watched"][0]


def _rate_where_edited(role: Need, evidence: Evidence) -> Estimate:
    return bootstrap(sink_rates(evidence.sequences(role), _edited_position(evidence, role)))


# --- visual sinks, on runs with pictures


def _beyond_random(evidence: Evidence) -> Estimate:
    share = visual_sink_share(evidence.run(MAIN))
    return Estimate(share.value - share.null, share.low - share.null, share.high - share.null, null=0.0)


SEEING = (requires(lambda run: run.manifest["model"].get("text_tower"), "it reads no pictures"),)
OF_LARGE_TOKENS = "of the tokens at which one coordinate is above 20 × their median entry, layer with the largest"

CLAIMS = (
    Claim("CV-1", "2510.06477", "The first token's norm makes the anisotropy: its bound is tight.",
        (Part("p_1 − (c + α) ÷ (c + 1), largest of the layers with massive activations", _bound_gap, at_most(0.02)),),
        (STATES,)),
    Claim("CV-2", "2510.06477", "Entropy has a valley where activations are massive.",
        (Part("entropy, mean over the layers with massive activations ÷ largest of all layers",
            partial(_against_largest, "entropy"), at_most(0.5)),), (STATES,)),
    Claim("CV-3", "2510.06477", "The first token's norm makes the valley: at the median norm, the entropy is back.",
        (Part("entropy with position 0 at the median norm, in these layers ÷ largest of all layers",
            partial(_against_largest, "entropy_rescaled"), at_least(0.5)),), (STATES,)),
    Claim("CV-4", "2510.06477", "The valley is where the sinks are.",
        (Part("rank correlation over layers of the states' entropy and the sink rate of the layer that reads them",
            _valley_at_sinks, below(0.0)),), (STATES,), (causal,)),
    Claim("CV-5", "2510.06477", "Without the massive activation, there is no sink.",
        (leaves(TO_ZERO, at_most(0.5)), falls(TO_ZERO), had_a_sink(TO_ZERO)), (TO_ZERO,)),
    Claim("SS-1", "2512.22213", "MLPs write secondary sinks.",
        (Part("cosine of the MLP's output and the first sink's state, where they join, mean over secondary sinks",
            partial(_of_secondary, "written"), at_least(0.9)),), (STATES,), (causal,)),
    Claim("SS-2", "2512.22213", "The norm of a secondary sink sets its lifetime.",
        (Part("rank correlation of norm and lifetime over secondary sinks", _lifetime_follows_norm, above(0.0)),),
        (STATES,), (causal,)),
    Claim("SS-3", "2512.22213", "Secondary sinks attract attention.",
        (Part("attention to a secondary sink ÷ to equal tokens that are no sinks, both ÷ uniform attention, mean",
            partial(_of_secondary, "preferred"), above(1.0)),), (STATES,), (causal,)),
    Claim("SS-4", "2512.22213", "Tokens that are parallel to the first sink are sinks.",
        (Part("tokens with 3 × the median norm ÷ all tokens parallel to the first sink", _parallel_are_sinks,
            at_least(0.5)),), (STATES,), (causal,)),
    Claim("RS-1", "2601.22966", "A fixed coordinate is large at most tokens.",
        (Part(f"share {OF_LARGE_TOKENS}", partial(_residual_share, "largest_share"), at_least(0.9)),
         Part("the same after a random rotation", partial(_residual_share, "rotated_share"), at_most(0.1))), (STATES,)),
    Claim("RS-2", "2603.05498", "A spike is the same vector in all sequences.",
        (Part("cosine of the largest tokens of two sequences, mean over pairs", partial(_spike_cosine, "cosine"),
            at_least(0.95)),
         Part("the same of tokens with the median norm", partial(_spike_cosine, "cosine_of_others"), below(0.95))),
        (STATES,), (varied_first_token,)),
    Claim("VS-1", "§3.1", "Some visual tokens are large in the model's massive coordinates.",
        (Part("share of visual tokens with φ > 20 − the same for random coordinates", _beyond_random, above(0.0)),),
        scope=SEEING, set_against=Null.NONE),
    Claim("VS-2", "§3.2", "Visual sinks take the attention of the text.",
        (Part("attention to a visual sink ÷ to another visual token",
            lambda e: visual_sink_attention(e.run(MAIN)), above(1.0)),),
        scope=SEEING, set_against=Null.NONE),
    Claim("SW-1", "table 1", "Setting the super weight alone to zero breaks the model.",
        breaks(ENTRY_TO_ZERO, "random entries of its row and column"), (ENTRY_TO_ZERO,),
        published=published("SW table 1", {"Llama-7B": 1211 / 5.67}, "Wikitext-2", "†")),
    Claim("SW-2", "§3", "Magnitude does not make a super weight.",
        (Part("perplexity with the largest entry of its matrix zeroed ÷ before",
            lambda e: perplexity_ratio(e, LARGEST_TO_ZERO), between(0.9, 1.1)),
         Part("with the super weight zeroed ÷ with that entry zeroed",  # it may be the same entry
            lambda e: perplexity_ratio(e, ENTRY_TO_ZERO, against=LARGEST_TO_ZERO), above(1.1))),
        (ENTRY_TO_ZERO, LARGEST_TO_ZERO)),
    Claim("SW-3", "§3", "One entry writes the massive activation.",
        (Part("share of the row's output that the entry writes", _written, at_least(0.5)),
         Part("share of sequences whose largest massive activation is at its row", _is_massive, at_least(0.9))),
        (MAIN, ENTRY_TO_ZERO), set_against=Null.RANDOM_WEIGHTS),
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
        (SINK_MASKED,), (causal,)),
    Claim("SO-1", "§4", "A token that sees nothing but itself becomes a sink, as position 0 does.",
        (Part("sink rate at a later token that sees only itself, in %", partial(_rate_where_edited, ALONE),
            above(SINK)),
         Part("its change, in points, beyond that at a token that also sees a random earlier one",
            lambda e: beyond_controls(e, ALONE, _edited_position(e, ALONE)), above(0.0)),
         Part("sink rate at a token from which only position 0 is hidden, in %",
            partial(_rate_where_edited, WITHOUT_FIRST), below(SINK)),
         had_a_sink(ALONE)),
        (ALONE, WITHOUT_FIRST), (causal,)),
    Claim("SO-2", "§4", "A token whose heads' outputs deviate more becomes a sink; one with larger outputs does not.",
        (Part("sink rate at a token with 5 × the deviation of its heads' outputs, in %",
            partial(_rate_where_edited, DEVIATING), above(SINK)),
         Part("its change, in points, beyond that if another token's deviate",
            lambda e: beyond_controls(e, DEVIATING, _edited_position(e, DEVIATING)), above(0.0)),
         Part("sink rate at the token with 5 × its heads' outputs, in %",
            partial(_rate_where_edited, SCALED), below(SINK)),
         had_a_sink(DEVIATING)),
        (DEVIATING, SCALED), (causal,)),
)  # fmt: skip

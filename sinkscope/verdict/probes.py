"""Findings on states, super weights, dormant heads, over-mixing and pictures, where they were measured.

Those on pictures are visual sinks, and patches of an encoder with a large norm.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from math import isnan

import numpy as np
import pandas as pd

from sinkscope.errors import counted
from sinkscope.interventions.heads import AblateHeads, dormant
from sinkscope.measuring.estimates import (
    by_head,
    head_sinks,
    outlier_patches,
    outlier_share,
    super_weight,
    visual_sink_attention,
    visual_sink_share,
)
from sinkscope.measuring.observables.spikes import SECONDARY
from sinkscope.results.findings import (
    AFTER_LAYER,
    BROADCAST,
    FEWEST_QUERIES,
    GIVING_HALF,
    HALF,
    HIGH_NORM,
    NO_OP,
    ON_SINKS,
    ONE_VECTOR,
    PHI,
    VISUAL,
    Finding,
    Outcome,
)
from sinkscope.results.judgment import NotDefined
from sinkscope.results.run import BEFORE, RunData
from sinkscope.results.sequences import Lacks, Sequences
from sinkscope.results.statistics import Estimate, bootstrap, exact, rank_correlation, weighted_means
from sinkscope.verdict.report import coordinates_text, finding, with_interval

SECTION, STATES, PICTURES = "Neurons and heads", "States of the residual stream", "Pictures"
DECODING = "Decoding"
SHARE = AblateHeads().share


def findings(run: RunData) -> Iterator[Finding]:
    natural = Sequences(run, BEFORE if run.is_experiment else None)
    parts: dict[str, Callable[[Sequences], Iterator[Finding]]] = {
        "entropy": _entropy,
        "sink_tokens": _secondary_sink_findings,
        "spikes": _spikes,
        "super_weights": _super_weight,
        "head_scores": _heads,
        "sink_output_by_sequence": _sink_output,
        "over_mixing_by_sequence": _over_mixing,
        "decoding": _decoding,
        "visual_patch": _visual_sinks,
        "encoder_patch": _outlier_patches,
    }
    for name, part in parts.items():
        if name in run.tables and len(natural.table(name)):
            yield from part(natural)


def _estimate(replicates: Callable[[], np.ndarray], value: float) -> Estimate:
    """Estimate from (1 + draws,) replicates; return `value` without an interval where the run lacks their table."""
    try:
        return bootstrap(replicates())
    except Lacks:
        return exact(value)


def _entropy(run: Sequences) -> Iterator[Finding]:
    table = run.table("entropy")
    lowest = table.loc[table["entropy"].idxmin(), ["layer", "entropy", "entropy_without_first", "entropy_rescaled"]]
    entropy = _estimate(lambda: run.means("entropy_by_sequence", "entropy").min(1), lowest["entropy"])
    sentence = f"The entropy of the states is lowest after layer {lowest['layer']:.0f}: "
    sentence += f"{with_interval(entropy, '.3g')} of the largest possible. Without position 0 it is "
    sentence += f"{lowest['entropy_without_first']:.3f} there, and with position 0 at the median norm of the others "
    sentence += f"{lowest['entropy_rescaled']:.3f}."
    yield finding("state-entropy", STATES, entropy, sentence, lowest.to_dict())


def _secondary_sink_findings(run: Sequences) -> Iterator[Finding]:
    table = run.table("sink_tokens")
    sinks = table[table["kind"] == SECONDARY]
    counts = np.bincount(sinks["sequence"], minlength=run.weights.shape[1])
    number = bootstrap(weighted_means(counts, run.weights) * len(counts))
    attention, elsewhere = sinks["attention"].mean(), sinks["attention_elsewhere"].mean()
    some = with_interval(number, ".0f") if len(sinks) else "No"
    sentence = f"{some} later tokens join the first sink for a part of its layers"
    if len(sinks):
        sentence += f", most often {sinks['token'].astype(str).mode()[0]!r}. They receive {attention:.1f} times "
        sentence += f"uniform attention, equal tokens that are no sinks {elsewhere:.1f} times"
    numbers = {"attention": attention, "elsewhere": elsewhere}
    yield finding("secondary-sinks", STATES, number, f"{sentence}.", numbers)


def _spikes(run: Sequences) -> Iterator[Finding]:
    table = run.table("spikes")
    most, rotated = table.loc[table["largest_share"].idxmax()], float(table["rotated_share"].max())
    share = _estimate(lambda: run.means("spikes_by_sequence", "largest_share").max(1), most["largest_share"])
    sentence = f"One coordinate is large, above 20 times the median entry, at {with_interval(share, '.1%')} of the "
    sentence += f"tokens after layer {most['layer']}; after a random rotation of the states at {rotated:.1%} at most."
    yield finding("residual-sinks", STATES, share, sentence, {"layer": int(most["layer"]), "rotated": rotated})
    (rises,) = np.nonzero(table["step"] == "up")
    if not len(rises):
        return
    rise = table.iloc[rises[0]]
    ratio = _estimate(lambda: run.means("spikes_by_sequence", "norm_ratio")[:, rises[0]], rise["norm_ratio"])
    sentence = f"The norm of a sequence's largest token rises most in layer {rise['layer']}, to "
    sentence += f"{with_interval(ratio, '.4g')} times the median. There the largest tokens of two sequences have "
    sentence += f"cosine {rise['cosine']:.3f}, tokens with the median norm {rise['cosine_of_others']:.3f}."
    numbers = {name: rise[name] for name in ("layer", "norm_ratio", "cosine", "cosine_of_others")}
    yield finding("spike", STATES, ratio, sentence, numbers)


def _super_weight(run: Sequences) -> Iterator[Finding]:
    try:
        chosen, share = super_weight(run)
    except NotDefined:
        return
    place = {name: int(chosen[name]) for name in ("layer", "row", "column")}
    layer, row = place["layer"], place["row"]
    sentence = "The largest entry that a feed-forward network adds in the first three quarters of the layers is "
    sentence += f"{chosen['written']:,.4g}, in layer {layer} at coordinate {row}. There the weight at row {row} and "
    sentence += f"column {place['column']}, the neuron with the largest input, writes {with_interval(share, '.0%')} of "
    sentence += f"the row's output, in {chosen['sequences']:.0%} of the sequences"
    massive = run.table("massive").query("is_massive") if "massive" in run.run.tables else pd.DataFrame()
    if len(massive):
        usually = int(massive.loc[massive["value"].abs().idxmax(), "coordinate"])
        sentence += f"; the largest massive activation is at {'the same' if usually == row else 'another'} coordinate"
        sentence += "" if usually == row else f", {usually}"
    numbers = {name: float(chosen[name]) for name in ("written", "input", "output", "weight", "sequences")}
    yield finding("super-weight", SECTION, share, f"{sentence}.", numbers | place)


def _heads(run: Sequences) -> Iterator[Finding]:
    table = run.table("head_scores")
    norm, mass, layers = (table[name].to_numpy() for name in ("relative_norm", "first_mass", "layer"))
    correlation = rank_correlation(-norm, mass, layers)
    flagged = [set(dormant(table, by, SHARE)) for by in ("output-norm", "first-mass")]
    both = len(flagged[0] & flagged[1]) / len(flagged[0])
    sentence = "Two scores of dormant heads, a small norm of the output in its layer and much attention to position 0, "
    sentence += f"have rank correlation {with_interval(correlation, '.2f')} over {len(table)} heads; of the "
    sentence += (
        f"{counted(len(flagged[0]), 'head')} that each of them flags, {both:.0%} are the same, where chance gives "
    )
    sentence += f"{SHARE:.0%}."
    numbers = {"heads": len(table), "flagged": len(flagged[0]), "both": both, "chance": SHARE}
    yield finding("dormant-heads", SECTION, correlation, sentence, numbers)


def _sink_output(run: Sequences) -> Iterator[Finding]:
    names = ("share", "uniform_share", "at_half", "value_ratio", "stable_rank")
    share, uniform, at_half, ratio, rank = (by_head(run, "sink_output_by_sequence", name) for name in names)
    has_sink = at_half >= GIVING_HALF
    with suppress(Lacks, NotDefined):  # without a sink rate, only by the weight of position 0
        has_sink |= head_sinks(run)[0]
    numbers: dict[str, Estimate | float] = {"heads": int(has_sink[0].sum()), "total": int(np.isfinite(share[0]).sum())}
    sentence = f"{numbers['heads']} of {counted(numbers['total'], 'head')} have a sink at position 0, or at least "
    sentence += f"{GIVING_HALF:.0%} of their queries give it {HALF:g} of their attention or more"
    numbers |= {"queries": GIVING_HALF, "half": HALF}
    if not has_sink[0].any():
        yield finding("sink-output", SECTION, np.nan, f"{sentence}.", numbers, outcome=Outcome.ABSENT)
        return
    mean, null = bootstrap(share[:, has_sink[0]].mean(1)), float(uniform[0, has_sink[0]].mean())
    no_op, broadcast = ratio <= NO_OP, (ratio >= BROADCAST) & (rank <= ONE_VECTOR)
    kinds = {"no_ops": no_op, "broadcasts": broadcast, "neither": ~no_op & ~broadcast}
    counts = {name: bootstrap((has_sink & kind).sum(1).astype(float)) for name, kind in kinds.items()}
    no_ops, broadcasts, neither = (with_interval(count, ".0f") for count in counts.values())
    sentence += f". In these heads its term has {with_interval(mean, '.1%')} of the norms of the output's two parts, "
    sentence += f"it and all other keys, and with uniform attention {null:.1%}. The number of no-ops, where its value "
    sentence += f"has at most {NO_OP:g} times the others' mean norm, is {no_ops}; of broadcasts, with at least "
    sentence += f"{BROADCAST:g} times and outputs of stable rank {ONE_VECTOR:g} or less, {broadcasts}; of neither, "
    sentence += f"{neither}. Whether zero (a gate, a sink logit) or a constant can take its place: `intervene --arm "
    sentence += "scale-sink-value --arm mean-sink-value`."
    numbers |= {"no_op": NO_OP, "broadcast": BROADCAST, "rank": ONE_VECTOR, **counts}
    yield finding("sink-output", SECTION, mean, sentence, numbers, null=null)


def _decoding(run: Sequences) -> Iterator[Finding]:
    table = run.table("decoding")
    by_step = table.groupby(["sequence", "step"])["sink_mass"].mean().unstack()
    mass = by_step.reindex(range(run.weights.shape[1])).to_numpy()  # (N, steps); NaN after a sequence's end
    steps, sums, tokens = mass.shape[1], np.nansum(mass, axis=1), np.isfinite(mass).sum(1)
    with np.errstate(invalid="ignore"):
        share = bootstrap((run.weights @ sums) / (run.weights @ tokens))
    null = float(table["uniform"].mean())
    sentence = f"Decoded tokens, up to {steps} after each sequence, give position 0 {with_interval(share, '.1%')} of "
    sentence += "their attention, mean over heads, layers and decoded tokens; "
    sentence += f"uniform attention gives {null:.1%}"
    numbers: dict[str, Estimate | float] = {"steps": steps}
    if steps >= 2 * FEWEST_QUERIES:
        goes_on = np.isfinite(mass[:, -1:])  # a change is one within the same sequences
        ends = (mass[:, :FEWEST_QUERIES], mass[:, -FEWEST_QUERIES:])
        first, last = (weighted_means(np.where(goes_on, x, np.nan).mean(1), run.weights) for x in ends)
        numbers |= {"first": bootstrap(first), "last": bootstrap(last), "change": bootstrap(last - first)}
        sentence += f". From the first {FEWEST_QUERIES} steps to the last {FEWEST_QUERIES} this share changes by "
        sentence += with_interval(bootstrap(100 * (last - first)), "+.1f", " points")
        if not goes_on.all():
            sentence += f" in the {goes_on.sum()} of {counted(len(goes_on), 'sequence')} that go on so long"
    if steps >= FEWEST_QUERIES and "attention" in run.run.tables:
        sinks = run.table("decoding_sinks").drop_duplicates(["layer", "head", "sequence"]).groupby("sequence").size()
        heads = len(run.table("attention")[["layer", "head"]].drop_duplicates())
        rates = sinks.reindex(range(run.weights.shape[1]), fill_value=0).to_numpy() / heads
        new = bootstrap(run.weights @ rates / run.weights.sum(1))
        numbers["new_sinks"] = new
        sentence += f". In {with_interval(new, '.2%')} of heads and sequences a decoded token becomes a sink, for at "
        sentence += f"least {FEWEST_QUERIES} decoded queries"
    largest = table.loc[table["largest"].idxmax()]
    numbers |= {"largest": float(largest["largest"]), "headroom": float(largest["headroom"])}
    sentence += f". The largest activation at a decoded token is {largest['largest']:.4g}, after layer "
    sentence += f"{largest['layer']}, where float16's limit is {largest['headroom']:.3g} × as large."
    yield finding("decoding", DECODING, share, sentence, numbers, null=null)


def _over_mixing(run: Sequences) -> Iterator[Finding]:
    def change(sequences: Sequences) -> Estimate:
        return bootstrap(sequences.means("over_mixing_by_sequence", "change").mean(1))

    value, numbers = change(run), dict[str, Estimate | float]()
    sentence = f"A changed token changes the states of later tokens by {with_interval(value, '.1%')} of their norm, "
    sentence += "mean over layers, substitutions and sequences"
    every = run.run.tables["over_mixing_by_sequence"].groupby("condition")["change"].mean()
    for label in run.run.manifest.get("arms", {}) if run.run.is_experiment else ():
        arm = change(Sequences(run.run, label))
        drawn = [float(x) for name, x in every.items() if str(name).startswith(f"{label} control ")]
        numbers |= {label: arm, f"{label} control": float(np.mean(drawn)) if drawn else float("nan")}
        sentence += f"; under {label} by {with_interval(arm, '.1%')}"
        sentence += f", under its {len(drawn)} controls by {min(drawn):.1%} to {max(drawn):.1%}" if drawn else ""
    yield finding("over-mixing", SECTION, value, f"{sentence}.", numbers)


def _visual_sinks(sequences: Sequences) -> Iterator[Finding]:
    run = sequences.run
    about, share = run.manifest["pictures"], visual_sink_share(run)
    of = "massive coordinates" if about["is_massive"] else "largest coordinates, none of them massive,"
    of += f" ({coordinates_text(about['coordinates'])})"
    pictures = counted(about["pictures"], "picture")
    sentence = f"{with_interval(share, '.2%')} of the visual tokens of {pictures} are sinks in layers from "
    sentence += f"{AFTER_LAYER} on: φ is above {PHI:g} at the model's {of}; at as many random ones {share.null:.2%}."
    numbers = {"pictures": about["pictures"], "coordinates": tuple(about["coordinates"]), "random": share.null,
        "layer": AFTER_LAYER}  # fmt: skip
    outcome = Outcome.PRESENT if share.low > share.null else Outcome.ABSENT if not share.value else Outcome.UNDECIDED
    try:
        ratio = visual_sink_attention(run)
        sentence += f" The text gives a visual sink {with_interval(ratio, '.2f', ' times')} the attention of another "
        sentence += "visual token" + ("." if isnan(ratio.null) else f", a sink by random ones {ratio.null:.2f} times.")
        numbers |= {"ratio": ratio.value, "ratio_low": ratio.low, "ratio_high": ratio.high, "ratio_random": ratio.null}
    except NotDefined:
        pass
    ends = {"low": share.low, "high": share.high}
    yield finding("visual-sinks", PICTURES, share.value, sentence, numbers, outcome=outcome, threshold=PHI, **ends)
    heads = run.tables["visual_head"].groupby(["layer", "head"])[["first_mass", "visual_mass", "sink_mass"]].mean()
    first, visual, on_sinks = heads.mean()
    centric = (heads["visual_mass"] >= VISUAL) & (heads["sink_mass"] <= ON_SINKS * heads["visual_mass"])
    sentence = f"The text after a picture gives {first:.1%} of its attention to position 0, "
    sentence += f"{visual:.1%} to visual tokens, and {on_sinks:.1%} to visual sinks. "
    sentence += f"{centric.sum()} of {len(heads)} heads see the picture: they give it at least {VISUAL:g} of their "
    sentence += f"attention, and at most {ON_SINKS:g} of that to sinks."
    numbers = {"first": first, "sinks": on_sinks, "seeing": int(centric.sum()), "heads": len(heads)}
    numbers |= {"visual": VISUAL, "on_sinks": ON_SINKS}
    yield finding("visual-attention", PICTURES, visual, sentence, numbers)


def _outlier_patches(sequences: Sequences) -> Iterator[Finding]:
    run = sequences.run
    share, table = outlier_share(run), outlier_patches(run)
    special = run.tables["encoder_patch"].query("row < 0")
    last = table[table["layer"] == table["layer"].max()]
    pictures = last["sequence"].nunique()
    sentence = f"After the last layer {with_interval(share, '.2%')} of the patches of "
    sentence += f"{counted(pictures, 'picture')} are outliers, with more than {HIGH_NORM:g} times the median patch's "
    sentence += f"norm; the largest has {last['ratio'].max():.2f} times."
    numbers = {"pictures": pictures, "largest": last["ratio"].max()}
    by_layer = table.groupby("layer")["is_outlier"].mean()
    if by_layer.max() > share.value:
        sentence += f" Most are after layer {by_layer.idxmax()}: {by_layer.max():.2%}."
        numbers |= {"layer": int(by_layer.idxmax()), "most": by_layer.max()}
    if len(special):
        mass = special.groupby(["layer", "sequence"])["mass"].sum().mean()
        sentence += f" {mass:.1%} of the attention goes to CLS and registers, mean over layers."
        numbers["special"] = mass
    if last["is_outlier"].any():
        mass, others = (last.loc[rows, "mass"].mean() for rows in (last["is_outlier"], ~last["is_outlier"]))
        sentence += f" In the last layer an outlier receives {mass / others:.2f} times the attention of another patch."
        numbers["ratio"] = mass / others
    outcome = Outcome.PRESENT if share.low > 0 else Outcome.UNDECIDED if share.value else Outcome.ABSENT
    about = {"outcome": outcome, "threshold": HIGH_NORM, "low": share.low, "high": share.high, "is_headline": True}
    yield finding("outlier-patches", PICTURES, share.value, sentence, numbers, **about)

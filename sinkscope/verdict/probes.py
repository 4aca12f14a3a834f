"""Findings on states, super weights, dormant heads and over-mixing, where `analyze` or `intervene` measured them."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd

from sinkscope.interventions.heads import AblateHeads, dormant
from sinkscope.measuring.estimates import super_weight
from sinkscope.measuring.observables.spikes import SECONDARY
from sinkscope.results.findings import Finding
from sinkscope.results.judgment import NotDefined
from sinkscope.results.run import BEFORE, RunData
from sinkscope.results.sequences import Lacks, Sequences
from sinkscope.results.statistics import Estimate, bootstrap, exact, rank_correlation, weighted_means
from sinkscope.verdict.report import interval, with_interval

SECTION, STATES = "Neurons and heads", "States of the residual stream"
SHARE = AblateHeads().share


def findings(run: RunData) -> Iterator[Finding]:
    natural = Sequences(run, BEFORE if run.is_experiment else None)
    parts: dict[str, Callable[[Sequences], Iterator[Finding]]] = {
        "entropy": _entropy,
        "sink_tokens": _secondary,
        "spikes": _spikes,
        "super_weights": _super_weight,
        "head_scores": _heads,
        "over_mixing_by_sequence": _over_mixing,
    }
    for name, part in parts.items():
        if name in run.tables and len(natural.table(name)):
            yield from part(natural)


def _finding(name: str, section: str, estimate: Estimate, numbers: dict[str, Any], sentence: str) -> Finding:
    return Finding(name, section, value=estimate.value, **interval(estimate), numbers=numbers, sentence=sentence)


def _estimate(replicates: Callable[[], np.ndarray], value: float) -> Estimate:
    """Estimate from (1 + draws,) replicates; return `value` without an interval where the run lacks their table."""
    try:
        return bootstrap(replicates())
    except Lacks:
        return exact(value)


def _entropy(run: Sequences) -> Iterator[Finding]:
    table = run.table("entropy")
    lowest = table.loc[table["entropy"].idxmin(), ["layer", "entropy", "entropy_without_first", "entropy_rescaled"]]
    found = _estimate(lambda: run.means("entropy_by_sequence", "entropy").min(1), lowest["entropy"])
    sentence = f"The entropy of the states is lowest after layer {lowest['layer']:.0f}: {with_interval(found, '.3g')} "
    sentence += f"of the largest possible. Without position 0 it is {lowest['entropy_without_first']:.3f} there, and "
    sentence += f"with position 0 at the median norm of the others {lowest['entropy_rescaled']:.3f}."
    yield _finding("state-entropy", STATES, found, lowest.to_dict(), sentence)


def _secondary(run: Sequences) -> Iterator[Finding]:
    table = run.table("sink_tokens")
    found = table[table["kind"] == SECONDARY]
    counts = np.bincount(found["sequence"], minlength=run.weights.shape[1])
    number = bootstrap(weighted_means(counts, run.weights) * len(counts))
    attention, elsewhere = found["attention"].mean(), found["attention_elsewhere"].mean()
    some = with_interval(number, ".0f") if len(found) else "No"
    sentence = f"{some} later tokens join the first sink for a part of its layers"
    if len(found):
        sentence += f", most often {found['token'].astype(str).mode()[0]!r}. They receive {attention:.1f} times "
        sentence += f"uniform attention, equal tokens that are no sinks {elsewhere:.1f} times"
    yield _finding("secondary-sinks", STATES, number, {"attention": attention, "elsewhere": elsewhere}, f"{sentence}.")


def _spikes(run: Sequences) -> Iterator[Finding]:
    table = run.table("spikes")
    most, rotated = table.loc[table["largest_share"].idxmax()], float(table["rotated_share"].max())
    found = _estimate(lambda: run.means("spikes_by_sequence", "largest_share").max(1), most["largest_share"])
    sentence = f"One coordinate is large, above 20 times the median entry, at {with_interval(found, '.1%')} of the "
    sentence += f"tokens after layer {most['layer']}; after a random rotation of the states at {rotated:.1%} at most."
    yield _finding("residual-sinks", STATES, found, {"layer": int(most["layer"]), "rotated": rotated}, sentence)
    (rises,) = np.nonzero(table["step"] == "up")
    if not len(rises):
        return
    rise = table.iloc[rises[0]]
    ratio = _estimate(lambda: run.means("spikes_by_sequence", "norm_ratio")[:, rises[0]], rise["norm_ratio"])
    sentence = f"The norm of a sequence's largest token rises most in layer {rise['layer']}, to "
    sentence += f"{with_interval(ratio, '.4g')} times the median. There the largest tokens of two sequences have "
    sentence += f"cosine {rise['cosine']:.3f}, tokens with the median norm {rise['cosine_of_others']:.3f}."
    numbers = {name: rise[name] for name in ("layer", "norm_ratio", "cosine", "cosine_of_others")}
    yield _finding("spike", STATES, ratio, numbers, sentence)


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
    yield _finding("super-weight", SECTION, share, numbers | place, f"{sentence}.")


def _heads(run: Sequences) -> Iterator[Finding]:
    table = run.table("head_scores")
    norm, mass, layers = (table[name].to_numpy() for name in ("relative_norm", "first_mass", "layer"))
    found = rank_correlation(-norm, mass, layers)
    flagged = [set(dormant(table, by, SHARE)) for by in ("output-norm", "first-mass")]
    both = len(flagged[0] & flagged[1]) / len(flagged[0])
    sentence = "Two scores of dormant heads, a small norm of the output in its layer and much attention to position 0, "
    sentence += f"have rank correlation {with_interval(found, '.2f')} over {len(table)} heads; of the "
    sentence += f"{len(flagged[0])} heads that each of them flags, {both:.0%} are the same, where chance gives "
    sentence += f"{SHARE:.0%}."
    numbers = {"heads": len(table), "flagged": len(flagged[0]), "both": both, "chance": SHARE}
    yield _finding("dormant-heads", SECTION, found, numbers, sentence)


def _over_mixing(run: Sequences) -> Iterator[Finding]:
    def change(sequences: Sequences) -> Estimate:
        return bootstrap(sequences.means("over_mixing_by_sequence", "change").mean(1))

    value, numbers = change(run), dict[str, float]()
    sentence = f"A changed token changes the states of later tokens by {with_interval(value, '.1%')} of their norm, "
    sentence += "mean over layers, substitutions and sequences"
    every = run.run.tables["over_mixing_by_sequence"].groupby("condition")["change"].mean()
    for label in run.run.manifest.get("arms", {}) if run.run.is_experiment else ():
        arm = change(Sequences(run.run, label))
        drawn = [float(x) for name, x in every.items() if str(name).startswith(f"{label} control ")]
        numbers |= {label: arm.value, **interval(arm, f"{label}_")}
        numbers |= {f"{label} control": float(np.mean(drawn)) if drawn else float("nan")}
        sentence += f"; under {label} by {with_interval(arm, '.1%')}"
        sentence += f", under its {len(drawn)} controls by {min(drawn):.1%} to {max(drawn):.1%}" if drawn else ""
    yield _finding("over-mixing", SECTION, value, numbers, f"{sentence}.")

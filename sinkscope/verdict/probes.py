"""Findings on states, super weights, dormant heads and over-mixing, where `analyze` or `intervene` measured them."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from sinkscope.interventions.heads import AblateHeads, dormant
from sinkscope.interventions.super_weight import usual_pairs
from sinkscope.measuring.experiment import BEFORE
from sinkscope.measuring.observables.spikes import SECONDARY
from sinkscope.results.findings import Finding
from sinkscope.results.run import RunData
from sinkscope.results.statistics import rank_correlation

SECTION, STATES = "Neurons and heads", "States of the residual stream"
SHARE = AblateHeads().share


def findings(run: RunData) -> Iterator[Finding]:
    parts = {"entropy": _entropy, "sink_tokens": _secondary, "spikes": _spikes}
    for name, part in (parts | {"super_weights": _super_weight, "head_scores": _heads}).items():
        table = run.tables.get(name)
        if table is not None and len(table):
            yield from part(table[table["condition"] == BEFORE] if run.is_experiment else table, run)
    mixing = run.tables.get("over_mixing_by_sequence")
    if mixing is not None and len(mixing):
        yield _over_mixing(run, mixing)


def _entropy(table: pd.DataFrame, run: RunData) -> Iterator[Finding]:
    lowest = table.loc[table["entropy"].idxmin(), ["layer", "entropy", "entropy_without_first", "entropy_rescaled"]]
    sentence = "The entropy of the states is lowest after layer {:.0f}: {:.3f} of the largest possible. Without "
    sentence += "position 0 it is {:.3f} there, and with position 0 at the median norm of the others {:.3f}."
    about: dict[str, Any] = {"numbers": lowest.to_dict(), "sentence": sentence.format(*lowest)}
    yield Finding("state-entropy", STATES, value=float(lowest["entropy"]), **about)


def _secondary(table: pd.DataFrame, run: RunData) -> Iterator[Finding]:
    found = table[table["kind"] == SECONDARY]
    attention, elsewhere = found["attention"].mean(), found["attention_elsewhere"].mean()
    sentence = f"{len(found) or 'No'} later tokens join the first sink for a part of its layers"
    if len(found):
        sentence += f", most often {found['token'].astype(str).mode()[0]!r}. They receive {attention:.1f} times "
        sentence += f"uniform attention, equal tokens that are no sinks {elsewhere:.1f} times"
    numbers = {"attention": attention, "elsewhere": elsewhere}
    yield Finding("secondary-sinks", STATES, value=len(found), numbers=numbers, sentence=f"{sentence}.")


def _spikes(table: pd.DataFrame, run: RunData) -> Iterator[Finding]:
    most, rotated = table.loc[table["largest_share"].idxmax()], float(table["rotated_share"].max())
    sentence = f"One coordinate is large, above 20 times the median entry, at {most['largest_share']:.1%} of the "
    sentence += f"tokens after layer {most['layer']}; after a random rotation of the states at {rotated:.1%} at most."
    numbers = {"layer": int(most["layer"]), "rotated": rotated}
    value = float(most["largest_share"])
    yield Finding("residual-sinks", STATES, value=value, numbers=numbers, sentence=sentence)
    rise = table.loc[table["step"] == "up", ["layer", "norm_ratio", "cosine", "cosine_of_others"]]
    if len(rise):
        sentence = "The norm of a sequence's largest token rises most in layer {:.0f}, to {:.4g} times the median. "
        sentence += "There the largest tokens of two sequences have cosine {:.3f}, tokens with the median norm {:.3f}."
        about: dict[str, Any] = {"numbers": rise.iloc[0].to_dict(), "sentence": sentence.format(*rise.iloc[0])}
        yield Finding("spike", STATES, value=float(rise.iloc[0]["norm_ratio"]), **about)


def _super_weight(table: pd.DataFrame, run: RunData) -> Iterator[Finding]:
    usual = usual_pairs(table)
    found = usual[usual["is_early"]].set_index("layer")["written"].idxmax()
    layer, chosen = int(found), usual.set_index("layer").loc[found]
    row, column = int(chosen["row"]), int(chosen["column"])
    sentence = "The largest entry that a feed-forward network adds in the first three quarters of the layers is "
    sentence += f"{chosen['written']:,.4g}, in layer {layer} at coordinate {row}. There the weight at row {row} and "
    sentence += f"column {column}, the neuron with the largest input, writes {chosen['share']:.0%} of the row's "
    sentence += f"output, in {chosen['sequences']:.0%} of the sequences"
    massive = run.tables["massive"][lambda x: x["is_massive"]] if "massive" in run.tables else pd.DataFrame()
    if len(massive):
        usually = int(massive.loc[massive["value"].abs().idxmax(), "coordinate"])
        sentence += f"; the largest massive activation is at {'the same' if usually == row else 'another'} coordinate"
        sentence += "" if usually == row else f", {usually}"
    numbers = {name: float(chosen[name]) for name in ("written", "input", "output", "weight", "sequences")}
    numbers |= {"layer": layer, "row": row, "column": column}
    yield Finding("super-weight", SECTION, value=float(chosen["share"]), numbers=numbers, sentence=f"{sentence}.")


def _heads(table: pd.DataFrame, run: RunData) -> Iterator[Finding]:
    norm, mass, layers = (table[name].to_numpy() for name in ("relative_norm", "first_mass", "layer"))
    found = rank_correlation(-norm, mass, layers)
    flagged = [set(dormant(table, by, SHARE)) for by in ("output-norm", "first-mass")]
    both = len(flagged[0] & flagged[1]) / len(flagged[0])
    sentence = "Two scores of dormant heads, a small norm of the output in its layer and much attention to position 0, "
    sentence += f"have rank correlation {found.value:.2f} over {len(table)} heads (95 % interval {found.low:.2f} to "
    sentence += f"{found.high:.2f}); of the {len(flagged[0])} heads that each of them flags, {both:.0%} are the same, "
    sentence += f"where chance gives {SHARE:.0%}."
    numbers = {"heads": len(table), "flagged": len(flagged[0]), "both": both, "chance": SHARE}
    about: dict[str, Any] = {"low": found.low, "high": found.high, "numbers": numbers, "sentence": sentence}
    yield Finding("dormant-heads", SECTION, value=found.value, **about)


def _over_mixing(run: RunData, table: pd.DataFrame) -> Finding:
    every = table.groupby("condition")["change"].mean()
    value = float(every[BEFORE] if run.is_experiment else every.iloc[0])
    sentence = "A changed token changes the states of later tokens by "
    sentence += f"{value:.1%} of their norm, mean over layers, substitutions and sequences"
    numbers: dict[str, float] = {}
    for label in run.manifest.get("arms", {}) if run.is_experiment else ():
        drawn = [float(x) for name, x in every.items() if str(name).startswith(f"{label} control ")]
        numbers |= {label: float(every[label]), f"{label} control": float(np.mean(drawn)) if drawn else float("nan")}
        sentence += f"; under {label} by {every[label]:.1%}"
        sentence += f", under its {len(drawn)} controls by {min(drawn):.1%} to {max(drawn):.1%}" if drawn else ""
    return Finding("over-mixing", SECTION, value=value, numbers=numbers, sentence=f"{sentence}.")

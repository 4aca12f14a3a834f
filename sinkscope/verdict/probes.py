"""Findings on states, super weights, dormant heads and over-mixing, where `analyze` or `intervene` measured them."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from sinkscope.interventions.heads import AblateHeads, dormant
from sinkscope.interventions.super_weight import usual_pairs
from sinkscope.measuring.experiment import BEFORE
from sinkscope.measuring.observables.spikes import RESIDUAL_SINK, SECONDARY
from sinkscope.results.findings import Finding
from sinkscope.results.run import RunData
from sinkscope.results.statistics import rank_correlation

SECTION, STATES = "Neurons and heads", "States of the residual stream"
SHARE = AblateHeads().share
MOST_COORDINATES = 3  # that are named


def findings(run: RunData) -> Iterator[Finding]:
    parts = (("entropy", _entropy), ("parallel_tokens", _secondary), ("spikes", _spikes))
    for name, part in (*parts, ("super_weights", _super_weight), ("head_scores", _heads)):
        table = run.tables.get(name)
        if table is not None and len(table):
            yield from part(_before(run, name), run)
    mixing = run.tables.get("over_mixing_by_sequence")
    if mixing is not None and len(mixing):
        yield _over_mixing(run, mixing)


def _before(run: RunData, name: str) -> pd.DataFrame:
    """Return a table without the arms of an experiment."""
    table = run.tables[name]
    return table[table["condition"] == BEFORE] if run.is_experiment else table


def _entropy(table: pd.DataFrame, run: RunData) -> Iterator[Finding]:
    lowest = table.loc[table["entropy"].idxmin()]
    names = ("entropy_without_first", "entropy_rescaled")
    without, rescaled = (float(lowest[name]) for name in names)
    sentence = f"The entropy of the states is lowest after layer {lowest['layer']}: {lowest['entropy']:.3f} of the "
    sentence += f"largest possible. Without position 0 it is {without:.3f} there, and with position 0 at the median "
    sentence += f"norm of the others {rescaled:.3f}."
    numbers = {"layer": int(lowest["layer"]), "without_first": without, "rescaled": rescaled}
    yield Finding("state-entropy", STATES, value=float(lowest["entropy"]), numbers=numbers, sentence=sentence)


def _secondary(parallel: pd.DataFrame, run: RunData) -> Iterator[Finding]:
    share = parallel.groupby("layer")["parallel"].mean()
    among = f"at most {share.max():.1%} of the other tokens have its direction (layer {share.idxmax()})"
    table = _before(run, "sink_tokens") if "sink_tokens" in run.tables else pd.DataFrame({"kind": []})
    found = table[table["kind"] == SECONDARY]
    sentence = f"No later token joins the first sink for a part of its layers; {among}."
    numbers = {"parallel": float(share.max()), "layer": int(share.idxmax())}
    if len(found):
        usual = found["token"].value_counts()
        attention, elsewhere = found["attention"].mean(), found["attention_elsewhere"].mean()
        sentence = f"{len(found)} later tokens join the first sink for a part of its layers, most often "
        sentence += (
            f"{usual.index[0]!r} ({usual.iloc[0]} times). They receive {attention:.1f} times the attention that "
        )
        sentence += f"uniform attention gives, equal tokens that are no sinks {elsewhere:.1f} times; {among}."
        numbers |= {"attention": attention, "elsewhere": elsewhere}
    yield Finding("secondary-sinks", STATES, value=len(found), numbers=numbers, sentence=sentence)


def _spikes(table: pd.DataFrame, run: RunData) -> Iterator[Finding]:
    most, rotated = table.loc[table["largest_share"].idxmax()], float(table["rotated_share"].max())
    sentence = (
        f"One coordinate is large, above 20 times the median entry, at {most['largest_share']:.1%} of the tokens "
    )
    sentence += f"after layer {most['layer']}; after a random rotation of the states at {rotated:.1%} at most."
    if "residual_sinks" in run.tables:
        found = _before(run, "residual_sinks")
        found = found.loc[found["kind"] == RESIDUAL_SINK, "coordinate"].value_counts()
        listed = ", ".join(map(str, found.index[:MOST_COORDINATES]))
        sentence += f" The coordinates that are large in most layers are {listed}." if listed else ""
    numbers = {"layer": int(most["layer"]), "rotated": rotated}
    value = float(most["largest_share"])
    yield Finding("residual-sinks", STATES, value=value, numbers=numbers, sentence=sentence)
    for rise in table[table["step"] == "up"].head(1).itertuples():
        sentence = (
            f"The norm of a sequence's largest token rises most in layer {rise.layer}, to {rise.norm_ratio:,.4g} "
        )
        sentence += (
            f"times the median. There the largest tokens of two sequences have cosine {rise.cosine:.3f}, tokens "
        )
        sentence += f"with the median norm {rise.cosine_of_others:.3f}."
        numbers = {"layer": rise.layer, "cosine": rise.cosine, "cosine_of_others": rise.cosine_of_others}
        yield Finding("spike", STATES, value=rise.norm_ratio, numbers=numbers, sentence=sentence)


def _super_weight(table: pd.DataFrame, run: RunData) -> Iterator[Finding]:
    usual = usual_pairs(table)
    found = usual[usual["is_early"]].set_index("layer")["written"].idxmax()
    layer, chosen = int(found), usual.set_index("layer").loc[found]
    row, column = int(chosen["row"]), int(chosen["column"])
    sentence = "The largest entry that a feed-forward network adds in the first three quarters of the layers is "
    sentence += f"{chosen['written']:,.4g}, in layer {layer} at coordinate {row}. There the weight at row {row} and "
    sentence += (
        f"column {column}, the neuron with the largest input, writes {chosen['share']:.0%} of the row's output, "
    )
    sentence += f"in {chosen['sequences']:.0%} of the sequences"
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

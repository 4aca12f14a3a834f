"""Numbers that claims of several papers are made of, with replicates on the first axis (`results/statistics.py`)."""

import numpy as np
import pandas as pd

from sinkscope.measuring.observables.gradient import ALL_HEADS
from sinkscope.measuring.observables.observable import LATER
from sinkscope.measuring.summary import pathway_norms
from sinkscope.paper_claims.claim import Part, above
from sinkscope.paper_claims.evidence import Evidence, Lacks
from sinkscope.results.findings import USUAL
from sinkscope.results.metrics import is_sink
from sinkscope.results.statistics import Estimate, bootstrap, positive_jackknife

BEHIND = slice(1, LATER.stop)  # all positions that position 0 is compared with where none is left out


# --- attention, by sequences


def attention(evidence: Evidence, column: str, role: str = "natural", condition: str | None = None) -> np.ndarray:
    """(R, layers, positions): sink_rate, sink_mass or window_mass, means over heads and sequences."""
    sequences = evidence.sequences(role, condition)
    return sequences.means("attention_by_sequence", column, ("layer", "position"))


def sink_rates(
    evidence: Evidence, role: str = "natural", position: int = 0, condition: str | None = None
) -> np.ndarray:
    """(R,): S_k of the whole model, in percent."""
    return 100 * attention(evidence, "sink_rate", role, condition)[..., position].mean(1)


def by_head(evidence: Evidence, table: str, column: str) -> np.ndarray:
    """(R, all heads): means over sequences, head after head and layer after layer."""
    means = evidence.sequences("natural").means(table, column, ("layer", "head"))
    # the axes are rectangular, but layers may have different numbers of heads
    return means.reshape(len(means), -1)


def layers_of_heads(evidence: Evidence) -> np.ndarray:
    """(all heads,): the layer of each head, as `by_head` has them."""
    shape = evidence.sequences("natural").values("attention_heads_by_sequence", "window_mass", ("layer", "head")).shape
    return np.repeat(np.arange(shape[1]), shape[2])


def sink_heads(evidence: Evidence) -> tuple[np.ndarray, str]:
    """Which heads have their sink at position 0: (all heads,), and how to say it. All, where none has one."""
    mass = by_head(evidence, "attention_heads_by_sequence", "window_mass")[0]
    found = is_sink(mass, evidence.runs["natural"].manifest["config"]["epsilon"])
    known = np.isfinite(mass)
    if not found.any():
        return known, "all heads, since none has a sink"
    return found, f"{found.sum()} of {known.sum()} heads, those with a sink"


def _has_sink_heads(evidence: Evidence) -> Estimate:
    """The share of heads with a sink at position 0, of the mean window mass."""
    mass = by_head(evidence, "attention_heads_by_sequence", "window_mass")
    mass = mass[:, np.isfinite(mass[0])]
    return bootstrap(is_sink(mass, evidence.runs["natural"].manifest["config"]["epsilon"]).mean(1))


# of claims on heads with a sink: without any they fail
HAS_SINK_HEADS = Part("share of heads with a sink at position 0", _has_sink_heads, above(0.0))


def in_sink_heads(evidence: Evidence, column: str) -> Estimate:
    """Median over sink heads of a number at position 0 ÷ the same at later positions."""
    chosen, note = sink_heads(evidence)
    first, later = (by_head(evidence, "geometry_by_sequence", name) for name in (column, f"{column}_later"))
    return bootstrap(np.median((first / later)[:, chosen], axis=1)).over(note)


# --- norms


def norms(evidence: Evidence, site: str, column: str = "norm", role: str = "natural") -> np.ndarray:
    """(R, layers): L2 norms at a site, mean over sequences."""
    return evidence.sequences(role).means("activation_by_sequence", column, ("layer",), site=site)


def norm_ratios(evidence: Evidence, site: str) -> np.ndarray:
    """(R, layers): at position 0 ÷ later ones."""
    return norms(evidence, site) / norms(evidence, site, "norm_later")


def massive_layers(evidence: Evidence, role: str = "natural") -> np.ndarray:
    """Layers whose output has massive activations at position 0 in at least half of the sequences."""
    table = evidence.table(role, "massive")
    at_first = table[table["is_massive"] & (table["position"] == 0)]
    count = evidence.runs[role].manifest["input"]["sequences"]
    share = at_first.groupby("layer")["sequence"].nunique() / count
    return share.index[share >= USUAL].to_numpy()


# --- gradients, by groups of sequences


def gradients(evidence: Evidence, pathway: str, role: str = "natural") -> np.ndarray:
    """(1 + groups, layers, positions): norms of all heads together; the first of the whole run, the others without one
    group of sequences each. Of values in front of a gate or scale on them.
    """
    tables = (evidence.table(role, "gradient").assign(group=-1), evidence.table(role, "gradient_by_group"))
    columns = ["group", "layer", "pathway", "head", "position", "grad_norm"]
    parts = [table.loc[table["head"] == ALL_HEADS, columns] for table in tables]  # most rows are of single heads
    norms = pathway_norms(in_front_of_valves(pd.concat(parts, ignore_index=True)), pathway, by=("group",))
    count = norms.index.get_level_values("group").nunique()
    return norms.to_numpy().reshape(count, len(norms) // max(count, 1), norms.shape[1])


def in_front_of_valves(gradient: pd.DataFrame) -> pd.DataFrame:
    """Rows of `gradient` in which `value` is the raw value state where there is a gate or scale behind it: the papers
    speak of that one (GS §5.1, VGA eq. 8).
    """
    is_raw = gradient["pathway"] == "raw_value"
    behind = (gradient["pathway"] == "value") & gradient["layer"].isin(gradient["layer"][is_raw].unique())
    return gradient[~behind].assign(pathway=gradient["pathway"].mask(is_raw, "value"))


def gradient_ratio(evidence: Evidence, pathway: str, role: str = "natural") -> Estimate:
    """At position 0 ÷ later ones, of norms averaged over layers first (GS fig. 2).

    Raises:
        Lacks: fewer positions were measured than it divides by.
    """
    by_position = gradients(evidence, pathway, role).mean(1)
    if by_position.shape[1] < min(LATER.stop, evidence.runs[role].manifest["input"]["longest"]):
        raise Lacks("needs positions 5–15: --positions 16 or more")
    return positive_jackknife(by_position[:, 0] / later_positions(by_position).mean(1))


def later_positions(x: np.ndarray) -> np.ndarray:
    """(…, positions) → (…, those of positions 5–15 that there are). Raises Lacks: there is none."""
    if x.shape[-1] <= LATER.start:
        raise Lacks("needs positions 5–15: longer sequences, and --positions 16 or more")
    return x[..., LATER]

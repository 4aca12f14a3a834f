"""Numbers of one run with their intervals, and the claims of papers that one run decides; the verdict uses both.

Functions read a run's tables by sequence (`results/sequences.py`) and return an estimate, or replicates on the first
axis R (`results/statistics.py`).
"""

from typing import NamedTuple

import numpy as np
import pandas as pd

from sinkscope.interventions.super_weight import PAIR, usual_pairs
from sinkscope.measuring.observables.reductions import ALL_HEADS, LATER
from sinkscope.measuring.summary import pathway_norms
from sinkscope.results.findings import AFTER_LAYER, HIGH_NORM, OUTLIER, PHI, SINK, USUAL
from sinkscope.results.judgment import NotDefined, Number, above, at_least, at_most, below, between
from sinkscope.results.metric_estimates import replicates
from sinkscope.results.metrics import is_clear, is_sink, lacks_rate, reason_without_rate
from sinkscope.results.run import RunData
from sinkscope.results.sequences import Lacks, Sequences
from sinkscope.results.statistics import (
    Estimate,
    bootstrap,
    exact,
    positive_jackknife,
    resamplings_of,
    weighted_means,
    with_unseen_values,
)

# --- attention, by sequences


def attention(sequences: Sequences, column: str) -> np.ndarray:
    """Return sink_rate, sink_mass or window_mass, means over heads and sequences, (R, layers, positions)."""
    return sequences.means("attention_by_sequence", column, ("layer", "position"))


def sink_rates(sequences: Sequences, position: int = 0) -> np.ndarray:
    """Return the sink rate S_k of the whole model in percent, (R,)."""
    return 100 * sequences.means("attention_by_sequence", "sink_rate", position=position).mean(1)


def sink_rate(sequences: Sequences) -> Estimate:
    """Estimate the sink rate at position 0 in percent. Raises NotDefined if there is none, at this ε and length."""
    rate = with_unseen_values(bootstrap(sink_rates(sequences)), sequences.texts, most=100.0)
    if np.isnan(rate.value):
        raise NotDefined(without_rate(sequences))
    return rate


def without_rate(sequences: Sequences) -> str:
    uniform_mass = float(attention(sequences, "uniform_mass")[0, :, 0].mean())
    return f"position 0 has no sink rate: {reason_without_rate(uniform_mass, sequences.epsilon)}"


def clear_sink_rate(sequences: Sequences) -> Estimate:
    """Estimate the share of heads in percent in which position 0 is a sink and clear of uniform attention."""
    rate = bootstrap(100 * replicates(sequences, "sink_rate_clear"))
    return with_unseen_values(rate, sequences.texts, most=100.0)


def by_head(sequences: Sequences, table: str, column: str) -> np.ndarray:
    """Return means over sequences of all heads, layer by layer, (R, heads); NaN where a layer has fewer heads."""
    means = sequences.means(table, column, ("layer", "head"))
    return means.reshape(len(means), -1)


def layers_of_heads(sequences: Sequences) -> np.ndarray:
    """Return the layer of each head in the order of `by_head`, (heads,)."""
    shape = sequences.values("attention_heads_by_sequence", "window_mass", ("layer", "head")).shape
    return np.repeat(np.arange(shape[1]), shape[2])


def head_sinks(sequences: Sequences) -> tuple[np.ndarray, np.ndarray]:
    """Return whether each head's mean window mass makes position 0 a sink, (R, heads), and which heads are measured."""
    mass, uniform = (by_head(sequences, "attention_heads_by_sequence", x) for x in ("window_mass", "uniform_mass"))
    epsilon, is_measured = sequences.epsilon, np.isfinite(mass[0])
    if lacks_rate(uniform[0, is_measured], epsilon).all():
        raise NotDefined(without_rate(sequences))
    return is_sink(mass, epsilon) & is_clear(mass, uniform), is_measured


def sink_heads(sequences: Sequences) -> tuple[np.ndarray, str]:
    """Return which heads have a sink at position 0, (heads,), with a note; all heads if none has one."""
    sinks, known = head_sinks(sequences)
    if not sinks[0].any():
        return known, "all heads, since none has a sink"
    return sinks[0], f"{sinks[0].sum()} of {known.sum()} heads, those with a sink"


def share_of_sink_heads(sequences: Sequences) -> Estimate:
    """Estimate the share of heads with a sink at position 0."""
    sinks, known = head_sinks(sequences)
    return bootstrap(sinks[:, known].mean(1))


def in_sink_heads(sequences: Sequences, column: str) -> Estimate:
    """Estimate the median over sink heads of a number at position 0 ÷ the same at later positions."""
    chosen, note = sink_heads(sequences)
    first, later = (by_head(sequences, "geometry_by_sequence", name) for name in (column, f"{column}_later"))
    return bootstrap(np.median((first / later)[:, chosen], axis=1)).over(note)


def share_within_bound(sequences: Sequences) -> Estimate:
    """Return, for repeated tokens, the smallest share of heads and queries whose weight is within WSE's bound."""
    table = equal_tokens(sequences).dropna(subset=["bound_share"])
    if not len(table):
        raise NotDefined("its logits are not scaled products of queries and keys")
    note = f"{len(table)} pairs of layer and sequence; a ÷ bound ≤ {table['bound_ratio'].max():.3g}"
    return exact(table["bound_share"].min()).over(note)


def equal_tokens(sequences: Sequences) -> pd.DataFrame:
    """Return the table `equal_tokens`; raise NotDefined if the run did not read repeated tokens."""
    if "equal_tokens" not in sequences.run.tables:
        raise NotDefined("its sequences are not one repeated token: another token precedes them")
    return sequences.table("equal_tokens")


# --- norms and massive activations


def norms(sequences: Sequences, site: str, column: str = "norm") -> np.ndarray:
    """Return L2 norms at a site, means over sequences, (R, layers)."""
    return sequences.means("activation_by_sequence", column, ("layer",), site=site)


def norm_ratios(sequences: Sequences, site: str) -> np.ndarray:
    """Return norms at position 0 ÷ at later positions, (R, layers)."""
    return norms(sequences, site) / norms(sequences, site, "norm_later")


def massive_layers(sequences: Sequences) -> np.ndarray:
    """Return the layers whose output has massive activations at position 0 in at least half of the sequences."""
    table = sequences.table("massive")
    at_first = table[table["is_massive"] & (table["position"] == 0)]
    count = sequences.run.manifest["input"]["sequences"]
    share = at_first.groupby("layer")["sequence"].nunique() / count
    return share.index[share >= USUAL].to_numpy()


def massive_count(sequences: Sequences) -> Estimate:
    """Estimate the massive activations per sequence in the output of the layer with the most, as the paper counts."""
    table = sequences.table("massive")
    counts = table.groupby(["sequence", "layer"])["is_massive"].sum().unstack(fill_value=0)
    weights = resamplings_of(sequences.run.text_numbers[counts.index])
    return bootstrap(weighted_means(counts.to_numpy(float), weights).max(1))


# --- gradients, by groups of sequences


def gradients(sequences: Sequences, pathway: str) -> np.ndarray:
    """Return norms of all heads, before gates, (1 + groups, layers, positions): of the run, then without each group."""

    def compute() -> np.ndarray:
        tables = (sequences.table("gradient").assign(group=-1), sequences.table("gradient_by_group"))
        columns = ["group", "layer", "pathway", "head", "position", "grad_norm"]
        parts = [table.loc[table["head"] == ALL_HEADS, columns] for table in tables]  # most rows are of single heads
        norms = pathway_norms(before_valves(pd.concat(parts, ignore_index=True)), pathway, by=("group",))
        count = norms.index.get_level_values("group").nunique()
        return norms.to_numpy().reshape(count, len(norms) // max(count, 1), norms.shape[1])

    return sequences.once(("gradients", pathway), compute)  # many claims read them


def before_valves(gradient: pd.DataFrame) -> pd.DataFrame:
    """Return `gradient` with `value` before any gate or scale, the state that the papers mean (GS §5.1, VGA eq. 8)."""
    is_raw = gradient["pathway"] == "raw_value"
    after = (gradient["pathway"] == "value") & gradient["layer"].isin(gradient["layer"][is_raw].unique())
    return gradient[~after].assign(pathway=gradient["pathway"].mask(is_raw, "value"))


def gradient_ratios(sequences: Sequences, pathway: str) -> np.ndarray:
    """Return the norm at position 0 ÷ at later positions, averaged over layers first (GS fig. 2), (1 + groups,)."""
    by_position = gradients(sequences, pathway).mean(1)
    if by_position.shape[1] < min(LATER.stop, sequences.run.manifest["input"]["longest"]):
        raise Lacks("needs positions 5–15: --positions 16 or more")
    return by_position[:, 0] / later_positions(by_position).mean(1)


def gradient_ratio(sequences: Sequences, pathway: str) -> Estimate:
    return positive_jackknife(gradient_ratios(sequences, pathway))


def later_positions(x: np.ndarray) -> np.ndarray:
    """Return the positions 5–15 that were measured of x (…, positions); raise Lacks if none was measured."""
    if x.shape[-1] <= LATER.start:
        raise Lacks("needs positions 5–15: longer sequences, and --positions 16 or more")
    return x[..., LATER]


def value_over_key(sequences: Sequences) -> Estimate:
    """Estimate the value gradient at position 0 ÷ the key gradient there."""
    value, key = (gradients(sequences, pathway).mean(1)[:, 0] for pathway in ("value", "key"))
    return positive_jackknife(value / key)


def branch_ratios(sequences: Sequences, column: str, branch: str = "attn") -> np.ndarray:
    """Return a column of the branch's ratios, (R, layers, positions); raise NotDefined if no layer has them."""
    ratios = sequences.means("gradient_ratio_by_sequence", column, ("layer", "position"), branch=branch)
    if ratios.size == 0:
        raise NotDefined(f"the gradient's gain in the {branch} branch is not defined in any layer")
    return ratios


def compression_fit(sequences: Sequences, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Fit log₁₀ compress to log₁₀‖h‖ over layers and positions ≥ `first`: slope (R,) and correlation (R,)."""
    x, y = (branch_ratios(sequences, name)[..., first:] for name in ("input_norm", "compress"))
    known = (x > 0).all(0) & (y > 0).all(0)
    if known.sum() < 3:  # points to which a line is fitted
        raise NotDefined("too few layers and positions have the gain of a norm in front of the attention branch")
    x, y = np.log10(x[:, known]), np.log10(y[:, known])
    x, y = x - x.mean(1, keepdims=True), y - y.mean(1, keepdims=True)
    covariance = (x * y).sum(1)
    return covariance / (x**2).sum(1), covariance / np.sqrt((x**2).sum(1) * (y**2).sum(1))


def _compression_slope(sequences: Sequences) -> Estimate:
    """Estimate the slope, with a note on the slope without position 0: few points with very large norms can set it."""
    later = bootstrap(compression_fit(sequences, first=1)[0])
    return bootstrap(compression_fit(sequences)[0]).over(
        f"without position 0 {later.value:.3f} [{later.low:.3f}, {later.high:.3f}]"
    )


# --- the query bias


def second_half(by_layer: np.ndarray) -> np.ndarray:
    """Return the second half of the layers of x (…, layers)."""
    return by_layer[..., by_layer.shape[-1] // 2 :]


def delta_gaps(sequences: Sequences) -> np.ndarray:
    """Return (Δ of position 0 - mean of later tokens) ÷ the standard deviation of all later tokens, (R, layers)."""
    table = "query_bias_by_sequence"
    first, later = (sequences.means(table, column) for column in ("delta", "delta_later"))
    mean, spread = (sequences.values(table, column) for column in ("delta_later", "delta_later_std"))
    deviation = np.sqrt(weighted_means(spread**2 + mean**2, sequences.weights) - later**2)
    # a bias of zeros has no Δ, and a single later token no deviation
    return (first - later) / np.where(deviation > 0, deviation, np.nan)


def _share_of_layers_apart(sequences: Sequences) -> Estimate:
    gaps = second_half(delta_gaps(sequences))
    note = f"{gaps.shape[1]} layers, Δ₀ {' '.join(f'{gap:+.1f}' for gap in gaps[0])} deviations from the mean"
    return bootstrap((gaps > OUTLIER).mean(1)).over(note)


def _alignment(sequences: Sequences) -> np.ndarray:
    """Return cos(W_k EPE, b_Q) of all heads together, (positions, layers)."""
    table = sequences.table("query_bias")
    rows = table[table["head"] == ALL_HEADS]
    return rows.pivot(index="position", columns="layer", values="key_alignment").to_numpy()


OF_WEIGHTS = "computed from the weights alone, so without an interval"


def _first_alignment(sequences: Sequences) -> Estimate:
    by_layer = second_half(_alignment(sequences))[0]
    return exact(by_layer.mean()).over(f"{OF_WEIGHTS}; by layer {', '.join(f'{cosine:.2f}' for cosine in by_layer)}")


def _later_alignment(sequences: Sequences) -> Estimate:
    later = np.abs(later_positions(second_half(_alignment(sequences)).T))
    return exact(later.mean()).over(f"{OF_WEIGHTS}; the largest {later.max():.2f}")


# --- claims that one run decides


class RunClaim(NamedTuple):
    """A claim that one run decides. `commands/claims/papers/` adds its scope and the published value."""

    reference: str
    statement: str
    parts: tuple[Number[Sequences], ...]


SPIKE = 2.0  # the threshold of GS-6: times the gradient ratio of random weights
SINK_HEADS_OF_RUN: Number[Sequences] = Number(  # a claim on heads with a sink fails if no head has one
    "share of heads with a sink at position 0", share_of_sink_heads, above(0.0), is_evidence=False
)

RUN_CLAIMS: dict[str, RunClaim] = {
    "W-1": RunClaim("table 1", "There is a sink at the first token.",
        (Number("sink rate at position 0 in %", sink_rate, above(SINK)),)),
    "W-9": RunClaim("proposition 4", "With rotary positions, attention to the first of repeated tokens is bounded.",
        (Number("smallest share, over layers and sequences, of heads and queries within e^{2ξ} ÷ (e^{2ξ} + t)",
            share_within_bound, at_least(1.0)),)),
    "S-6": RunClaim("Sun et al.", "Massive activations are few.",
        (Number("number per sequence, in the output of the layer with the most", massive_count, below(10.0)),
         Number("the same number, compared with zero", massive_count, above(0.0)))),
    "GS-8": RunClaim("§3.1, §5", "The value pathway is stronger than the key pathway.",
        (Number("‖∇v₀‖ ÷ ‖∇k₀‖, means over layers", value_over_key, at_least(2.0)),)),
    "GS-17": RunClaim("fig. 3", "Compression follows the norm, as RMSNorm alone makes it.",
        (Number("slope of log compress on log ‖h‖, over all layers", _compression_slope, between(-1.15, -0.85)),
         Number("their correlation", lambda run: bootstrap(compression_fit(run)[1]), at_most(-0.95)))),
    "GS-20": RunClaim("§5", "The sink's values are small.",
        (Number("value norm at 0 ÷ later, median over sink heads",
            lambda run: in_sink_heads(run, "value_norm"), below(0.5)),
         SINK_HEADS_OF_RUN)),
    "N-1": RunClaim("fig. 1, 4", "The query bias sets Δ of position 0 apart in most deep layers.",
        (Number("share of the second half of layers with Δ₀ above the mean of later tokens by 2 standard deviations",
            _share_of_layers_apart, above(0.5)),)),
    "N-2": RunClaim("fig. 2, 5", "W_k EPE₀ is parallel to b_Q, and that of other positions is not.",
        (Number("cos(W_k EPE₀, b_Q), mean over the second half of layers", _first_alignment, above(0.5)),
         Number("magnitude of the same at positions 5–15, mean over them", _later_alignment, below(0.2)))),
}  # fmt: skip


# --- pictures: ratios of sums over pictures, which are resampled


def _ratio_of_sums(run: RunData, table: pd.DataFrame, above: pd.Series, below: pd.Series) -> np.ndarray:
    """Return Σ above ÷ Σ below for all resamplings of the pictures, (R,); NaN where nothing was drawn."""
    sums = pd.DataFrame({"above": above, "below": below}).astype(float).groupby(table["sequence"]).sum()
    listed = run.tables.get("picture")
    looks = sums.index if listed is None else listed.set_index("sequence")["thumbnail"].reindex(sums.index)
    totals = resamplings_of(pd.factorize(looks)[0]) @ sums.to_numpy()  # copies look the same
    with np.errstate(invalid="ignore", divide="ignore"):
        return totals[:, 0] / totals[:, 1]


def super_weight(sequences: Sequences) -> tuple[pd.Series, Estimate]:
    """Return the super weight, a row of `usual_pairs`, and the share of its row's output that it writes.

    The share is the mean over the sequences that have the pair. Raises NotDefined.
    """
    table = sequences.table("super_weights")
    usual = usual_pairs(table)
    usual = usual[usual["is_early"]]
    if usual.empty:
        raise NotDefined("no early layer has a feed-forward network of this form")
    chosen, key = usual.loc[usual["written"].idxmax()], ["layer", *PAIR]
    of_pair = table[(table[key] == chosen[key]).all(axis=1)]
    shares = of_pair.set_index("sequence")["share"].reindex(range(sequences.weights.shape[1]))
    return chosen, bootstrap(weighted_means(shares.to_numpy(float), sequences.weights))


def _visual(run: RunData) -> pd.DataFrame:
    if "visual_patch" not in run.tables:
        raise Lacks("sinkscope analyze MODEL --images DIR")
    return run.tables["visual_patch"].query(f"layer >= {AFTER_LAYER}")


def visual_sink_share(run: RunData) -> Estimate:
    """Estimate the share of visual tokens that are sinks by φ; the null is the share by random coordinates."""
    table = _visual(run)
    every = pd.Series(1.0, table.index)
    share, null = (_ratio_of_sums(run, table, sinks, every) for sinks in (table["phi"] > PHI, table["random_share"]))
    return bootstrap(share).against(float(null[0]))


def visual_sink_attention(run: RunData) -> Estimate:
    """Estimate the attention to a visual sink ÷ to another visual token; the null is by random coordinates."""
    table = _visual(run)
    sinks, mass = (table["phi"] > PHI).astype(float), table["mass"]
    if not sinks.any():
        raise NotDefined("no visual token is a sink")
    ratio, null = (
        _ratio_of_sums(run, table, share * mass, share) / _ratio_of_sums(run, table, (1 - share) * mass, 1 - share)
        for share in (sinks, table["random_share"])
    )
    return bootstrap(ratio).against(float(null[0]))


def outlier_patches(run: RunData) -> pd.DataFrame:
    """Return the patches of an encoder with their norm ÷ the median of their layer, and whether they are outliers."""
    table = run.tables["encoder_patch"].query("row >= 0")
    ratio = table["norm"] / table.groupby("layer")["norm"].transform("median")
    return table.assign(ratio=ratio, is_outlier=ratio > HIGH_NORM)


def outlier_share(run: RunData) -> Estimate:
    """Estimate the share of patches that are outliers by norm after the last layer of an encoder."""
    table = outlier_patches(run)
    last = table[table["layer"] == table["layer"].max()]
    return bootstrap(_ratio_of_sums(run, last, last["is_outlier"], pd.Series(1.0, last.index)))

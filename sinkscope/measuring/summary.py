"""The table `summary`: one number a layer, and one for the model (layer -1), from the other tables."""

from collections.abc import Mapping

import numpy as np
import pandas as pd

from sinkscope.measuring.gradient_summary import gradient_summary
from sinkscope.measuring.observables.query_bias import ALL_HEADS
from sinkscope.models.families import Family
from sinkscope.text.inputs import TokenInputs

FEWEST_QUERIES = 16  # a later position with fewer queries behind it cannot be told from a head that looks at itself
WHOLE_MODEL = -1
OUTLIER = 2.0  # standard deviations that set position 0's Δ apart (NU §4.2.1)


def summarise(
    tables: Mapping[str, pd.DataFrame],
    inputs: TokenInputs,
    family: Family,
    scaling: tuple[float, ...],
    loss: float | None = None,
) -> pd.DataFrame:
    """(layer, metric, value) rows of every metric that the tables allow. Position 0 is meant where none is named.

    sink_rate            share of heads with window mass above ε, mean over sequences (GS eq. 1)
    sink_rate_later      share of (head, sequence) pairs with a sink at some later position
    window_mass, sink_mass, attention_entropy, missing_mass    means over heads
    value_drain          value norm ÷ mean over the other positions, mean over heads
    gate_first, gate_later    what a retrofit multiplies values or heads' outputs by: at position 0, at later ones
    raw_value_drain      as value_drain, of the values before that
    norm_ratio           norm of the layer's output ÷ mean over the other positions
    massive_count        massive activations per sequence
    max_inf_norm         largest over sites (the model's: over layers too)
    kurtosis             mean over sites (the model's: over layers too)
    loss, perplexity     of the run's predicted tokens, where there was a backward pass
    value_gradient_ratio, key_gradient_ratio    gradient norm ÷ mean over positions ≥ 5
    bloat, compress, change    of the attention branch at position 0, the model's a median over layers;
                         bloat_later, … medians over positions ≥ 5
    compress_slope, compress_correlation    of log₁₀ compress on log₁₀‖x‖ over layers ≥ 1 and positions, attention
                         branch; also per token group of GS fig. 3, as compress_slope_2-3
    identity_residual    the largest relative residual of ∇v_s = Σ_t a[t,s] g_t
    theorem1_holds, theorem2_holds    share of heads and positions, of tokens, at which the bounds hold
    theorem2_tightness   measured ÷ bound
    delta_first, delta_later    what the query bias adds to the logits of position 0, of later ones (Δ, NU §4.1)
    delta_gap            Δ of position 0 above the later positions', in standard deviations of theirs
    delta_outlier_share  share of layers where that is more than OUTLIER
    key_alignment_first, key_alignment_later    cosine of W_k EPE and the query bias, learned positions only
    gamma_ratio          mean |γ| at the massive coordinates of EPE_0 ÷ mean |γ|
    repeated_bound       proposition 4 of WSE, for rotary models on repeated tokens: what sink_mass cannot exceed
    """
    per_layer: dict[str, pd.Series] = {}
    totals: dict[str, float] = {}
    if "attention" in tables:
        per_layer |= _attention(tables, inputs)
    if "geometry" in tables:
        per_layer |= _geometry(tables["geometry"])
        # not with a BOS in front of the repeated token
        repeated = inputs.condition == "repeated" and all((ids == ids[0]).all() for ids in inputs.sequences)
        if repeated and family.positions == "rotary":
            per_layer["repeated_bound"] = _repeated_bound(tables["geometry"], scaling, inputs.longest)
    if "gate" in tables:
        per_layer |= _gate(tables["gate"])
    if "activation" in tables:
        per_layer["norm_ratio"] = _ratio_to_others(
            tables["activation"].query("site == 'layer_out'"), "norm_mean", ["layer"]
        )
    if "massive" in tables:
        counts = tables["massive"].groupby("layer")["is_massive"].sum() / len(inputs)
        per_layer["massive_count"] = counts
        totals["massive_count"] = float(counts.sum())
    if "outlier" in tables:
        by_layer = tables["outlier"].groupby("layer")
        per_layer["max_inf_norm"] = by_layer["max_inf_norm"].max()
        per_layer["kurtosis"] = by_layer["kurtosis"].mean()
        totals["max_inf_norm"] = float(per_layer["max_inf_norm"].max())
    if loss is not None:
        totals |= {"loss": loss, "perplexity": float(np.exp(loss))}
    if "gradient" in tables:
        by_layer_gradient, fits = gradient_summary(tables)
        per_layer |= by_layer_gradient
        totals |= fits
    if "query_bias" in tables:
        per_layer |= _query_bias(tables)
        totals["delta_outlier_share"] = float((per_layer["delta_gap"] > OUTLIER).mean())
    rows = [
        (int(layer), metric, float(value)) for metric, series in per_layer.items() for layer, value in series.items()
    ]
    whole = {metric: float(series.mean()) for metric, series in per_layer.items()} | totals
    rows += [(WHOLE_MODEL, metric, value) for metric, value in whole.items()]
    return pd.DataFrame(rows, columns=["layer", "metric", "value"])


def _attention(tables: Mapping[str, pd.DataFrame], inputs: TokenInputs) -> dict[str, pd.Series]:
    attention, sinks = tables["attention"], tables["sink_positions"]
    first = attention[attention["position"] == 0].groupby("layer")
    heads = attention.groupby("layer")["head"].nunique()
    lengths = np.array([len(ids) for ids in inputs.sequences])
    later = sinks[(sinks["position"] > 0) & (lengths[sinks["sequence"]] - sinks["position"] >= FEWEST_QUERIES)]
    pairs = later.drop_duplicates(["layer", "head", "sequence"]).groupby("layer").size()
    by_head = tables["attention_heads"].groupby("layer")
    return {
        "sink_rate": first["sink_rate"].mean(),
        "sink_rate_later": (pairs.reindex(heads.index, fill_value=0) / heads / len(inputs)),
        "window_mass": first["window_mass"].mean(),
        "sink_mass": first["sink_mass"].mean(),
        "attention_entropy": by_head["attention_entropy"].mean(),
        "missing_mass": by_head["missing_mass"].mean(),
    }


def _geometry(geometry: pd.DataFrame) -> dict[str, pd.Series]:
    first = geometry[geometry["position"] == 0].groupby("layer")
    drain = _ratio_to_others(geometry, "value_norm", ["layer", "head"])
    return {
        "value_drain": drain.groupby("layer").mean(),
        "sink_logit_gap": first["sink_logit_gap"].mean(),
        "qk_cosine": first["qk_cosine"].mean(),
    }


def _gate(gate: pd.DataFrame) -> dict[str, pd.Series]:
    first, later = (gate[at].groupby("layer")["gate"] for at in _first_and_later(gate))
    drain = _ratio_to_others(gate, "raw_value_norm", ["layer", "head"])
    return {
        "gate_first": first.mean(),
        "gate_later": later.mean(),
        "raw_value_drain": drain.groupby("layer").mean(),
    }


def _query_bias(tables: Mapping[str, pd.DataFrame]) -> dict[str, pd.Series]:
    """All heads together. What rests on learned positions is left out where there are none."""
    table = tables["query_bias"]
    together = table[table["head"] == ALL_HEADS]
    first, later = (rows.groupby("layer") for rows in (together[at] for at in _first_and_later(together)))
    metrics = {
        "delta_first": first["delta_mean"].mean(),
        "delta_later": later["delta_mean"].mean(),
        "delta_gap": delta_gap(together),
    }
    if together["key_alignment"].notna().any():
        metrics |= {
            "key_alignment_first": first["key_alignment"].mean(),
            "key_alignment_later": later["key_alignment"].mean(),
        }
    gamma = tables["gamma"].assign(magnitude=tables["gamma"]["gamma"].abs())
    massive = gamma[gamma["is_massive_epe"]]
    if len(massive):
        by_layer = gamma.groupby("layer")["magnitude"]
        metrics["gamma_ratio"] = massive.groupby("layer")["magnitude"].mean() / by_layer.mean()
    return metrics


def delta_gap(query_bias: pd.DataFrame) -> pd.Series:
    """(Δ_0 - mean) ÷ standard deviation of the later positions' Δ, by layer, from one head's rows of `query_bias`.

    The deviation is over sequences and positions, all positions alike: spread within and between them.
    """
    at_first, at_later = _first_and_later(query_bias)
    later = query_bias[at_later].assign(within=query_bias["delta_std"] ** 2).groupby("layer")
    variance = later["within"].mean() + later["delta_mean"].var(ddof=0)
    first = query_bias[at_first].set_index("layer")["delta_mean"]
    return (first - later["delta_mean"].mean()) / np.sqrt(variance)


def _first_and_later(table: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    return table["position"] == 0, table["position"] > 0


def _ratio_to_others(table: pd.DataFrame, column: str, keys: list[str]) -> pd.Series:
    """Value at position 0 ÷ mean over the other positions of the table."""
    at_first = table["position"] == 0
    return table[at_first].groupby(keys)[column].mean() / table[~at_first].groupby(keys)[column].mean()


def _repeated_bound(geometry: pd.DataFrame, scaling: tuple[float, ...], length: int) -> pd.Series:
    """Mean over heads and queries of e^{2ξ} / (e^{2ξ} + t), t = 0 … T-1, with ξ = scaling · ‖q‖‖k‖ (WSE prop. 4).

    All tokens are equal, so every query and key of a head has one norm, and |logit| ≤ ξ.
    """
    first = geometry[geometry["position"] == 0]
    xi = first["query_norm"] * first["key_norm"] * np.asarray(scaling)[first["layer"]]
    bound = 1.0 / (1.0 + np.exp(-2 * xi.to_numpy())[:, None] * np.arange(length))
    return pd.Series(bound.mean(1), index=first["layer"]).groupby("layer").mean()

"""The table `summary`: every metric by layer, and of the whole model (layer -1), from the other tables."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from sinkscope.measuring.gradient_summary import gradient_summary
from sinkscope.measuring.losses import perplexity
from sinkscope.measuring.observables.outlier import OF_BONDARENKO
from sinkscope.measuring.observables.query_bias import ALL_HEADS
from sinkscope.measuring.uniform_attention import uniform_gradient_ratio
from sinkscope.models.family import NO_POSITIONS, Family
from sinkscope.results.findings import FEWEST_QUERIES, OUTLIER
from sinkscope.text.inputs import TokenInputs

WHOLE_MODEL = -1
# what the whole model has where that is not the mean of its layers
OF_MODEL: Mapping[str, Callable[[pd.Series], float]] = {
    "massive_count": pd.Series.sum,
    "max_inf_norm": pd.Series.max,
    "layer_inf_norm": pd.Series.max,
}


@dataclass(frozen=True)
class Measured:
    """What metrics are made of; as for `summarize`."""

    tables: Mapping[str, pd.DataFrame]
    inputs: TokenInputs
    family: Family
    scaling: tuple[float, ...]
    outside: Collection[str]


Metrics = tuple[dict[str, pd.Series], dict[str, float]]  # by layer; and of the whole model alone


def summarize(
    tables: Mapping[str, pd.DataFrame],
    inputs: TokenInputs,
    family: Family,
    scaling: tuple[float, ...],
    loss: float | None = None,
    outside: Collection[str] = (),
) -> pd.DataFrame:
    """The table `summary` from a run's other tables: every metric that they allow, by layer and of the whole model, as
    `results/metrics.py` defines it.

    Args:
        tables: Of one run, by name.
        inputs: What was read.
        family: Of the model.
        scaling: Of each layer's logits.
        loss: Per predicted token in nats, where there was a backward pass.
        outside: What is attended to besides the text.

    Returns:
        layer (-1: the whole model), metric, value.
    """
    given = Measured(tables, inputs, family, scaling, outside)
    by_layer: dict[str, pd.Series] = {}
    whole: dict[str, float] = {} if loss is None else {"loss": loss, "perplexity": perplexity(loss)}
    for name, metrics_of in METRICS_OF.items():
        if name in tables:
            metrics, of_model = metrics_of(given)
            by_layer |= metrics
            whole |= of_model
    whole = {metric: float(OF_MODEL.get(metric, pd.Series.mean)(series)) for metric, series in by_layer.items()} | whole
    rows = [
        (int(layer), metric, float(value)) for metric, series in by_layer.items() for layer, value in series.items()
    ]
    rows += [(WHOLE_MODEL, metric, value) for metric, value in whole.items()]
    return pd.DataFrame(rows, columns=["layer", "metric", "value"])


def _keeps_tokens_equal(family: Family) -> bool:
    """Whether equal tokens stay equal in all layers of a model with rotary positions (WSE propositions 1 and 4)."""
    kinds = family.kinds_of_positions
    return "rotary" in kinds and kinds <= {"rotary", NO_POSITIONS} and family.mixes_by_attention_alone


def attention_by_layer(attention: pd.DataFrame, position: int = 0) -> pd.DataFrame:
    """Sink rate, window mass and sink mass at a position (GS eq. 1 and 2): rows layers, means over heads.

    Args:
        attention: The table of that name.
        position: Counted from each sequence's first token.
    """
    return attention[attention["position"] == position].groupby("layer").mean(numeric_only=True)


def clear_sinks(sinks: pd.DataFrame) -> pd.DataFrame:
    """The rows of the table `sink_positions` whose key has enough queries (FEWEST_QUERIES)."""
    return sinks[sinks["queries"] >= FEWEST_QUERIES]


def later_sinks(sinks: pd.DataFrame) -> pd.DataFrame:
    """As `clear_sinks`, without position 0."""
    clear = clear_sinks(sinks)
    return clear[clear["position"] > 0]


def _attention(given: Measured) -> Metrics:
    tables, inputs = given.tables, given.inputs
    attention, sinks = tables["attention"], tables["sink_positions"]
    first = attention_by_layer(attention)
    heads = attention.groupby("layer")["head"].nunique()
    pairs = later_sinks(sinks).drop_duplicates(["layer", "head", "sequence"]).groupby("layer").size()
    by_head = tables["attention_heads"].groupby("layer")
    outside = tables.get("attention_outside")
    rates = {} if outside is None else {"sink_rate_outside": outside.groupby("layer")["sink_rate_outside"].mean()}
    metrics = rates | {
        "sink_rate": first["sink_rate"],
        "sink_rate_later": (pairs.reindex(heads.index, fill_value=0) / heads / len(inputs)),
        "window_mass": first["window_mass"],
        "sink_mass": first["sink_mass"],
        "attention_entropy": by_head["attention_entropy"].mean(),
        "missing_mass": by_head["missing_mass"].mean(),
    }
    return metrics, {}


def _geometry(given: Measured) -> Metrics:
    geometry, inputs = given.tables["geometry"], given.inputs
    first = geometry[geometry["position"] == 0].groupby("layer")
    drain = _ratio_to_others(geometry, "value_norm", ["layer", "head"])
    metrics = {
        "value_drain": drain.groupby("layer").mean(),
        "sink_logit_gap": first["sink_logit_gap"].mean(),
        "qk_cosine": first["qk_cosine"].mean(),
    }
    if inputs.repeats_one_token and not given.outside and _keeps_tokens_equal(given.family):
        metrics["repeated_bound"] = _repeated_bound(geometry, given.scaling, inputs.longest, given.family.causal)
    return metrics, {}


def _activation(given: Measured) -> Metrics:
    outputs = given.tables["activation"].query("site == 'layer_out'")
    return {"norm_ratio": _ratio_to_others(outputs, "norm_mean", ["layer"])}, {}


def _massive(given: Measured) -> Metrics:
    return {"massive_count": given.tables["massive"].groupby("layer")["is_massive"].sum() / len(given.inputs)}, {}


def _outliers(given: Measured) -> Metrics:
    table = given.tables["outlier"]
    by_layer, layer_out = table.groupby("layer"), table[table["site"] == "layer_out"]
    metrics = {
        "max_inf_norm": by_layer["max_inf_norm"].max(),
        "layer_inf_norm": layer_out.set_index("layer")["max_inf_norm"],
        "kurtosis": by_layer["kurtosis"].mean(),
    }
    norms = given.tables.get("outlier_norms")  # a model may have none in front of its branches
    if norms is not None and not norms.empty:
        theirs = pd.concat([table[table["site"].isin(OF_BONDARENKO)], norms])
        metrics["kurtosis_with_norms"] = theirs.groupby("layer")["kurtosis"].mean()
    return metrics, {}


def _gate(given: Measured) -> Metrics:
    gate = given.tables["gate"]
    first, later = (gate[at].groupby("layer")["gate"] for at in _first_and_later(gate))
    drain = _ratio_to_others(gate, "raw_value_norm", ["layer", "head"])
    metrics = {
        "gate_first": first.mean(),
        "gate_later": later.mean(),
        "raw_value_drain": drain.groupby("layer").mean(),
    }
    return metrics, {}


def _gradient(given: Measured) -> Metrics:
    metrics, of_model = gradient_summary(given.tables, given.inputs.longest)
    if given.family.causal and given.family.has_attention:
        of_model["uniform_gradient_ratio"] = uniform_gradient_ratio(given.inputs.predicted)
    return metrics, of_model


def _query_bias(given: Measured) -> Metrics:
    """Metrics of all heads together; without those of learned positions where the model has none."""
    tables = given.tables
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
    return metrics, {"delta_outlier_share": float((metrics["delta_gap"] > OUTLIER).mean())}


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


def _repeated_bound(geometry: pd.DataFrame, scaling: tuple[float, ...], length: int, causal: bool) -> pd.Series:
    """Mean over heads and queries of e^{2ξ} / (e^{2ξ} + n), with ξ = scaling · ‖q‖‖k‖ (WSE prop. 4). A query sees n
    others beside the key: t = 0 … T-1, or of an encoder T-1.

    All tokens are equal, so every query and key of a head has one norm, and |logit| ≤ ξ.
    """
    others = np.arange(length) if causal else np.full(length, length - 1)
    first = geometry[geometry["position"] == 0]
    xi = first["query_norm"] * first["key_norm"] * np.asarray(scaling)[first["layer"]]
    bound = 1.0 / (1.0 + np.exp(-2 * xi.to_numpy())[:, None] * others)
    return pd.Series(bound.mean(1), index=first["layer"]).groupby("layer").mean()


# table → the metrics that are made of it and of those beside it
METRICS_OF: dict[str, Callable[[Measured], Metrics]] = {
    "attention": _attention,
    "geometry": _geometry,
    "gate": _gate,
    "activation": _activation,
    "massive": _massive,
    "outlier": _outliers,
    "gradient": _gradient,
    "query_bias": _query_bias,
}

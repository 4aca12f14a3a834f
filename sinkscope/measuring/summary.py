"""The tables `summary` (every metric by layer, and of the whole model as layer -1) and `effect` (metrics of arms).

Both are computed from the other tables of a run.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from sinkscope.measuring.losses import perplexity
from sinkscope.measuring.observables.reductions import ALL_HEADS, LATER
from sinkscope.measuring.observables.spikes import SECONDARY
from sinkscope.models.family import NO_POSITIONS, Family
from sinkscope.options.measuring import ObservableOptions
from sinkscope.plugins import naming_plugin
from sinkscope.results.findings import FEWEST_QUERIES, OUTLIER
from sinkscope.results.metrics import METRICS, TOKEN_GROUPS, is_clear, is_sink, lacks_rate
from sinkscope.results.tables import WHOLE_MODEL
from sinkscope.text.inputs import TokenInputs

# `whole` of a metric → its reduction over layers to the value of the whole model; the default is the mean
REDUCTIONS: Mapping[str, Callable[[pd.Series], float]] = {"sum": pd.Series.sum, "largest": pd.Series.max}


@dataclass(frozen=True)
class MeasuredTables:
    """The tables of one run, and what else metrics are computed from."""

    tables: Mapping[str, pd.DataFrame]
    inputs: TokenInputs
    family: Family
    scaling: tuple[float, ...]  # of each layer's logits
    outside: Collection[str] = ()  # everything other than the text that takes attention weight
    settings: ObservableOptions = field(default_factory=ObservableOptions)


LayerMetric = Callable[[MeasuredTables], pd.Series | None]  # by layer; None if it does not apply


def summarize(measured: MeasuredTables, loss: float | None = None) -> pd.DataFrame:
    """Compute the table `summary` (layer, with -1 for the whole model; metric; value); `loss` is in nats per token."""
    tables, inputs, family = measured.tables, measured.inputs, measured.family
    by_layer: dict[str, pd.Series] = {}
    whole: dict[str, float] = {} if loss is None else {"loss": loss, "perplexity": perplexity(loss)}
    for table, metrics in METRICS_OF.items():
        if table in tables:
            with naming_plugin(METRICS_OF, table):
                by_layer |= {name: series for name, of in metrics.items() if (series := of(measured)) is not None}
    if "gradient" in tables:
        gradients, of_model = gradient_summary(tables, inputs.longest)
        by_layer |= gradients
        whole |= of_model
        if family.causal and family.has_attention:
            whole["uniform_gradient_ratio"] = uniform_gradient_ratio(inputs.predicted)
    if "query_bias" in tables:
        by_layer |= _query_bias_metrics(tables)
        whole["delta_outlier_share"] = float((by_layer["delta_gap"] > OUTLIER).mean())
    reduced = {
        name: float(REDUCTIONS.get(METRICS[name].whole if name in METRICS else "mean", pd.Series.mean)(series))
        for name, series in by_layer.items()
    }
    rows = [
        (int(layer), metric, float(value)) for metric, series in by_layer.items() for layer, value in series.items()
    ]
    rows += [(WHOLE_MODEL, metric, value) for metric, value in (reduced | whole).items()]
    return pd.DataFrame(rows, columns=["layer", "metric", "value"])


def clear_sinks(sinks: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `sink_positions` whose key has enough queries, and more mass than random weights give.

    With fewer than FEWEST_QUERIES, a head in which tokens attend to themselves would look like a sink.
    """
    return sinks[(sinks["queries"] >= FEWEST_QUERIES) & is_clear(sinks["window_mass"], sinks["uniform_mass"])]


def later_sinks(sinks: pd.DataFrame) -> pd.DataFrame:
    return clear_sinks(sinks[sinks["position"] > 0])


FIRST, REST = "position == 0", "position > 0"


def layerwise(table: str, column: str, reduction: str = "mean", where: str = "") -> LayerMetric:
    """Return the metric that reduces a column of a table, or of the rows `where` a condition holds, layer by layer."""

    def metric(measured: MeasuredTables) -> pd.Series | None:
        if (rows := measured.tables.get(table)) is None:
            return None
        return (rows.query(where) if where else rows).groupby("layer")[column].agg(reduction)

    return metric


def _sink_rate_clear(measured: MeasuredTables) -> pd.Series:
    """Return the share in which position 0 is a sink and clear of uniform attention, where it has a rate."""
    masses, epsilon = measured.tables["attention_heads_by_sequence"], measured.settings.epsilon
    mass, uniform = masses["window_mass"], masses["uniform_mass"]
    sinks = (is_sink(mass, epsilon) & is_clear(mass, uniform)).astype(float)
    return sinks.mask(lacks_rate(uniform, epsilon)).set_axis(masses["layer"]).groupby(level=0).mean()


def _sink_rate_later(measured: MeasuredTables) -> pd.Series:
    queries = min(
        measured.settings.window, measured.inputs.longest - measured.family.causal
    )  # most of any later position
    sinks = later_sinks(measured.tables["sink_positions"])
    return _rate_of_pairs(sinks, measured.tables["attention"], len(measured.inputs), queries)


def _rate_of_pairs(sinks: pd.DataFrame, attention: pd.DataFrame, sequences: int, queries: int) -> pd.Series:
    """Return the share of heads and sequences that have any of the sinks, by layer; NaN if `queries` are too few."""
    heads = attention.groupby("layer")["head"].nunique()
    pairs = sinks.drop_duplicates(["layer", "head", "sequence"]).groupby("layer").size()
    shares = pairs.reindex(heads.index, fill_value=0) / heads / sequences
    return shares if queries >= FEWEST_QUERIES else shares * np.nan


def _ratio_to_others(table: pd.DataFrame, column: str, keys: list[str]) -> pd.Series:
    """Return the value at position 0 ÷ the mean over the other positions of the table."""
    at_first = table["position"] == 0
    return table[at_first].groupby(keys)[column].mean() / table[~at_first].groupby(keys)[column].mean()


def _drain(table: str, column: str) -> LayerMetric:
    return lambda measured: _ratio_to_others(measured.tables[table], column, ["layer", "head"]).groupby("layer").mean()


def _repeated_bound(measured: MeasuredTables) -> pd.Series | None:
    """Return the mean over heads and queries of e^{2ξ} / (e^{2ξ} + n), with ξ = scaling · ‖q‖‖k‖ (WSE prop. 4)."""
    kinds, length = measured.family.kinds_of_positions, measured.inputs.longest
    is_rotary = "rotary" in kinds and kinds <= {"rotary", NO_POSITIONS} and measured.family.mixes_by_attention_alone
    if not (measured.inputs.repeats_one_token and not measured.outside and is_rotary):
        return None  # tokens do not stay equal (WSE propositions 1 and 4)
    # n is the number of other keys that a query sees: 0 … T-1, or always T-1 in an encoder. All tokens are equal, so
    # all queries and keys of a head have one norm, and |logit| ≤ ξ.
    others = np.arange(length) if measured.family.causal else np.full(length, length - 1)
    first = measured.tables["geometry"].query(FIRST)
    xi = first["query_norm"] * first["key_norm"] * np.asarray(measured.scaling)[first["layer"]]
    bound = 1.0 / (1.0 + np.exp(-2 * xi.to_numpy())[:, None] * others)
    return pd.Series(bound.mean(1), index=first["layer"]).groupby("layer").mean()


def kurtosis_with_norms(tables: Mapping[str, pd.DataFrame]) -> pd.Series | None:
    """Average by layer over the sites that Bondarenko et al.'s code reads, in pre-norm and in post-norm models.

    Args:
        tables: the tables of `Outlier`.
    """
    table, norms = tables["outlier"], tables.get("outlier_norms")
    if "out_sum" in set(table["site"]):
        rows = table[table["site"].isin(["mlp_out", "layer_out"])]
    elif norms is None or norms.empty:  # a model may have no norms
        return None
    else:
        rows = pd.concat([table[table["site"].isin(["attn_out", "mlp_out", "layer_out"])], norms])
    return rows.groupby("layer")["kurtosis"].mean()


def layer_inf_norm(tables: Mapping[str, pd.DataFrame]) -> pd.Series:
    """Read by layer the sum of the feed-forward network's input and output, wherever the layer's norms are.

    Args:
        tables: the tables of `Outlier`.
    """
    table = tables["outlier"]
    sums = table[table["site"].isin(["out_sum", "layer_out"])]
    return sums.groupby("layer")["max_inf_norm"].first()  # out_sum comes before layer_out


def _secondary_sinks_per_text(measured: MeasuredTables) -> pd.Series:
    sinks = measured.tables["sink_tokens"]
    return sinks[sinks["kind"] == SECONDARY].groupby("layer").size() / len(measured.inputs)


# table → the metrics that are computed from it (and from related tables), before those of gradients and query biases
METRICS_OF: dict[str, dict[str, LayerMetric]] = {
    "attention": {
        "sink_rate_outside": layerwise("attention_outside", "sink_rate_outside"),
        "sink_rate": layerwise("attention", "sink_rate", where=FIRST),
        "sink_rate_clear": _sink_rate_clear,
        "uniform_mass": layerwise("attention", "uniform_mass", where=FIRST),
        "sink_rate_later": _sink_rate_later,
        "window_mass": layerwise("attention", "window_mass", where=FIRST),
        "sink_mass": layerwise("attention", "sink_mass", where=FIRST),
        "attention_entropy": layerwise("attention_heads", "attention_entropy"),
        "missing_mass": layerwise("attention_heads", "missing_mass"),
    },
    "geometry": {
        "value_drain": _drain("geometry", "value_norm"),
        "sink_logit_gap": layerwise("geometry", "sink_logit_gap", where=FIRST),
        "qk_cosine": layerwise("geometry", "qk_cosine", where=FIRST),
        "repeated_bound": _repeated_bound,
    },
    "largest_logit": {"largest_logit": layerwise("largest_logit", "largest", "max")},
    "gate": {
        "gate_first": layerwise("gate", "gate", where=FIRST),
        "gate_later": layerwise("gate", "gate", where=REST),
        "raw_value_drain": _drain("gate", "raw_value_norm"),
        **{f"gate_{column}": layerwise("gate_heads", column) for column in ("mean", "closed", "deviation")},
    },
    "activation": {
        "norm_ratio": lambda measured: _ratio_to_others(
            measured.tables["activation"].query("site == 'layer_out'"), "norm_mean", ["layer"]
        ),
        "first_norm": layerwise("activation", "norm_mean", where="site == 'layer_out' and position == 0"),
    },
    "massive": {
        "massive_count": lambda measured: (
            measured.tables["massive"].groupby("layer")["is_massive"].sum() / len(measured.inputs)
        ),
    },
    "outlier": {
        "max_inf_norm": layerwise("outlier", "max_inf_norm", "max"),
        "layer_inf_norm": lambda measured: layer_inf_norm(measured.tables),
        "kurtosis": layerwise("outlier", "kurtosis"),
        "kurtosis_with_norms": lambda measured: kurtosis_with_norms(measured.tables),
    },
    "entropy": {
        "state_entropy": layerwise("entropy", "entropy"),
        "state_entropy_without_first": layerwise("entropy", "entropy_without_first"),
    },
    "sink_tokens": {"secondary_sinks": _secondary_sinks_per_text},
    "spikes": {"residual_share": layerwise("spikes", "largest_share")},
}


def _query_bias_metrics(tables: Mapping[str, pd.DataFrame]) -> dict[str, pd.Series]:
    """Compute metrics of all heads together, and metrics of learned positions if the model has them."""
    table = tables["query_bias"]
    together = table[table["head"] == ALL_HEADS]
    first, later = (together.query(where).groupby("layer") for where in (FIRST, REST))
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
    """Return (Δ_0 - mean) ÷ standard deviation of later positions' Δ, by layer, from one head's `query_bias` rows."""
    # the deviation combines the spread over sequences within positions and the spread between positions
    later = query_bias.query(REST).assign(within=query_bias["delta_std"] ** 2).groupby("layer")
    variance = later["within"].mean() + later["delta_mean"].var(ddof=0)
    first = query_bias.query(FIRST).set_index("layer")["delta_mean"]
    return (first - later["delta_mean"].mean()) / np.sqrt(variance)


def gradient_summary(
    tables: Mapping[str, pd.DataFrame], longest: int = LATER.stop
) -> tuple[dict[str, pd.Series], dict[str, float]]:
    """Compute gradient metrics by layer, and for the whole model if not means over layers (GS figures 2 and 3).

    If the tables have fewer of the positions LATER than the longest sequence, comparisons with later positions are NaN.
    """
    by_layer: dict[str, pd.Series] = {}
    whole: dict[str, float] = {}
    if "gradient" in tables:  # GS fig. 2 averages norms over layers before dividing
        norms = {pathway: pathway_norms(tables["gradient"], pathway) for pathway in ("value", "key", "raw_value")}
        value = norms["raw_value"].combine_first(norms["value"])[0]  # before a gate or scale, if there is one
        key = norms["key"][0]
        by_layer |= {"value_gradient_norm": value, "value_over_key_gradient": value / key}
        with np.errstate(invalid="ignore", divide="ignore"):  # no gradient at all: 0 ÷ 0
            whole["value_over_key_gradient"] = float(value.mean() / key.mean())
        for pathway, by_position in norms.items():
            if len(by_position):
                ratio = f"{pathway}_gradient_ratio"
                by_layer[ratio] = _against_later(by_position, longest)
                whole[ratio] = float(_against_later(by_position.mean().to_frame().T, longest).iloc[0])
    ratios = tables["gradient_ratio"].query("branch == 'attn'") if "gradient_ratio" in tables else pd.DataFrame()
    if len(ratios):  # GS eq. 3
        for name in ("bloat", "compress", "change"):
            by_position = ratios.pivot(index="layer", columns="position", values=name)
            by_layer[name] = by_position[0]
            by_layer[f"{name}_later"] = _later(by_position, longest).median(axis=1)
            whole |= {metric: float(by_layer[metric].median()) for metric in (name, f"{name}_later")}
        whole |= compress_fits(ratios)
    if "gradient_check" in tables:
        check = tables["gradient_check"].groupby("layer")
        by_layer["identity_residual"] = check["identity_residual"].max()
        whole["identity_residual"] = float(by_layer["identity_residual"].max())
        by_layer["theorem1_holds"] = check["holds"].mean()
    if len(tables["norm_bound"]):
        bound = tables["norm_bound"].groupby("layer")
        by_layer["theorem2_holds"] = bound["holds"].mean()
        by_layer["theorem2_tightness"] = bound["tightness"].mean()
    return by_layer, whole


def pathway_norms(gradient: pd.DataFrame, pathway: str, by: Sequence[str] = ()) -> pd.DataFrame:
    """Return gradient norms of all heads together, layers × positions; columns `by` become index levels above layer."""
    chosen = gradient[(gradient["pathway"] == pathway) & (gradient["head"] == ALL_HEADS)]
    return chosen.pivot(index=[*by, "layer"] if by else "layer", columns="position", values="grad_norm")


def fit_points(ratios: pd.DataFrame, first: int = 0, last: int | None = None) -> pd.DataFrame:
    """Return the points of GS figure 3 to which a line is fitted."""
    last = int(ratios["position"].max()) if last is None else last
    points = ratios[ratios["position"].between(first, last)]
    return points[(points["compress"] > 0) & (points["input_norm"] > 0)]


def compress_fits(ratios: pd.DataFrame) -> dict[str, float]:
    """Return slope and correlation of log₁₀ compress on log₁₀‖x‖, over all positions and by token group."""
    fits: dict[str, float] = {}
    for name, first, last in (("", 0, None), *((f"_{name}", first, last) for name, first, last in TOKEN_GROUPS)):
        points = fit_points(ratios, first, last)
        x, y = np.log10(points["input_norm"]), np.log10(points["compress"])
        if len(points) >= 3 and x.std() > 0 and y.std() > 0:
            fits[f"compress_slope{name}"] = float(np.polyfit(x, y, 1)[0])
            fits[f"compress_correlation{name}"] = float(np.corrcoef(x, y)[0, 1])
    return fits


def _later(by_position: pd.DataFrame, longest: int) -> pd.DataFrame:
    """Return the columns of the positions LATER; no columns, whose mean is NaN, if the table lacks some of them."""
    wanted = range(*LATER.indices(longest))
    known = set(wanted) <= set(by_position.columns)
    return by_position[list(wanted) if known else []]


def _against_later(norms: pd.DataFrame, longest: int) -> pd.Series:
    return norms[0] / _later(norms, longest).mean(axis=1)


def uniform_mass(length: int, positions: int) -> np.ndarray:
    """Return the sink mass (GS eq. 2) of each position, (positions,), under uniform causal attention."""
    weights = 1 / np.arange(1, length + 1)
    return np.array([weights[first:].mean() for first in range(positions)])


def uniform_gradient_ratio(predicted: Sequence[int]) -> float:
    """Return the `value_gradient_ratio` of uniform causal attention, for sequences with these numbers of predictions.

    ∇v_s = Σ_{t ≥ s} g_t ÷ (t + 1), where the g_t of the predicting tokens t are uncorrelated and of equal norm (GS
    §3.1). For random weights, see `random_weights.py`.
    """
    queries = np.arange(max(predicted))
    sequences = (np.asarray(predicted)[:, None] > queries).sum(0)  # number of sequences that have this query
    norms = np.sqrt(np.cumsum((sequences / (queries + 1.0) ** 2)[::-1])[::-1])
    return float(norms[0] / norms[LATER].mean()) if len(norms) > LATER.start else float("nan")


NO_POSITION = -1


def with_next(watched: Sequence[int]) -> tuple[int, ...]:
    """Return watched positions and the one after the first, to which a sink moves that is prevented there."""
    return tuple(dict.fromkeys((*watched, watched[0] + 1)))


def arm_metrics(
    tables: Mapping[str, pd.DataFrame], watched: Sequence[int], loss: float, window: int = FEWEST_QUERIES
) -> pd.DataFrame:
    """Compute the metrics of one arm of an experiment, for the table `effect`.

    sink_rate, window_mass,   at the positions of `with_next`, means over heads (GS eq. 1);
    uniform_mass              whole model: mean over layers
    sink_rate_anywhere        share of heads and sequences with a sink at any position; whole model: mean over layers
    massive_magnitude         largest |entry| of a layer's output, mean over sequences; whole model: largest layer
    massive_count             massive activations per sequence; whole model: sum over layers
    loss, perplexity          of the predicted tokens, loss in nats; left out if the loss is NaN

    `tables` are the arm's tables `attention`, `sink_positions` and `massive`, `watched` are positions; `window` is at
    most the number of tokens.
    """
    rows: list[tuple[int, str, int, float]] = []

    def add(metric: str, position: int, by_layer: pd.Series, whole: float) -> None:
        rows.extend((int(layer), metric, position, float(value)) for layer, value in by_layer.items())
        rows.append((WHOLE_MODEL, metric, position, float(whole)))

    massive, attention = tables["massive"], tables["attention"]
    sequences = massive["sequence"].nunique()
    by_position = attention.groupby(["position", "layer"])[["sink_rate", "window_mass", "uniform_mass"]].mean()
    for position in with_next(watched):
        if position in by_position.index:  # texts may be that short
            for metric, by_layer in by_position.loc[position].items():
                add(str(metric), position, by_layer, by_layer.mean())
    anywhere = _rate_of_pairs(clear_sinks(tables["sink_positions"]), attention, sequences, window)
    add("sink_rate_anywhere", NO_POSITION, anywhere, anywhere.mean())
    largest = massive["value"].abs().groupby([massive["layer"], massive["sequence"]]).max().groupby("layer").mean()
    counts = massive.groupby("layer")["is_massive"].sum() / sequences
    add("massive_magnitude", NO_POSITION, largest, largest.max())
    add("massive_count", NO_POSITION, counts, counts.sum())
    if not np.isnan(loss):
        rows += [(WHOLE_MODEL, name, NO_POSITION, x) for name, x in (("loss", loss), ("perplexity", perplexity(loss)))]
    return pd.DataFrame(rows, columns=["layer", "metric", "position", "value"])

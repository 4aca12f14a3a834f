"""Metrics of a run with their 95 % intervals over texts: of the whole model, by layer, or by head.

They are computed from the values of each sequence that a run stores, so that no model is read again. `SOURCES` has the
table and the column of each metric. Attention to position 0 is stored by head, so that its rates exist at every ε.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from typing import Any

import numpy as np
import pandas as pd

from sinkscope.errors import InputError, unknown
from sinkscope.results.metrics import METRICS, is_clear, is_sink, lacks_rate
from sinkscope.results.sequences import Lacks, Sequences
from sinkscope.results.statistics import (
    Estimate,
    bootstrap,
    differences,
    jackknife,
    positive_jackknife,
    weighted_means,
    with_unseen_values,
)  # fmt: skip

LAYER, HEAD = BY_HEAD = ("layer", "head")
# `whole` of a metric → the method of pandas that reduces the layers to the whole model; otherwise their mean
REDUCTIONS = {"sum": "sum", "largest": "max", "median": "median"}


@dataclass(frozen=True)
class Source:
    """Where the values by sequence of a metric are."""

    table: str
    column: str = "window_mass"
    rate: Callable[[np.ndarray, np.ndarray, float], np.ndarray] | None = None  # of the mass, the uniform mass, and ε
    null: str = ""  # the metric that is its value under uniform attention; a rate is then 0
    by: tuple[str, ...] = BY_HEAD
    where: Mapping[str, object] = field(default_factory=dict)  # column → the value of its rows
    is_count: bool = False  # a sequence has several rows in a layer, which are added up

    def values(self, sequences: Sequences, epsilon: float | None = None) -> np.ndarray:
        """(N, layers, heads) or (N, layers): the value of each sequence, NaN where it has none."""
        if self.is_count:
            counts = sequences.table(self.table).groupby(["sequence", LAYER])[self.column].sum().unstack(fill_value=0)
            return counts.reindex(range(sequences.weights.shape[1]), fill_value=0).to_numpy(float)
        x = sequences.values(self.table, self.column, self.by, **self.where)
        if self.rate is None:
            return x
        uniform = sequences.values(self.table, "uniform_mass", self.by)
        epsilon = sequences.epsilon if epsilon is None else epsilon
        return np.where(np.isfinite(x) & ~lacks_rate(uniform, epsilon), self.rate(x, uniform, epsilon), nan)

    def labels(self, sequences: Sequences, by: Sequence[str]) -> tuple[pd.DataFrame, tuple[Any, ...]]:
        """Return the layers and heads that the run has, a row each, and their indices on the axes of the values."""
        table = sequences.table(self.table)
        labels = table.loc[(table[[*self.where]] == pd.Series(self.where, dtype=object)).all(axis=1), [*by]]
        labels = labels.drop_duplicates().sort_values([*by], ignore_index=True)
        return labels, tuple(np.unique(labels[name], return_inverse=True)[1] for name in by)


_HEADS, _GEOMETRY, _BY_LAYER = "attention_heads_by_sequence", "geometry_by_sequence", (LAYER,)
SOURCES = {
    "sink_rate": Source(_HEADS, rate=lambda mass, uniform, epsilon: is_sink(mass, epsilon)),
    "sink_rate_clear": Source(
        _HEADS, rate=lambda mass, uniform, epsilon: is_sink(mass, epsilon) & is_clear(mass, uniform)
    ),
    "window_mass": Source(_HEADS, null="uniform_mass"),
    "sink_mass": Source(_HEADS, "sink_mass"),
    "uniform_mass": Source(_HEADS, "uniform_mass"),
    "qk_cosine": Source(_GEOMETRY, "qk_cosine"),
    "sink_logit_gap": Source(_GEOMETRY, "sink_logit_gap"),
    "first_norm": Source("activation_by_sequence", "norm", by=_BY_LAYER, where={"site": "layer_out"}),
    "massive_count": Source("massive", "is_massive", by=_BY_LAYER, is_count=True),
    "state_entropy": Source("entropy_by_sequence", "entropy", by=_BY_LAYER),
    "state_entropy_without_first": Source("entropy_by_sequence", "entropy_without_first", by=_BY_LAYER),
    "residual_share": Source("spikes_by_sequence", "largest_share", by=_BY_LAYER),
    "delta_first": Source("query_bias_by_sequence", "delta", by=_BY_LAYER),
    **{
        name: Source("gradient_ratio_by_sequence", name, by=_BY_LAYER, where={"branch": "attn", "position": 0})
        for name in ("bloat", "compress", "change")
    },
}
# metrics of the loss, whose passages are left out one by one: a function of the loss per token
OF_LOSS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"loss": lambda loss: loss, "perplexity": np.exp}


def level_of(metric: str, by: str | Sequence[str]) -> tuple[str, ...]:
    """Return the labels by which a metric is estimated.

    Raises InputError if there is no such metric, or if runs have no values by sequence, or none by these labels.
    """
    wanted = {by} if isinstance(by, str) else {*by}
    if metric not in METRICS:
        raise InputError(f"metric {unknown(metric, METRICS)}")
    if metric not in (*SOURCES, *OF_LOSS):
        known = ", ".join([*SOURCES, *OF_LOSS])
        raise InputError(f"{metric} has no interval, as runs keep no values by sequence of it; these have one: {known}")
    for label in sorted(wanted.difference(() if metric in OF_LOSS else SOURCES[metric].by)):
        raise InputError(f"{metric} has no values by {label}" if label in BY_HEAD else f"by {unknown(label, BY_HEAD)}")
    return BY_HEAD if HEAD in wanted else tuple(wanted)  # heads are those of a layer


def replicates(sequences: Sequences, metric: str, by: Sequence[str] = (), epsilon: float | None = None) -> np.ndarray:
    """(1 + draws, *by): a metric, first of the run itself and then of resampled texts.

    Args:
        sequences: those of a run.
        metric: one of `SOURCES` or `OF_LOSS`.
        by: what the axes are, layer, or layer and head; (): the whole model.
        epsilon: the threshold of a rate; None: that of the run.

    Raises:
        Lacks: the run has no values by sequence of it.
    """
    if metric in OF_LOSS:
        return OF_LOSS[metric](sequences.losses)
    x = weighted_means(SOURCES[metric].values(sequences, epsilon), sequences.weights)
    if HEAD in SOURCES[metric].by and HEAD not in by:
        x = pd.DataFrame(x.reshape(-1, x.shape[-1])).mean(axis=1).to_numpy().reshape(x.shape[:-1])
    return x if by else getattr(pd.DataFrame(x), REDUCTIONS.get(METRICS[metric].whole, "mean"))(axis=1).to_numpy()


def texts_of(sequences: Sequences, has_value: np.ndarray) -> np.ndarray:
    """(N, …) → (…): the number of distinct texts of which a sequence has a value."""
    numbers = sequences.run.text_numbers
    copies = (np.unique(numbers)[:, None] == numbers).astype(float)
    return np.asarray((np.tensordot(copies, has_value, axes=1) > 0).sum(axis=0))


def estimate_of(drawn: np.ndarray, metric: str, texts: int) -> Estimate:
    """Return a metric with its interval, from its replicates and the number of texts that have a value."""
    if metric in OF_LOSS:
        return positive_jackknife(drawn)
    estimate = bootstrap(drawn)
    return with_unseen_values(estimate, texts) if METRICS[metric].unit == "share" else estimate


def estimate_table(
    sequences: Sequences,
    metric: str,
    by: str | Sequence[str] = (),
    epsilons: Sequence[float] = (),
    null: Sequences | None = None,
) -> pd.DataFrame:
    """Return a row for each layer, head and ε: metric, `by`, epsilon, value, low, high, null, sequences.

    `epsilon` is a column of rates alone. The column `null` is the value in the run `null`, such as one of random
    weights; without such a run, the value under uniform attention on the same lengths, NaN for a metric of which that
    says nothing. `sequences` are those that the mean is over.

    Raises:
        InputError: there is no such metric, a run has no values by sequence of it, it does not depend on ε, or `null`
            has other layers or heads.
    """
    level, source = level_of(metric, by), SOURCES.get(metric, Source("loss_by_sequence", "loss", by=_BY_LAYER))
    if epsilons and source.rate is None:
        raise InputError(f"{metric} does not depend on ε")
    if sequences.run.is_experiment or (null is not None and null.run.is_experiment):
        raise InputError("a run of `intervene` has several arms: choose one by run.at(ARM)")
    tables = []
    try:
        labels, index = source.labels(sequences, level or _BY_LAYER)
        labels, index = (labels, index) if level else (pd.DataFrame(index=[0]), (None,))
        if null is not None and level and not source.labels(null, level)[0].equals(labels):
            raise InputError("the run of the null has other layers or heads")
        for epsilon in epsilons or [sequences.epsilon]:
            drawn = replicates(sequences, metric, level, epsilon)[(slice(None), *index)]
            has_value = np.isfinite(source.values(sequences, epsilon))
            has_value = has_value.any(axis=tuple(range(1 + len(level), has_value.ndim)))  # (N, *level)
            texts = np.broadcast_to(texts_of(sequences, has_value)[index], len(drawn.T))
            estimates = [estimate_of(column, metric, count) for column, count in zip(drawn.T, texts, strict=True)]
            rows = labels.assign(metric=metric, **({} if source.rate is None else {"epsilon": epsilon}))
            rows = rows.assign(
                **{name: [getattr(each, name) for each in estimates] for name in ("value", "low", "high")}
            )
            if null is not None:
                rows["null"] = replicates(null, metric, level, epsilon)[(0, *index)]
            elif source.null:
                rows["null"] = replicates(sequences, source.null, level)[(0, *index)]
            else:
                rows["null"] = 0.0 if source.rate else nan
            rows["sequences"] = has_value.sum(axis=0)[index]
            tables.append(rows)
    except Lacks as lack:
        raise InputError(f"{metric} has no values by sequence in this run: {lack}") from lack
    table = pd.concat(tables, ignore_index=True)
    return table[["metric", *(name for name in table if name != "metric")]]


def difference(first: Sequences, second: Sequences, metric: str) -> Estimate:
    """Return a metric of the whole model in the second run minus that in the first, each at its own ε.

    It is paired over texts if both runs read the same tokens, and NaN if a run has no values by sequence.
    """
    try:
        level_of(metric, ())
        before, after = (replicates(each, metric) for each in (first, second))
    except (InputError, Lacks):
        return Estimate(nan)
    return difference_of(before, after, metric, first, second)


def difference_of(before: np.ndarray, after: np.ndarray, metric: str, first: Sequences, second: Sequences) -> Estimate:
    """Return `difference` from the replicates in both runs."""
    if reads_the_same(first, second):
        return (jackknife if metric in OF_LOSS else bootstrap)(differences(before, after))
    return estimate_of(after, metric, second.texts) - estimate_of(before, metric, first.texts)


def reads_the_same(first: Sequences, second: Sequences) -> bool:
    """Return whether both runs read the same tokens, so that their texts are compared in pairs."""
    hashes = {each.run.manifest["input"].get("sha256") for each in (first, second)}
    return len(hashes) == 1 and np.array_equal(first.run.text_numbers, second.run.text_numbers)

"""The values that the tables must have, by float64 loops over what plain transformers compute (support/plain.py).

Every sequence goes through the model alone and unpadded, so that padding and position ids are tested, too. Nothing of
sinkscope is imported.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
from support.plain import Layer, Sequence
from support.plain import record as record
from support.plain import record_each as record_each


def attention(
    sequences: list[Sequence], positions: int, window: int, epsilon: float, causal: bool = True
) -> pd.DataFrame:
    def measured(layer: Layer, head: int, position: int) -> tuple[float, ...]:
        weights = layer.weights[head]
        column = weights[position if causal else 0 :, position]
        mass, uniform = _masses(weights, position, window, causal)
        is_sink = np.nan if uniform > epsilon else float(mass > epsilon)
        return mass, column.mean(), (column**2).mean(), uniform, is_sink

    def mean(at_place: list) -> tuple[float, ...]:
        *masses, is_sink = np.transpose(at_place)
        known = is_sink[~np.isnan(is_sink)]
        return *np.mean(masses, axis=1), known.mean() if len(known) else np.nan

    columns = ["window_mass", "sink_mass", "sink_second_moment", "uniform_mass", "sink_rate"]
    return _by_head_and_position(sequences, positions, measured, columns, mean)


def attention_heads(sequences: list[Sequence]) -> pd.DataFrame:
    def measured(layer: Layer, head: int, position: int) -> tuple[float, float]:
        weights = layer.weights[head]
        return np.mean([-(row[row > 0] * np.log(row[row > 0])).sum() for row in weights]), np.mean(1 - weights.sum(1))

    table = _by_head_and_position(sequences, 1, measured, ["attention_entropy", "missing_mass"])
    return table.drop(columns="position")


def _by_head_and_position(
    sequences: list[Sequence],
    positions: int,
    measured: Callable[[Layer, int, int], tuple],
    columns: list[str],
    mean: Callable[[list], Any] = lambda values: np.mean(values, axis=0),
) -> pd.DataFrame:
    """Return means over sequences of what is measured of a layer, a head and a position."""
    rows = []
    for number, head, groups in _heads(sequences):
        for position in range(positions):
            values = [measured(one.layers[number], head, position) for one in long_enough(sequences, position)]
            rows.append((number, head, head // groups, position, *mean(values)))
    return pd.DataFrame(rows, columns=["layer", "head", "kv_head", "position", *columns])


def _near(weights: np.ndarray, position: int, window: int, causal: bool) -> np.ndarray:
    """Return a key's weights from the queries in its window: later queries, in an encoder queries on both sides."""
    first = position if causal else max(0, position - window + 1)
    return weights[first : position + window, position]


def _masses(weights: np.ndarray, position: int, window: int, causal: bool) -> tuple[float, float]:
    """Return a key's window mass, and what it would be if each query gave all keys that it sees the same weight."""
    alike = _near(_uniform(len(weights), causal), position, window, causal)
    return _near(weights, position, window, causal).mean(), alike.mean()


@cache
def _uniform(length: int, causal: bool) -> np.ndarray:
    """Return the weights of queries that give all keys that they see the same."""
    seen = np.tril(np.ones((length, length))) if causal else np.ones((length, length))
    return seen / seen.sum(1, keepdims=True)


def sink_positions(sequences: list[Sequence], window: int, epsilon: float, causal: bool = True) -> pd.DataFrame:
    rows = []
    for index, sequence in enumerate(sequences):
        for number, head, _ in _heads([sequence]):
            weights = sequence.layers[number].weights[head]
            for position in range(len(sequence.ids)):
                mass, uniform = _masses(weights, position, window, causal)
                if mass > epsilon and uniform <= epsilon:
                    queries = len(sequence.ids) - (position if causal else 0)
                    rows.append((number, head, index, position, sequence.ids[position], queries, mass, uniform))
    columns = ["layer", "head", "sequence", "position", "token_id", "queries", "window_mass", "uniform_mass"]
    return pd.DataFrame(rows, columns=columns)


def geometry(sequences: list[Sequence], positions: int) -> pd.DataFrame:
    norm = np.linalg.norm

    def measured(layer: Layer, head: int, position: int) -> tuple[float, ...]:
        kv_head = head * len(layer.key) // len(layer.query)
        query, key, value = layer.query[head], layer.key[kv_head, position], layer.value[kv_head, position]
        allowed, logits = layer.allowed[head], layer.logits[head]
        seen = allowed[:, position]
        products = norm(query[seen], axis=1) * norm(key)
        cosines = query[seen] @ key / products
        others = allowed[seen] & (np.arange(len(query)) != position)
        count = others.sum(1)
        sums = np.where(others, logits[seen], 0.0).sum(1)
        gaps = logits[seen, position][count > 0] - sums[count > 0] / count[count > 0]
        by_key = cosines, products, gaps
        return norm(query[position]), norm(key), norm(value), *(np.mean(x) if len(x) else np.nan for x in by_key)

    norms, pairs = ["query_norm", "key_norm", "value_norm"], ["qk_cosine", "qk_norm_product", "sink_logit_gap"]
    return _by_head_and_position(sequences, positions, measured, [*norms, *pairs])


def activation(sequences: list[Sequence], positions: int) -> pd.DataFrame:
    rows = []
    for number, layer in enumerate(sequences[0].layers):
        for site in (*layer.sites, *(("value",) if layer.value is not None else ())):
            for position in range(positions):
                norms = []
                for sequence in long_enough(sequences, position):
                    if site == "value":
                        vector = sequence.layers[number].value[:, position]
                    else:
                        vector = sequence.layers[number].sites[site][position]
                    norms.append(np.sqrt((vector**2).sum()))
                rows.append((number, site, position, np.mean(norms), np.max(norms)))
    return pd.DataFrame(rows, columns=["layer", "site", "position", "norm_mean", "norm_max"])


def massive(sequences: list[Sequence]) -> pd.DataFrame:
    rows = []
    for index, sequence in enumerate(sequences):
        for number, layer in enumerate(sequence.layers):
            if not layer.sites:
                continue
            hidden = layer.sites["layer_out"]
            magnitudes = np.sort(np.abs(hidden).ravel())
            median = magnitudes[(len(magnitudes) - 1) // 2]  # the lower one where there are two
            is_massive = (np.abs(hidden) > 100) & (np.abs(hidden) >= 1000 * median)
            largest = np.abs(hidden) >= magnitudes[-3]
            for position, coordinate in zip(*np.nonzero(is_massive | largest), strict=True):
                value = hidden[position, coordinate]
                entry = (value, median, abs(value) / median, is_massive[position, coordinate])
                rows.append((number, index, position, sequence.ids[position], coordinate, *entry))
    keys = ["layer", "sequence", "position", "token_id", "coordinate"]
    return pd.DataFrame(rows, columns=[*keys, "value", "median", "ratio", "is_massive"])


def outlier(sequences: list[Sequence]) -> pd.DataFrame:
    rows = []
    for number, layer in enumerate(sequences[0].layers):
        for site in layer.sites:
            seen = []
            for sequence in sequences:
                entries = sequence.layers[number].sites[site].ravel()
                centered = entries - entries.mean()
                seen.append((np.abs(entries).max(), (centered**4).mean() / (centered**2).mean() ** 2))
            rows.append((number, site, *np.mean(seen, axis=0)))
    return pd.DataFrame(rows, columns=["layer", "site", "max_inf_norm", "kurtosis"])


def tables(sequences: list[Sequence], positions: int, window: int, epsilon: float) -> dict[str, pd.DataFrame]:
    return {
        "attention": attention(sequences, positions, window, epsilon),
        "attention_heads": attention_heads(sequences),
        "sink_positions": sink_positions(sequences, window, epsilon),
        "geometry": geometry(sequences, positions),
        "activation": activation(sequences, positions),
        "massive": massive(sequences),
        "outlier": outlier(sequences),
    }


def _heads(sequences: list[Sequence]) -> Iterator[tuple[int, int, int]]:
    """Yield layer, query head, and query heads per key/value head."""
    for number, layer in enumerate(sequences[0].layers):
        heads = 0 if layer.weights is None else len(layer.weights)
        for head in range(heads):
            yield number, head, heads // len(layer.key)


def long_enough(sequences: list[Sequence], position: int) -> list[Sequence]:
    return [sequence for sequence in sequences if len(sequence.ids) > position]


KEYS = (
    "layer", "pathway", "branch", "head", "kv_head", "site", "sequence", "position", "token_id", "coordinate",
    "is_massive",
)  # fmt: skip
# The scale of an entry's error. For sums of positive terms (masses, norms, …) it is the entry itself, because each term
# is right to round-off. If terms cancel, round-off has the size of the terms: cosines are means of numbers up to
# 1, the missing mass is 1 minus a sum, and logit gaps are compared with the column's largest.
SCALES: dict[str, float | None] = {"qk_cosine": 1.0, "missing_mass": 1.0, "sink_logit_gap": None}
SMALLEST = 1e-6  # relative to the column's largest: a smaller entry (such as e⁻⁵⁰) may have lost relative accuracy
FACTORS = {"sink_second_moment": 2.0}  # a square's relative error is twice its root's


def errors(ours: pd.DataFrame, expected: pd.DataFrame) -> dict[str, float]:
    """Return the worst relative error by column, and assert that the rows and the positions of NaN are the same.

    Pathways that the expected table does not have are left out. The identity's residual is round-off in both tables:
    its largest value takes the place of an error.
    """
    keys = [name for name in KEYS if name in expected]
    if "pathway" in keys:
        ours = ours[ours["pathway"].isin(expected["pathway"])]
    mine, truth = (table.sort_values(keys, ignore_index=True) for table in (ours, expected))
    assert len(mine) == len(truth), f"{len(mine)} rows, not {len(truth)}"
    for name in keys:
        assert list(mine[name]) == list(truth[name]), f"other values of {name}"
    by_column = {}
    for name in (name for name in truth if name not in keys):
        column, right = mine[name].to_numpy(float), truth[name].to_numpy(float)
        assert (np.isnan(column) == np.isnan(right)).all(), f"NaN elsewhere in {name}"
        largest = np.nanmax(np.abs(right), initial=0.0)
        scale = SCALES.get(name, SMALLEST * largest)
        scale = largest if scale is None else scale
        error = np.abs(column - right) / np.maximum(np.maximum(np.abs(right), scale), 1e-300)
        error = column if name == "identity_residual" else error
        by_column[name] = float(np.nanmax(error, initial=0.0)) / FACTORS.get(name, 1.0)
    return by_column


def assert_same(ours: dict[str, pd.DataFrame], expected: dict[str, pd.DataFrame], tolerance: float) -> dict[str, float]:
    """Assert that every column of every expected table agrees; return the worst error of each table."""
    worst = {}
    for name, table in expected.items():
        by_column = errors(ours[name], table)
        wrong = {column: error for column, error in by_column.items() if not error <= tolerance}
        assert not wrong, f"table {name}: {wrong}"
        worst[name] = max(by_column.values(), default=0.0)
    return worst


def window_masses(sequences: list[Sequence], window: int) -> np.ndarray:
    return np.array([
        weights[position : position + window, position].mean()
        for sequence in sequences
        for layer in sequence.layers
        for weights in layer.weights
        for position in range(len(sequence.ids))
    ])  # fmt: skip


def clear_threshold(sequences: list[Sequence], window: int, around: float = 0.25) -> float:
    """Return an ε near `around` as far as possible from every window mass, so that round-off changes no indicator."""
    masses = window_masses(sequences, window)
    ends = [around - 0.05, around + 0.05]
    near = np.sort([*masses[np.abs(masses - around) < 0.05], *ends])
    widest = np.argmax(np.diff(near))
    return float((near[widest] + near[widest + 1]) / 2)

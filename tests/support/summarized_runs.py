"""Runs of `analyze` made by hand from given metrics, and the tables from which claims compute these metrics."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from sinkscope.output.run import Run

SEQUENCES, HEADS, POSITIONS, GROUPS = 2, 100, 16, 20


def summarized(
    summary: dict[str, list[float]] | None = None,
    whole: dict[str, float] | None = None,
    tables: dict[str, pd.DataFrame] | None = None,
    **manifest: Any,
) -> Run:
    """Return a run with these metrics by layer, and for the whole model their means or the given values."""
    rows = [(layer, metric, value) for metric, values in (summary or {}).items() for layer, value in enumerate(values)]
    means = {metric: sum(values) / len(values) for metric, values in (summary or {}).items()} | (whole or {})
    rows += [(-1, metric, value) for metric, value in means.items()]
    record = {
        "model": {"name": "tiny", "source": "org/tiny", "layer_types": None, "sliding_window": None},
        "family": {"positions": "rotary", "wiring": "pre-norm"},
        "input": {"sequences": SEQUENCES, "token_zero": "bos", "shortest": 64, "longest": 64},
        "config": {"seq_len": 64, "window": 64, "epsilon": 0.3},
        "condition": "natural",
        "dtype": "float32",
        "absent": {},
    }
    measured = {"summary": pd.DataFrame(rows, columns=["layer", "metric", "value"])}
    measured |= _by_sequence(summary or {}) | _gradients(means) | _query_bias(means, (summary or {}).get("delta_gap"))
    measured |= tables or {}
    if "gradient" in measured:  # the groups of sequences are all the same
        parts = [measured["gradient"].assign(group=group) for group in range(GROUPS)]
        measured["gradient_by_group"] = pd.concat(parts, ignore_index=True)
    return Run(record | manifest, measured)


def _table(axes: Mapping[str, Sequence[Any]], **columns: Any) -> pd.DataFrame:
    """Return a row for each combination of the axes, with columns of values that are broadcast to them."""
    shape = tuple(len(labels) for labels in axes.values())
    labels = np.meshgrid(*axes.values(), indexing="ij")
    frame = {name: label.ravel() for name, label in zip(axes, labels, strict=True)}
    return pd.DataFrame(frame | {name: np.broadcast_to(values, shape).ravel() for name, values in columns.items()})


def _by_sequence(summary: Mapping[str, list[float]]) -> dict[str, pd.DataFrame]:
    """Return tables in which all sequences are the same, and the first heads of a layer have the sink."""
    tables = {}
    if "sink_rate" in summary:
        rates = np.array(summary["sink_rate"])
        at = {"layer": range(len(rates)), "sequence": range(SEQUENCES)}
        first = np.arange(POSITIONS) == 0
        masses = rates[:, None, None] * first
        tables["attention_by_sequence"] = _table({**at, "position": range(POSITIONS)}, sink_rate=masses)
        has_sink = np.arange(HEADS) < np.round(HEADS * rates)[:, None, None]
        heads = {**at, "head": range(HEADS)}
        tables["attention_heads_by_sequence"] = _table(heads, window_mass=np.where(has_sink, 0.9, 0.1))
    if "value_drain" in summary:
        drains = np.array(summary["value_drain"])[:, None, None]
        at = {"layer": range(len(drains)), "sequence": range(SEQUENCES), "head": range(HEADS)}
        tables["geometry_by_sequence"] = _table(at, value_norm=drains, value_norm_later=1.0)
        if "sink_rate" not in summary:
            tables["attention_heads_by_sequence"] = _table(at, window_mass=0.1)
    return tables


def _gradients(whole: Mapping[str, float]) -> dict[str, pd.DataFrame]:
    """Return norms with these ratios, and points of the branch around a line."""
    tables = {}
    if {"value_gradient_ratio", "key_gradient_ratio", "value_over_key_gradient"} <= whole.keys():
        ratios = np.array([whole["value_gradient_ratio"], whole["key_gradient_ratio"]])
        later = np.array([1.0, ratios[0] / whole["value_over_key_gradient"] / ratios[1]])
        norms = np.where(np.arange(POSITIONS) == 0, (ratios * later)[:, None], later[:, None])
        at = {"layer": [0], "pathway": ["value", "key"], "head": [-1], "position": range(POSITIONS)}
        tables["gradient"] = _table(at, grad_norm=norms[:, None])
    slope, r = (whole.get(f"compress_{name}", np.nan) for name in ("slope", "correlation"))
    if np.isfinite([slope, r]).all():
        x, apart = np.array([-1, -1, 1, 1]), abs(slope) * np.sqrt(1 / r**2 - 1) * np.array([-1, 1, -1, 1])
        at = {"layer": [0, 1], "branch": ["attn"], "sequence": range(SEQUENCES), "position": range(4)}
        points = {"input_norm": 10.0**x, "compress": 10.0 ** (slope * x + apart)}
        tables["gradient_ratio_by_sequence"] = _table(at, **points)
    return tables


def _query_bias(whole: Mapping[str, float], gaps: list[float] | None) -> dict[str, pd.DataFrame]:
    tables = {}
    if gaps:
        at = {"layer": range(len(gaps)), "sequence": range(SEQUENCES)}
        columns = {"delta": np.array(gaps)[:, None], "delta_later": 0.0, "delta_later_std": 1.0}
        tables["query_bias_by_sequence"] = _table(at, **columns)
    if "key_alignment_first" in whole:
        cosines = np.where(
            np.arange(POSITIONS) == 0, whole["key_alignment_first"], whole.get("key_alignment_later", 0.0)
        )
        at = {"layer": range(2), "head": [-1], "position": range(POSITIONS)}
        tables["query_bias"] = _table(at, key_alignment=cosines)
    return tables

"""Runs of `analyze` made by hand from given metrics, and the tables from which claims compute these metrics."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from sinkscope.output.run import Run
from support.figure_tables import grid
from support.manifests import run_manifest

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
    measured = {"summary": pd.DataFrame(rows, columns=["layer", "metric", "value"])}
    measured |= _by_sequence(summary or {}) | (tables or {})
    if "gradient" in measured:  # the groups of sequences are all the same
        parts = [measured["gradient"].assign(group=group) for group in range(GROUPS)]
        measured["gradient_by_group"] = pd.concat(parts, ignore_index=True)
    record = run_manifest(**manifest)
    record["input"] |= {"sequences": SEQUENCES}
    return Run(record, measured)


def _table(axes: Mapping[str, Sequence[Any]], **columns: Any) -> pd.DataFrame:
    """Return a row for each combination of the axes, with columns of values that are broadcast to them."""
    shape = tuple(len(labels) for labels in axes.values())
    return grid(**axes).assign(**{name: np.broadcast_to(values, shape).ravel() for name, values in columns.items()})


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

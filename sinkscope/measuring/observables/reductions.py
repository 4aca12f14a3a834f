"""Reductions that observables share: means over the positions that a sequence has, and tables made of arrays."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch

from sinkscope.text.batch import on_cpu

ALL_HEADS = -1  # the head of rows for all heads together
GROUPS = 20  # maximum number of groups of sequences for a jackknife; text i of a run is in group i modulo GROUPS
LATER = slice(5, 16)  # positions that position 0 is compared with, independent of --positions
AFTER_FIRST = slice(1, LATER.stop)  # the same for GS's figures, and for claims about all later positions


def filled(x: torch.Tensor, present: torch.Tensor | None, entry: float = 0.0) -> torch.Tensor:
    """Set x (B,…,P) to `entry` where `present` (B,P) or (B,…,P) is False; None means True everywhere."""
    if present is None:
        return x
    if present.dim() < x.dim():
        present = present.view(len(present), *[1] * (x.dim() - 2), -1)
    return x.masked_fill(~present.to(x.device), entry)


def mean_over(x: torch.Tensor, present: torch.Tensor | None) -> torch.Tensor:
    """Average x (B,…,P) over positions or queries, (B,…), as in `filled`; NaN if none is present."""
    if present is None:
        return x.mean(-1)
    count = present.sum(-1).to(x.device)
    return filled(x, present).sum(-1) / count.view(-1, *[1] * (x.dim() - 2))


def later_mean(x: torch.Tensor, present: torch.Tensor | None, positions: slice = LATER) -> torch.Tensor:
    """Average statistics by position (B,…,P) over those of the `positions` that a sequence has."""
    return mean_over(x[..., positions], None if present is None else present[:, positions])


def long_table(parts: Iterable[tuple[dict[str, Any], Mapping[str, np.ndarray | torch.Tensor]]]) -> pd.DataFrame:
    """Make a table in long format from `axes` and `columns` of several parts, with one row per entry of the arrays.

    The columns of a part are arrays or tensors of one shape. Its axes are a label for all rows (a scalar), or the
    labels of an axis, in the order of the arrays' axes. This is faster than `pd.concat` of many tables.
    """
    tables, parts = [], list(parts)
    copied = iter(on_cpu(x for _, columns in parts for x in columns.values() if isinstance(x, torch.Tensor)))
    for axes, columns in parts:
        shape = next(iter(columns.values())).shape
        indices = iter(np.indices(shape))
        labels = {
            name: np.full(math.prod(shape), label) if np.isscalar(label) else np.asarray(label)[next(indices).ravel()]
            for name, label in axes.items()
        }
        arrays = {name: next(copied).numpy() if isinstance(x, torch.Tensor) else x for name, x in columns.items()}
        tables.append(labels | {name: array.ravel() for name, array in arrays.items()})
    return pd.DataFrame({name: np.concatenate([table[name] for table in tables]) for name in tables[0]})


def with_kv_head(table: pd.DataFrame) -> pd.DataFrame:
    """Replace the column `group`, the number of query heads per key/value head, by the `kv_head` that a head reads."""
    return table.assign(kv_head=table["head"] // table["group"]).drop(columns="group")

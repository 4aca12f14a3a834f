"""The by-sequence tables of a run, under resamplings of its sequences."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pandas as pd

from sinkscope.results.run import RunData
from sinkscope.results.statistics import resamplings_of, weighted_means


class Lacks(Exception):
    """A run lacks a table or an option that a number needs; the message names it."""


def table_of_run(run: RunData, name: str) -> pd.DataFrame:
    """Return a table of a run. Raises Lacks."""
    if name not in run.tables:
        raise Lacks(f"a run of `{run.command}` lacks the table '{name}'")
    return run.tables[name]


@dataclass(frozen=True)
class Sequences:
    """The by-sequence tables of a run, under resamplings of its sequences."""

    run: RunData
    condition: str | None = None  # the arm of a run of `intervene`
    _arrays: dict[tuple, np.ndarray] = field(default_factory=dict, repr=False)

    def table(self, name: str) -> pd.DataFrame:
        """Return one table of the run, or its rows for the arm. Raises Lacks."""
        table = table_of_run(self.run, name)
        return table if self.condition is None else table[table["condition"] == self.condition]

    @property
    def epsilon(self) -> float:
        return float(self.run.manifest["config"]["epsilon"])

    @property
    def texts(self) -> int:
        """The number of distinct texts."""
        return len(np.unique(self.run.text_numbers))

    @cached_property
    def weights(self) -> np.ndarray:
        """(1 + draws, N): how often each sequence counts."""
        return resamplings_of(self.run.text_numbers)

    def values(self, table: str, column: str, by: tuple[str, ...] = ("layer",), **where: object) -> np.ndarray:
        """(N, *by): the value of each sequence, NaN where it has none. The axes are sorted like the columns `by`."""

        def pivoted() -> np.ndarray:
            rows = self.table(table)
            for name, value in where.items():
                rows = rows[rows[name] == value]
            axes = [np.unique(rows[name].to_numpy(), return_inverse=True) for name in by]
            count = self.run.manifest["input"]["sequences"]
            values = np.full((count, *(len(labels) for labels, _ in axes)), np.nan)
            values[(rows["sequence"].to_numpy(), *(index for _, index in axes))] = rows[column].to_numpy(float)
            return values

        return self.once((table, column, by, *sorted(where.items())), pivoted)

    def once(self, key: tuple, find: Callable[[], np.ndarray]) -> np.ndarray:
        """Return the array named `key`, which `find` computes at the first call."""
        if key not in self._arrays:
            self._arrays[key] = find()
        return self._arrays[key]

    def means(self, table: str, column: str, by: tuple[str, ...] = ("layer",), **where: object) -> np.ndarray:
        """(1 + draws, *by): means over sequences; the first are the means of the run itself."""
        return weighted_means(self.values(table, column, by, **where), self.weights)

    @property
    def losses(self) -> np.ndarray:
        """(1 + passages,): loss per predicted token, of the complete run and without each passage of the text.

        Passages are left out as units because the losses of their sequences are not independent.
        """
        loss, predicted = (self.values("loss_by_sequence", column)[:, 0] for column in ("loss", "predicted"))
        # a copy is in the passage of the first sequence with its text
        _, first, text = np.unique(self.run.text_numbers, return_index=True, return_inverse=True)
        passage = first[text] // self.run.manifest["input"].get("per_passage", 1)
        weights = np.concatenate([np.ones((1, len(loss))), np.unique(passage)[:, None] != passage])
        with np.errstate(invalid="ignore"):
            return (weights @ np.nan_to_num(loss * predicted)) / (weights @ predicted)

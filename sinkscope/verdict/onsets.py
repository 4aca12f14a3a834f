"""When the sink, the gradient sink and the first token's norm begin in a training, and which of them changes first.

GS says that the sink makes a gradient sink, and that the norm responds to it. In a training the three would then begin
in this order. Every measure is computed at each checkpoint from the same sequences, and its onset is the step at which
it first reaches its threshold.
"""

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import NamedTuple

import numpy as np
import pandas as pd

from sinkscope.measuring.estimates import gradients, later_positions, norm_ratios, sink_rates
from sinkscope.results.findings import SINK
from sinkscope.results.run import RunData
from sinkscope.results.sequences import Lacks, Sequences
from sinkscope.results.statistics import Estimate, bootstrap, positive_jackknife, rank_correlation

RISEN = 2.0  # times its null: a ratio above this has risen


class Measure(NamedTuple):
    """A measure of a run: its replicates (R,), their interval, and the value from which on it has begun."""

    label: str
    replicates: Callable[[Sequences], np.ndarray]
    interval: Callable[[np.ndarray], Estimate]
    threshold: float
    is_ratio: bool  # it changes by factors


def _gradient_ratio(sequences: Sequences) -> np.ndarray:
    """Return ‖∇v₀‖ ÷ later, means over layers, in multiples of what uniform causal attention gives."""
    by_position = gradients(sequences, "value").mean(1)
    null = sequences.run.metric("uniform_gradient_ratio")
    return by_position[:, 0] / later_positions(by_position).mean(1) / null


def _norm_ratio(sequences: Sequences) -> np.ndarray:
    return norm_ratios(sequences, "layer_out").max(1)


MEASURES: dict[str, Measure] = {
    "sink": Measure("sink rate at position 0 (%)", sink_rates, bootstrap, SINK, False),
    "gradient": Measure("value gradient, 0 ÷ later ÷ null", _gradient_ratio, positive_jackknife, RISEN, True),
    "norm": Measure("residual norm, 0 ÷ later, largest layer", _norm_ratio, bootstrap, RISEN, True),
}


def courses(runs: Sequence[tuple[int, RunData]]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Return the steps, and each measure's replicates over them, (R, steps). Raises Lacks."""
    steps = np.array([step for step, _ in runs])
    if len(steps) < 2:
        raise Lacks("a single step has no onset")
    read = [Sequences(run) for _, run in runs]
    return steps, {name: np.stack([measure.replicates(each) for each in read], 1) for name, measure in MEASURES.items()}


def onset(course: np.ndarray, steps: np.ndarray, threshold: float) -> np.ndarray:
    """Return the step at which each replicate first reaches the threshold, (R, steps) → (R,); NaN: at no step.

    Between two checkpoints it is interpolated, on the scale of log (1 + step).
    """
    reached = course >= threshold
    first = reached.argmax(1)
    x, rows = np.log1p(steps), np.arange(len(course))
    before = np.maximum(first - 1, 0)
    low, high = course[rows, before], course[rows, first]
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.where(first > 0, (threshold - low) / (high - low), 0.0)
    found = np.expm1(x[before] + share * (x[first] - x[before]))
    return np.where(reached.any(1), found, np.nan)


def onset_table(steps: np.ndarray, measured: dict[str, np.ndarray]) -> pd.DataFrame:
    """Return measure, threshold, step, low, high: the onset of each measure and its 95 % interval over sequences."""
    rows = []
    for name, course in measured.items():
        found = MEASURES[name].interval(onset(course, steps, MEASURES[name].threshold))
        rows.append((name, MEASURES[name].threshold, found.value, found.low, found.high))
    return pd.DataFrame(rows, columns=["measure", "threshold", "step", "low", "high"])


def lag_table(measured: dict[str, np.ndarray]) -> pd.DataFrame:
    """Return first, then, correlation, low, high: Spearman's of a change with the other's change one checkpoint later.

    The interval is over pairs of checkpoints, and takes them as independent. Where `first` drives `then`, its
    correlation is above that of the two exchanged.
    """
    changes = {
        name: np.diff(np.log(np.maximum(course[0], 1e-9)) if MEASURES[name].is_ratio else course[0])
        for name, course in measured.items()
    }
    rows = []
    for first, then in permutations(changes, 2):
        found = rank_correlation(changes[first][:-1], changes[then][1:])
        rows.append((first, then, found.value, found.low, found.high))
    return pd.DataFrame(rows, columns=["first", "then", "correlation", "low", "high"])

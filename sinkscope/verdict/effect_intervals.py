"""How far other sequences would change what an arm does: 95 % intervals, from an experiment's tables by sequence.

An arm reads the sequences that are read before, so that its change is known better than either number: sequences are
resampled in pairs, and the interval is that of the change, put where the arm's number is. Perplexities are compared
without each passage of the text in turn (jackknife): sequences of one passage are alike.
"""

from collections.abc import Callable

import numpy as np
import pandas as pd

from sinkscope.measuring.experiment import BEFORE
from sinkscope.measuring.summary import NO_POSITION
from sinkscope.results.run import RunData
from sinkscope.results.sequences import Lacks, Sequences, table_of
from sinkscope.results.statistics import bootstrap, positive_jackknife, weighted_means


def interval(run: RunData, label: str, metric: str, position: int = NO_POSITION) -> tuple[float, float] | None:
    """Of a metric of the whole model.

    Args:
        run: Of `intervene`.
        label: Of an arm.
        metric: A key of `REPLICATES`.
        position: At which it is read, if at one.

    Returns:
        Where the arm's number would be, with the number before as it is; None where the run lacks the table, or rows of
        this arm.
    """
    pair = _pair(run, label, metric, position)
    if pair is None:
        return None
    before, after = (found if found.ndim == 1 else found.mean(1) for found in pair)
    return _change(before, after, metric == "perplexity")


def interval_by_layer(run: RunData, label: str, metric: str, position: int) -> pd.DataFrame:
    """The same of each layer, of a metric of attention: rows layers, columns low and high; those that have one."""
    pair = _pair(run, label, metric, position)
    if pair is None:
        return pd.DataFrame(columns=["low", "high"])
    ends = [_change(before, after) for before, after in zip(*(found.T for found in pair), strict=True)]
    table = table_of(run, "attention_by_sequence")
    layers = np.unique(table["layer"][(table["condition"] == label) & (table["position"] == position)])
    found = pd.DataFrame(ends, columns=["low", "high"], index=layers)
    return found[np.isfinite(found).all(axis=1)]  # a single sequence has none


def _change(before: np.ndarray, after: np.ndarray, is_factor: bool = False) -> tuple[float, float]:
    """The interval of a change, from (1 + draws,) each; perplexities, (1 + passages,), change by a factor."""
    found = positive_jackknife(after / before) if is_factor else bootstrap(after - before)
    ends = found.low, found.high
    low, high = (before[0] * end if is_factor else before[0] + end for end in ends)
    return float(low), float(high)


def _pair(run: RunData, label: str, metric: str, position: int) -> tuple[np.ndarray, np.ndarray] | None:
    """(1 + draws,) or (1 + draws, layers) each, before and under the arm; None where there is nothing to resample."""
    try:
        before, after = (REPLICATES[metric](Sequences(run, name), metric, position) for name in (BEFORE, label))
    except Lacks:
        return None
    return (before, after) if before.shape == after.shape and before.size else None


def _of_attention(sequences: Sequences, metric: str, position: int) -> np.ndarray:
    return sequences.means("attention_by_sequence", metric, position=position)


def _perplexity(sequences: Sequences, metric: str, position: int) -> np.ndarray:
    return np.exp(sequences.losses)


def _magnitude(sequences: Sequences, metric: str, position: int) -> np.ndarray:
    """Of the layer that has the largest."""
    massive = table_of(sequences.run, "massive")
    rows = massive[massive["condition"] == sequences.condition]
    largest = rows["value"].abs().groupby([rows["sequence"], rows["layer"]]).max().unstack("layer")
    count = sequences.weights.shape[1]
    return weighted_means(largest.reindex(range(count)).to_numpy(float), sequences.weights).max(1)


REPLICATES: dict[str, Callable[[Sequences, str, int], np.ndarray]] = {
    "sink_rate": _of_attention,
    "window_mass": _of_attention,
    "perplexity": _perplexity,
    "massive_magnitude": _magnitude,
}

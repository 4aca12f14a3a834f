"""What uniform causal attention alone gives position 0, in closed form."""

from collections.abc import Sequence

import numpy as np

from sinkscope.measuring.observables.observable import LATER


def uniform_mass(length: int, positions: int) -> np.ndarray:
    """(positions,): the sink mass (GS eq. 2) of each position over `length` tokens: a query sees t + 1 keys alike."""
    weights = 1 / np.arange(1, length + 1)
    return np.array([weights[first:].mean() for first in range(positions)])


def uniform_gradient_ratio(predicted: Sequence[int]) -> float:
    """`value_gradient_ratio` of uniform causal attention alone: ∇v_s = Σ_{t ≥ s} g_t ÷ (t + 1), the g_t of all
    predicting tokens t unrelated and of one size (GS §3.1). What random weights give: `random_weights.py`.

    Args:
        predicted: Of each sequence, how many tokens predict another: one less than it has.
    """
    queries = np.arange(max(predicted))
    sequences = (np.asarray(predicted)[:, None] > queries).sum(0)  # that have this query
    norms = np.sqrt(np.cumsum((sequences / (queries + 1.0) ** 2)[::-1])[::-1])
    return float(norms[0] / norms[LATER].mean()) if len(norms) > LATER.start else float("nan")

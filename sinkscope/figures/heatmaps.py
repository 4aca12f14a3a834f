"""Attention weights as heat maps: queries downwards, keys across, white where a causal mask forbids a key."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.image import AxesImage

from sinkscope.figures.style import SEQUENTIAL


def square(table: pd.DataFrame, size: int) -> np.ndarray:
    """Rows with query, key and weight as a matrix (size, size), NaN where there is no row."""
    weights = np.full((size, size), np.nan)
    weights[table["query"], table["key"]] = table["weight"]
    return weights


def above_diagonal(weights: np.ndarray) -> np.ndarray:
    """(T,T) bool: the places above the diagonal, unless there are weights, as an encoder's map has."""
    above = np.triu(np.ones_like(weights, bool), 1)
    return above & bool(np.isnan(weights[above]).all())


def draw_weights(ax: Axes, weights: np.ndarray, faintest: float, masked: np.ndarray | None = None) -> AxesImage:
    """Draw weights on a logarithmic color scale from `faintest` to 1.

    White where `masked` (by default above the diagonal, unless there are weights), gray where a weight is NaN.
    """
    masked = above_diagonal(weights) if masked is None else masked
    image = ax.imshow(np.clip(weights, faintest / 10, 1), cmap=SEQUENTIAL, norm=LogNorm(faintest, 1))
    ax.imshow(np.where(masked, 1.0, np.nan), cmap="Greys_r", vmin=0, vmax=1)
    return image

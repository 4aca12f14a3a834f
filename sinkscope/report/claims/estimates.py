"""A number with its 95 % interval: bootstraps over units that were drawn, jackknives where a sum is not a mean of them.

Pure functions on arrays. Replicates stand on the first axis: the first is the estimate itself, the others are those of
the resampled data.
"""

from dataclasses import dataclass, replace
from functools import cache
from math import exp, log, nan

import numpy as np
from scipy import stats

LEVEL = 0.95
DRAWS = 1000  # bootstrap replicates
SEED = 0  # of the resampling: the same runs give the same intervals


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval; both ends are the value where nothing was drawn that could have been another.

    Attributes:
        value: The quantity.
        low, high: Ends of the interval.
        null: The same quantity where there is nothing to find; NaN where it has none.
        note: What the number is over, if that depends on the model.
    """

    value: float
    low: float = nan
    high: float = nan
    null: float = nan
    note: str = ""

    def __truediv__(self, other: "Estimate") -> "Estimate":
        """A ratio of two independent estimates of what is never negative: their errors add in quadrature, on the scale
        of logarithms. Where the upper one reaches 0, the ends are the outermost ratios.
        """
        if other.low <= 0:
            return Estimate(self.value / other.value, 0.0, np.inf) if other.value else Estimate(nan, nan, nan)
        value = self.value / other.value
        if self.low <= 0:
            return Estimate(value, 0.0, self.high / other.low)
        down = np.hypot(log(self.value / self.low), log(other.high / other.value))
        up = np.hypot(log(self.high / self.value), log(other.value / other.low))
        return Estimate(value, value * exp(-down), value * exp(up))

    def __sub__(self, other: "Estimate") -> "Estimate":
        """A difference of two independent estimates: their errors add in quadrature."""
        value = self.value - other.value
        down = np.hypot(self.value - self.low, other.high - other.value)
        up = np.hypot(self.high - self.value, other.value - other.low)
        return Estimate(value, value - down, value + up)

    def against(self, null: float) -> "Estimate":
        return replace(self, null=null)

    def over(self, note: str) -> "Estimate":
        return replace(self, note=note)


def exact(value: float) -> Estimate:
    """Of a quantity of the weights alone."""
    return Estimate(float(value), float(value), float(value))


@cache
def resamplings(units: int, draws: int = DRAWS, seed: int = SEED) -> np.ndarray:
    """(1 + draws, units): how often each unit counts; once each in the first row, and drawn with replacement below.
    A single unit says nothing of how units differ: it counts in no draw, and the interval becomes unbounded.
    """
    drawn = np.random.default_rng(seed).multinomial(units * (units > 1), np.full(units, 1 / units), size=draws)
    weights = np.concatenate([np.ones((1, units)), drawn]).astype(np.float64)
    weights.flags.writeable = False  # it is shared
    return weights


def weighted_means(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Means over units under each row of weights; entries that are NaN count nowhere.

    Args:
        x: (units, …).
        weights: (replicates, units).

    Returns:
        (replicates, …); NaN where no unit counts.
    """
    known = np.isfinite(x)
    flat, counts = np.where(known, x, 0.0).reshape(len(x), -1), known.reshape(len(x), -1).astype(np.float64)
    with np.errstate(invalid="ignore"):
        means = (weights @ flat) / (weights @ counts)
    return means.reshape(len(weights), *x.shape[1:])


def bootstrap(replicates: np.ndarray) -> Estimate:
    """The percentile interval of (1 + draws,) replicates (Efron & Tibshirani 1993, §13.3).

    NaN among the replicates are left out; where more than 5 % are, the interval is unbounded.
    """
    value, drawn = float(replicates[0]), replicates[1:]
    known = drawn[np.isfinite(drawn)]
    if len(known) < LEVEL * len(drawn) or not len(known):
        return Estimate(value, -np.inf, np.inf)
    low, high = np.quantile(known, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, min(float(low), value), max(float(high), value))


def jackknife(replicates: np.ndarray) -> Estimate:
    """The interval of (1 + groups,) replicates, each but the first without one group (Efron & Tibshirani 1993, §11).

    For norms of sums over sequences: drawn twice, a sequence would add its own noise twice, and the bootstrap's norms
    would be too large.
    """
    value, without = float(replicates[0]), replicates[1:]
    groups = len(without)
    if groups < 2 or not np.isfinite(replicates).all():
        return Estimate(value, -np.inf, np.inf)
    error = np.sqrt((groups - 1) / groups * ((without - without.mean()) ** 2).sum())
    reach = float(stats.t.ppf((1 + LEVEL) / 2, groups - 1) * error)
    return Estimate(value, value - reach, value + reach)


def positive_jackknife(replicates: np.ndarray) -> Estimate:
    """`jackknife` of a positive quantity, on the scale of logarithms: the interval of a ratio stays above 0."""
    if not (replicates > 0).all():
        return jackknife(replicates)
    found = jackknife(np.log(replicates))
    return Estimate(float(replicates[0]), float(np.exp(found.low)), float(np.exp(found.high)))


def rank_correlation(x: np.ndarray, y: np.ndarray) -> Estimate:
    """Spearman's, of (units,) against (units,), the units (layers or heads) resampled; NaN where one is constant."""
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return Estimate(nan, -np.inf, np.inf)
    picks = np.random.default_rng(SEED).integers(len(x), size=(DRAWS, len(x)))
    picks = np.concatenate([np.arange(len(x))[None], picks])
    a, b = (stats.rankdata(values[picks], axis=1) for values in (x, y))
    a, b = a - a.mean(1, keepdims=True), b - b.mean(1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return bootstrap((a * b).sum(1) / np.sqrt((a**2).sum(1) * (b**2).sum(1)))


def mean_of_runs(values: np.ndarray) -> Estimate:
    """The mean over seeds, or over random controls, with Student's interval; unbounded with a single one."""
    value = float(np.mean(values))
    if len(values) < 2:
        return Estimate(value, -np.inf, np.inf)
    reach = float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1) * np.std(values, ddof=1) / np.sqrt(len(values)))
    return Estimate(value, value - reach, value + reach)


def one_more_run(values: np.ndarray) -> Estimate:
    """The mean over runs with the interval in which one more would fall (Student's); unbounded with fewer than two."""
    value = float(np.mean(values)) if len(values) else 0.0
    if len(values) < 2:
        return Estimate(value, -np.inf, np.inf)
    spread = float(np.std(values, ddof=1) * np.sqrt(1 + 1 / len(values)))
    reach = float(stats.t.ppf((1 + LEVEL) / 2, len(values) - 1)) * spread
    return Estimate(value, value - reach, value + reach)

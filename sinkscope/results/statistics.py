"""Numbers with their 95 % intervals: bootstraps, jackknives, intervals over runs, and intervals of correlations.

Replicates are on the first axis: the first is the estimate itself, the others are of resampled data. All intervals are
two-sided: each end misses the truth with 2.5 %. A claim whose truth is exactly at its threshold is therefore decided in
5 % of studies, and in half of these it holds falsely (tests/commands/claims/test_claims_levels.py measures both).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import exp, log, nan
from typing import Any

import numpy as np
import scipy
from scipy.special import ndtr, ndtri, stdtrit

LEVEL = 0.95
DRAWS = 1000  # bootstrap replicates
RHO = np.linspace(-1, 1, 2001)[1:-1]  # correlations that are tested
ROUND_OFF = 1e-5  # relative: two passes in float32 with batches of different sizes differ by less
RESAMPLING_SEED = 0  # resampling has a fixed seed: the same runs give the same intervals


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval; both ends equal the value if nothing was drawn at random."""

    value: float
    low: float = nan
    high: float = nan
    null: float = nan  # the same quantity without the effect; NaN if there is none
    note: str = ""  # the units that the mean is over, if they depend on the model
    null_low: float = nan  # the smallest of the null's draws
    null_high: float = nan  # the largest of the null's draws
    seeds: int = 0  # number of training seeds that the interval is over; 0 if it is over other units
    truest: float = nan  # the value if the claim is as true as it can be; NaN: `value` itself

    def __neg__(self) -> "Estimate":
        return replace(self, value=-self.value, low=-self.high, high=-self.low)

    def __truediv__(self, other: "Estimate") -> "Estimate":
        """Return the ratio of two independent estimates of nonnegative quantities.

        Their errors add in quadrature, on the scale of logarithms. If the interval of the numerator reaches 0, the ends
        are the outermost ratios.
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
        """Return the difference of two independent estimates: their errors add in quadrature."""
        value = self.value - other.value
        down = np.hypot(self.value - self.low, other.high - other.value)
        up = np.hypot(self.high - self.value, other.value - other.low)
        return Estimate(value, value - down, value + up)

    def against(self, null: float) -> "Estimate":
        return replace(self, null=null)

    def over(self, note: str) -> "Estimate":
        return replace(self, note=note)

    def as_columns(self, name: str) -> dict[str, float]:
        """Return the value and the ends of its interval by the names of their columns in a table."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}

    @classmethod
    def of_columns(cls, row: Any, name: str) -> "Estimate":
        """Return the estimate in these columns of a row."""
        return cls(float(row[name]), float(row[f"{name}_low"]), float(row[f"{name}_high"]))


def exact(value: float) -> Estimate:
    """Return the estimate of a quantity that depends only on the weights, which has no interval."""
    return Estimate(float(value), float(value), float(value))


@cache
def resamplings(units: int, draws: int = DRAWS, seed: int = RESAMPLING_SEED, size: int | None = None) -> np.ndarray:
    """(1 + draws, units): the weight of each unit: 1 in the first row, then from `size` draws with replacement.

    By default fewer are drawn than there are, 13 of 16 or 97 of 100, so that percentiles of a mean are as far apart as
    the ends of Student's interval. With as many as there are they would miss the mean of 16 normal numbers in 8 %, and
    of 8 in 11 % of studies (Hesterberg 2015, §5.3). A single unit has no spread: its weight is 0 in every draw, so that
    the interval becomes unbounded.
    """
    if size is None:
        narrower = ndtri((1 + LEVEL) / 2) / stdtrit(max(units - 1, 1), (1 + LEVEL) / 2)
        size = max(1, round((units - 1) * narrower**2))
    drawn = np.random.default_rng(seed).multinomial(size, np.full(units, 1 / units), size=draws)
    weights = np.concatenate([np.ones((1, units)), drawn * (units > 1) * (units / size)])
    weights.flags.writeable = False  # the array is cached and shared
    return weights


def resamplings_of(texts: Sequence[int] | np.ndarray) -> np.ndarray:
    """(1 + draws, N): `resamplings` of distinct texts, from the number of each sequence's text.

    Copies of a text are one unit: they are drawn together, so that they do not narrow an interval.
    """
    units, index = np.unique(np.asarray(texts, dtype=int), return_inverse=True)
    return resamplings(len(units))[:, index]


def weighted_means(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """(units, …), (replicates, units) → (replicates, …): means over units under each row of weights.

    NaN entries are ignored; a mean is NaN if all its entries with a weight are NaN.
    """
    is_finite = np.isfinite(x)
    flat, counts = np.where(is_finite, x, 0.0).reshape(len(x), -1), is_finite.reshape(len(x), -1).astype(np.float64)
    with np.errstate(invalid="ignore"):
        means = (weights @ flat) / (weights @ counts)
    return means.reshape(len(weights), *x.shape[1:])


def bootstrap(replicates: np.ndarray) -> Estimate:
    """Return the percentile interval of (1 + draws,) replicates (Efron & Tibshirani 1993, §13.3).

    NaN replicates are left out; if more than 5 % are NaN, the interval is unbounded.
    """
    value, drawn = float(replicates[0]), replicates[1:]
    finite = drawn[np.isfinite(drawn)]
    if len(finite) < LEVEL * len(drawn) or not len(finite):
        return Estimate(value, -np.inf, np.inf)
    low, high = np.quantile(finite, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(value, min(float(low), value), max(float(high), value))


def with_unseen_values(estimate: Estimate, units: int, least: float = 0.0, most: float = 1.0) -> Estimate:
    """Return the estimate of a mean between `least` and `most`, with an interval also if all units are equal.

    Their spread is then unknown. A share p of units could have any value, and none of n units shows it with probability
    (1 − p)ⁿ: p is at most 1 − 0.05^(1/n), 45 % with five.
    """
    if estimate.low != estimate.high or units < 2:
        return estimate
    unseen, value = 1 - (1 - LEVEL) ** (1 / units), estimate.value
    return replace(estimate, low=value - unseen * (value - least), high=value + unseen * (most - value))


def differences(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Return second − first, which is 0 if it is no more than round-off."""
    apart = second - first
    return np.where(np.abs(apart) <= ROUND_OFF * np.maximum(np.abs(first), np.abs(second)), 0.0, apart)


def p_values(first: np.ndarray, second: np.ndarray | None = None) -> np.ndarray:
    """Return two-sided p-values (K,) of rank tests: that samples (units, K) differ, or differences of pairs from 0.

    They are those of Mann & Whitney (1947), and of Wilcoxon's signed ranks in the normal approximation (Pratt 1959).
    """
    with np.errstate(invalid="ignore", divide="ignore"):  # all units are equal
        if second is not None:
            return np.nan_to_num(scipy.stats.mannwhitneyu(first, second, axis=0).pvalue, nan=1.0)
        ranks = np.sign(first) * scipy.stats.rankdata(np.abs(first), axis=0)
        z = np.abs(ranks.sum(0)) / np.sqrt((ranks**2).sum(0))
    return np.nan_to_num(2 * ndtr(-z), nan=1.0)


def jackknife(replicates: np.ndarray) -> Estimate:
    """Return the interval of (1 + groups,) replicates, of which all except the first leave out one group.

    Efron & Tibshirani 1993, §11. It is used for norms of sums over sequences, because a sequence that is drawn twice
    would add its own noise twice, and the norms of a bootstrap would be too large.
    """
    value, without = float(replicates[0]), replicates[1:]
    groups = len(without)
    if groups < 2 or not np.isfinite(replicates).all():
        return Estimate(value, -np.inf, np.inf)
    error = np.sqrt((groups - 1) / groups * ((without - without.mean()) ** 2).sum())
    reach = float(stdtrit(groups - 1, (1 + LEVEL) / 2) * error)
    return Estimate(value, value - reach, value + reach)


def positive_jackknife(replicates: np.ndarray) -> Estimate:
    """Return the `jackknife` of a positive quantity on the scale of logarithms: the interval stays above 0."""
    if not (replicates > 0).all():
        return jackknife(replicates)
    logarithm = jackknife(np.log(replicates))
    return Estimate(float(replicates[0]), float(np.exp(logarithm.low)), float(np.exp(logarithm.high)))


def rank_correlation(x: np.ndarray, y: np.ndarray, layers: np.ndarray | None = None) -> Estimate:
    """Return Spearman's correlation of (units,) and (units,); NaN if one of them is constant.

    Units in neighboring layers are similar, and so are heads of a layer: their number is replaced by the effective one.
    The interval inverts the test of a correlation ρ that compares |artanh r − artanh ρ| with the critical value of
    Student's test, times √(1 + ρ²/2) (Bonett & Wright 2000).

    Args:
        x, y: (units,); NaN where a unit has no value.
        layers: (units,) the layer of each unit; None: the units are independent.
    """
    is_finite = np.isfinite(x) & np.isfinite(y)
    x, y = scipy.stats.rankdata(x[is_finite]), scipy.stats.rankdata(y[is_finite])
    units = len(x)
    if units < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return Estimate(nan, -np.inf, np.inf)
    value = float(np.corrcoef(x, y)[0, 1])
    size = units if layers is None else effective_size(x, y, layers[is_finite])
    freedom = max(size - 2, 1.0)
    critical = stdtrit(freedom, (1 + LEVEL) / 2)
    reach = np.arctanh(critical / np.hypot(critical, np.sqrt(freedom)))
    largest = 1 - 6 / (units**3 - units)  # half a step from 1 to the next smaller value: 1 itself has no artanh
    off = np.abs(np.arctanh(np.clip(value, -largest, largest)) - np.arctanh(RHO))
    inside = RHO[off <= np.maximum(reach * np.sqrt(1 + RHO**2 / 2), off.min())]  # a value of 1 is beyond all of RHO
    low, high = (-1.0 if inside[0] == RHO[0] else inside[0]), (1.0 if inside[-1] == RHO[-1] else inside[-1])
    return Estimate(value, min(float(low), value), max(float(high), value))


def effective_size(x: np.ndarray, y: np.ndarray, layers: np.ndarray) -> float:
    """Return the number of independent pairs that give the correlation of (units,) and (units,) the same variance.

    The variance of the correlation of two unrelated series is the mean of ρ_x(i, j) ρ_y(i, j) over all pairs of units
    (Bartlett 1935). The product is estimated for two units of one layer and of neighboring layers; each further layer
    multiplies it by the ratio of these two, as in an autoregressive series: the full empirical autocorrelation of so
    few layers would be biased towards 0 (Bretherton et al. 1999, eq. 31; Pyper & Peterman 1998).
    """
    index = np.unique(layers, return_inverse=True)[1]
    counts = np.bincount(index).astype(float)
    pairs = (counts * (counts - 1)).sum()

    def unit_correlations(values: np.ndarray) -> tuple[float, float]:
        """Return the correlations of two units in one layer, and of two units in neighboring layers."""
        z = (values - values.mean()) / values.std()
        sums = np.bincount(index, z)
        within = max((sums**2).sum() - (z**2).sum(), 0.0) / pairs if pairs else 1.0
        neighboring = (sums[1:] * sums[:-1]).sum() / (counts[1:] * counts[:-1]).sum() if len(counts) > 1 else 0.0
        return float(within), float(neighboring)

    within, neighboring = np.prod([unit_correlations(values) for values in (x, y)], axis=0)
    ratio = np.clip(neighboring / within, -0.99, 0.99) if within > 0 else 0.0
    lags = np.arange(1, len(counts))
    apart = np.array([(counts[lag:] * counts[:-lag]).sum() for lag in lags])
    total = len(x) + pairs * within + 2 * (apart * neighboring * ratio ** (lags - 1)).sum()
    return float(np.clip(len(x) ** 2 / max(total, 1.0), 3, len(x)))


# --- over runs


def mean_of_runs(values: np.ndarray) -> Estimate:
    """Return the mean over seeds with Student's interval, which is unbounded with a single seed."""
    value, seeds = float(np.mean(values)), len(values)
    if seeds < 2:
        return Estimate(value, -np.inf, np.inf, seeds=seeds)
    reach = float(stdtrit(seeds - 1, (1 + LEVEL) / 2) * np.std(values, ddof=1) / np.sqrt(seeds))
    return Estimate(value, value - reach, value + reach, seeds=seeds)


def mean_of_controls(values: np.ndarray) -> Estimate:
    """Return `mean_of_runs` over random controls, which are draws, so that the estimate has no seeds."""
    return replace(mean_of_runs(values), seeds=0)


def mean_of_rates(values: np.ndarray, least: float = 0.0, most: float = 1.0) -> Estimate:
    """Return the mean over (seeds,) of a quantity between `least` and `most`, such as a rate or a correlation.

    Rates near an end are skewed, so that Student's interval misses their mean in up to 20 % of studies. Cube roots of
    the distance to the nearer end are close to normal (Wilson & Hilferty 1931), and the mean of a cube of a normal
    variable is m³ + 3 m s²: its generalized interval (Weerahandi 1993) has the level from 3 seeds on. If `most` is
    infinite, Student's interval is used. For seeds that are all equal, see `with_unseen_values`.
    """
    value, seeds = float(np.mean(values)), len(values)
    if seeds < 2:
        return Estimate(value, least, most, seeds=seeds)
    if np.ptp(values) == 0:
        return with_unseen_values(Estimate(value, value, value, seeds=seeds), seeds, least, most)
    if np.isinf(most):
        return mean_of_runs(values)
    x = (np.asarray(values, float) - least) / (most - least)
    from_top = x.mean() > 0.5
    roots = np.cbrt(1 - x if from_top else x)
    shift, scale = _pivots(seeds)
    spread = scale * roots.std(ddof=1)
    middle = roots.mean() - shift * spread
    ends = np.quantile(middle**3 + 3 * middle * spread**2, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    low, high = least + (most - least) * np.clip(np.sort(1 - ends) if from_top else ends, 0, 1)
    return Estimate(value, min(float(low), value), max(float(high), value), seeds=seeds)


@cache
def _pivots(seeds: int) -> tuple[np.ndarray, np.ndarray]:
    """(draws,) and (draws,): (mean − truth) ÷ standard deviation, and true ÷ sample deviation, of normal samples."""
    drawn = np.random.default_rng(RESAMPLING_SEED)
    scale = np.sqrt((seeds - 1) / drawn.chisquare(seeds - 1, 5 * DRAWS))
    return drawn.standard_normal(5 * DRAWS) / np.sqrt(seeds), scale


def one_more_run(values: np.ndarray) -> Estimate:
    """Return the mean over runs with Student's interval for one more run, which is unbounded with fewer than two."""
    value = float(np.mean(values)) if len(values) else 0.0
    if len(values) < 2:
        return Estimate(value, -np.inf, np.inf)
    spread = float(np.std(values, ddof=1) * np.sqrt(1 + 1 / len(values)))
    reach = float(stdtrit(len(values) - 1, (1 + LEVEL) / 2)) * spread
    return Estimate(value, value - reach, value + reach)


def one_more_factor(values: np.ndarray) -> Estimate:
    """Return `one_more_run` of positive numbers on the scale of logarithms, with their geometric mean."""
    logarithm = one_more_run(np.log(values))
    with np.errstate(over="ignore"):
        return Estimate(float(np.exp(logarithm.value)), float(np.exp(logarithm.low)), float(np.exp(logarithm.high)))


# --- the extremes of several numbers


def least_of(estimates: Sequence[Estimate]) -> Estimate:
    """Return the smallest of several numbers.

    It is above a threshold if the lower end of every number is, without a correction for the number of comparisons
    (intersection-union test; Berger 1982), and below it only if the simultaneous (Bonferroni) bound of one number is.
    """
    simultaneous = [_widened(each, len(estimates)).high for each in estimates]
    least = min(estimates, key=lambda each: each.value)
    return replace(least, low=min(each.low for each in estimates), high=min(simultaneous))


def largest_of(estimates: Sequence[Estimate]) -> Estimate:
    """Return the largest of several numbers, with an interval as in `least_of`."""
    return -least_of([-each for each in estimates])


def range_of(differences: Sequence[Estimate]) -> Estimate:
    """Return the range of several numbers, from their pairwise differences.

    It is below a margin if both ends of each difference are (two one-sided tests, Schuirmann 1987), and above it only
    if a difference is with its simultaneous bounds. The truth of a claim that the numbers are equal is a range of 0.
    """
    simultaneous = [_widened(each, len(differences)) for each in differences]
    furthest = max(differences, key=lambda each: abs(each.value))
    low = max(max(0.0, each.low, -each.high) for each in simultaneous)
    high = max(max(each.high, -each.low) for each in differences)
    return replace(furthest, value=abs(furthest.value), low=low, high=high, truest=0.0)


def _widened(estimate: Estimate, among: int) -> Estimate:
    """Widen an interval to one of `among` intervals that together miss the truth with 5 % (Bonferroni)."""
    wanted = [1 - (1 - LEVEL) / 2 / among, (1 + LEVEL) / 2]
    wide, usual = stdtrit(estimate.seeds - 1, wanted) if estimate.seeds > 1 else ndtri(wanted)
    factor = wide / usual
    low, high = (estimate.value + factor * (end - estimate.value) for end in (estimate.low, estimate.high))
    return replace(estimate, low=low, high=high)

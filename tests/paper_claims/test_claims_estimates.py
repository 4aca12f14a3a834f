"""Intervals against known truth, and the outcomes that are made of them."""

import numpy as np
import pytest

from sinkscope.results.judgment import Outcome, above, at_least, at_most, below, between
from sinkscope.results.statistics import (
    Estimate,
    bootstrap,
    exact,
    jackknife,
    mean_of_runs,
    one_more_run,
    positive_jackknife,
    rank_correlation,
    resamplings,
    weighted_means,
)

TRIALS = 600
WEIGHTS = resamplings(100)


def drawn_mean(drawn: np.random.Generator, mean: float, spread: float) -> Estimate:
    """The mean over 100 sequences."""
    return bootstrap(weighted_means(drawn.normal(mean, spread, 100), WEIGHTS))


def skewed_mean(drawn: np.random.Generator) -> Estimate:
    return bootstrap(weighted_means(drawn.gamma(4.0, 0.5, 100), WEIGHTS))


def ratio_of_means(drawn: np.random.Generator) -> Estimate:
    """A ratio of two means over the same sequences."""
    means = weighted_means(np.stack([drawn.normal(6, 2, 100), drawn.normal(2, 0.5, 100)], axis=1), WEIGHTS)
    return bootstrap(means[:, 0] / means[:, 1])


def rate_over_heads(drawn: np.random.Generator) -> Estimate:
    """The share of 30 heads, of different rates, that exceed a threshold; those of a sequence do so together."""
    heads, sequence = np.linspace(-3, 3, 30), drawn.normal(0, 0.5, (100, 1))
    found = drawn.normal(size=(100, 30)) < heads + sequence
    return bootstrap(weighted_means(found.astype(float), WEIGHTS).mean(1))


def groups_left_out(vectors: np.ndarray, groups: int) -> np.ndarray:
    """(1 + groups,): the norm of the sum of (N,D), with all vectors and without each group, ÷ the number of vectors."""
    owner = np.arange(len(vectors)) % groups
    norms = [np.linalg.norm(vectors.mean(0))]
    return np.array(norms + [np.linalg.norm(vectors[owner != group].mean(0)) for group in range(groups)])


ALONG = np.eye(50)[0]
NORMS = ((1.0, 0.35), (0.3, 0.1))
TRUE_NORMS = [np.sqrt(scale**2 + 50 * noise**2 / 60) for scale, noise in NORMS]


def ratio_of_norms(drawn: np.random.Generator) -> Estimate:
    """Of gradients at two positions, over the same sequences: truth √(1 + D σ²/N) ÷ √(0.09 + D τ²/N)."""
    norms = [groups_left_out(scale * ALONG + drawn.normal(0, noise, (60, 50)), 20) for scale, noise in NORMS]
    return positive_jackknife(norms[0] / norms[1])


def beyond_controls(drawn: np.random.Generator) -> Estimate:
    """An arm's change, over sequences, beyond what one more of five controls' kind would do."""
    return drawn_mean(drawn, -3.0, 10.0) - one_more_run(drawn.normal(1.0, 1.0, 5))


@pytest.mark.parametrize(
    ("measure", "truth"),
    [
        (skewed_mean, lambda drawn: 2.0),
        (ratio_of_means, lambda drawn: 3.0),
        (rate_over_heads, lambda drawn: 0.5),
        (ratio_of_norms, lambda drawn: TRUE_NORMS[0] / TRUE_NORMS[1]),
        (lambda drawn: drawn_mean(drawn, 6, 2) / drawn_mean(drawn, 2, 0.5), lambda drawn: 3.0),
        (lambda drawn: drawn_mean(drawn, 6, 2) - drawn_mean(drawn, 2, 0.5), lambda drawn: 4.0),
        (lambda drawn: mean_of_runs(drawn.normal(1.0, 1.0, 5)), lambda drawn: 1.0),
        (lambda drawn: one_more_run(drawn.normal(1.0, 1.0, 5)), lambda drawn: drawn.normal(1.0, 1.0)),
        (beyond_controls, lambda drawn: -3.0 - drawn.normal(1.0, 1.0)),
    ],
    ids=["mean", "of means", "rate", "norms", "ratio", "difference", "controls", "another control", "beyond controls"],
)
def test_intervals_of_every_kind_cover_the_truth(measure, truth) -> None:
    drawn = np.random.default_rng(7)
    hits = []
    for _ in range(TRIALS):
        estimate = measure(drawn)
        hits.append(estimate.low <= truth(drawn) <= estimate.high)
    assert 0.93 <= np.mean(hits) <= 0.97


def test_rank_correlations() -> None:
    """They depend only on order; the interval covers that of normal variables, 6/π · asin(r/2)."""
    x = np.arange(20.0)
    assert rank_correlation(x, np.exp(x)).value == pytest.approx(1.0)
    assert rank_correlation(x, -(x**3)).value == pytest.approx(-1.0)
    assert np.isnan(rank_correlation(x, np.ones(20)).value)
    drawn, hits = np.random.default_rng(8), []
    for _ in range(60):
        x, noise = drawn.normal(size=(2, 60))
        found = rank_correlation(x, 0.6 * x + 0.8 * noise)
        hits.append(found.low <= 6 / np.pi * np.arcsin(0.3) <= found.high)
    assert 0.9 <= np.mean(hits) < 1


def test_the_jackknife_of_a_mean_is_students_interval() -> None:
    x = np.random.default_rng(4).normal(size=12)
    found = jackknife(np.array([x.mean(), *(np.delete(x, at).mean() for at in range(12))]))
    reach = 2.200985 * x.std(ddof=1) / np.sqrt(12)  # Student's t with 11 degrees of freedom
    assert (found.low, found.high) == pytest.approx((x.mean() - reach, x.mean() + reach))


def test_missing_values_count_nowhere_and_single_ones_have_no_interval() -> None:
    x = np.array([[1.0, 5.0], [3.0, np.nan]])
    assert weighted_means(x, np.array([[1.0, 1.0], [1.0, 3.0]])) == pytest.approx(np.array([[2.0, 5.0], [2.5, 5.0]]))
    assert bootstrap(weighted_means(np.array([3.0]), resamplings(1))) == Estimate(3.0, -np.inf, np.inf)
    assert exact(3.0) == Estimate(3.0, 3.0, 3.0)


def test_errors_of_ratios_and_differences_add_in_quadrature_and_ratios_are_bounded() -> None:
    a, b = Estimate(4.0, 2.0, 8.0), Estimate(1.0, 0.5, 2.0)
    assert (a / b).high == pytest.approx(4.0 * 2 ** np.sqrt(2))
    assert (a - b).low == pytest.approx(3.0 - np.hypot(2.0, 1.0))
    sink, none, some = Estimate(0.8, 0.75, 0.85), Estimate(0.0, 0.0, 0.0), Estimate(0.01, 0.0, 0.03)
    assert none / sink == none
    assert ((some / sink).low, (some / sink).high) == pytest.approx((0.0, 0.04))
    assert at_least(0.5).outcome(none / sink) == at_least(0.5).outcome(some / sink) == Outcome.FAILS
    assert (sink / some).high == np.inf


@pytest.mark.parametrize(
    ("test", "low", "high", "outcome"),
    [
        (at_least(0.5), 0.5, 0.9, Outcome.HOLDS),
        (at_least(0.5), 0.4, 0.9, Outcome.INCONCLUSIVE),
        (at_least(0.5), 0.1, 0.4, Outcome.FAILS),
        (above(0.0), 0.0, 0.0, Outcome.FAILS),
        (above(0.0), 0.0, 0.2, Outcome.INCONCLUSIVE),
        (at_most(1.0), 0.0, 1.0, Outcome.HOLDS),
        (below(1.0), 1.0, 1.0, Outcome.FAILS),
        (between(-1.15, -0.85), -1.0, -0.9, Outcome.HOLDS),
        (between(-1.15, -0.85), -0.8, -0.5, Outcome.FAILS),
        (between(-1.15, -0.85), -0.9, -0.8, Outcome.INCONCLUSIVE),
        (at_least(0.5), -np.inf, np.inf, Outcome.INCONCLUSIVE),
        (at_least(3.0), np.nan, np.nan, Outcome.INCONCLUSIVE),
    ],
)
def test_the_interval_decides_the_outcome(test, low: float, high: float, outcome: Outcome) -> None:
    assert test.outcome(Estimate(1.0 if low == -np.inf else low, low, high)) == outcome

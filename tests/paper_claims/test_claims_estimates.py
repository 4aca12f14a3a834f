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


def covered(estimates: list[Estimate], truth: float) -> float:
    return float(np.mean([one.low <= truth <= one.high for one in estimates]))


def test_bootstrap_intervals_of_a_mean_cover_it_in_95_percent() -> None:
    samples = np.random.default_rng(0).exponential(2.0, size=(TRIALS, 100))
    weights = resamplings(100)
    estimates = [bootstrap(weighted_means(sample, weights)) for sample in samples]
    assert 0.93 <= covered(estimates, 2.0) <= 0.97


def test_bootstrap_intervals_of_a_ratio_of_means_cover_it() -> None:
    drawn = np.random.default_rng(1)
    weights = resamplings(100)
    estimates = []
    for _ in range(TRIALS):
        pairs = np.stack([drawn.normal(6.0, 2.0, 100), drawn.normal(2.0, 0.5, 100)], axis=1)
        means = weighted_means(pairs, weights)
        estimates.append(bootstrap(means[:, 0] / means[:, 1]))
    assert 0.93 <= covered(estimates, 3.0) <= 0.97


WEIGHTS = resamplings(100)


def drawn_mean(drawn: np.random.Generator, mean: float, spread: float) -> Estimate:
    """Of 100 sequences."""
    return bootstrap(weighted_means(drawn.normal(mean, spread, 100), WEIGHTS))


def rate_over_heads(drawn: np.random.Generator) -> Estimate:
    """The share of 30 heads, of different rates, that exceed a threshold; those of a sequence do so together."""
    heads, sequence = np.linspace(-3, 3, 30), drawn.normal(0, 0.5, (100, 1))
    found = drawn.normal(size=(100, 30)) < heads + sequence
    return bootstrap(weighted_means(found.astype(float), WEIGHTS).mean(1))


def ratio_of_norms(drawn: np.random.Generator) -> Estimate:
    """Of gradients at two positions, over the same sequences: truth √(1 + D σ²/N) ÷ √(0.09 + D τ²/N)."""
    along = np.zeros(50)
    along[0] = 1.0
    norms = [groups_left_out(scale * along + drawn.normal(0, noise, (60, 50)), 20) for scale, noise in NORMS]
    return positive_jackknife(norms[0] / norms[1])


NORMS = ((1.0, 0.35), (0.3, 0.1))
TRUE_NORMS = [np.sqrt(scale**2 + 50 * noise**2 / 60) for scale, noise in NORMS]


def beyond_controls(drawn: np.random.Generator) -> Estimate:
    """An arm's change, over sequences, beyond what one more of five controls' kind would do."""
    return drawn_mean(drawn, -3.0, 10.0) - one_more_run(drawn.normal(1.0, 1.0, 5))


@pytest.mark.parametrize(
    ("measure", "truth"),
    [
        (rate_over_heads, lambda drawn: 0.5),
        (ratio_of_norms, lambda drawn: TRUE_NORMS[0] / TRUE_NORMS[1]),
        (lambda drawn: drawn_mean(drawn, 6, 2) / drawn_mean(drawn, 2, 0.5), lambda drawn: 3.0),
        (lambda drawn: drawn_mean(drawn, 6, 2) - drawn_mean(drawn, 2, 0.5), lambda drawn: 4.0),
        (lambda drawn: mean_of_runs(drawn.normal(1.0, 1.0, 5)), lambda drawn: 1.0),
        (lambda drawn: one_more_run(drawn.normal(1.0, 1.0, 5)), lambda drawn: drawn.normal(1.0, 1.0)),
        (beyond_controls, lambda drawn: -3.0 - drawn.normal(1.0, 1.0)),
    ],
    ids=["rate", "norms", "ratio", "difference", "controls", "another control", "beyond controls"],
)
def test_intervals_of_every_kind_cover_the_truth(measure, truth) -> None:
    drawn = np.random.default_rng(7)
    hits = []
    for _ in range(TRIALS):
        estimate = measure(drawn)
        hits.append(estimate.low <= truth(drawn) <= estimate.high)
    assert 0.93 <= np.mean(hits) <= 0.97


def test_a_rank_correlations_interval_covers_it() -> None:
    """Of normal variables: 6/π · asin(r/2)."""
    drawn, hits = np.random.default_rng(8), []
    for _ in range(60):
        x, noise = drawn.normal(size=(2, 60))
        found = rank_correlation(x, 0.6 * x + 0.8 * noise)
        hits.append(found.low <= 6 / np.pi * np.arcsin(0.3) <= found.high)
    assert 0.9 <= np.mean(hits) < 1


def test_a_single_sequence_has_no_interval() -> None:
    found = bootstrap(weighted_means(np.array([3.0]), resamplings(1)))
    assert (found.value, found.low, found.high) == (3.0, -np.inf, np.inf)


def groups_left_out(vectors: np.ndarray, groups: int) -> np.ndarray:
    """(1 + groups,): the norm of the sum of (N,D), whole and without each group, ÷ the number of vectors."""
    owner = np.arange(len(vectors)) % groups
    norms = [np.linalg.norm(vectors.mean(0))]
    return np.array(norms + [np.linalg.norm(vectors[owner != group].mean(0)) for group in range(groups)])


def test_jackknife_intervals_of_the_norm_of_a_sum_cover_it() -> None:
    """And bootstrap intervals do not: drawn twice, a sequence adds its own noise twice."""
    drawn, truth, size = np.random.default_rng(2), np.zeros(50), 60
    truth[0] = 1.0
    by_groups, by_bootstrap = [], []
    for _ in range(200):
        vectors = truth + drawn.normal(0, 0.35, size=(size, 50))
        by_groups.append(positive_jackknife(groups_left_out(vectors, 20)))
        weights = resamplings(size, draws=200) / size
        by_bootstrap.append(bootstrap(np.linalg.norm(weights @ vectors, axis=1)))
    expected = np.sqrt(1 + 50 * 0.35**2 / size)  # what the norm of the sum estimates
    assert 0.92 <= covered(by_groups, expected) <= 0.98
    assert covered(by_bootstrap, expected) < 0.9


def test_twice_the_sequences_shrink_intervals_by_the_root_of_two() -> None:
    drawn = np.random.default_rng(3)
    widths = []
    for size in (200, 400):
        samples = drawn.normal(size=(100, size))
        found = [bootstrap(weighted_means(sample, resamplings(size))) for sample in samples]
        widths.append(np.mean([one.high - one.low for one in found]))
    assert widths[0] / widths[1] == pytest.approx(np.sqrt(2), rel=0.05)


def test_the_jackknife_of_a_mean_is_students_interval() -> None:
    x = np.random.default_rng(4).normal(size=12)
    found = jackknife(np.array([x.mean(), *(np.delete(x, at).mean() for at in range(12))]))
    reach = 2.200985 * x.std(ddof=1) / np.sqrt(12)  # Student's t with 11 degrees of freedom
    assert (found.low, found.high) == pytest.approx((x.mean() - reach, x.mean() + reach))


def test_rank_correlation_knows_order_alone() -> None:
    x = np.arange(20.0)
    assert rank_correlation(x, np.exp(x)).value == pytest.approx(1.0)
    assert rank_correlation(x, -(x**3)).value == pytest.approx(-1.0)
    assert np.isnan(rank_correlation(x, np.ones(20)).value)
    unrelated = rank_correlation(np.random.default_rng(5).normal(size=60), np.random.default_rng(6).normal(size=60))
    assert unrelated.low < 0 < unrelated.high


def test_missing_values_count_nowhere() -> None:
    x = np.array([[1.0, 5.0], [3.0, np.nan]])
    assert weighted_means(x, np.array([[1.0, 1.0], [1.0, 3.0]])) == pytest.approx(np.array([[2.0, 5.0], [2.5, 5.0]]))


def test_ratios_and_differences_add_errors_in_quadrature() -> None:
    a, b = Estimate(4.0, 2.0, 8.0), Estimate(1.0, 0.5, 2.0)
    assert (a / b).high == pytest.approx(4.0 * 2 ** np.sqrt(2))
    assert (a - b).low == pytest.approx(3.0 - np.hypot(2.0, 1.0))


def test_a_ratio_to_nothing_is_bounded_and_one_by_nothing_is_not() -> None:
    sink, none, some = Estimate(0.8, 0.75, 0.85), Estimate(0.0, 0.0, 0.0), Estimate(0.01, 0.0, 0.03)
    assert none / sink == none
    assert (some / sink).low == 0.0
    assert (some / sink).high == pytest.approx(0.04)
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
    ],
)
def test_the_outcome_is_the_intervals(test, low: float, high: float, outcome: Outcome) -> None:
    value = low if np.isfinite(low) else 1.0
    assert test.outcome(Estimate(value, low, high)) == outcome


def test_what_was_not_drawn_has_no_interval() -> None:
    assert exact(3.0) == Estimate(3.0, 3.0, 3.0)
    assert at_least(3.0).outcome(Estimate(float("nan"))) == Outcome.INCONCLUSIVE

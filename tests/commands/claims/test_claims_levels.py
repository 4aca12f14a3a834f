"""Intervals compared with known truth, and the rates at which claims are decided, or hold falsely.

In the synthetic studies, the truth is exactly at the threshold. The intervals are two-sided at 95 %: 5 % of studies are
decided, 2.5 % hold falsely. For studies without a spread the bound is one-sided: 5 % hold falsely.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from scipy.signal import lfilter
from support.hand_made_runs import FAILS, FEW_SEEDS, HOLDS, INCONCLUSIVE

from sinkscope.results import statistics
from sinkscope.results.judgment import Test, above, at_least, at_most, below, between
from sinkscope.results.statistics import Estimate, bootstrap, mean_of_rates, mean_of_runs, range_of, rank_correlation

WEIGHTS, TRIALS = statistics.resamplings(100), 600
ALONG = np.eye(50)[0]
NORMS = ((1.0, 0.35), (0.3, 0.1))  # scale and noise of gradients at two positions


def ratio_of_means(drawn: np.random.Generator) -> Estimate:
    """Return a ratio of two means over the same sequences, which is 3."""
    means = statistics.weighted_means(np.stack([drawn.normal(6, 2, 100), drawn.normal(2, 0.5, 100)], axis=1), WEIGHTS)
    return bootstrap(means[:, 0] / means[:, 1])


def ratio_of_norms(drawn: np.random.Generator) -> Estimate:
    """Return a ratio of norms of sums over the same sequences: √(scale² + D noise²/N) of each."""
    owner, norms = np.arange(60) % 20, []
    for scale, noise in NORMS:
        vectors = scale * ALONG + drawn.normal(0, noise, (60, 50))
        means = [vectors.mean(0), *(vectors[owner != group].mean(0) for group in range(20))]
        norms.append(np.linalg.norm(means, axis=1))
    return statistics.positive_jackknife(norms[0] / norms[1])


@pytest.mark.parametrize(
    ("measure", "truth"),
    [
        (ratio_of_means, lambda drawn: 3.0),
        (
            ratio_of_norms,
            lambda drawn: np.divide(*(np.hypot(scale, noise * (50 / 60) ** 0.5) for scale, noise in NORMS)),
        ),
        (lambda drawn: mean_of_runs(drawn.normal(1.0, 1.0, 5)), lambda drawn: 1.0),
        (  # the change of an arm, over sequences, beyond that of one more control; five random controls are known
            lambda drawn: (
                bootstrap(statistics.weighted_means(drawn.normal(-3.0, 10.0, 100), WEIGHTS))
                - statistics.one_more_run(drawn.normal(1.0, 1.0, 5))
            ),
            lambda drawn: -3.0 - drawn.normal(1.0, 1.0),
        ),
    ],
    ids=["means", "norms", "controls", "beyond controls"],
)
def test_intervals_of_every_kind_cover_the_truth(measure, truth) -> None:
    drawn, hits = np.random.default_rng(7), []
    for _ in range(TRIALS):
        estimate = measure(drawn)
        hits.append(estimate.low <= truth(drawn) <= estimate.high)
    assert 0.93 <= np.mean(hits) <= 0.97


def test_rank_correlations() -> None:
    """They depend only on order; the interval covers the correlation of normal variables, 6/π · asin(r/2)."""
    x = np.arange(20.0)
    assert rank_correlation(x, np.exp(x)).value == pytest.approx(1.0)
    assert rank_correlation(x, -(x**3)).value == pytest.approx(-1.0)
    assert np.isnan(rank_correlation(x, np.ones(20)).value)
    drawn, hits = np.random.default_rng(8), []
    for _ in range(60):
        x, noise = drawn.normal(size=(2, 60))
        correlation = rank_correlation(x, 0.6 * x + 0.8 * noise)
        hits.append(correlation.low <= 6 / np.pi * np.arcsin(0.3) <= correlation.high)
    assert 0.9 <= np.mean(hits) < 1


def test_errors_of_ratios_and_differences_add_in_quadrature_and_ratios_are_bounded() -> None:
    a, b = Estimate(4.0, 2.0, 8.0), Estimate(1.0, 0.5, 2.0)
    assert (a / b).high == pytest.approx(4.0 * 2 ** np.sqrt(2))
    assert (a - b).low == pytest.approx(3.0 - np.hypot(2.0, 1.0))
    sink, none, some = Estimate(0.8, 0.75, 0.85), Estimate(0.0, 0.0, 0.0), Estimate(0.01, 0.0, 0.03)
    assert none / sink == none
    assert ((some / sink).low, (some / sink).high) == pytest.approx((0.0, 0.04))
    assert at_least(0.5).outcome(none / sink) == at_least(0.5).outcome(some / sink) == FAILS
    assert (sink / some).high == np.inf


def test_an_interval_is_unbounded_if_more_than_one_draw_in_twenty_is_undefined() -> None:
    replicates = np.linspace(0.0, 1.0, 1001)
    for undefined, is_bounded in ((50, True), (51, False)):
        replicates[1 : undefined + 1] = np.nan
        assert np.isfinite([bootstrap(replicates).low, bootstrap(replicates).high]).tolist() == [is_bounded] * 2


def test_an_extreme_is_beyond_a_threshold_only_with_the_simultaneous_bound_of_one_number() -> None:
    """Two intervals that together miss the truth with 5 % reach 2.2414 standard errors, and a single one 1.9600."""
    wide = 2.241403 / 1.959964
    numbers = [Estimate(1.0, -1.0, 4.0), Estimate(2.0, -3.0, 2.5)]
    least, largest = statistics.least_of(numbers), statistics.largest_of(numbers)
    assert (least.value, least.low, least.high) == pytest.approx((1.0, -3.0, 2 + 0.5 * wide))
    assert (largest.value, largest.low, largest.high) == pytest.approx((2.0, 1 - 2 * wide, 4.0))
    apart = range_of([Estimate(3.0, 1.0, 4.0), Estimate(-5.0, -6.0, -2.0)])
    assert (apart.value, apart.low, apart.high) == pytest.approx((5.0, 5 - 3 * wide, 6.0))


# test → whether a value passes; thresholds and ends are whole numbers, so that they often meet
PASSES = {
    at_least(0): lambda x: x >= 0,
    above(0): lambda x: x > 0,
    at_most(0): lambda x: x <= 0,
    below(0): lambda x: x < 0,
    between(-1, 1): lambda x: -1 <= x <= 1,
}
WHOLE = st.integers(-3, 3)


@given(st.sampled_from(list(PASSES)), st.tuples(WHOLE, WHOLE, WHOLE))
def test_the_interval_decides_the_outcome(test: Test, ends: tuple[int, ...]) -> None:
    low, value, high = sorted(ends)
    passes = [PASSES[test](x) for x in np.arange(low, high + 0.5, 0.5)]
    expected = HOLDS if all(passes) else INCONCLUSIVE if any(passes) else FAILS
    assert test.outcome(Estimate(value, low, high)) == expected
    assert test.outcome(Estimate(value, -np.inf, np.inf)) == test.outcome(Estimate(np.nan)) == INCONCLUSIVE


@given(st.sampled_from(list(PASSES)), WHOLE, st.tuples(WHOLE, WHOLE))
def test_a_null_is_separated_if_no_draw_passes_as_far_inside(test: Test, value: int, draws: tuple[int, int]) -> None:
    """A draw with a larger value may fail by its interval alone, and shows that the null gives as much."""
    estimate = Estimate(value, null_low=min(draws), null_high=max(draws))
    if test == between(-1, 1):
        expected = max(draws) < -1 or min(draws) > 1
    else:
        sign = 1 if test.most == np.inf else -1
        expected = not any(PASSES[test](draw) and sign * draw >= sign * value for draw in draws)
    assert test.separates(estimate) == expected
    assert not test.separates(Estimate(value))  # without draws, or undefined for all


def test_a_test_in_words() -> None:
    assert [test.text() for test in PASSES] == ["≥ 0", "> 0", "≤ 0", "< 0", "-1 to 1"]


STUDIES = 1200  # the standard error of 5 % is 0.6 %
Draw = np.random.Generator


def rates_of(make: Callable[[], Estimate], truth: float, studies: int = STUDIES) -> tuple[float, ...]:
    """Return the shares of studies, in percent, in which "above the truth" holds, and "below the truth" holds."""
    estimates = [make() for _ in range(studies)]
    return tuple(100 * float(np.mean([test(truth).holds(each) for each in estimates])) for test in (above, below))


# distribution of the rates of seeds, and their mean
SEEDS = {
    "normal": (lambda drawn, seeds: drawn.normal(0.3, 0.03, seeds), 0.3),
    "exponential": (lambda drawn, seeds: drawn.exponential(0.02, seeds), 0.02),
    "very skewed": (lambda drawn, seeds: drawn.beta(0.5, 20, seeds), 0.5 / 20.5),
    "near 1": (lambda drawn, seeds: 1 - drawn.exponential(0.02, seeds).clip(0, 1), 0.98),
}


@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("kind", SEEDS)
def test_means_over_seeds(kind: str, seeds: int) -> None:
    """Student's interval misses up to 18 % of skewed rates, nearly all on one side."""
    draw, truth = SEEDS[kind]
    drawn = np.random.default_rng(1)
    more, less = rates_of(lambda: mean_of_rates(draw(drawn, seeds)), truth)
    assert 2 <= more + less <= 8
    assert max(more, less) <= 5


@pytest.mark.parametrize("seeds", [3, 5, 8])
def test_seeds_without_a_sink_where_some_have_one(seeds: int) -> None:
    """The true share of seeds with a sink is the largest with which often no seed has one: 45 % for five seeds."""
    most = 1 - 0.05 ** (1 / seeds)
    assert mean_of_rates(np.zeros(seeds)).high == pytest.approx(most)
    assert mean_of_rates(np.ones(seeds)).low == pytest.approx(1 - most)
    drawn = np.random.default_rng(2)
    estimates = [mean_of_rates((drawn.random(seeds) < most).astype(float)) for _ in range(STUDIES)]
    assert 2 <= 100 * np.mean([below(most + 1e-9).holds(each) for each in estimates]) <= 8


def series(drawn: Draw, layers: int, likeness: float) -> np.ndarray:
    """Return an autoregressive series over layers, without the influence of its start."""
    return lfilter([1.0], [1.0, -likeness], drawn.normal(size=layers + 100))[100:]


@pytest.mark.parametrize(
    ("layers", "heads", "within", "likeness"),
    [(30, 1, 1.0, 0.0), (48, 1, 1.0, 0.8), (30, 9, 0.5, 0.0), (30, 9, 0.8, 0.8)],
)
def test_correlations_of_unrelated_heads(layers: int, heads: int, within: float, likeness: float) -> None:
    """`within` is the correlation of two heads in one layer, and `likeness` that of a layer with the next.

    If layers were taken as independent, 31 % would be decided at 0.8 and 48 layers.
    """
    drawn, place = np.random.default_rng(3), np.repeat(np.arange(layers), heads)

    def values() -> np.ndarray:
        shared = series(drawn, layers, likeness) * np.sqrt(within * (1 - likeness**2))
        return shared[place] + np.sqrt(1 - within) * drawn.normal(size=layers * heads)

    more, less = rates_of(lambda: rank_correlation(values(), values(), place), 0.0, studies=800)
    assert 2 <= more + less <= 8
    assert max(more, less) <= 5


def smallest(drawn: Draw, *means: float) -> Estimate:
    return statistics.least_of([mean_of_runs(drawn.normal(mean, 1.0, 5)) for mean in means])


def furthest(drawn: Draw, *means: float, seeds: int = 5) -> Estimate:
    pairs = combinations([drawn.normal(mean, 1.0, seeds) for mean in means], 2)
    return range_of([mean_of_runs(first - second) for first, second in pairs])


@pytest.mark.parametrize(
    ("outcome", "make", "means", "test", "least", "most"),
    [
        # six levels, one of them at the threshold, pass as rarely as a single level at the threshold
        (HOLDS, smallest, (10, 20, 20, 20, 20, 20), above(10), 1, 5),
        (HOLDS, smallest, (14,) * 6, above(10), 90, 100),  # a claim that is true
        (FAILS, smallest, (10,) * 6, above(10), 0, 4),  # a true claim at its threshold seldom fails
        (FAILS, smallest, (5, 20, 20, 20, 20, 20), above(10), 60, 100),
        (HOLDS, furthest, (10, 10, 13), at_most(3), 0, 4),
        (HOLDS, furthest, (10, 10, 10), at_most(5), 60, 100),
        (FAILS, furthest, (10, 11.5, 13), at_most(3), 0, 5),
        (FAILS, furthest, (5, 10, 25), at_most(3), 90, 100),
    ],
)
def test_extremes_of_levels_can_hold_and_rarely_do_falsely(outcome, make, means, test: Test, least, most) -> None:
    drawn = np.random.default_rng(5)
    assert least <= 100 * np.mean([test.outcome(make(drawn, *means)) == outcome for _ in range(STUDIES // 4)]) <= most


def test_too_few_seeds_are_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    test = at_most(3.0)
    wide = range_of([mean_of_runs(np.array([-9.0, 8.0, 2.0]))])
    assert test.outcome(wide) == FEW_SEEDS
    assert test.power(wide) < 0.5
    assert above(0.0).outcome(mean_of_runs(np.array([1.0]))) == FEW_SEEDS
    assert above(0.0).outcome(mean_of_runs(np.array([-2.0, 1.0, -1.0]))) == INCONCLUSIVE  # contradicts the claim
    narrow = range_of([mean_of_runs(np.array([2.9, 3.0, 3.05]))])  # would hold if both were equal
    assert (test.outcome(narrow), test.power(narrow) > 0.9) == (INCONCLUSIVE, True)
    enough = mean_of_runs(np.array([1.0, 4.0, 5.0]))
    monkeypatch.setattr("sinkscope.results.judgment.ENOUGH_POWER", above(0.0).power(enough))
    assert above(0.0).outcome(enough) == INCONCLUSIVE  # at exactly enough power


def test_power_is_that_of_normal_errors() -> None:
    """The standard error is 1 below the value and 2 above it."""
    reach = stats.t.ppf(0.975, 4)
    estimate = Estimate(2.0, 2 - reach, 2 + 2 * reach, seeds=5)
    of_least, of_most = stats.norm.sf(reach - 4 / 1), stats.norm.sf(reach - 10 / 2)
    powers = [test.power(estimate) for test in (above(-2.0), below(12.0), between(-2.0, 12.0))]
    assert powers == pytest.approx([of_least, of_most, of_least + of_most - 1])
    of_range = replace(estimate, truest=0.0)  # the numbers are equal, and either may be the larger one by chance
    assert at_most(10.0).power(of_range) == pytest.approx(2 * of_most - 1)


@pytest.mark.parametrize(("effect", "threshold"), [(0.6, 0.0), (-0.5, 0.0), (1.2, 0.5)])
def test_the_number_of_seeds_that_decide(effect: float, threshold: float) -> None:
    """With so many seeds, four of five studies decide the test in the direction of the effect; with half fewer do."""
    pilot = Estimate(effect, effect - stats.t.ppf(0.975, 4) / np.sqrt(5), effect + stats.t.ppf(0.975, 4) / np.sqrt(5))
    seeds = int(above(threshold).seeds_to_decide(replace(pilot, seeds=5)))  # a standard deviation of 1
    other_end = {"high": 9.0} if effect > threshold else {"low": -9.0}  # away from the threshold
    assert above(threshold).seeds_to_decide(replace(pilot, seeds=5, **other_end)) == seeds
    random = np.random.default_rng(0)
    decided = []
    for number in (seeds, seeds // 2):
        means = [mean_of_runs(random.normal(effect, 1, number)) for _ in range(2000)]
        wanted = HOLDS if effect > threshold else FAILS
        decided.append(np.mean([above(threshold).outcome(mean) == wanted for mean in means]))
    assert 0.76 < decided[0] < 0.88
    assert decided[1] < 0.6
    assert above(0.0).seeds_to_decide(replace(pilot, value=0.0, low=-1.0, high=1.0, seeds=5)) == np.inf
    assert np.isnan(above(0.0).seeds_to_decide(pilot))
    mirrored = -replace(pilot, seeds=5, **other_end)
    assert below(-threshold).seeds_to_decide(mirrored) == between(-99.0, -threshold).seeds_to_decide(mirrored) == seeds
    assert above(0.0).seeds_to_decide(Estimate(1.0, 1.0, 1.0, seeds=5)) == 2  # the fewest

"""Estimates over the seeds of trainings, and extremes over levels, each level with its own interval.

Means have Student's interval (for ratios, of logarithms), or for rates and correlations an interval within their range.
With a single seed the spread is not known, so that a claim has not enough seeds.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial, wraps
from itertools import combinations
from math import exp, nan
from typing import Any, Concatenate, ParamSpec

import numpy as np
from scipy import stats

from sinkscope.commands.claims.claim import Claim, Part
from sinkscope.commands.claims.evidence import Need
from sinkscope.commands.claims.studies import PLAIN, ClaimStudy, Level, StudyArm
from sinkscope.results import trainings as training_tables
from sinkscope.results.findings import SINK
from sinkscope.results.judgment import NotDefined, Test
from sinkscope.results.sequences import Lacks, table_of_run
from sinkscope.results.statistics import Estimate, largest_of, mean_of_rates, mean_of_runs, range_of
from sinkscope.results.trainings import HELD_OUT, LOGGED

OfStudy = Callable[[ClaimStudy], Estimate]
OfArm = Callable[[StudyArm], float]
Ends = tuple[float, float] | None  # the smallest and the largest possible value, if they are finite
Where = tuple[str, OfArm, float] | None  # what plain training must have: its name, its number and the least value
RESIDUAL = 1e-4  # of identities of gradients, the difference of the sides ÷ the gradient in float32
PERCENT, CORRELATION = (0.0, 100.0), (-1.0, 1.0)
P = ParamSpec("P")


def of_study(estimate: Callable[Concatenate[ClaimStudy, P], Estimate]) -> Callable[P, OfStudy]:
    """Bind the further arguments of an estimate: the result is a function of the study alone."""

    @wraps(estimate)
    def bound(*args: P.args, **options: P.kwargs) -> OfStudy:
        return lambda study: estimate(study, *args, **options)

    return bound


def study_part(role: Need, quantity: str, estimate: OfStudy, test: Test) -> Part:
    return Part(quantity, lambda evidence: estimate(evidence.studies[role]), test)


def study_claim(
    id: str, reference: str, statement: str, role: Need, *numbers: tuple[str, OfStudy, Test], **others: Any
) -> Claim:
    """Return a claim whose numbers are all estimates from one study."""
    return Claim(id, reference, statement, tuple(study_part(role, *each) for each in numbers), (role,), **others)


def mean_over_seeds(values: np.ndarray, ends: Ends = None) -> Estimate:
    """Return the mean over seeds of a number, which is between `ends`.

    A rate or a count that is 0 in all seeds has no width: it is 0 in each of their heads and sequences already. Other
    numbers that all seeds share, as a rank correlation of a few levels, may do so by chance.
    """
    is_zero = len(values) > 1 and ends is not None and ends[0] == 0 and not values.any()
    return mean_of_runs(values) if ends is None or is_zero else mean_of_rates(values, *ends)


def mean_of_ratios(ratios: np.ndarray) -> Estimate:
    """Return the geometric mean of positive numbers with Student's interval of their logarithms."""
    if not (ratios > 0).all():
        return Estimate(float(np.mean(ratios)), -np.inf, np.inf, seeds=len(ratios))
    logarithm = mean_of_runs(np.log(ratios))
    with np.errstate(over="ignore"):
        low, high = (float(np.exp(end)) for end in (logarithm.low, logarithm.high))
    return replace(logarithm, value=exp(logarithm.value), low=low, high=high)


def words_for(seeds: int, scale: str = "") -> str:
    if seeds == 1:
        return "one seed, so that the spread over seeds is not known: train with --seeds 3"
    return f"{seeds} seeds{scale}"


def with_setting(study: ClaimStudy, words: str) -> str:
    return f"{study.setting}; {words}" if study.setting else words


# --- arms against each other


def metric(name: str, scale: float = 1.0) -> OfArm:
    """Return a function that reads a metric of an arm (whole model). It raises Lacks if it was not measured."""

    def of(arm: StudyArm) -> float:
        value = arm.metric(name)
        if np.isnan(value):
            raise Lacks(f"the runs of {arm.label} lack the metric '{name}'")
        return scale * value

    return of


SINK_RATE = metric("sink_rate", 100)
HAS_SINK: Where = ("sink: its sink rate in %", SINK_RATE, SINK)


def raw_residual(arm: StudyArm) -> float:
    """Return the median residual of the equation for the gradient before an arm's gate or scale on values."""
    table = table_of_run(arm.run, "gradient_identity")
    if "raw_value" not in set(table["pathway"]):
        raise NotDefined(f"{arm.label} has no gate or scale on values")
    return float(table[table["pathway"] == "raw_value"]["residual"].median())


def _read(study: ClaimStudy, of: OfArm, *methods: str, where: Where = None) -> np.ndarray:
    """Return a number of each method, (methods, seeds); NotDefined if plain training lacks what an arm can remove."""
    if where is not None:
        what, of_plain, least = where
        plain = float(_read(study, of_plain, PLAIN).mean())
        if plain <= least:
            raise NotDefined(f"plain training has no {what} is {plain:.3g}, not above {least:g}")
    return np.array([[of(arms[method]) for arms in study.by_seed] for method in methods])


def _words(study: ClaimStudy, labels: Iterable[str], scale: str = "") -> str:
    """Return «vga 1.02, none 1.31; 6000 steps, 3 seeds»."""
    steps = next(iter(study.by_seed[0].values())).training.settings["steps"]
    return f"{', '.join(labels)}; {with_setting(study, f'{steps} steps, {words_for(len(study.by_seed), scale)}')}"


@of_study
def of_several(
    study: ClaimStudy, of: Callable[[Mapping[str, StudyArm]], float], *methods: str, ends: Ends = None
) -> Estimate:
    """Return the mean over seeds of a number computed from several arms. The note names the arms `methods`."""
    values = np.array([of(arms) for arms in study.by_seed])
    return mean_over_seeds(values, ends).over(_words(study, [study.by_seed[0][method].label for method in methods]))


@of_study
def of_one(
    study: ClaimStudy, of: OfArm, method: str, null: str | None = None, ends: Ends = None, where: Where = None
) -> Estimate:
    """Return the mean over seeds of one arm's number, with the mean of a null arm."""
    (values,) = _read(study, of, method, where=where)
    estimate = mean_over_seeds(values, ends).over(_words(study, [study.by_seed[0][method].label]))
    return estimate.against(nan if null is None else float(_read(study, of, null).mean()))


def ranked(of: OfArm, levels: Mapping[float, str]) -> OfStudy:
    """Return the mean over seeds of the rank correlation of arms' numbers and their levels. `levels`: level → arm."""

    def correlation(arms: Mapping[str, StudyArm]) -> float:
        values = [of(arms[arm]) for arm in levels.values()]
        return float(stats.spearmanr(list(levels), values)[0]) if np.ptp(values) else nan

    return of_several(correlation, *levels.values(), ends=CORRELATION)


@of_study
def difference(
    study: ClaimStudy, of: OfArm, method: str, against: str = PLAIN, as_ratio: bool = False, where: Where = None
) -> Estimate:
    """Return the mean over seeds of one arm's number − another's of the same seed, or the geometric mean of ratios."""
    first, second = _read(study, of, method, against, where=where)
    labels = [study.by_seed[0][name].label for name in (method, against)]
    if as_ratio and (not (second > 0).all() or (first < 0).any()):
        raise NotDefined(f"it is 0 in {labels[1]}, so that the ratio is not defined")
    estimate = mean_of_ratios(first / second) if as_ratio else mean_of_runs(first - second)
    means = (f"{label} {values.mean():.3g}" for label, values in zip(labels, (first, second), strict=True))
    return estimate.over(_words(study, means, ", of logarithms" if as_ratio else ""))


ratio = partial(difference, as_ratio=True)


@of_study
def rates_at_equal_loss(study: ClaimStudy, method: str, against: str = PLAIN) -> Estimate:
    """Return the mean over seeds of one arm's sink rate − another's in points, at the lowest loss that both reach.

    These are the held-out loss and the rate by total weight if a probe measured them, else the training loss and the
    usual rate.
    """
    pairs = [[arms[method], arms[against]] for arms in study.by_seed]
    for names in (HELD_OUT, LOGGED):
        courses = [[arm.training.courses[names].get((arm.label, arm.seed)) for arm in pair] for pair in pairs]
        if all(course is not None for pair in courses for course in pair):
            break
    else:
        raise Lacks(f"the trainings of {pairs[0][0].label} and {pairs[0][1].label} have no sink rates by step")
    kind = "held-out loss" if names == HELD_OUT else "training loss"
    read = np.stack([training_tables.at_equal_loss(*pair).to_numpy() for pair in courses])  # (seeds, arms, 3)
    if np.isnan(read).any():
        raise NotDefined(f"these arms have no {kind} in common")
    (_, level, _), rates = read.mean((0, 1)), 100 * read[..., 2]
    means = ", ".join(f"{arm.label} {rate:.1f}" for arm, rate in zip(pairs[0], rates.mean(0), strict=True))
    return mean_of_runs(rates[:, 0] - rates[:, 1]).over(_words(study, [f"{means} % at a {kind} of {level:.3f}"]))


# --- plain trainings that differ in one setting


def common_seeds(study: ClaimStudy) -> list[int]:
    seeds = sorted(set.intersection(*(set(runs) for runs in study.by_level.values())))
    if not seeds:
        raise Lacks("these trainings have no --seed in common")
    return seeds


def level_rates(study: ClaimStudy) -> np.ndarray:
    """(seeds, levels): the sink rate at position 0 in percent, for the seeds that all levels have."""
    seeds = common_seeds(study)
    return np.array([[100 * runs[seed].metric("sink_rate") for runs in study.by_level.values()] for seed in seeds])


# (levels,) and sink rates (seeds, levels) in percent → (seeds,) or an estimate
OfLevels = Callable[[np.ndarray, np.ndarray], np.ndarray | Estimate]


@of_study
def over_levels(
    study: ClaimStudy, of: OfLevels, ends: Ends = None, check: Callable[[ClaimStudy], None] = lambda study: None
) -> Estimate:
    """Return a number computed from all levels. `check` raises Lacks if the levels cannot be compared."""
    check(study)
    rates = level_rates(study)
    number = of(np.array(list(study.by_level)), rates)
    estimate = number if isinstance(number, Estimate) else mean_over_seeds(number, ends)
    return estimate.over(by_level(study, study.by_level, rates))


def largest_rate(levels: np.ndarray, rates: np.ndarray) -> Estimate:
    return largest_of([mean_over_seeds(each, PERCENT) for each in rates.T])


def range_of_rates(levels: np.ndarray, rates: np.ndarray) -> Estimate:
    with_a_sink(rates)
    return range_of([mean_of_runs(first - second) for first, second in combinations(rates.T, 2)])


def by_level(study: ClaimStudy, levels: Iterable[Level], rates: np.ndarray) -> str:
    """Return «0.001: 2.1, 0.01: 18.3 %; 3 seeds», after the setting that is read, if there are several."""
    names = [level if isinstance(level, str) else format(level, ".10g") for level in levels]
    means = ", ".join(f"{name}: {rate:.1f}" for name, rate in zip(names, rates.mean(0), strict=True))
    return with_setting(study, f"{means} %; {words_for(len(rates))}")


def with_a_sink(rates: np.ndarray) -> np.ndarray:
    if rates.mean(0).max() <= SINK:
        raise NotDefined(f"no sink rate is above {SINK:g} %")
    return rates


def slope_on(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """(…,): least-squares slopes of y (…, levels) on x (levels,)."""
    x = x - x.mean()
    return y @ x / (x**2).sum()


def slope(levels: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """(seeds,): slopes of the sink rate on log₂ of the level. Raises NotDefined if there is no sink."""
    return slope_on(np.log2(levels.astype(float)), with_a_sink(rates))

"""Estimates over the seeds of trainings: means with Student's interval, of ratios on the scale of logarithms, of rates
and correlations with one that knows their ends; and extremes over levels, each level with an interval of its own.

With a single seed nothing is known of the spread, and a claim that rests on it has not enough seeds.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import combinations
from math import exp, nan
from typing import TypeVar

import numpy as np
from scipy import stats

from sinkscope.paper_claims.evidence import Evidence
from sinkscope.paper_claims.need import Need
from sinkscope.paper_claims.studies import PLAIN, Arm, ArmStudy, FactorStudy, Level, Study
from sinkscope.results.findings import SINK
from sinkscope.results.judgment import NotDefined
from sinkscope.results.sequences import Lacks
from sinkscope.results.statistics import Estimate, largest_of, least_of, mean_of_rates, mean_of_runs, range_of

Kind = TypeVar("Kind")
Measure = Callable[[Evidence], Estimate]
OfArm = Callable[[Arm], float]
Ends = tuple[float, float]
PERCENT, CORRELATION = (0.0, 100.0), (-1.0, 1.0)


def _mean(values: np.ndarray, ends: Ends | None) -> Estimate:
    return mean_of_runs(values) if ends is None else mean_of_rates(values, *ends)


def mean_of_percent(rates: np.ndarray) -> Estimate:
    return mean_of_rates(rates, *PERCENT)


def mean_of_ratios(ratios: np.ndarray) -> Estimate:
    """The geometric mean of positive numbers with Student's interval of their logarithms."""
    if not (ratios > 0).all():
        return Estimate(float(np.mean(ratios)), -np.inf, np.inf, seeds=len(ratios))
    found = mean_of_runs(np.log(ratios))
    with np.errstate(over="ignore"):
        return replace(found, value=exp(found.value), low=float(np.exp(found.low)), high=float(np.exp(found.high)))


def words_for(seeds: int, scale: str = "") -> str:
    """Say how an interval was made: «3 seeds, Student's t»."""
    if seeds == 1:
        return "one seed, so that the spread over seeds is not known: train with --seeds 3"
    return f"{seeds} seeds, Student's t{scale}"


def words_for_arms(study: ArmStudy, scale: str = "") -> str:
    """Say how an interval over arms was made: «6000 steps, 3 seeds, Student's t»."""
    training = next(iter(study.by_seed[0].values())).training
    return with_setting(study, f"{training.settings['steps']} steps, {words_for(len(study.by_seed), scale)}")


def with_setting(study: Study, words: str) -> str:
    """Prefix the setting that is read, if several were trained."""
    return f"{study.setting}; {words}" if study.setting else words


LOGARITHMS = " of logarithms"


# --- arms against each other


def study_of(evidence: Evidence, role: Need, kind: type[Kind]) -> Kind:
    """Return a study of a known kind."""
    study = evidence.studies[role]
    assert isinstance(study, kind)
    return study


def metric(name: str, scale: float = 1.0) -> OfArm:
    """Read a metric of an arm's whole model. Raises Lacks where it was not measured."""

    def of(arm: Arm) -> float:
        value = arm.metric(name)
        if np.isnan(value):
            raise Lacks(f"the runs of {arm.label} lack the metric '{name}'")
        return scale * value

    return of


def of_one(role: Need, of: OfArm, method: str, null: str | None = None, ends: Ends | None = None) -> Measure:
    """The mean over seeds of one arm's number, and of a null arm's. `ends`: the range of possible numbers."""

    def measure(evidence: Evidence) -> Estimate:
        study = study_of(evidence, role, ArmStudy)
        found = _mean(_values(study, of, method), ends)
        of_null = nan if null is None else float(np.mean(_values(study, of, null)))
        return found.against(of_null).over(f"{_label(study, method)}; {words_for_arms(study)}")

    return measure


def correlation(role: Need, of: OfArm, method: str) -> Measure:
    """The mean over seeds of one arm's correlation."""
    return of_one(role, of, method, ends=CORRELATION)


def difference(role: Need, of: OfArm, method: str, against: str = PLAIN) -> Measure:
    """The mean over seeds of one arm's number − another's of the same seed."""

    def measure(evidence: Evidence) -> Estimate:
        study = study_of(evidence, role, ArmStudy)
        first, second = (_values(study, of, name) for name in (method, against))
        return mean_of_runs(first - second).over(_both(study, method, first, against, second))

    return measure


def ratio(role: Need, of: OfArm, method: str, against: str = PLAIN) -> Measure:
    """The geometric mean over seeds of one arm's number ÷ another's of the same seed."""

    def measure(evidence: Evidence) -> Estimate:
        study = study_of(evidence, role, ArmStudy)
        first, second = (_values(study, of, name) for name in (method, against))
        if not (second > 0).all() or (first < 0).any():
            raise NotDefined(f"it is 0 in {_label(study, against)}, so that there is nothing to divide by")
        return mean_of_ratios(first / second).over(_both(study, method, first, against, second, LOGARITHMS))

    return measure


def together(role: Need, of: Callable[[Mapping[str, Arm]], float], *methods: str, ends: Ends | None = None) -> Measure:
    """The mean over seeds of a number that is made of several arms."""

    def measure(evidence: Evidence) -> Estimate:
        study = study_of(evidence, role, ArmStudy)
        values = np.array([of(arms) for arms in study.by_seed])
        labels = ", ".join(_label(study, method) for method in methods)
        return _mean(values, ends).over(f"{labels}; {words_for_arms(study)}")

    return measure


def where_plain_has(what: str, of: OfArm, least: float, role: Need, measure: Measure) -> Measure:
    """Restrict a measure to models whose plain training has what the arms remove or move.

    The measure raises NotDefined if plain training has no more than `least` of it, on average over seeds.
    """

    def within(evidence: Evidence) -> Estimate:
        found = _values(study_of(evidence, role, ArmStudy), of, PLAIN).mean()
        if found <= least:
            raise NotDefined(f"plain training has no {what} is {found:.3g}, not above {least:g}")
        return measure(evidence)

    return within


def _values(study: ArmStudy, of: OfArm, method: str) -> np.ndarray:
    return np.array([of(arms[method]) for arms in study.by_seed])


def _label(study: ArmStudy, method: str) -> str:
    return study.by_seed[0][method].label


def _both(study: ArmStudy, method: str, first: np.ndarray, against: str, second: np.ndarray, scale: str = "") -> str:
    pairs = ((method, first), (against, second))
    means = ", ".join(f"{_label(study, name)} {values.mean():.3g}" for name, values in pairs)
    return f"{means}; {words_for_arms(study, scale)}"


def ranked(role: Need, of: OfArm, levels: Mapping[float, str]) -> Measure:
    """The mean over seeds of the rank correlation of arms' numbers and their levels. `levels`: level → arm."""

    def found(arms: Mapping[str, Arm]) -> float:
        values = [of(arms[arm]) for arm in levels.values()]
        return float(stats.spearmanr(list(levels), values)[0]) if np.ptp(values) else nan

    return together(role, found, *levels.values(), ends=CORRELATION)


# --- plain trainings that differ in one setting


def common_seeds(study: FactorStudy) -> list[int]:
    """Return the seeds that all levels have. Raises Lacks where there are none."""
    seeds = sorted(set.intersection(*(set(runs) for runs in study.by_level.values())))
    if not seeds:
        raise Lacks("no --seed is that of all these trainings")
    return seeds


def sink_rates(study: FactorStudy) -> tuple[list[Level], np.ndarray]:
    """The levels, and (seeds, levels): the sink rate at position 0 in percent, of the seeds that all levels have.

    Raises:
        Lacks: they have no seed in common.
    """
    seeds = common_seeds(study)
    rates = [[100 * runs[seed].metric("sink_rate") for runs in study.by_level.values()] for seed in seeds]
    return list(study.by_level), np.array(rates)


def over_levels(
    role: Need, of: Callable[[np.ndarray, np.ndarray], np.ndarray | Estimate], ends: Ends | None = None
) -> Measure:
    """A number that is made of all levels: its mean over seeds, or an estimate itself.

    Args:
        role: The study.
        of: Makes (seeds,) or an estimate from the levels (levels,) and the sink rates (seeds, levels).
        ends: The range of possible numbers.
    """

    def measure(evidence: Evidence) -> Estimate:
        study = study_of(evidence, role, FactorStudy)
        levels, rates = sink_rates(study)
        found = of(np.array(levels), rates)
        estimate = found if isinstance(found, Estimate) else _mean(found, ends)
        return estimate.over(by_level(study, levels, rates))

    return measure


def least_rate(levels: np.ndarray, rates: np.ndarray) -> Estimate:
    """The sink rate of the level that has the least, of (seeds, levels) in percent."""
    return least_of([mean_of_percent(each) for each in rates.T])


def largest_rate(levels: np.ndarray, rates: np.ndarray) -> Estimate:
    """The sink rate of the level that has the most."""
    return largest_of([mean_of_percent(each) for each in rates.T])


def range_of_rates(levels: np.ndarray, rates: np.ndarray) -> Estimate:
    """How far levels are apart, in points. Raises NotDefined where there is no sink that could differ."""
    with_a_sink(rates)
    return range_of([mean_of_runs(first - second) for first, second in combinations(rates.T, 2)])


def by_level(study: FactorStudy, levels: Iterable[Level], rates: np.ndarray) -> str:
    """«0.001: 2.1, 0.01: 18.3 %; 3 seeds, Student's t», after the setting that is read, if several were trained."""
    means = ", ".join(
        f"{level if isinstance(level, str) else format(level, '.10g')}: {rate:.1f}"
        for level, rate in zip(levels, rates.mean(0), strict=True)
    )
    return with_setting(study, f"{means} %; {words_for(len(rates))}")


def with_a_sink(rates: np.ndarray) -> np.ndarray:
    """Return rates in percent (seeds, levels) unchanged. Raises NotDefined where no level has a sink, on average."""
    if rates.mean(0).max() <= SINK:
        raise NotDefined(f"no sink rate is above {SINK:g} %")
    return rates


def slope(levels: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """(seeds,): least-squares slopes of the sink rate on log₂ of the level. Raises NotDefined: there is no sink."""
    x = np.log2(levels.astype(float))
    x = x - x.mean()
    return with_a_sink(rates) @ x / (x**2).sum()

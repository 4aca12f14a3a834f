"""The judgment of a number: the values with which a claim of a paper holds."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isfinite, isnan, nan
from typing import Generic, TypeVar

import numpy as np
from scipy.special import ndtr, stdtrit

from sinkscope.results.findings import Outcome
from sinkscope.results.statistics import LEVEL, Estimate

Read = TypeVar("Read")
ENOUGH_POWER = 0.5  # power; with less power, a claim that is not shown may well be true
WANTED_POWER, MOST_SEEDS = 0.8, 1000  # the power with which a study would decide; the most seeds that are tried


class NotDefined(Exception):
    """The quantity of a claim does not exist for this model; the message is the reason."""


@dataclass(frozen=True)
class Test:
    """The values with which a claim holds: from `least` to `most`, without these two if `strict`."""

    __test__ = False  # keeps pytest from collecting the class

    least: float = -inf
    most: float = inf
    strict: bool = False

    def outcome(self, estimate: Estimate) -> Outcome:
        """Judge by the complete interval.

        Each end misses the truth with 2.5 %, so that a claim whose truth is at the threshold holds in 2.5 % of studies.
        """
        if isnan(estimate.value):
            return Outcome.INCONCLUSIVE
        if self.holds(estimate):
            return Outcome.HOLDS
        if not self._above(estimate.high) or not self._below(estimate.low):
            return Outcome.FAILS
        return Outcome.NOT_ENOUGH_SEEDS if self.power(estimate) < ENOUGH_POWER else Outcome.INCONCLUSIVE

    def holds(self, estimate: Estimate) -> bool:
        """Return whether the complete interval is inside."""
        return self._above(estimate.low) and self._below(estimate.high)

    def power(self, estimate: Estimate) -> float:
        """Return the probability that a study with as many seeds and this spread shows the claim, if it is true.

        The true value is taken to be that of the estimate, or 0 for a range. The power is NaN if the number is not over
        seeds, or if its value contradicts the claim.
        """
        truth = estimate.value if isnan(estimate.truest) else estimate.truest
        if not estimate.seeds or isnan(truth):
            return nan
        if not (isfinite(estimate.low) and isfinite(estimate.high)) or estimate.seeds < 2:
            return 0.0
        if not (self._above(truth) and self._below(truth)):
            return nan
        freedom = estimate.seeds - 1
        reach = stdtrit(freedom, (1 + LEVEL) / 2)
        below, above = estimate.value - estimate.low, estimate.high - estimate.value
        sides = [(truth - self.least, below), (self.most - truth, above)]
        if not isnan(estimate.truest):  # a range is the size of a difference that may have either sign
            sides *= 2
        misses = [ndtr(-reach * (room / side - 1)) for room, side in sides if isfinite(room) and side]
        return float(max(0.0, 1 - sum(misses)))

    def seeds_to_decide(self, estimate: Estimate) -> float:
        """Return the number of seeds that decide the test with WANTED_POWER, if effect and spread are those seen.

        The interval then is inside if the value is, and outside if it is outside. The number is NaN if the estimate has
        no spread over seeds, and ∞ if MOST_SEEDS are too few.
        """
        truth = estimate.value
        if estimate.seeds < 2 or not (isfinite(estimate.low) and isfinite(estimate.high) and isfinite(truth)):
            return nan
        below, above = truth - estimate.low, estimate.high - truth
        if self._above(truth) and self._below(truth):
            sides = [(truth - self.least, below), (self.most - truth, above)]
        else:
            sides = [(self.least - truth, above)] if not self._above(truth) else [(truth - self.most, below)]
        sides = [(room, side) for room, side in sides if isfinite(room) and side]
        seeds = np.arange(2, MOST_SEEDS + 1)
        reach, known = (stdtrit(number - 1, (1 + LEVEL) / 2) for number in (seeds, estimate.seeds))
        narrower = reach / np.sqrt(seeds) / (known / np.sqrt(estimate.seeds))
        misses = sum(ndtr(-reach * (room / (side * narrower) - 1)) for room, side in sides)
        enough = np.flatnonzero(1 - misses >= WANTED_POWER) if sides else np.array([0])
        return float(seeds[enough[0]]) if len(enough) else inf

    def separates(self, estimate: Estimate) -> bool:
        """Return whether every draw of the null is outside, or less far inside than the value; False without draws."""
        low, high = estimate.null_low, estimate.null_high
        if isnan(low):
            return False
        if isfinite(self.least) and isfinite(self.most):
            return not (self._above(high) and self._below(low))
        if isfinite(self.least):
            return high < estimate.value or not self._above(high)
        return low > estimate.value or not self._below(low)

    def _above(self, x: float) -> bool:
        return x > self.least if self.strict and self.least != -inf else x >= self.least

    def _below(self, x: float) -> bool:
        return x < self.most if self.strict and self.most != inf else x <= self.most

    def text(self, form: str = "{:.3g}") -> str:
        """Return for example "≥ 0.5", "< 1" or "0.5 to 2"."""
        least, most = (form.format(end) for end in (self.least, self.most))
        if self.most == inf:
            return f"{'>' if self.strict else '≥'} {least}"
        if self.least == -inf:
            return f"{'<' if self.strict else '≤'} {most}"
        return f"{least} to {most}"


def at_least(threshold: float) -> Test:
    return Test(least=threshold)


def at_most(threshold: float) -> Test:
    return Test(most=threshold)


def above(threshold: float) -> Test:
    return Test(least=threshold, strict=True)


def below(threshold: float) -> Test:
    return Test(most=threshold, strict=True)


def between(least: float, most: float) -> Test:
    return Test(least, most)


@dataclass(frozen=True)
class Number(Generic[Read]):
    """One number of a claim, and the values with which the claim holds."""

    quantity: str  # what is measured, in words
    measure: Callable[[Read], Estimate]  # computes the estimate; raises NotDefined
    test: Test
    form: str = "{:.3g}"  # format string of its values
    is_evidence: bool = True  # False: a condition, as that there is a sink, or an identity; a null need not fail it


def estimated(measure: Callable[[Read], Estimate], read: Read) -> Estimate:
    """Call a measure, without warnings for 0 ÷ 0, which gives NaN."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return measure(read)

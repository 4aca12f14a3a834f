"""What a claim is, and how an estimate is judged by it."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import inf, isnan

import numpy as np

from sinkscope.report.claims.estimates import Estimate
from sinkscope.report.claims.evidence import MAIN, NULL, Evidence, Lacks
from sinkscope.results import metrics
from sinkscope.results.findings import Published

PAPERS = {  # first part of a claim's id → its paper
    "GS": metrics.PAPERS["GS"],
    "W": metrics.PAPERS["WSE"],
    "S": "StreamingLLM; Massive Activations in Large Language Models (Sun et al. 2024)",
    "N": metrics.PAPERS["NU"],
    "V": metrics.PAPERS["VGA"],
}


class Outcome(StrEnum):
    """What a model's runs say of a claim."""

    HOLDS = "holds"
    FAILS = "fails"
    INCONCLUSIVE = "inconclusive"  # the interval spans the threshold
    DOES_NOT_APPLY = "does not apply"
    NOT_MEASURED = "not measured"


class NotDefined(Exception):
    """A claim's quantity does not exist on this model; the message is the reason."""


@dataclass(frozen=True)
class Test:
    """The values with which a claim holds: from `least` to `most`, the ends themselves only where not `strict`."""

    __test__ = False  # no test of pytest's

    least: float = -inf
    most: float = inf
    strict: bool = False

    def outcome(self, estimate: Estimate) -> Outcome:
        """By the whole interval, not by the point."""
        if isnan(estimate.value):
            return Outcome.INCONCLUSIVE
        inside = (self._above(estimate.low), self._below(estimate.high))
        if all(inside):
            return Outcome.HOLDS
        outside = not self._above(estimate.high) or not self._below(estimate.low)
        return Outcome.FAILS if outside else Outcome.INCONCLUSIVE

    def _above(self, x: float) -> bool:
        return x > self.least if self.strict and self.least != -inf else x >= self.least

    def _below(self, x: float) -> bool:
        return x < self.most if self.strict and self.most != inf else x <= self.most

    def text(self, form: str = "{:.3g}") -> str:
        """«≥ 0.5», «< 1», «0.5 to 2»."""
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


# Why a claim does not speak of a model; None where it does.
Scope = Callable[[Evidence], str | None]


@dataclass(frozen=True)
class Part:
    """One number of a claim, and the values with which the claim holds.

    Attributes:
        quantity: What is measured, in words.
        measure: Makes the estimate from runs. Raises NotDefined.
        test: The values with which the claim holds.
        form: Format string of its values.
    """

    quantity: str
    measure: Callable[[Evidence], Estimate]
    test: Test
    form: str = "{:.3g}"


@dataclass(frozen=True)
class Claim:
    """What a paper says happens, and how that is decided.

    Attributes:
        id: Paper and number: GS-6.
        reference: Where the paper says so.
        statement: What it says.
        parts: The numbers that decide it; all have to pass.
        needs: Names of the runs that the parts read (`evidence.py`).
        beside: Names of further runs that the parts read where they are there.
        scope: Which models the claim speaks of: all conditions have to be met.
        published: What the paper measured.
        is_ours: Whether the thresholds are ours and not the paper's.
    """

    id: str
    reference: str
    statement: str
    parts: tuple[Part, ...]
    needs: tuple[str, ...] = ("natural",)
    scope: tuple[Scope, ...] = ()
    published: tuple[Published, ...] = ()
    is_ours: bool = True
    beside: tuple[str, ...] = ()

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of all runs that the parts read."""
        return (*self.needs, *self.beside)

    @property
    def paper(self) -> str:
        return PAPERS[self.id.partition("-")[0]]


@dataclass(frozen=True)
class Judgment:
    """What runs of a model say of a claim.

    Attributes:
        claim: Which.
        outcome: Of all its parts together.
        estimates: One a part; none where nothing was measured.
        reason: Why it does not apply, or the command that would measure it.
    """

    claim: Claim
    outcome: Outcome
    estimates: tuple[Estimate, ...] = ()
    reason: str = ""

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """One a part."""
        return tuple(
            part.test.outcome(estimate) for part, estimate in zip(self.claim.parts, self.estimates, strict=False)
        )


def judge(claim: Claim, evidence: Evidence) -> Judgment:
    """What the runs say of one claim."""
    for scope in claim.scope:
        if reason := scope(evidence):
            return Judgment(claim, Outcome.DOES_NOT_APPLY, reason=reason)
    missing = [need for need in claim.needs if not evidence.has(need)]
    reasons = [reason for need in missing if (reason := evidence.inapplicable(need))]
    if reasons:
        return Judgment(claim, Outcome.DOES_NOT_APPLY, reason=reasons[0])
    if missing:
        return Judgment(claim, Outcome.NOT_MEASURED, reason=evidence.command(missing[0]))
    try:
        estimates = tuple(_beside_null(part, claim, evidence) for part in claim.parts)
    except NotDefined as reason:
        return Judgment(claim, Outcome.DOES_NOT_APPLY, reason=str(reason))
    except Lacks as reason:
        return Judgment(claim, Outcome.NOT_MEASURED, reason=str(reason))
    return Judgment(claim, _together(Judgment(claim, Outcome.HOLDS, estimates).outcomes), estimates)


def estimated(measure: Callable[[Evidence], Estimate], evidence: Evidence) -> Estimate:
    """What is measured; of 0 ÷ 0 NaN, of which nothing is said."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return measure(evidence)


def _beside_null(part: Part, claim: Claim, evidence: Evidence) -> Estimate:
    """What is measured of the model as it is, beside the same of random weights."""
    estimate = estimated(part.measure, evidence)
    if set(claim.needs) != {MAIN} or not evidence.has(NULL) or not isnan(estimate.null):
        return estimate
    try:
        return estimate.against(estimated(part.measure, evidence.null).value)
    except (NotDefined, Lacks):
        return estimate


def _together(outcomes: tuple[Outcome, ...]) -> Outcome:
    """Of a claim whose parts all have to pass."""
    worst = (Outcome.FAILS, Outcome.INCONCLUSIVE)
    return next((outcome for outcome in worst if outcome in outcomes), Outcome.HOLDS)

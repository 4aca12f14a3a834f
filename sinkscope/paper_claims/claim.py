"""What a claim is, and how an estimate is judged by it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import isnan, nan
from typing import Any

import numpy as np

from sinkscope.measuring.estimates import HAS_SINK_HEADS as SINK_HEADS_OF_RUN
from sinkscope.measuring.estimates import RUN_CLAIMS
from sinkscope.paper_claims.evidence import MAIN, Evidence
from sinkscope.paper_claims.studies import ARMS, PLAIN, Arm, ArmStudy
from sinkscope.paper_claims.studies import KINDS as STUDIES
from sinkscope.results.findings import Published
from sinkscope.results.judgment import NotDefined, Number, Outcome, estimated
from sinkscope.results.papers import paper_of
from sinkscope.results.sequences import Lacks, Sequences
from sinkscope.results.statistics import Estimate
from sinkscope.training.tables import UNTOUCHED

# --- Nulls of claims: data in which there is nothing to find, on which the test of a claim should not pass.


class Null(StrEnum):
    """The kinds of data in which there is nothing to find."""

    RANDOM_WEIGHTS = "random weights"  # each draw in the place of the model, and judged against the other draws
    CONTROLS = "random controls"  # each of an intervention's controls in the place of the intervention
    PLAIN = "plain training"  # of another seed, in the place of the method
    THEOREM = "theorem"  # or an identity: it holds of any weights, and tests the code
    NONE = "none"  # nothing is measured that could be put in the place


def usual_null(needs: Iterable[str]) -> Null:
    """The null of a claim that reads these roles."""
    kinds = {need.partition(":")[0] for need in needs}
    if any(kind.endswith("do") for kind in kinds):
        return Null.CONTROLS
    if kinds & STUDIES.keys():
        return Null.PLAIN if kinds <= ARMS.keys() else Null.NONE
    return Null.NONE if any(kind.endswith("alone") for kind in kinds) else Null.RANDOM_WEIGHTS


def draws_of(null: Null, needs: Iterable[str], evidence: Evidence) -> list[Evidence]:
    """The evidence with the null in the place of what a claim speaks of, once for each draw that was measured."""
    if null == Null.RANDOM_WEIGHTS:
        return evidence.nulls
    if null == Null.CONTROLS:
        roles = [need for need in needs if need.partition(":")[0].endswith("do") and evidence.has(need)]
        counts = [len(evidence.controls(role)) for role in roles]
        return [evidence.as_control(draw) for draw in range(min(counts, default=0))]
    if null == Null.PLAIN:
        studies = {need: found for need in needs if (found := _all_plain(evidence.studies.get(need)))}
        if set(needs) <= studies.keys():
            return [replace(evidence, studies=studies)]
    return []


def _all_plain(study: object) -> ArmStudy | None:
    """Each method's arm is the plain one of the next seed; None where there is no other, or no plain one."""
    if not isinstance(study, ArmStudy) or len(study.by_seed) < 2 or any(PLAIN not in arms for arms in study.by_seed):
        return None
    following = (*study.by_seed[1:], study.by_seed[0])
    exchanged = [
        {method: (after[PLAIN] if method in _methods(arms) else arm) for method, arm in arms.items()}
        for arms, after in zip(study.by_seed, following, strict=True)
    ]
    return replace(study, by_seed=tuple(exchanged))


def _methods(arms: Mapping[str, Arm]) -> set[str]:
    """Those that were trained otherwise than plainly; what all arms began from is none."""
    return {method for method, arm in arms.items() if arm.method not in (PLAIN, UNTOUCHED)}


# Why a claim does not speak of a model; None where it does.
Scope = Callable[[Evidence], str | None]
Part = Number[Evidence]


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
        set_against: What its test should not pass; None: the usual null of what it needs.
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
    set_against: Null | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of all runs that the parts read."""
        return (*self.needs, *self.beside)

    @property
    def null(self) -> Null:
        return self.set_against or usual_null(self.needs)

    @property
    def paper(self) -> str:
        return paper_of(self.id)


def of_run(part: Number[Sequences], role: str = MAIN) -> Part:
    """A number of one run, as a part of a claim."""
    return Part(part.quantity, lambda evidence: part.measure(evidence.sequences(role)), part.test, part.form)


HAS_SINK_HEADS = of_run(SINK_HEADS_OF_RUN)


def run_claim(id: str, *more: Part, role: str = MAIN, **others: Any) -> Claim:
    """A claim of `RUN_CLAIMS`. `more`: further parts of it; `others`: its other attributes."""
    claim = RUN_CLAIMS[id]
    parts = (*(of_run(part, role) for part in claim.parts), *more)
    return Claim(id, claim.reference, claim.statement, parts, **others)


@dataclass(frozen=True)
class Judgment:
    """What runs of a model say of a claim.

    Attributes:
        claim: Which.
        outcome: Of all its parts together.
        estimates: One a part; none where nothing was measured.
        reason: Why it does not apply, or the command that would measure it.
        null_passes: The share of the null's draws of which the claim would hold; NaN where that is not known.
    """

    claim: Claim
    outcome: Outcome
    estimates: tuple[Estimate, ...] = ()
    reason: str = ""
    null_passes: float = nan

    @property
    def tells(self) -> str:
        """Whether the claim tells the model from its null: «yes», «no», «theorem», or «» if that is not known.

        It does only if no draw passes. Where few layers or heads make a wide interval, a draw that gives more than the
        model may fail, too: one of the numbers has to separate the model from all draws besides.
        """
        if self.claim.null == Null.THEOREM:
            return str(Null.THEOREM)
        if isnan(self.null_passes):
            return ""
        parts = zip(self.claim.parts, self.estimates, strict=False)
        separated = any(part.test.separates(estimate) for part, estimate in parts)
        return "yes" if separated and not self.null_passes else "no"

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
        estimates = tuple(estimated(part.measure, evidence) for part in claim.parts)
    except NotDefined as reason:
        return Judgment(claim, Outcome.DOES_NOT_APPLY, reason=str(reason))
    except Lacks as reason:
        return Judgment(claim, Outcome.NOT_MEASURED, reason=str(reason))
    outcome = _together(Judgment(claim, Outcome.HOLDS, estimates).outcomes)
    return _beside_null(Judgment(claim, outcome, estimates), evidence)


def _beside_null(judgment: Judgment, evidence: Evidence) -> Judgment:
    """The same with what the claim's null gives, in numbers and in the share of its draws that pass."""
    claim = judgment.claim
    draws = draws_of(claim.null, claim.needs, evidence)
    values = np.full((len(draws), len(claim.parts)), nan)
    passed: list[bool | None] = []
    for draw, row in zip(draws, values, strict=True):
        passed.append(_passes(claim, draw, row))
    known = [each for each in passed if each is not None]
    share = float(np.mean(known)) if known else nan
    beside = []
    for estimate, own in zip(judgment.estimates, values.T, strict=True):
        own = own[np.isfinite(own)]
        if len(own):
            estimate = replace(estimate, null=float(own.mean()), null_low=float(own.min()), null_high=float(own.max()))
        beside.append(estimate)
    return replace(judgment, estimates=tuple(beside), null_passes=share)


def _passes(claim: Claim, draw: Evidence, values: np.ndarray) -> bool | None:
    """Whether a claim holds of a draw of its null; None where no part fails and some cannot be read. Fills `values`."""
    if any(scope(draw) for scope in claim.scope):
        return False
    outcomes = set()
    for place, part in enumerate(claim.parts):
        try:
            estimate = estimated(part.measure, draw)
        except NotDefined:  # as of a sink, where there is none
            return False
        except Lacks:
            outcomes.add(Outcome.NOT_MEASURED)
            continue
        values[place] = estimate.value
        outcomes.add(part.test.outcome(estimate))
    if outcomes <= {Outcome.HOLDS, Outcome.NOT_MEASURED}:
        return None if Outcome.NOT_MEASURED in outcomes else True
    return False


def _together(outcomes: tuple[Outcome, ...]) -> Outcome:
    """Of a claim whose parts all have to pass."""
    worst = (Outcome.FAILS, Outcome.INCONCLUSIVE, Outcome.NOT_ENOUGH_SEEDS)
    return next((outcome for outcome in worst if outcome in outcomes), Outcome.HOLDS)

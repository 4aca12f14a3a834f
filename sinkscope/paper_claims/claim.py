"""Claims of papers, and their judgment by the runs of a model and by the runs of a null."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from math import isnan, nan
from typing import Any

import numpy as np

from sinkscope.measuring.estimates import HAS_SINK_HEADS as SINK_HEADS_OF_RUN
from sinkscope.measuring.estimates import RUN_CLAIMS
from sinkscope.paper_claims.evidence import MAIN, Evidence
from sinkscope.paper_claims.need import ARMS, Need
from sinkscope.paper_claims.studies import PLAIN, Arm, ArmStudy
from sinkscope.results.findings import Published
from sinkscope.results.judgment import NotDefined, Number, Outcome, estimated
from sinkscope.results.papers import paper_of
from sinkscope.results.sequences import Lacks, Sequences
from sinkscope.results.statistics import Estimate
from sinkscope.training.tables import UNTOUCHED

# --- Nulls of claims: data in which there is nothing to find, on which the test of a claim should not pass.


class Null(StrEnum):
    """The kinds of data in which there is nothing to find."""

    RANDOM_WEIGHTS = "random weights"  # each draw takes the place of the model, and is judged against the other draws
    CONTROLS = "random controls"  # each random control takes the place of its intervention
    PLAIN = "plain training"  # of another seed takes the place of the method
    THEOREM = "theorem"  # or an identity: it holds for any weights, and tests the code
    NONE = "none"  # nothing is measured that could take the place


def usual_null(needs: Collection[Need]) -> Null:
    """Return the null of a claim that needs these runs."""
    if any(need.has_controls for need in needs):
        return Null.CONTROLS
    if any(need.is_study for need in needs):
        return Null.PLAIN if all(need.kind in ARMS for need in needs) else Null.NONE
    return Null.NONE if any(need.is_intervention for need in needs) else Null.RANDOM_WEIGHTS


def draws_of(null: Null, needs: Collection[Need], evidence: Evidence) -> list[Evidence]:
    """Return, for each measured draw of a null, the evidence in which it replaces what a claim is about."""
    if null == Null.RANDOM_WEIGHTS:
        return evidence.nulls
    if null == Null.CONTROLS:
        roles = [need for need in needs if need.has_controls and evidence.has(need)]
        counts = [len(evidence.controls(role)) for role in roles]
        return [evidence.as_control(draw) for draw in range(min(counts, default=0))]
    if null == Null.PLAIN:
        studies = {need: found for need in needs if (found := _all_plain(evidence.studies.get(need)))}
        if set(needs) <= studies.keys():
            return [replace(evidence, studies=studies)]
    return []


def _all_plain(study: object) -> ArmStudy | None:
    """Replace each method's arm by the plain arm of the next seed; None without another seed or a plain arm."""
    if not isinstance(study, ArmStudy) or len(study.by_seed) < 2 or any(PLAIN not in arms for arms in study.by_seed):
        return None
    following = (*study.by_seed[1:], study.by_seed[0])
    exchanged = [
        {method: (after[PLAIN] if method in _methods(arms) else arm) for method, arm in arms.items()}
        for arms, after in zip(study.by_seed, following, strict=True)
    ]
    return replace(study, by_seed=tuple(exchanged))


def _methods(arms: Mapping[str, Arm]) -> set[str]:
    """Return the arms that a method was applied to: neither plain ones nor the model that all arms began from."""
    return {method for method, arm in arms.items() if arm.method not in (PLAIN, UNTOUCHED)}


# Returns why a claim does not apply to a model, or None.
Scope = Callable[[Evidence], str | None]
Part = Number[Evidence]


@dataclass(frozen=True)
class Claim:
    """A statement of a paper, and the numbers that decide it.

    Attributes:
        id: Paper and number: GS-6.
        reference: The place in the paper.
        statement: The statement.
        parts: The numbers that decide it; all have to pass.
        needs: The runs that the parts read (`evidence.py`).
        also_reads: Further runs that the parts read where they exist.
        scope: Conditions that a model has to meet.
        published: The paper's numbers.
        is_ours: Whether the thresholds are ours rather than the paper's.
        set_against: The null, which should not pass the tests; by default `usual_null(needs)`.
    """

    id: str
    reference: str
    statement: str
    parts: tuple[Part, ...]
    needs: tuple[Need, ...] = (MAIN,)
    scope: tuple[Scope, ...] = ()
    published: tuple[Published, ...] = ()
    is_ours: bool = True
    also_reads: tuple[Need, ...] = ()
    set_against: Null | None = None

    @property
    def reads(self) -> tuple[Need, ...]:
        """All runs that the parts read."""
        return (*self.needs, *self.also_reads)

    @property
    def null(self) -> Null:
        return self.set_against or usual_null(self.needs)

    @property
    def paper(self) -> str:
        return paper_of(self.id)


def of_run(part: Number[Sequences], role: Need = MAIN) -> Part:
    """Make a number of one run a part of a claim."""
    return Part(part.quantity, lambda evidence: part.measure(evidence.sequences(role)), part.test, part.form)


HAS_SINK_HEADS = of_run(SINK_HEADS_OF_RUN)


def run_claim(id: str, *more: Part, role: Need = MAIN, **others: Any) -> Claim:
    """Make a claim of an entry of `RUN_CLAIMS`.

    Args:
        id: The key of the entry.
        *more: Parts that read further runs.
        role: The run that the entry's numbers are of.
        **others: The claim's other attributes.
    """
    claim = RUN_CLAIMS[id]
    parts = (*(of_run(part, role) for part in claim.parts), *more)
    return Claim(id, claim.reference, claim.statement, parts, **others)


@dataclass(frozen=True)
class Judgment:
    """The judgment of one claim on one model.

    Attributes:
        claim: The claim.
        outcome: The outcome of all parts together.
        estimates: One for each part; none where nothing was measured.
        reason: Why it does not apply, or the command that would measure it.
        null_passes: The share of the null's draws for which the claim would hold; NaN where that is not known.
    """

    claim: Claim
    outcome: Outcome
    estimates: tuple[Estimate, ...] = ()
    reason: str = ""
    null_passes: float = nan

    @property
    def tells(self) -> str:
        """Whether the claim distinguishes the model from its null: «yes», «no», «theorem», or «» if that is not known.

        It does only if no draw passes. With few layers or heads, intervals are wide, and a draw with a larger number
        than the model's may fail as well: one of the numbers also has to separate the model from all draws.
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
        """The outcome of each part."""
        return tuple(
            part.test.outcome(estimate) for part, estimate in zip(self.claim.parts, self.estimates, strict=False)
        )


def judge(claim: Claim, evidence: Evidence) -> Judgment:
    """Judge one claim by the runs of a model."""
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
    return _with_null(Judgment(claim, outcome, estimates), evidence)


def _with_null(judgment: Judgment, evidence: Evidence) -> Judgment:
    """Add the null's numbers to a judgment, and the share of its draws that pass."""
    claim = judgment.claim
    draws = draws_of(claim.null, claim.needs, evidence)
    values = np.full((len(draws), len(claim.parts)), nan)
    passed: list[bool | None] = []
    for draw, row in zip(draws, values, strict=True):
        passed.append(_passes(claim, draw, row))
    known = [each for each in passed if each is not None]
    share = float(np.mean(known)) if known else nan
    compared = []
    for estimate, own in zip(judgment.estimates, values.T, strict=True):
        own = own[np.isfinite(own)]
        if len(own):
            estimate = replace(estimate, null=float(own.mean()), null_low=float(own.min()), null_high=float(own.max()))
        compared.append(estimate)
    return replace(judgment, estimates=tuple(compared), null_passes=share)


def _passes(claim: Claim, draw: Evidence, values: np.ndarray) -> bool | None:
    """Whether a claim holds for a draw of its null; None if no part fails and some cannot be read. Fills `values`."""
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
    """Return the outcome of a claim, whose parts all have to pass."""
    worst = (Outcome.FAILS, Outcome.INCONCLUSIVE, Outcome.NOT_ENOUGH_SEEDS)
    return next((outcome for outcome in worst if outcome in outcomes), Outcome.HOLDS)

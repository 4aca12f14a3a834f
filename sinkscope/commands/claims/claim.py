"""Claims of papers, and their judgment from the runs of a model and the runs of a null."""

from dataclasses import dataclass, replace
from itertools import chain
from math import isnan, nan
from typing import Any

import numpy as np

from sinkscope.commands.claims.evidence import MAIN, Evidence, Need, Null
from sinkscope.commands.claims.scopes import Scope
from sinkscope.commands.claims.studies import PLAIN
from sinkscope.measuring.estimates import RUN_CLAIMS, SINK_HEADS_OF_RUN, in_sink_heads
from sinkscope.results.findings import Outcome, Published
from sinkscope.results.judgment import NotDefined, Number, Test, estimated
from sinkscope.results.sequences import Lacks, Sequences
from sinkscope.results.statistics import Estimate
from sinkscope.results.trainings import UNTOUCHED

Part = Number[Evidence]
SHUFFLES = 5  # draws of steps in random order
UNSHOWN = (Outcome.FAILS, Outcome.INCONCLUSIVE, Outcome.NOT_ENOUGH_SEEDS)  # the worst first


@dataclass(frozen=True)
class Claim:
    id: str  # paper and number, such as GS-6
    reference: str  # section, figure or table of the paper
    statement: str
    parts: tuple[Part, ...]  # the numbers that decide it; all have to pass
    needs: tuple[Need, ...] = (MAIN,)  # the runs that the parts read
    scope: tuple[Scope, ...] = ()  # conditions that a model has to meet
    published: tuple[Published, ...] = ()
    is_ours: bool = True  # whether the thresholds are ours rather than the paper's
    also_reads: tuple[Need, ...] = ()  # further runs that the parts read if they exist
    set_against: Null | None = None  # the null; by default that of the kinds in `needs`
    holds_untrained: bool = False  # whether it also holds for a model's initial weights (tested); they are not a null

    @property
    def reads(self) -> tuple[Need, ...]:
        return (*self.needs, *self.also_reads)

    @property
    def null(self) -> Null:
        """The null: random controls if there are any, else that of all needs."""
        nulls = {need.record.null for need in self.needs}
        usual = Null.CONTROLS if Null.CONTROLS in nulls else nulls.pop() if len(nulls) == 1 else Null.NONE
        return self.set_against or usual

    def draws(self, evidence: Evidence) -> list[Evidence]:
        """Return, for each measured draw of the null, the evidence in which it replaces the subject of the claim."""
        if self.null == Null.RANDOM_WEIGHTS:
            return evidence.nulls
        if self.null == Null.CONTROLS:
            counts = [len(evidence.controls(need)) for need in self.needs if need.has_controls and evidence.has(need)]
            return [replace(evidence, control=draw) for draw in range(min(counts, default=0))]
        if self.null == Null.SHUFFLED:
            return [_shuffled(evidence, self.needs, seed) for seed in range(SHUFFLES)]
        if self.null != Null.PLAIN:
            return []
        studies = {}
        for need in self.needs:
            by_seed = evidence.studies[need].by_seed if need in evidence.studies else ()
            if len(by_seed) < 2 or any(PLAIN not in arms for arms in by_seed):
                return []
            exchanged = [  # each method's arm for the plain arm of the next seed
                {name: arm if arm.method in (PLAIN, UNTOUCHED) else after[PLAIN] for name, arm in arms.items()}
                for arms, after in zip(by_seed, (*by_seed[1:], by_seed[0]), strict=True)
            ]
            studies[need] = replace(evidence.studies[need], by_seed=tuple(exchanged))
        return [replace(evidence, studies=studies)]


def _shuffled(evidence: Evidence, needs: tuple[Need, ...], seed: int) -> Evidence:
    """Return the evidence with the measured steps of each training in random order."""
    generator, studies = np.random.default_rng(seed), dict(evidence.studies)
    for need in needs:
        orders = [(runs, generator.permutation(list(runs))) for runs in studies[need].steps]
        shuffled = tuple({step: runs[other] for step, other in zip(runs, order, strict=True)} for runs, order in orders)
        studies[need] = replace(studies[need], steps=shuffled)
    return replace(evidence, studies=studies)


def of_run(part: Number[Sequences], role: Need = MAIN, **changes: Any) -> Part:
    """Return a number of one run as a part of a claim, which may have another quantity, test or form."""
    fields = {name: getattr(part, name) for name in ("quantity", "test", "form", "is_evidence")} | changes
    return Part(measure=lambda evidence: part.measure(evidence.sequences(role)), **fields)


HAS_SINK_HEADS = of_run(SINK_HEADS_OF_RUN)


def of_sink_heads(words: str, column: str, test: Test) -> tuple[Part, Part]:
    """Return the parts of a claim about a number at position 0 ÷ later in sink heads, which must exist."""
    quantity = f"{words} at 0 ÷ later, median over sink heads"
    return Part(quantity, lambda evidence: in_sink_heads(evidence.natural, column), test), HAS_SINK_HEADS


def run_claim(id: str, *more: Part, role: Need = MAIN, **others: Any) -> Claim:
    """Return a claim made from an entry of `RUN_CLAIMS`, with numbers of the run `role`, and from further parts."""
    claim = RUN_CLAIMS[id]
    parts = (*(of_run(part, role) for part in claim.parts), *more)
    return Claim(id, claim.reference, claim.statement, parts, **others)


@dataclass(frozen=True)
class Judgment:
    claim: Claim
    outcome: Outcome  # outcome of all parts together
    estimates: tuple[Estimate, ...] = ()  # one for each part; empty if nothing was measured
    reason: str = ""  # why the claim does not apply, or the command that would measure it
    null_passes: float = nan  # the share of the null's draws for which the claim holds; NaN if it is not known
    is_null_undefined: bool = False  # undefined for all draws, which then do not show that the null fails

    @property
    def tells(self) -> str:
        """Whether the claim distinguishes the model from its null: «yes», «no», «undefined», «theorem», «» if unknown.

        It does so only if it is defined for a draw and no draw passes. With few layers or heads, intervals are
        wide, and a draw with a larger number than the model may fail as well: therefore one of the numbers must also
        separate the model from all draws.
        """
        if self.claim.null == Null.THEOREM:
            return str(Null.THEOREM)
        if self.claim.holds_untrained or self.null_passes > 0:
            return "no"
        if self.is_null_undefined:
            return "undefined"
        if isnan(self.null_passes):
            return ""
        parts = zip(self.claim.parts, self.estimates, strict=False)
        separated = any(part.test.separates(estimate) for part, estimate in parts if part.is_evidence)
        return "yes" if separated else "no"

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        parts = zip(self.claim.parts, self.estimates, strict=False)
        return tuple(part.test.outcome(estimate) for part, estimate in parts)


def judge(claim: Claim, evidence: Evidence) -> Judgment:
    missing = [need for need in claim.needs if not evidence.has(need)]
    reasons = chain((scope(evidence.any_run) for scope in claim.scope), map(evidence.inapplicable, missing))
    if reason := next(filter(None, reasons), None):
        return Judgment(claim, Outcome.DOES_NOT_APPLY, reason=reason)
    if missing:
        return Judgment(claim, Outcome.NOT_MEASURED, reason=evidence.command(missing[0]))
    try:
        estimates = [estimated(part.measure, evidence) for part in claim.parts]
    except NotDefined as error:
        return Judgment(claim, Outcome.DOES_NOT_APPLY, reason=str(error))
    except Lacks as error:
        return Judgment(claim, Outcome.NOT_MEASURED, reason=str(error))

    draws = claim.draws(evidence)
    values = np.full((len(draws), len(claim.parts)), nan)
    outcomes = [_outcome_of_null(claim, draw, row) for draw, row in zip(draws, values, strict=True)]
    for number, (estimate, drawn) in enumerate(zip(estimates, values.T, strict=True)):
        if len(finite := drawn[np.isfinite(drawn)]):
            null, low, high = (float(each) for each in (finite.mean(), finite.min(), finite.max()))
            estimates[number] = replace(estimate, null=null, null_low=low, null_high=high)
    holding = [outcome == Outcome.HOLDS for outcome in outcomes if outcome in (Outcome.HOLDS, Outcome.FAILS)]
    null_passes = float(np.mean(holding)) if holding else nan
    is_null_undefined = bool(draws) and set(outcomes) == {Outcome.DOES_NOT_APPLY}
    judgment = Judgment(claim, Outcome.HOLDS, tuple(estimates), "", null_passes, is_null_undefined)
    # all parts have to pass
    return replace(judgment, outcome=next((each for each in UNSHOWN if each in judgment.outcomes), Outcome.HOLDS))


def _outcome_of_null(claim: Claim, draw: Evidence, values: np.ndarray) -> Outcome:
    """Return whether a claim holds or fails for a draw of its null, does not apply or was not measured; fill `values`.

    Conditions do not count: a null without the sink that they require shows nothing about the sink's properties.
    """
    if any(scope(draw.any_run) for scope in claim.scope):
        return Outcome.DOES_NOT_APPLY
    outcomes = set()
    for number, part in enumerate(claim.parts):
        try:
            estimate = estimated(part.measure, draw)
        except NotDefined:  # for example, nothing is massive
            estimate = Estimate(nan)
        except Lacks:
            outcomes.add(Outcome.NOT_MEASURED)
            continue
        values[number] = estimate.value
        if part.is_evidence:
            outcomes.add(Outcome.DOES_NOT_APPLY if isnan(estimate.value) else part.test.outcome(estimate))
    if not outcomes <= {Outcome.HOLDS, Outcome.NOT_MEASURED, Outcome.DOES_NOT_APPLY}:
        return Outcome.FAILS
    order = (Outcome.DOES_NOT_APPLY, Outcome.NOT_MEASURED)
    return next((each for each in order if each in outcomes), Outcome.HOLDS)

"""Nulls of claims: data in which there is nothing to find, on which the test of a claim should not pass."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import StrEnum

from sinkscope.paper_claims.evidence import Evidence
from sinkscope.paper_claims.studies import ARMS, ArmStudy
from sinkscope.paper_claims.studies import KINDS as STUDIES
from sinkscope.paper_claims.trainings import PLAIN, Arm
from sinkscope.training.tables import UNTOUCHED


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

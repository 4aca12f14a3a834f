"""Findings that are numbers of claims: value, interval, threshold and published values are those of the scorecard."""

from collections.abc import Callable
from math import inf, isclose, isfinite
from typing import Any

from sinkscope.measuring.estimates import RUN_CLAIMS
from sinkscope.results.findings import Finding, Outcome
from sinkscope.results.judgment import NotDefined, estimated
from sinkscope.results.judgment import Outcome as Judged
from sinkscope.results.sequences import Lacks, Sequences
from sinkscope.results.statistics import Estimate

OUTCOMES = {
    Judged.HOLDS: Outcome.PRESENT,
    Judged.FAILS: Outcome.ABSENT,
    Judged.INCONCLUSIVE: Outcome.UNDECIDED,
    Judged.NOT_ENOUGH_SEEDS: Outcome.UNDECIDED,
}


def measured(measure: Callable[[Sequences], Estimate], sequences: Sequences) -> Estimate | None:
    """None where the quantity does not exist, or the run lacks its table."""
    try:
        return estimated(measure, sequences)
    except (NotDefined, Lacks):
        return None


def of_claim(sequences: Sequences, claim: str, part: int = 0) -> Estimate | None:
    """A number of a claim, of one run; None as for `measured`."""
    return measured(RUN_CLAIMS[claim].parts[part].measure, sequences)


def threshold_of(claim: str, part: int = 0) -> float:
    """Return the threshold of a test that has only one."""
    test = RUN_CLAIMS[claim].parts[part].test
    return test.most if test.least == -inf else test.least


def finding(name: str, section: str, estimate: Estimate, claim: str = "", part: int = 0, **given: Any) -> Finding:
    """An estimate as a finding. With a claim the outcome is that of this number of it; `given` goes before."""
    if claim:
        judged = OUTCOMES[RUN_CLAIMS[claim].parts[part].test.outcome(estimate)]
        given = {"outcome": judged, "threshold": threshold_of(claim, part), "claim": claim} | given
    ends: dict[str, Any] = interval(estimate)
    return Finding(name, section, value=estimate.value, **ends, **given)


def interval(estimate: Estimate, name: str = "") -> dict[str, float]:
    """`low` and `high` of an estimate, behind a name; none where nothing was drawn, or the ends are not known."""
    if isclose(estimate.low, estimate.high, rel_tol=1e-9) or not (isfinite(estimate.low) and isfinite(estimate.high)):
        return {}
    return {f"{name}low": estimate.low, f"{name}high": estimate.high}


def is_known(estimate: Estimate | None) -> bool:
    return estimate is not None and isfinite(estimate.value)

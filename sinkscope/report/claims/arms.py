"""What intervention arms do to sinks, beside their random controls, in percent and points of the sink rate."""

from collections.abc import Callable

import numpy as np

from sinkscope.report.claims.claim import Part, above, below
from sinkscope.report.claims.estimates import Estimate, bootstrap, one_more_run
from sinkscope.report.claims.evidence import BEFORE, Evidence
from sinkscope.report.claims.quantities import sink_rates

SINK = 10.0  # percent: a sink rate above this is a sink (W-1)


def before_and_after(evidence: Evidence, role: str, position: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(R,) each: the sink rate at position 0 of the model as it is, and the arm's at `position`.

    Both are under the same resamplings: an arm reads the same sequences.
    """
    return sink_rates(evidence, role, condition=BEFORE), sink_rates(evidence, role, position)


def controls(evidence: Evidence, role: str) -> np.ndarray:
    """(draws,): the sink rate at position 0 under each of an arm's random controls."""
    label = evidence.label(role)
    drawn = evidence.runs[role].manifest["arms"][label]["controls"]
    conditions = [f"{label} control {draw}" for draw in range(len(drawn))]
    return np.array([sink_rates(evidence, role, condition=condition)[0] for condition in conditions])


def beyond_controls(evidence: Evidence, role: str) -> Estimate:
    """The arm's change of the sink rate at position 0, minus what a further random control would change it by."""
    before, after = before_and_after(evidence, role)
    drawn = controls(evidence, role)
    note = f"{before[0]:.1f} → {after[0]:.1f} %; {len(drawn)} random controls"
    note += f": {drawn.min():.1f} to {drawn.max():.1f} %" if len(drawn) else ""
    return (bootstrap(after - before) - one_more_run(drawn - before[0])).over(note)


def share_left(evidence: Evidence, role: str, position: int = 0) -> Estimate:
    """The arm's sink rate at `position` ÷ that of the model as it is at position 0."""
    before, after = before_and_after(evidence, role, position)
    with np.errstate(divide="ignore", invalid="ignore"):
        return bootstrap(after / before).over(f"{before[0]:.1f} → {after[0]:.1f} %")


def rate_after(evidence: Evidence, role: str) -> Estimate:
    before, after = before_and_after(evidence, role)
    return bootstrap(after).over(f"before: {before[0]:.1f} %")


def of_arm(measure: Callable[..., Estimate], role: str, **given: int) -> Callable[[Evidence], Estimate]:
    """One of the functions above, as a part of a claim has it."""
    return lambda evidence: measure(evidence, role, **given)


def had_a_sink(role: str) -> Part:
    """Of a claim on what becomes of a sink: without one it fails."""
    return Part("sink rate at position 0 before, in %", of_arm(_rate_before, role), above(SINK))


def _rate_before(evidence: Evidence, role: str) -> Estimate:
    return bootstrap(before_and_after(evidence, role)[0])


def falls(role: str) -> Part:
    """Of a claim that a sink falls by an arm, and not by random changes of the same kind."""
    quantity = "change of the sink rate at position 0, in points, beyond a random control's"
    return Part(quantity, of_arm(beyond_controls, role), below(0.0))

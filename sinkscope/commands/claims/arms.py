"""Effects of intervention arms and their controls: on the sink rate, in percent and points, and on perplexity."""

from collections.abc import Mapping

import numpy as np

from sinkscope.commands.claims.claim import Part
from sinkscope.commands.claims.evidence import Evidence, Need
from sinkscope.measuring.estimates import sink_rates
from sinkscope.results.findings import COLLAPSE, SINK
from sinkscope.results.judgment import NotDefined, Test, above, at_least, below, between
from sinkscope.results.run import BEFORE, RunData
from sinkscope.results.sequences import Sequences
from sinkscope.results.statistics import Estimate, bootstrap, mean_of_controls, one_more_run, positive_jackknife

NO_COST = 0.02  # nats of loss, or 2 % of perplexity: smaller differences are ignored, so that a claim can hold
LARGE_NORM = 2.0  # ratio to the norm at later positions


def before_and_after(evidence: Evidence, role: Need, position: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(R,) each: the sink rate at position 0 without the intervention, and the rate of the arm at `position`."""
    return sink_rates(evidence.sequences(role, BEFORE)), sink_rates(evidence.sequences(role), position)


def control_rates(evidence: Evidence, role: Need, position: int = 0) -> np.ndarray:
    conditions = evidence.controls(role)
    return np.array([sink_rates(evidence.sequences(role, condition), position)[0] for condition in conditions])


def beyond_controls(evidence: Evidence, role: Need, position: int = 0) -> Estimate:
    """Return the change of the sink rate at a position by the arm − the change by a further random control."""
    before, after = (sink_rates(evidence.sequences(role, condition), position) for condition in (BEFORE, None))
    drawn = control_rates(evidence, role, position)
    note = f"{before[0]:.1f} → {after[0]:.1f} %; {len(drawn)} random controls"
    note += f": {drawn.min():.1f} to {drawn.max():.1f} %" if len(drawn) else ""
    return (bootstrap(after - before) - one_more_run(drawn - before[0])).over(note)


def sink_left(evidence: Evidence, role: Need, position: int = 0) -> Estimate:
    """Return the sink rate of the arm at `position` ÷ the rate of the unchanged model at position 0."""
    before, after = before_and_after(evidence, role, position)
    with np.errstate(divide="ignore", invalid="ignore"):
        return bootstrap(after / before).over(f"{before[0]:.1f} → {after[0]:.1f} %")


def had_a_sink(role: Need) -> Part:
    """Return a part that requires a sink, because a claim about a change of the sink fails without one."""
    quantity = "sink rate at position 0 before, in %"
    return Part(quantity, lambda e: bootstrap(before_and_after(e, role)[0]), above(SINK), is_evidence=False)


def falls(role: Need) -> Part:
    quantity = "change of the sink rate at position 0, in points, beyond a random control's"
    return Part(quantity, lambda evidence: beyond_controls(evidence, role), below(0.0))


def leaves(role: Need, test: Test, position: int = 0) -> Part:
    """Return a part on the share of the sink that an arm leaves, or that it moves to another position."""
    moved = f"sink rate at position {position} after ÷ at position 0 before"
    quantity = moved if position else "sink rate at position 0, after ÷ before"
    return Part(quantity, lambda evidence: sink_left(evidence, role, position), test)


def perplexity_ratio(evidence: Evidence, role: Need, against: Need | None = None) -> Estimate:
    """Return perplexity with an intervention ÷ without, or ÷ with another; both leave out the same passage."""
    other = evidence.sequences(against) if against else evidence.sequences(role, BEFORE)
    return positive_jackknife(np.exp(evidence.sequences(role).losses - other.losses))


def breaks(role: Need, controls: str) -> tuple[Part, Part]:
    """Return the parts of a claim that an arm breaks the model while its random controls, named in words, do not."""
    return (
        Part("perplexity ÷ before", lambda evidence: perplexity_ratio(evidence, role), at_least(COLLAPSE)),
        Part(f"of {controls} ÷ before", lambda evidence: perplexity_of_controls(evidence, role), between(0.9, 1.1)),
    )


def perplexity_of_controls(evidence: Evidence, role: Need) -> Estimate:
    """Return perplexity under random controls ÷ without, their mean and spread."""
    draws = evidence.controls(role)
    if not draws:
        raise NotDefined("the intervention has no random control on this model")
    before = evidence.sequences(role, BEFORE).losses[0]
    return mean_of_controls(np.exp([evidence.sequences(role, draw).losses[0] - before for draw in draws]))


# --- the steps of a training


def rates_over_steps(runs: Mapping[int, RunData]) -> tuple[list[int], np.ndarray]:
    """Return steps, and (R, steps): the sink rate at position 0 in percent, from the same sequences at every step."""
    return list(runs), np.stack([sink_rates(Sequences(run)) for run in runs.values()], axis=1)


def onset(rates: np.ndarray) -> int | None:
    return next(iter(np.flatnonzero(rates[0] > SINK).tolist()), None)

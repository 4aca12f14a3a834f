"""The table `claim`: the judgment of every claim on a model, one row for each number of a claim."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pandas as pd

from sinkscope.commands.claims.claim import judge
from sinkscope.commands.claims.columns import CLAIM_COLUMNS
from sinkscope.commands.claims.evidence import Evidence, Skipped
from sinkscope.commands.claims.register import CLAIMS
from sinkscope.commands.claims.routes import ROUTE_ROLES
from sinkscope.commands.claims.studies import StudySources
from sinkscope.results.findings import Outcome
from sinkscope.results.papers import paper_of
from sinkscope.results.run import RunData
from sinkscope.results.statistics import Estimate
from sinkscope.results.tables import LEADING, WHOLE_MODEL, names_of

NOT_JUDGED = (Outcome.DOES_NOT_APPLY, Outcome.NOT_MEASURED)
NEEDS = tuple(need for claim in CLAIMS.values() for need in claim.reads)


def evidence_of(runs: Iterable[RunData], model: str, skipped: Skipped | None = None) -> Evidence:
    """Find the runs of one model that claims need."""
    evidence = Evidence.of(runs, (*NEEDS, *ROUTE_ROLES), model).with_studies(StudySources(model), NEEDS)
    measured = {need.name for need in evidence.runs}
    reasons = {role: why for role, why in (skipped or {}).get(model, {}).items() if role not in measured}
    return replace(evidence, skipped={**reasons, **evidence.skipped})


def judged(evidence: Evidence, name: str | None = None) -> pd.DataFrame:
    run = evidence.any_run
    rows = []
    for claim in CLAIMS.values():
        judgment = judge(claim, evidence)
        estimates = judgment.estimates or [Estimate(float("nan"))] * len(claim.parts)
        passes = judgment.outcomes or [judgment.outcome] * len(claim.parts)
        values = [f"{each.name} {each.value:g}{each.mark} ({each.setting}; {each.source})" for each in claim.published]
        published = "; ".join(values)
        rows += [
            (name or run.model, run.condition, WHOLE_MODEL,
             claim.id, paper_of(claim.id), claim.reference, claim.statement, number, part.quantity,
             estimate.value, estimate.low, estimate.high, estimate.null, estimate.null_low, estimate.null_high,
             part.test.text(part.form), part.test.least, part.test.most, claim.is_ours, published,
             str(outcome), part.test.power(estimate), part.test.seeds_to_decide(estimate),
             str(judgment.outcome), str(claim.null), judgment.null_passes,
             judgment.tells, judgment.reason or "; ".join(filter(None, (estimate.note, no_interval(estimate, run)))))
            for number, (part, estimate, outcome) in enumerate(zip(claim.parts, estimates, passes, strict=True))
        ]  # fmt: skip
    return pd.DataFrame(rows, columns=[*LEADING, *names_of(CLAIM_COLUMNS)])


def no_interval(estimate: Estimate, run: RunData) -> str:
    """Return why an interval has no end, on one side or both; "" if it has both, or no value, or its note says it."""
    if np.isnan(estimate.value) or estimate.seeds or not np.isinf([estimate.low, estimate.high]).any():
        return ""
    if run.manifest["input"]["sequences"] < 2:
        return "no interval: fewer than two sequences"
    return "the interval has no end: too few units, or a denominator that may be zero"

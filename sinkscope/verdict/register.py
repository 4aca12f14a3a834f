"""The report of each command that measures, and the columns of every table that a command writes."""

from collections.abc import Callable

from sinkscope.commands.card.tables import CARD_TABLES
from sinkscope.commands.claims.columns import CLAIM, CLAIM_COLUMNS, ROUTE, ROUTE_COLUMNS
from sinkscope.commands.doctor import findings as overflow
from sinkscope.commands.intervene import findings as effects
from sinkscope.commands.kv_plan import findings as kv_plan
from sinkscope.commands.quantize import findings as quantization
from sinkscope.commands.steps import onsets
from sinkscope.commands.sweep.tables import SWEEP_TABLES
from sinkscope.measuring.tables import all_tables
from sinkscope.results import scores
from sinkscope.results.run import RunData
from sinkscope.results.tables import Columns
from sinkscope.verdict import analysis
from sinkscope.verdict.report import Report

# command → function that makes the report on its run
REPORTS: dict[str, Callable[[RunData], Report]] = {
    "analyze": analysis.report,
    "intervene": effects.report,
    "quantize": quantization.report,
    "kv-plan": kv_plan.report,
    "doctor": overflow.report,
}


def written_tables() -> dict[str, Columns]:
    """Return table → columns after the leading ones, for measured tables and those of verdicts, claims and sweeps."""
    of_reports = {made.TABLE: made.COLUMNS for made in (analysis, onsets, scores)}
    of_claims = {CLAIM: CLAIM_COLUMNS, ROUTE: ROUTE_COLUMNS}
    return all_tables() | of_reports | of_claims | SWEEP_TABLES | CARD_TABLES

"""Every table that a command writes, with its columns behind the leading ones."""

from sinkscope.measuring.tables import all_tables
from sinkscope.results import scores
from sinkscope.results.scorecard import CLAIM, CLAIM_COLUMNS, ROUTE, ROUTE_COLUMNS
from sinkscope.results.tables import Columns
from sinkscope.verdict import finding_table
from sinkscope.verdict.sweep_tables import SWEEP_TABLES


def written_tables() -> dict[str, Columns]:
    """Those that are measured, then those that reports, scorecards and sweeps make of them."""
    of_reports = {
        finding_table.TABLE: finding_table.COLUMNS,
        CLAIM: CLAIM_COLUMNS,
        ROUTE: ROUTE_COLUMNS,
        scores.TABLE: scores.COLUMNS,
    }
    return all_tables() | of_reports | SWEEP_TABLES

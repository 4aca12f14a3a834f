"""Every table that a command writes, with its columns behind the leading ones."""

from sinkscope.measuring.tables import all_tables
from sinkscope.report import finding_table, scores
from sinkscope.report.claims import routes, scorecard
from sinkscope.report.sweep_tables import SWEEP_TABLES
from sinkscope.results.tables import Columns


def written_tables() -> dict[str, Columns]:
    """Those that are measured, then those that reports, scorecards and sweeps make of them."""
    of_reports = {made.TABLE: made.COLUMNS for made in (finding_table, scorecard, routes, scores)}
    return all_tables() | of_reports | SWEEP_TABLES

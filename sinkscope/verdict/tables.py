"""Every table that a command writes, with its columns behind the leading ones."""

from sinkscope.measuring.tables import all_tables
from sinkscope.paper_claims import routes, table
from sinkscope.results import scores
from sinkscope.results.tables import Columns
from sinkscope.verdict import finding_table
from sinkscope.verdict.sweep_tables import SWEEP_TABLES


def written_tables() -> dict[str, Columns]:
    """Those that are measured, then those that reports, scorecards and sweeps make of them."""
    of_reports = {made.TABLE: made.COLUMNS for made in (finding_table, table, routes, scores)}
    return all_tables() | of_reports | SWEEP_TABLES

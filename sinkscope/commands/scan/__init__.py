"""`scan`: which neurons can write massive activations, from weights alone."""

from sinkscope.commands.scan.options import ScanOptions
from sinkscope.options.register import Command

COMMANDS = (
    Command(
        "scan",
        __name__,
        ScanOptions,
        public={"scan": ".command:scan"},
        tables=(".networks:SCAN_TABLES", ".matrices:MATRIX_TABLES"),
        page=".findings:ScanPage",
        summaries=".command:summaries",
    ),
)

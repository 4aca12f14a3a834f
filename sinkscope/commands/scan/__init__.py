"""`scan`: which neurons can write massive activations, from weights alone."""

from sinkscope.commands.scan.options import ScanOptions
from sinkscope.options.register import Command

COMMANDS = (
    Command(
        "scan",
        __name__,
        ScanOptions,
        public={"scan": ".command:scan"},
        tables=(".networks:SCAN_TABLES",),
        figures={"scans": (("scan", "the largest gains of neurons by layer, with their coordinates", "scan"),)},
        page=".findings:ScanPage",
    ),
)

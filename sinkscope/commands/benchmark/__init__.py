"""`benchmark`: scores a model on tasks of lm-evaluation-harness."""

from sinkscope.commands.benchmark.options import BenchmarkOptions
from sinkscope.options.register import Command

COMMANDS = (
    Command(
        "benchmark",
        __name__,
        BenchmarkOptions,
        public={"benchmark": ".command:benchmark"},
        manifest=".manifest:BenchmarkManifest",
        tables=("sinkscope.results.scores:SCORE_TABLES",),
        of_cells=("benchmark",),
    ),
)

"""`analyze`: measures one model."""

from sinkscope.commands.analyze.options import AnalyzeOptions
from sinkscope.options.register import Command

COMMANDS = (
    Command(
        "analyze",
        __name__,
        AnalyzeOptions,
        public={
            "analyze": ".command:analyze",
            "analyze_steps": ".command:analyze_steps",
            "spike_filter": ".command:spike_filter",
            "spike_mask": ".command:spike_mask",
        },
        manifest="sinkscope.results.schema:RunManifest",
        report="sinkscope.verdict.analysis:report",
        of_cells=("summary",),
        whole_model="sinkscope.verdict.analysis:whole_model",
    ),
)

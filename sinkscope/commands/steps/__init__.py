"""The steps of a training, which `analyze` measures one after the other: a series of runs, and its onsets."""

from sinkscope.options.register import Command

COMMANDS = (
    Command(
        "analyze_steps",
        __name__,
        public={"Series": ".series:Series"},
        manifest=".manifest:SeriesManifest",
        tables=(".onsets:ONSET_TABLES",),
        figures={
            "training steps": (
                ("training-by-step", "loss, sinks, gradient sinks and norms by training step", "summary"),
                ("training-onsets",
                    "onsets of value gradient, norm and sink in training, and which of them leads",
                    "attention_by_sequence", "activation_by_sequence", "gradient_by_group"),
                ("training-gradient-norms", "gradient norms by token position and step (GS fig. 2)", "gradient"),
            ),
        },
        summaries=".series:summaries",
        page=".page:StepsPage",
    ),
)  # fmt: skip

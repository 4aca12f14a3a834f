"""`intervene`: changes a model during a run, next to random controls."""

from sinkscope.commands.intervene.options import InterveneOptions
from sinkscope.options.register import Command

COMMANDS = (
    Command(
        "intervene",
        __name__,
        InterveneOptions,
        public={"intervene": ".command:intervene", "intervening": ".intervening:intervening"},
        manifest=".manifest:InterveneManifest",
        report=".findings:report",
        tables=(".columns:COLUMNS", "sinkscope.measuring.streaming:STREAMING_TABLES"),
        of_arms=("effect", "arm_maps"),
        of_cells=("effect",),
        whole_model=".findings:whole_model",
        figures={
            "one run": (
                ("effects",
                    "effect of every arm on sink, perplexity and massive activations, with its control", "effect"),
                ("arm-maps", "attention maps of one layer under every arm and its control (NU fig. 3)", "arm_maps"),
                ("arm-maps-by-layer",
                    "attention maps of every layer under every arm (NU figs. 7–13 on one page)", "arm_maps"),
                ("effects-by-layer",
                    "sink rate by layer before and after every arm, with its control's spread", "effect"),
                ("over-mixing",
                    "change of later tokens by a changed token, by layer and distance, under every arm",
                    "effect", "over_mixing", "over_mixing_by_sequence"),
                ("streaming-perplexity",
                    "perplexity with a short cache, with and without first tokens (StreamingLLM)", "streaming"),
            ),
        },
        page=".page:IntervenePage",
        script="page.js",
    ),
)  # fmt: skip

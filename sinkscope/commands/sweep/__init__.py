"""`sweep`: measures many models, revisions, inputs and settings."""

from sinkscope.commands.sweep.options import SweepOptions
from sinkscope.options.register import Command

COMMANDS = (
    Command(
        "sweep",
        __name__,
        SweepOptions,
        public={"sweep": ".command:sweep"},
        recipes=("sweep", "sweeps"),
        runs_in="cells",
        tables=(".tables:SWEEP_TABLES",),
        figures={
            "cells of a sweep": (
                ("sweep-inputs", "sink rate by model and input, next to WSE table 1", "sweep"),
                ("sweep-sizes", "sink rate against the number of parameters, by family and input", "sweep"),
                ("sweep-steps", "sink rate against the training step, by model and input", "sweep"),
                ("sweep-chat", "sink rate of base models and of models tuned from them", "sweep"),
                ("sweep-epsilon", "sink rate against ε, by model and input", "sweep_epsilon"),
                ("sweep-lengths", "sink rate against sequence length T = window, by model and input", "sweep"),
                ("sweep-domains", "sink rate by model and domain of the text", "sweep"),
                ("sweep-benchmarks", "scores against the sink rate, by task and family", "sweep_benchmark"),
                ("sweep-factor", "sink rate at the end of each training, every seed, next to WSE's", "sweep_training"),
                ("sweep-training-sink",
                    "sink rate of each training by step, mean and range over seeds", "sweep_training"),
                ("formats-models", "rise of perplexity by model and format that is served", "sweep_formats"),
                ("sweep-training-loss", "loss of each training by step, mean and range over seeds", "sweep_training"),
            ),
        },
        summaries=".output:summaries",
        page=".page:SweepPage",
        script="page.js",
        lists={
            "sweeps": (
                "grids of many models", "sweep NAME", ".file:listed",
                "sweep", "title", "reproduces", "cells",
            ),
        },
    ),
)  # fmt: skip

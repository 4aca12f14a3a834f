"""`retrofit` and `train`: train a model with a change next to one without it, from pretrained or random weights."""

from sinkscope.commands.train.options import RetrofitOptions, TrainOptions
from sinkscope.options.register import Command

RETROFIT = Command(
    "retrofit",
    __name__,
    RetrofitOptions,
    public={"retrofit": ".command:retrofit"},
    manifest=".manifest:ArmsManifest",
    tables=("sinkscope.results.trainings:TRAINED_TABLES",),
    of_cells=("retrofit",),
    summaries=".output:summaries",
    figures={
        "arms of a training": (
            ("retrofit-bars", "perplexity, outliers and sinks of every arm, over seeds", "retrofit"),
            ("retrofit-training", "loss and displacement of new parameters by training step", "training"),
            ("retrofit-equal-loss", "sink rate by total weight against held-out loss, of every arm", "training"),
            ("retrofit-layers", "sink rate and norms of every arm by layer (GS fig. 5)", "attention", "activation"),
            ("retrofit-values", "value norms and gates of every arm (VGA figs. 1 and 4)", "geometry"),
            ("backcopy-maps",
                "Bigram-Backcopy: attention and value norms on one sequence (VGA figs. 4 and 6)", "value_norms"),
            ("backcopy-training", "Bigram-Backcopy by training step, of every arm (VGA figs. 5 and 6)", "training"),
        ),
    },
    page=".page:TrainPage",
    lists={
        "architectures": (
            "models to train from scratch", "train --config NAME", ".architectures:listed",
            "architecture", "model type", "configuration",
        ),
        "tasks": (
            "tasks to train on", "train --text NAME", ".tasks:TASKS about",
            "task", "what is learned", "plugin",
        ),
    },
)  # fmt: skip
TRAIN = Command(
    "train",
    __name__,
    TrainOptions,
    public={"train": ".command:train"},
    manifest=RETROFIT.manifest,
    of_cells=("retrofit", "training"),
    summaries=RETROFIT.summaries,
    page=RETROFIT.page,
)
COMMANDS = (RETROFIT, TRAIN)

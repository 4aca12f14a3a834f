"""The options of a training. Nothing here imports torch, because the command line shows their defaults."""

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import model_validator

from sinkscope.options.files import kind_of, user_path
from sinkscope.options.measuring import (
    DeviceOptions,
    ModelOptions,
    ObservableOptions,
    RunConfig,
    SeedOptions,
    SequenceOptions,
)
from sinkscope.options.option import (
    MAX_INT,
    as_folder_name,
    distinct_folder_name,
    option,
    path_as_text,
    split_at_commas,
    text_as_tuple,
)

KEPT_CHECKPOINTS = 2  # of an arm whose steps are not measured, while it is trained


class TrainingConfig(SeedOptions):
    """The options of the trainer. VGA trains for 6,000 steps (appendix C).

    Gates start at zero weights and hardly move at the learning rate of pretrained weights: they have their own rate.
    """

    panel: ClassVar = "Training"

    steps: int = option(6000, "Steps of the optimizer in each arm.", metavar="N", ge=1)
    block_length: int = option(256, "Tokens in each block, the BOS included.", metavar="T", ge=2)
    batch_size: int = option(8, "Blocks at once, on each GPU.", metavar="N", ge=1)
    accumulation: int = option(1, "Batches in a step.", metavar="N", ge=1)
    optimizer: Literal["adamw", "muon"] = option(
        "adamw",
        "adamw, or muon: Muon for the matrices of the layers, its updates as large as AdamW's, and AdamW for the rest.",
        metavar="O",
    )
    learning_rate: float = option(5e-5, "Rate of the model's own weights.", metavar="R", gt=0)
    new_learning_rate: float = option(1e-3, "Rate of the parameters that a method adds.", metavar="R", gt=0)
    weight_decay: float = option(0.01, "Decay of the parameters that --decay names.", metavar="W", ge=0)
    decay: Literal["matrices", "all"] = option(
        "matrices",
        "Decayed parameters: matrices alone, or also norms, biases and what the method adds.",
        metavar="WHAT",
    )
    beta1: float = option(0.9, "The first beta of AdamW.", metavar="B", ge=0, lt=1)
    beta2: float = option(0.999, "The second beta of AdamW; WSE uses .95.", metavar="B", ge=0, lt=1)
    clip: float = option(
        1.0, "Largest norm of a step's gradient, to which larger ones are scaled; 0: none.", metavar="N", ge=0
    )
    warmup: float = option(0.05, "Share of the steps in which the rates rise.", metavar="SHARE", ge=0, lt=1)
    schedule: Literal["linear", "cosine", "constant"] = option(
        "linear", "Rates after the warmup: linear or cosine, down to 0, or constant.", metavar="S"
    )
    only_new: bool = option(False, "Train only what the method adds.")
    bf16: bool = option(False, "Compute in bfloat16; the weights stay in float32.")
    save_every: int = option(500, "Steps between checkpoints.", metavar="N", ge=1)
    log_every: int = option(10, "Steps between logs of loss and gates.", metavar="N", ge=1)
    eval_share: float = option(
        0.1, "Share of the text, at its end, that is held out for measuring.", metavar="SHARE", gt=0, lt=1
    )

    @model_validator(mode="after")
    def _check_optimizer(self) -> Self:
        if self.only_new and self.optimizer == "muon":
            raise ValueError("--optimizer muon is for the model's own matrices, which --only-new does not train")
        return self

    def blocks_wanted(self, processes: int = 1) -> int:
        """Return the number of blocks with which training reads no block twice."""
        return self.steps * self.batch_size * self.accumulation * processes


class ArmOptions(TrainingConfig, SequenceOptions, ObservableOptions, DeviceOptions):
    """The common options of `retrofit` and `train`: methods, a text, a training, and the measurement of the arms."""

    resumable: ClassVar[bool] = True
    trains: ClassVar[bool] = True

    seeds: int = option(
        1, "Trainings of each arm, from --seed on: each has its own order of the text and random weights. "
        "From two on, the same command with more of them adds these to its folder.",
        metavar="N", ge=1,
    )  # fmt: skip
    method: Annotated[tuple[str, ...] | dict[str, str], text_as_tuple] = option(
        (),
        "Methods to build in, each in its own arm; none is the plain model.",
        metavar="NAME[:K=V],…",
        names="sinkscope.retrofits:RETROFITS",
    )
    text: Annotated[str, path_as_text] = option(
        "natural",
        "natural, a file (.txt, .jsonl with `text`, .npy of token ids), sampled by the model itself, or a task "
        "(`sinkscope list tasks`).",
        metavar="FILE",
    )

    tokens: int | None = option(
        None, "Train on at most N tokens of the text, repeatedly.", metavar="N", shown="all", ge=1, le=10**13
    )
    bos: Literal["auto", "never"] = option(
        "auto", "BOS before each block: never, or where the tokenizer puts one.", metavar="B"
    )
    random_tokens: int = option(0, "Draw the first N tokens of each block at random (WSE §5).", metavar="N", ge=0)
    fixed_position: int | None = option(
        None, "Put the same token at position K of each block, from 0 on (WSE §5).", metavar="K", shown="none",
        ge=0, le=MAX_INT,
    )  # fmt: skip

    probe: Annotated[tuple[str, ...], split_at_commas] = option(
        (),
        "Observables whose metrics are measured at step 0 and at every log, on 32 held-out sequences of 64 tokens.",
        metavar="a,b",
        shown="none",
    )
    save_models: Literal["all", "none"] = option(
        "all", "Trained models to keep once they are measured; none: also no checkpoints.", metavar="WHICH"
    )

    @model_validator(mode="before")
    @classmethod
    def _check_device(cls, options: Any) -> Any:
        typed = options if isinstance(options, dict) else {}
        if typed.get("dtype") == "float16":
            raise ValueError("--dtype float16: gradients become infinite in it; take float32, with --bf16 for speed")
        if typed.get("device_map") not in (None, "cpu", "cuda"):
            raise ValueError(
                f"--device-map {typed['device_map']}: a model that is trained stays on one GPU, the first that "
                "CUDA_VISIBLE_DEVICES shows: take cuda or cpu"
            )
        return options

    @property
    def measuring(self) -> RunConfig:
        """The options with which arms are measured: on blocks of the training's length, and in float32.

        At the learning rate of a fine-tune most steps are too small to change weights in bfloat16.
        """
        measured = RunConfig.model_fields.keys() - {"batch_size", "dataset"}
        names = (self.model_fields_set | self.defaults.keys()) & measured
        options = {name: getattr(self, name) for name in names}
        return RunConfig(**options | {"dtype": self.dtype or "float32", "seq_len": self.block_length})


class RetrofitOptions(ArmOptions, ModelOptions):
    """Build a method into a model, train it, and compare it with a plain fine-tune and with the
    unchanged model.

    Writes ARM/model/ (the trained model) and ARM/run/ (its run folder) of each arm, their comparison in retrofit.md,
    which is printed, and tables and figures of all arms. W8A8 quantizes the same linear layers in every arm; what a
    method adds stays in full precision. With register tokens, position 0 is the first register. The same command
    resumes an interrupted training. `accelerate launch -m sinkscope.cli retrofit …` trains on several GPUs.

    `sinkscope list retrofits` shows the methods and their parameters."""

    writes: ClassVar = "runs/MODEL-retrofit"
    defaults: ClassVar = {"method": ("vga", "none")}  # VGA's table 3

    def folder(self) -> Path:
        return Path("runs", as_folder_name(self.folder_name, "retrofit"))


class TrainOptions(ArmOptions):
    """Train a small model from random weights, plainly and with each method, and compare. A
    causal model predicts the next token, an encoder masked tokens.

    Writes a folder with the trained model, its run and its checkpoints of each arm; `sinkscope analyze
    ARM/checkpoints` shows sinks and gradients by step. The same command resumes an interrupted training."""

    panel: ClassVar = "Model"

    # random weights learn faster; the methods are those of GS figure 5
    defaults: ClassVar = {
        "method": ("none", "vscale"),
        "steps": 2000,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "save_every": 200,
    }
    writes: ClassVar = "runs/CONFIG-train"
    refused: ClassVar = {"only_new": "`train` begins with random weights"}

    config: str = option(
        "tiny-llama",
        "See `sinkscope list architectures`; fields of its configuration may follow it. Or a config.json.",
        metavar="NAME[:K=V,…]",
        names="sinkscope.commands.train.architectures:ARCHITECTURES",
    )
    tokenizer: str | None = option(
        None, "A hub id or a folder.", metavar="M", shown="made from the text: byte-level BPE"
    )

    @model_validator(mode="before")
    @classmethod
    def _one_rate(cls, options: Any) -> Any:
        """Give new parameters the learning rate of all others unless their own rate is given."""
        if not isinstance(options, dict) or "new_learning_rate" in options:
            return options
        return options | {"new_learning_rate": options.get("learning_rate", cls.defaults["learning_rate"])}

    @property
    def shape_name(self) -> str:
        """The architecture's name, or that of its config.json."""
        path = user_path(self.config)
        return self.config if kind_of(path) is None else path.resolve().stem

    def folder(self) -> Path:
        return Path("runs", as_folder_name(distinct_folder_name(self.shape_name), "train"))

"""The options of a training, checked once. Nothing here imports torch: the command line shows their defaults."""

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from sinkscope.options.measuring import checked


class TrainingConfig(BaseModel):
    """How a model is trained. 6,000 steps are VGA's (appendix C).

    Gates start at zero weights and hardly move at the learning rate of pretrained ones: they have their own.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int = Field(default=6000, ge=1)  # of the optimiser
    block_length: int = Field(default=256, ge=2)
    batch_size: int = Field(default=8, ge=1)  # blocks at once on each GPU
    accumulation: int = Field(default=1, ge=1)  # batches a step
    learning_rate: float = Field(default=5e-5, gt=0, allow_inf_nan=False)
    new_learning_rate: float = Field(default=1e-3, gt=0, allow_inf_nan=False)
    weight_decay: float = Field(default=0.01, ge=0, allow_inf_nan=False)  # not of the new parameters, norms and biases
    warmup: float = Field(default=0.05, ge=0, lt=1)  # share of the steps; then down to 0 in a line
    only_new: bool = False
    bf16: bool = False  # in mixed precision: the weights stay in float32
    seed: int = Field(default=0, ge=0)
    save_every: int = Field(default=500, ge=1)
    log_every: int = Field(default=10, ge=1)
    eval_share: float = Field(default=0.1, gt=0, lt=1)  # of the text, its end: never trained on

    def blocks_wanted(self, processes: int = 1) -> int:
        """So many that none is seen twice."""
        return self.steps * self.batch_size * self.accumulation * processes


# of `train`, where its defaults are others: what begins at random learns faster
PRETRAINING: dict[str, Any] = {"steps": 2000, "learning_rate": 1e-3, "weight_decay": 0.1, "save_every": 200}


def make_training_config(**options: Any) -> TrainingConfig:
    """TrainingConfig with its first complaint as one clear line. Errors: InputError."""
    return checked(TrainingConfig, options)

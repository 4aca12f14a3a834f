"""What a training takes before it begins: tokens, floating-point operations, traffic, hours on a GPU, memory and disk.

    operations of a token  6 · (weights of linear layers and of the head) + 6 · layers · T · D of causal attention
    traffic of a token     what a backward pass keeps of it, TRAFFIC times: written, read, and written as gradients
    seconds of a step      operations ÷ (UTILIZATION · peak) + (traffic of its tokens + of the optimizer) ÷ bandwidth

It is checked within a factor of 1.5 on a CPU, whose peak and bandwidth are measured (tests/benchmarks/
training_cost.py). UTILIZATION is what trainings of small models usually reach of a GPU's peak, with a fused kernel of
attention: operations without one take longer. The text has to be read and tokenized besides.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn
from transformers import PreTrainedModel

from sinkscope.commands.train.options import KEPT_CHECKPOINTS, ArmOptions, TrainOptions
from sinkscope.measuring.memory import bytes_per_token

UTILIZATION = 0.4
TRAFFIC = 4
OPTIMIZER_TRAFFIC = 28  # bytes a weight: AdamW reads weight, gradient and two moments, and writes all but the gradient
STATE = 20  # bytes a weight in memory: weight, the copy that arms start from, gradient and two moments in float32


class Device(NamedTuple):
    """Operations a second in bfloat16 (without sparsity) and in float32, and bytes a second of its memory."""

    half: float
    single: float
    bandwidth: float


GPUS = {  # NVIDIA's data sheets
    "H100": Device(989e12, 67e12, 3.35e12),
    "H200": Device(989e12, 67e12, 4.8e12),
    "A100": Device(312e12, 19.5e12, 2.04e12),
    "L40S": Device(362e12, 91.6e12, 0.864e12),
    "RTX4090": Device(165e12, 82.6e12, 1.01e12),
}


@dataclass(frozen=True)
class Cost:
    """What one arm of a training takes with one seed."""

    model: PreTrainedModel  # may be on the meta device
    options: ArmOptions

    @property
    def tokens_of_step(self) -> int:
        return self.options.batch_size * self.options.accumulation * self.options.block_length

    @property
    def tokens(self) -> int:
        return self.options.steps * self.tokens_of_step

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def operations_of_token(self) -> float:
        config: Any = self.model.config.get_text_config()
        vectors = (module.weight for module in self.model.modules() if isinstance(module, nn.Embedding))
        head = self.model.get_output_embeddings()
        of_head = 0 if head is None else head.weight.numel()
        looked_up = {id(weight): weight.numel() for weight in vectors}
        is_tied = head is not None and id(head.weight) in looked_up
        multiplied = self.parameters - sum(looked_up.values()) + (of_head if is_tied else 0)
        attention = config.num_hidden_layers * self.options.block_length * config.hidden_size
        return 6.0 * (multiplied + attention)

    @property
    def bytes_of_token(self) -> float:
        """Bytes that a backward pass keeps of a token."""
        return bytes_per_token(self.model, backward=True, size=2 if self.options.bf16 else 4)

    def seconds_of_step(self, device: Device, utilization: float = UTILIZATION) -> float:
        peak = device.half if self.options.bf16 else device.single
        traffic = self.tokens_of_step * TRAFFIC * self.bytes_of_token + OPTIMIZER_TRAFFIC * self.parameters
        computing = self.tokens_of_step * self.operations_of_token / (utilization * peak)
        return computing + traffic / device.bandwidth

    def hours(self, device: Device) -> float:
        return self.options.steps * self.seconds_of_step(device) / 3600

    @property
    def memory(self) -> float:
        """Bytes on each GPU."""
        tokens = self.options.batch_size * self.options.block_length
        return STATE * self.parameters + tokens * self.bytes_of_token

    def disk(self, arms: int) -> int:
        """Bytes of checkpoints and trained models of arms that are trained one after the other, at most.

        Checkpoints have two moments until their arm is measured.
        """
        keeps_models = self.options.save_models == "all"
        checkpoints = math.ceil(self.options.steps / self.options.save_every)
        if keeps_models and isinstance(self.options, TrainOptions):
            models = 2  # of step 0, and trained
            kept = models + checkpoints
        else:
            models, kept = 1, int(keeps_models)
            checkpoints = min(checkpoints, KEPT_CHECKPOINTS + 1)  # one is written before an old one is deleted
        return 4 * self.parameters * ((arms - 1) * kept + models + 3 * checkpoints)

"""Short trainings of a tiny model."""

from typing import Any

import numpy as np
import torch
from tiny import VOCAB, tiny_model

from sinkscope.commands.train.blocks import Blocks
from sinkscope.commands.train.options import TrainingConfig
from sinkscope.options.option import checked
from sinkscope.retrofits import retrofit_model

LENGTH = 16

# a Llama that begins with random weights
SHAPE: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "max_position_embeddings": 64, "vocab_size": 300,
}  # fmt: skip

SHORT: dict[str, Any] = {
    "steps": 12, "block_length": LENGTH, "batch_size": 2, "learning_rate": 1e-3, "new_learning_rate": 1e-2,
    "log_every": 2, "save_every": 4, "warmup": 0.0,
}  # fmt: skip


def repetitive(count: int = 10) -> Blocks:
    """Return blocks that repeat one text, each from another offset."""
    words = np.random.default_rng(0).integers(3, VOCAB, 8)
    rows = np.stack([np.roll(np.tile(words, LENGTH // 8), at) for at in range(count + 2)]).astype(np.int64)
    return Blocks(rows[:count], rows[count:], "repetitive")


def config(**options: Any) -> TrainingConfig:
    return checked(TrainingConfig, SHORT | options)


def model(kind: str = "llama", method: str = "vga", **parameters: Any) -> Any:
    return retrofit_model(tiny_model(kind, spread=2.0), None, method, **parameters)


def same(first: Any, second: Any) -> bool:
    """Return whether two models have the same weights, bit for bit."""
    pairs = zip(first.state_dict().items(), second.state_dict().items(), strict=True)
    return all(name == twin and torch.equal(x, y) for (name, x), (twin, y) in pairs)


def random_blocks(count: int) -> Blocks:
    """Return different blocks, so that the result depends on the blocks that a step reads."""
    rows = np.random.default_rng(1).integers(3, VOCAB, (count + 2, 16)).astype(np.int64)
    return Blocks(rows[:count], rows[count:], "random")

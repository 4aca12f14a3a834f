"""How many tokens fit into memory at once: an estimate from the sizes of a model's weights."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from sinkscope.models.family import vocabulary
from sinkscope.models.loading import free_memory

USABLE = 0.8  # share of the free memory that a pass may take
# What a pass keeps of a token, in sizes of the inputs and outputs of linear layers: norms, residual sums, activation
# functions and the tensors of attention come to about half of these. Peaks that were measured (tests/measuring/
# test_memory.py) are below it.
KEPT = 1.5


def tokens_that_fit(model: PreTrainedModel, backward: bool) -> int:
    """Return how many tokens of a pass fit into the free memory of the model's first device; at least 1."""
    return max(1, int(USABLE * free_memory(model.device) / bytes_per_token(model, backward)))


def bytes_per_token(model: PreTrainedModel, backward: bool) -> float:
    """Estimate the memory of a pass for each token: of one layer and the logits, or with gradients of all layers."""
    size, logits = model.dtype.itemsize, vocabulary(model)
    every_layer = KEPT * sum(_widths(model))
    if backward:  # the logits and their gradient
        return size * (every_layer + 2 * logits)
    return 4 * every_layer / model.config.get_text_config().num_hidden_layers + size * logits  # reduced in float32


def _widths(model: PreTrainedModel) -> Iterator[int]:
    """Yield the sizes of input and output of every linear map that a token passes, except embeddings and logits."""
    config: Any = model.config.get_text_config()
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if module is model.get_output_embeddings() or isinstance(module, nn.Embedding):
            continue
        if isinstance(getattr(module, "in_features", None), int):
            yield module.in_features + module.out_features
            continue
        for parameter in module.parameters(recurse=False):
            if parameter.dim() > 1:  # of experts, (E,D,F), a token passes a few
                of_token = getattr(config, "num_experts_per_tok", None) or len(parameter)
                yield sum(parameter.shape[-2:]) * (of_token if parameter.dim() > 2 else 1)

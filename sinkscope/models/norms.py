"""Norms, the linear layers that read their outputs, and factors that move between the two.

A norm's gain can be divided by factors and the weights that read its output multiplied by them: the model computes the
same function with other numbers, which a number format rounds otherwise.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from sinkscope.errors import InputError
from sinkscope.models.edits import Edit, first_argument, replaced
from sinkscope.models.family import embedding_weight, first_tensor, input_device
from sinkscope.models.projections import LINEAR_LAYERS, by_output

MOST_CHANGED = 1e-3  # largest difference of logits by rounding, relative to the largest logit


class ModuleEnds:
    """The inputs and outputs of all modules in one pass, by which a tensor is found where another module reads it.

    Raises:
        InputError: Weights are offloaded, so that they cannot be replaced.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if any(parameter.is_meta for parameter in model.parameters()):
            raise InputError("weights are offloaded and cannot be replaced: load without --device-map auto")
        self.inputs: dict[nn.Module, torch.Tensor] = {}
        self.outputs: dict[nn.Module, torch.Tensor] = {}

        def keep(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            entry = first_argument(args, kwargs) if args or kwargs else None
            for ends, end in ((self.inputs, entry), (self.outputs, output)):
                if isinstance(tensor := first_tensor(end), torch.Tensor):
                    ends[module] = tensor

        with ExitStack() as hooks, torch.no_grad():
            for module in model.modules():
                hooks.enter_context(module.register_forward_hook(keep, with_kwargs=True))
            model(_probe(model), use_cache=False)
        self.linear: list[Any] = [module for module in self.outputs if isinstance(module, LINEAR_LAYERS)]

    def readers_of_norms(self) -> dict[Any, list[Any]]:
        """Map each norm to the linear layers that read its output, if there are any."""
        readers = {}
        for norm, output in self.outputs.items():
            if isinstance(weight := getattr(norm, "weight", None), torch.Tensor) and weight.dim() == 1:
                readers[norm] = [each for each in self.linear if source(self.inputs[each]) is source(output)]
        return {norm: layers for norm, layers in readers.items() if layers}


def source(x: torch.Tensor) -> torch.Tensor:
    """Return the base of a view, or x itself if it is no view."""
    return x if x._base is None else x._base


def _probe(model: PreTrainedModel) -> torch.Tensor:
    return torch.arange(3, 14, device=input_device(model))[None] % len(embedding_weight(model))


@contextmanager
def reparametrized(model: PreTrainedModel, edits: Callable[[], list[Edit]], what: str) -> Iterator[None]:
    """Replace parameters until the end of the block, and then restore them bit for bit.

    Raises:
        InputError: The edits would change the model's function.
    """
    with torch.no_grad():
        before = model(_probe(model), use_cache=False).logits
        with replaced(edits()):
            error = float((model(_probe(model), use_cache=False).logits - before).abs().max() / before.abs().max())
            if not error < MOST_CHANGED:
                raise InputError(f"{what} would change the model's logits, by {error:.1g} of the largest")
            yield


def scaled_inputs(readers: Mapping[Any, list[Any]], factors: Mapping[Any, torch.Tensor]) -> list[Edit]:
    """Return edits that divide the outputs (…,D) of norms by factors (D,) and multiply the weights that read them."""
    edits: list[Edit] = []
    for norm, factor in factors.items():
        divided, neutral = (norm.weight.double(), 1.0) if isinstance(norm, nn.LayerNorm) else gain_of(norm)
        edits.append((norm, "weight", (divided / factor - (1.0 - neutral)).to(norm.weight.dtype)))
        if getattr(norm, "bias", None) is not None:
            edits.append((norm, "bias", (norm.bias.double() / factor).to(norm.bias.dtype)))
        for module in readers[norm]:
            weight = (by_output(module, module.weight).double() * factor).to(module.weight.dtype)
            edits.append((module, "weight", by_output(module, weight).contiguous()))
    return edits


def gain_of(norm: Any) -> tuple[torch.Tensor, float]:
    """Return the gain (D,) of a norm, and the weight that makes it 1; InputError unless it is an RMSNorm."""
    ones = 1e3 * torch.ones(1, 1, len(norm.weight), dtype=norm.weight.dtype, device=norm.weight.device)
    output = norm(ones)[0, 0].double()
    for neutral in (1.0, 0.0):  # Gemma's gain is 1 + weight
        gain = norm.weight.double() + 1.0 - neutral
        if torch.allclose(output, gain, rtol=1e-3, atol=1e-5):
            return gain, neutral
    raise InputError(f"{type(norm).__name__} is not an RMSNorm")

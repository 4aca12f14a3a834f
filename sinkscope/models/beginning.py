"""A model that begins at one of its layers, where what the layers before that one gave is kept."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sinkscope.models.edits import wrapped_forward


@dataclass(frozen=True)
class Beginning:
    """Where a model begins on some inputs: at this layer, the one before having given `output`."""

    layer: int
    output: Any  # a tensor (B,T,D), or a tuple that begins with one


class _Reached(Exception):
    """Ends a forward pass as soon as what it is run for is known."""


@torch.no_grad()
def beginning_at(
    layer: int,
    model: nn.Module,
    layers: Sequence[nn.Module],
    inputs: Mapping[str, Any],
    before: Beginning | None = None,
) -> Beginning | None:
    """Run the model up to this layer, from the beginning `before` on where there is one.

    None where the layer in front of it does not run.
    """
    outputs: list[Any] = []

    def keep(module: nn.Module, args: tuple, output: Any) -> None:
        outputs.append(output)
        raise _Reached

    with ExitStack() as stack:
        if before is not None:
            stack.enter_context(begun(layers, before))
        stack.enter_context(layers[layer - 1].register_forward_hook(keep))
        stack.enter_context(suppress(_Reached))
        model(**inputs)
    return Beginning(layer, outputs[0]) if outputs else None


@contextmanager
def begun(layers: Sequence[nn.Module], beginning: Beginning) -> Iterator[None]:
    """The layers before the beginning compute nothing until the end of the block: each gives what the last of them
    gave. What the model makes outside its layers (masks, rotary angles) is made as always.
    """

    def kept(forward: Any, *args: Any, **kwargs: Any) -> Any:
        output = beginning.output  # its own copy: some models add to it in place
        return (output[0].clone(), *output[1:]) if isinstance(output, tuple) else output.clone()

    with ExitStack() as stack:
        for layer in layers[: beginning.layer]:
            stack.enter_context(wrapped_forward(layer, kept))
        yield

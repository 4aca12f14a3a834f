"""Parameters replaced for the length of a block: an edited copy takes the place, and the Parameter comes back."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from sinkscope.errors import InputError

Edit = tuple[nn.Module, str, torch.Tensor]  # module, name of its parameter, what stands in for it


@contextmanager
def replaced(edits: Iterable[Edit]) -> Iterator[None]:
    """Parameters (module, name) hold these tensors; at the end the very Parameters that were there are back."""
    with ExitStack() as stack:
        for module, name, tensor in edits:
            before = module._parameters[name]
            assert before is not None
            stack.callback(module._parameters.__setitem__, name, before)
            module._parameters[name] = nn.Parameter(tensor, requires_grad=before.requires_grad)
        yield


def check_changes(name: str, edits: list[Edit]) -> None:
    """Errors: InputError where weights are not in memory, or where all would stay as they are."""
    for module, parameter, _ in edits:
        if module.get_parameter(parameter).is_meta:
            raise InputError(
                f"{name}: these weights are offloaded and cannot be edited: load without --device-map auto"
            )
    if all(torch.equal(module.get_parameter(parameter), tensor) for module, parameter, tensor in edits):
        raise InputError(f"{name} would change nothing: what it sets to zero or exchanges is so already")

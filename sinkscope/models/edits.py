"""Changes of a module for the length of a block: its parameters replaced, or its forward wrapped; then all put back.

Parameters are never written to: an edited copy takes the place, and the Parameter itself comes back. A forward is
wrapped, not hooked, so that nnsight, which wraps it once more, sees the changed tensors.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from sinkscope.errors import InputError
from sinkscope.models.origin import check_own_map, check_parameters

ACCELERATE = "_hf_hook"  # where accelerate keeps what moves a module's inputs and weights
Edit = tuple[nn.Module, str, torch.Tensor]  # module, name of its parameter, the tensor that stands in for it


@contextmanager
def replaced(edits: Iterable[Edit]) -> Iterator[None]:
    """Parameters hold other tensors until the end of the block; then the very Parameters are back."""
    with ExitStack() as stack:
        for module, name, tensor in edits:
            before = module._parameters[name]
            assert before is not None
            stack.callback(module._parameters.__setitem__, name, before)
            module._parameters[name] = nn.Parameter(tensor, requires_grad=before.requires_grad)
        yield


def check_changes(name: str, edits: list[Edit]) -> None:
    """Raise InputError where weights are not in memory or are computed, or where all would stay as they are."""
    for module, parameter, _ in edits:
        try:
            check_own_map(module)
            check_parameters(module)
        except InputError as error:
            raise InputError(f"{name} does not apply to this model: {error}") from None
        if module.get_parameter(parameter).is_meta:
            raise InputError(
                f"{name}: these weights are offloaded and cannot be edited: load without --device-map auto"
            )
    if all(torch.equal(module.get_parameter(parameter), tensor) for module, parameter, tensor in edits):
        raise InputError(f"{name} would change nothing: what it sets to zero or exchanges is so already")


@contextmanager
def wrapped_forward(module: nn.Module, around: Callable[..., Any]) -> Iterator[None]:
    """module(…) computes around(forward, …) until the end of the block, where `forward` is the module's own."""
    own = vars(module).get("forward")  # accelerate's, or that of another edit
    forward, moves = module.forward, vars(module).pop(ACCELERATE, None)
    if moves is not None:
        forward = _moved(module, moves)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(forward, *args, **kwargs)

    module.forward = wrapped
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own
        if moves is not None:
            vars(module)[ACCELERATE] = moves


def _moved(module: Any, moves: Any) -> Callable[..., Any]:
    """The forward of a module to which accelerate moves inputs and weights.

    Where nnsight finds accelerate's attribute, it runs the forward of the module's class in place of the module's own,
    and what that had wrapped would be left out.
    """
    forward = module._old_forward

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = moves.pre_forward(module, *args, **kwargs)
        return moves.post_forward(module, forward(*args, **kwargs))

    return run


def edited_output(
    module: nn.Module, edit: Callable[[nn.Module, torch.Tensor], torch.Tensor]
) -> AbstractContextManager[None]:
    """module(…) gives edit(module, output) until the end of the block; of a tuple, its first tensor is edited."""

    def around(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        return (edit(module, output[0]), *output[1:]) if isinstance(output, tuple) else edit(module, output)

    return wrapped_forward(module, around)


def first_argument(args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """What a module was called with, by place or by name."""
    return args[0] if args else next(iter(kwargs.values()))


@contextmanager
def edited_input(module: nn.Module, edit: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """module(x, …) computes module(edit(module, x), …) until the end of the block, x being its first argument.

    A hook runs in front of what nnsight wraps, which so reads the changed tensor as the module's input, while the
    output of the module before stays what it was.
    """

    def changed(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if args:
            return (edit(module, args[0]), *args[1:]), kwargs
        name = next(iter(kwargs))
        return args, kwargs | {name: edit(module, kwargs[name])}

    handle = module.register_forward_pre_hook(changed, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()

"""Who has written what a module runs: a forward or a hook of the user may give more than the module's weights say."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from sinkscope.errors import InputError

LIBRARIES = ("sinkscope.", "transformers.", "torch.", "accelerate.", "nnsight.", "peft.")


def written_in(function: Any) -> str:
    """The Python module whose file defines a function. `functools.wraps` copies names, but not this."""
    function = getattr(function, "__func__", function)  # of a bound method
    written: dict[str, Any] = getattr(function, "__globals__", {})
    return str(written.get("__name__", type(function).__module__))


def name_of(function: Any) -> str:
    """For people: where a function was written, and what it is called."""
    return f"{written_in(function)}.{getattr(function, '__qualname__', type(function).__qualname__)}"


def forward_of(module: Any) -> Callable[..., Any]:
    """The function that a call of the module runs. Accelerate keeps the original when it replaces `forward`."""
    own = vars(module)
    forward: Callable[..., Any] = own["_old_forward"] if "_hf_hook" in own else module.forward
    return forward


def check_own_map(module: nn.Module) -> None:
    """Raise InputError where a hook or a forward of the user may change what the module makes of its input."""
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    for hook in (hook.func if isinstance(hook, partial) else hook for hook in hooks):
        if not written_in(hook).startswith(LIBRARIES):
            raise InputError(
                f"it has a forward hook, {name_of(hook)}, that may change what its weight gives: remove the hook, or "
                "add what it does to the weight"
            )
    forward = forward_of(module)
    if not written_in(forward).startswith(LIBRARIES):
        raise InputError(
            f"its forward is {name_of(forward)}, which may compute with more than its weight: put its own forward back"
        )


def check_parameters(module: nn.Module) -> None:
    """Raise InputError where the weight or the bias is computed at each call, and cannot be replaced by another."""
    for name in ("weight", "bias"):
        if getattr(module, name, None) is not None and module._parameters.get(name) is None:
            raise InputError(
                f"its {name} is no parameter but computed from others, by torch.nn.utils.prune or a parametrization: "
                "make it permanent with prune.remove or remove_parametrizations"
            )

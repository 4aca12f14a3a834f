"""Models that the caller has already loaded: found inside their wrappers, and measured without a lasting change."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from sinkscope.errors import InputError
from sinkscope.models.quantized import is_packed
from sinkscope.models.towers import reading_text

WRAPPERS = ("torch.compile", "DataParallel", "DistributedDataParallel", "PEFT")
COMPILED = "_compiled_call_impl"  # where `module.compile()` puts its own `__call__`

Attributes = list[tuple[str, Any, dict[Any, Any] | None]]  # name, value, and what a dict held


def text_of(name: Any) -> str:
    """A name or path as text. Raises InputError for any other object."""
    if not isinstance(name, str | os.PathLike):
        raise InputError(f"a name or a path is needed, and this is a {_kind(name)}")
    return os.fspath(name)


def unwrapped(model: Any) -> PreTrainedModel:
    """The transformers model in an object that the caller has handed over.

    Raises:
        InputError: it is no model of transformers, nor one that torch.compile, DataParallel or PEFT has wrapped, or its
            weights were made in inference mode, or are unpacked at its first run.
    """
    kind = _kind(model)
    while not isinstance(model, PreTrainedModel):
        inner = _inner(model)
        if inner is None:
            raise InputError(
                f"{kind} is no model: give a hub id, a folder, a .gguf file, or a model of transformers "
                f"(also behind {', '.join(WRAPPERS)})"
            )
        model = inner
    if is_packed(model):
        raise InputError(f"the weights of {type(model).__name__} are unpacked at its first run: run it once before")
    if any(parameter.is_inference() for parameter in model.parameters()):
        raise InputError(f"the weights of {type(model).__name__} were made in torch.inference_mode: load it outside")
    return model


def _kind(thing: Any) -> str:
    return f"{type(thing).__module__.partition('.')[0]}.{type(thing).__qualname__}"


def _inner(model: Any) -> Any:
    """What a wrapper holds; None where it is none."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return model.module
    if not isinstance(model, nn.Module):
        return None
    peft: Any = model
    if hasattr(peft, "get_base_model"):  # adapters are modules of that model
        if peft.active_peft_config.is_prompt_learning:
            raise InputError("a model behind PEFT's prompts cannot be measured with them: give the model itself")
        return peft.get_base_model()
    return getattr(model, "_orig_mod", None)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Within it, the model computes what it computes when it is deployed; afterwards it is as it was.

    It is in eval mode, without what `module.compile()` has compiled, and outside of the caller's autocast and
    inference mode.
    """
    with ExitStack() as stack:
        stack.enter_context(unchanged_after(model))
        for module in model.modules():
            module.training = False
            vars(module)[COMPILED] = None
        stack.enter_context(reading_text(model))
        stack.enter_context(torch.inference_mode(False))
        for device in {"cpu", *(parameter.device.type for parameter in model.parameters())} - {"meta"}:
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def unchanged_after(model: nn.Module) -> Iterator[None]:
    """The attributes of every module are at the end of the block what they were, also after an exception.

    Weights are not copied: what changes their values has to put them back itself.
    """
    before = [(module, _attributes(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            _restore(module, attributes)


def _attributes(module: nn.Module) -> Attributes:
    """Of the module itself; dicts are, for one, its hooks and parameters.

    Most of a module's dicts are empty, and a model has thousands of them: those are not copied.
    """
    return [
        (name, value, dict(value) if isinstance(value, dict) and value else None)
        for name, value in vars(module).items()
    ]


def _restore(module: nn.Module, before: Attributes) -> None:
    """Its attributes as they were, in the same dicts: the handles of hooks refer to them."""
    own = vars(module)
    for name in own.keys() - {name for name, _, _ in before}:
        del own[name]
    for name, value, entries in before:
        own[name] = value
        if isinstance(value, dict) and (value or entries):
            value.clear()
            value.update(entries or {})

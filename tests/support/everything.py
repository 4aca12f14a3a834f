"""The state that a measurement could change: of a model, its configuration, and the process."""

import random
from typing import Any

import numpy as np
import torch
from tiny import tiny_tokens
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """Return the state by name, for `differences`."""
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    seen: dict[str, Any] = {}
    for name, tensor in tensors:
        seen[f"{name}: object"] = (id(tensor), tensor.data_ptr(), tensor.dtype, tensor.requires_grad)
        seen[f"{name}: bits"] = tensor.detach().clone()
        if tensor.grad is not None:
            seen[f"{name}: gradient"] = (id(tensor.grad), tensor.grad.detach().clone())
    for name, module in model.named_modules():
        seen[f"{name}: module"] = (id(module), type(module), module.training)
        seen[f"{name}: attributes"] = {key: _of_value(value) for key, value in vars(module).items()}
    seen["configuration"] = repr(model.config.to_dict()), model.config._attn_implementation
    generation = getattr(model, "generation_config", None)
    seen["generation"] = repr(generation.to_dict()) if generation else None
    return seen | _process()


def _process() -> dict[str, Any]:
    return {
        "torch's random numbers": torch.get_rng_state(),
        "numpy's random numbers": repr(np.random.get_state(legacy=False)),  # noqa: NPY002 (a user's may be the legacy ones)
        "Python's random numbers": random.getstate(),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
        "function modes": len(_get_current_function_mode_stack()),
        "default dtype": torch.get_default_dtype(),
        "attention functions": sorted(ALL_ATTENTION_FUNCTIONS.valid_keys()),
    }


def _of_value(value: Any) -> Any:
    """Represent containers, such as hooks, by their entries; objects by identity; numbers and text by value."""
    # the configuration that all modules hold is recorded once, separately
    if isinstance(value, dict):
        return {key: id(entry) for key, entry in value.items()}
    by_identity = isinstance(value, nn.Module | torch.Tensor | PreTrainedConfig) or callable(value)
    return id(value) if by_identity else repr(value)


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the names of all entries that have changed."""
    return [name for name in before | after if not _same(before.get(name), after.get(name))]


def _same(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(map(_same, first, second))
    return type(first) is type(second) and bool(first == second)


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(tiny_tokens(2, 9), use_cache=False).logits


def state_of(model: PreTrainedModel) -> dict[str, Any]:
    return snapshot(model) | {"logits": logits(model)}


def assert_as_before(model: PreTrainedModel, before: dict[str, Any]) -> None:
    assert differences(before, state_of(model)) == []

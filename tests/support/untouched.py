"""Whether a model is what it was before something was put into it and taken out again."""

from typing import Any

import torch
from tiny import tiny_tokens
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from transformers import PreTrainedModel


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(tiny_tokens(2, 9), use_cache=False).logits


def structure_of(model: PreTrainedModel) -> dict[str, Any]:
    """All that a seam or nnsight could leave behind, but for what the model computes."""
    hooks = [name for name in vars(nn.Module()) if "hooks" in name]
    return {
        "modules": [(name, id(module)) for name, module in model.named_modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "hooks": [len(vars(module)[name]) for module in model.modules() for name in hooks],
        "forwards": [vars(module).get("forward") for module in model.modules()],
        "parameters": [
            (name, id(p), p.data_ptr(), p.requires_grad) for name, p in model.named_parameters(remove_duplicate=False)
        ],
        "keys": list(model.state_dict()),
        "attention": [module.config._attn_implementation for module in model.modules() if hasattr(module, "config")],
        "modes": len(_get_current_function_mode_stack()),
    }


def state_of(model: PreTrainedModel) -> dict[str, Any]:
    return structure_of(model) | {"logits": logits(model)}


def assert_as_before(model: PreTrainedModel, before: dict[str, Any]) -> None:
    after = state_of(model)
    assert torch.equal(before.pop("logits"), after.pop("logits"))
    assert after == before

"""Forward hooks: as a user registers them, and as a test looks at the calls of modules."""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from sinkscope.models.families import find_family
from sinkscope.models.family import first_tensor


@torch.no_grad()
def calls_of(
    model: PreTrainedModel, modules: Mapping[Any, nn.Module], *batches: Any
) -> dict[Any, list[tuple[tuple, torch.Tensor]]]:
    """Run the model, and return the arguments and the output of each call of these modules, by key, as copies."""
    calls: dict[Any, list[tuple[tuple, torch.Tensor]]] = {key: [] for key in modules}

    def keep(module: nn.Module, args: tuple, output: Any, key: Any) -> None:
        copies = tuple(x.clone() if isinstance(x, torch.Tensor) else x for x in args)
        calls[key].append((copies, first_tensor(output).clone()))  # Falcon adds to it in place

    with ExitStack() as hooks:
        for key, module in modules.items():
            hooks.enter_context(module.register_forward_hook(partial(keep, key=key)))
        for ids in batches:
            model(torch.as_tensor(ids), use_cache=False)
    return calls


def hook_all(model: PreTrainedModel, is_in_place: bool = False) -> PreTrainedModel:
    """Change a coordinate of what leaves modules, as a user's steering does; returns the model."""

    def changed(value: float, module: Any, args: tuple, *more: Any) -> Any:
        output = more[-1]
        first = output[0] if isinstance(output, tuple) else output
        if not is_in_place:
            first = first.clone()
        first[..., 5] = value * first[..., 5] + 10 * (value - 0.5)
        if is_in_place:
            return None
        return (first, *output[1:]) if isinstance(output, tuple) else first

    family = find_family(model)
    layers, block = family.layer_modules(model), family.block(1)
    sites = [block.sites[site].rpartition(".")[0] for site in ("attn_out", "mlp_out")]
    norm = next(module for path, module in model.named_modules() if "norm" in path.rpartition(".")[2] or "ln_f" in path)
    modules = [*map(layers[1].get_submodule, sites), layers[0], layers[2], norm]
    for at, module in enumerate(modules):
        with_kwargs = bool(at % 2)
        module.register_forward_hook(partial(changed, at / 2), with_kwargs=with_kwargs, always_call=not with_kwargs)
    return model

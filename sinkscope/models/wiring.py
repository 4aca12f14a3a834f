"""Numerical checks of a family's row on a model: its residual-stream sites, and the equation between them."""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from sinkscope.models.family import RESIDUAL_SITES, Block, Family, first_tensor


@torch.no_grad()
def read_sites(model: nn.Module, family: Family, token_ids: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Read every residual-stream site of every layer, each (B,T,D), with torch's forward hooks and without nnsight.

    Copies of all are kept, so inputs have to be small.
    """
    records: list[dict[str, torch.Tensor]] = []

    def keep(index: int, address: str, module: nn.Module, args: tuple, kwargs: dict, *output: Any) -> None:
        x = first_tensor(output[0]) if output else (args[0] if args else next(iter(kwargs.values())))
        if isinstance(x, torch.Tensor):
            records[index][address] = x.detach().clone()

    with ExitStack() as hooks:
        for index, layer in enumerate(family.layer_modules(model)):
            records.append({})
            for address in {"input", *family.block(index).sites.values()}:
                path, _, end = address.rpartition(".")
                module = layer.get_submodule(path)
                register = module.register_forward_pre_hook if end == "input" else module.register_forward_hook
                hooks.enter_context(register(partial(keep, index, address), with_kwargs=True))
        model(token_ids, use_cache=False)
    layers: list[dict[str, torch.Tensor]] = []
    for index, record in enumerate(records):
        layers.append({})
        block = family.block(index)
        for site in (site for site in RESIDUAL_SITES if site in block.sites):  # none if the layer does not run
            shape = family.stream(record["input"]).shape
            parts = [(term.scale, family.stream(record[term.address]).view(shape)) for term in block.terms(site)]
            rest = (x if scale == 1.0 else scale * x for scale, x in parts[1:])
            layers[index][site] = sum(rest, start=parts[0][0] * parts[0][1])
    return layers


def output_of(module: nn.Module, model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Run the model, and return a module's output in its last run."""
    kept: list[torch.Tensor] = []
    # a clone, because Falcon adds to its MLP's output in place
    with module.register_forward_hook(lambda module, args, output: kept.append(first_tensor(output).clone())):
        model(**inputs)
    return kept[-1]


@torch.no_grad()
def mlp_reads_attention(model: nn.Module, layer: nn.Module, block: Block, inputs: Mapping[str, Any]) -> bool:
    """Return whether the output of a layer's MLP branch changes with that of its attention branch."""

    def doubled(module: nn.Module, args: tuple, output: Any) -> Any:
        return (2 * output[0], *output[1:]) if isinstance(output, tuple) else 2 * output

    attention, mlp = (layer.get_submodule(block.sites[site].rpartition(".")[0]) for site in ("attn_out", "mlp_out"))
    before = output_of(mlp, model, inputs)
    with attention.register_forward_hook(doubled):
        after = output_of(mlp, model, inputs)
    return bool((after - before).abs().max() > 1e-3 * before.abs().max())


@torch.no_grad()
def layer_output(model: nn.Module, family: Family, layer: int, inputs: dict[str, Any]) -> torch.Tensor:
    """Return a layer's output (B,T,D) for these inputs of the model, on the CPU."""
    path, _, _ = family.block(layer).sites["layer_out"].rpartition(".")
    module = family.layer_modules(model)[layer].get_submodule(path)
    stream = family.stream(output_of(module, model, inputs)).cpu()
    return stream.view(*inputs["input_ids"].shape[:1], -1, stream.shape[-1])


def check_wiring(block: Block, sites: dict[str, torch.Tensor]) -> float:
    """Return the error of a layer's wiring equation (head of family.py): largest error ÷ largest entry.

    Args:
        block: the block that gives the equation.
        sites: the sites of one layer, from `read_sites`.
    """
    if block.wiring == "unknown" or not sites:
        return 0.0
    stream = sites["layer_in"].double()
    expected = []
    for branch, after in (("attn_out", "mid"), ("mlp_out", "layer_out")):
        if branch in sites:
            stream = stream + sites[branch].double()
        if after in sites and (after == "mid" or block.wiring != "post-norm"):
            expected.append((stream, sites[after]))
    return max((float((a - b).abs().max() / b.abs().max()) for a, b in expected), default=0.0)

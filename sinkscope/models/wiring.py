"""Numerical checks of a family's row on a model: its residual-stream sites, and the equation between them."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn

from sinkscope.models.edits import edited_output
from sinkscope.models.family import RESIDUAL_SITES, Block, Family
from sinkscope.text.batch import on_cpu


class Event(NamedTuple):
    """An input or output of a module in one of its runs."""

    order: int  # counts all inputs and outputs in the order in which they appear
    end: str  # input or output
    x: torch.Tensor  # its first floating-point tensor
    path: str = ""  # the module's, if it is known

    @property
    def address(self) -> str:
        return f"{self.path}.{self.end}" if self.path else self.end


@torch.no_grad()
def record_ends(
    model: nn.Module, modules: Iterable[nn.Module], inputs: Mapping[str, Any]
) -> dict[nn.Module, list[Event]]:
    """Run the model, and return CPU copies of the inputs and outputs of these modules, as far as they run."""
    events: list[tuple[nn.Module, str, torch.Tensor]] = []

    def keep(module: nn.Module, args: tuple, kwargs: dict, *output: Any) -> None:
        x = first_floats(output[0] if output else (*args, *kwargs.values()))
        if x is not None:
            # a clone, because Falcon adds to its MLP's output in place
            events.append((module, "output" if output else "input", x.detach().clone()))

    with ExitStack() as hooks:
        for module in set(modules):
            hooks.enter_context(module.register_forward_pre_hook(keep, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(keep, with_kwargs=True))
        model(**inputs)
    ends: dict[nn.Module, list[Event]] = {}
    for order, ((module, end, _), x) in enumerate(zip(events, on_cpu(x for *_, x in events), strict=True)):
        ends.setdefault(module, []).append(Event(order, end, x))
    return ends


def first_floats(values: Any) -> torch.Tensor | None:
    """Return the first floating-point tensor of several values, or of one; None if there is none."""
    several = values if isinstance(values, tuple | list) else (values,)
    return next((value for value in several if isinstance(value, torch.Tensor) and value.is_floating_point()), None)


def output_of(module: nn.Module, model: nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Run the model, and return a module's output in its last run."""
    return record_ends(model, [module], inputs)[module][-1].x


def read_sites(model: nn.Module, family: Family, token_ids: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Read every residual-stream site of every layer, each (B,T,D); all are kept, so inputs have to be small."""
    layers = []
    for number, layer in enumerate(family.layer_modules(model)):
        wanted = {"input", *family.block(number).sites.values()}
        layers.append({address: layer.get_submodule(address.rpartition(".")[0]) for address in wanted})
    modules = [module for addresses in layers for module in addresses.values()]
    ends = record_ends(model, modules, {"input_ids": token_ids, "use_cache": False})
    read: list[dict[str, torch.Tensor]] = []
    for number, addresses in enumerate(layers):
        known = {
            address: family.stream(end.x)
            for address, module in addresses.items()
            for end in ends.get(module, ())
            if address.endswith(end.end)
        }
        known = {address: x.view(known["input"].shape) for address, x in known.items()}
        read.append(at_sites(family.block(number), known))
    return read


def at_sites(block: Block, known: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors at a layer's sites, from those at its addresses; sites that are not known are left out."""
    terms = {site: block.terms(site) for site in RESIDUAL_SITES if site in block.sites}
    return {
        site: torch.stack([term.scale * known[term.address] for term in parts]).sum(0)
        for site, parts in terms.items()
        if all(term.address in known for term in parts)
    }


@torch.no_grad()
def mlp_reads_attention(model: nn.Module, layer: nn.Module, block: Block, inputs: Mapping[str, Any]) -> bool:
    """Return whether the output of a layer's MLP branch changes with that of its attention branch."""
    attention, mlp = (layer.get_submodule(block.sites[site].rpartition(".")[0]) for site in ("attn_out", "mlp_out"))
    before = output_of(mlp, model, inputs)
    with edited_output(attention, lambda module, output: 2 * output):
        after = output_of(mlp, model, inputs)
    return bool((after - before).abs().max() > 1e-3 * before.abs().max())


def check_wiring(block: Block, sites: dict[str, torch.Tensor]) -> float:
    """Return the error of a layer's wiring equation (head of family.py) at its sites: largest error ÷ largest entry."""
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

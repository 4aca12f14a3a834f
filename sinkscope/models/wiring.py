"""Whether a family's row is right for a model, checked numerically, and a row found for one that has none."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from sinkscope.errors import InputError
from sinkscope.models.families import FAMILIES, Family, first_tensor


@contextmanager
def _recorded(layer: nn.Module, record: dict[str, torch.Tensor], wanted: set[str]) -> Iterator[None]:
    """Copies of the wanted tensors of one layer in plain transformers, without nnsight: the doctor's second opinion."""

    def before(path: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
        address = f"{path}.input".lstrip(".")
        if address in wanted:
            record[address] = (args[0] if args else next(iter(kwargs.values()))).detach().clone()

    def after(path: str, module: nn.Module, args: tuple, output: Any) -> None:
        address = f"{path}.output".lstrip(".")
        if address in wanted and isinstance(first_tensor(output), torch.Tensor):
            record[address] = first_tensor(output).detach().clone()

    handles = []
    for path, module in layer.named_modules():
        handles.append(module.register_forward_pre_hook(partial(before, path), with_kwargs=True))
        handles.append(module.register_forward_hook(partial(after, path)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def read_sites(model: nn.Module, family: Family, token_ids: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Every site of every layer, (B,T,D), read with ordinary forward hooks. Small inputs only: all is kept."""
    layers = family.layer_modules(model)
    records: list[dict[str, torch.Tensor]] = [{} for _ in layers]
    with ExitStack() as hooks:
        for layer, record in zip(layers, records, strict=True):
            hooks.enter_context(_recorded(layer, record, {"input", *family.sites.values()}))
        model(token_ids)
    return [
        {site: record[address].view(record["input"].shape) for site, address in family.sites.items()}
        for record in records
    ]


def check_wiring(family: Family, sites: dict[str, torch.Tensor]) -> float:
    """How far one layer is from its wiring equation (head of this file): largest error ÷ largest entry."""
    stream = sites["layer_in"].double() + sites["attn_out"].double()
    expected = [(stream, sites["mid"])] if "mid" in sites else []
    if family.wiring != "post-norm":
        expected.append((stream + sites["mlp_out"].double(), sites["layer_out"]))
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in expected)


def calibrate(model: nn.Module, token_ids: torch.Tensor) -> Family:
    """A row for an architecture that has none, found by trying every row's wiring and keeping one that is exact.

    The layers are the ModuleList with one entry a layer; the sites are those of the first known row whose modules
    exist there and whose wiring equation holds at every layer to round-off.

    Errors: InputError naming what could not be found, so that the missing row can be written by hand.
    """
    config: Any = model.config
    text_config = config.get_text_config()
    stacks = [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == text_config.num_hidden_layers
    ]
    if not stacks:
        raise InputError(f"'{config.model_type}': no ModuleList with {text_config.num_hidden_layers} layers found")
    layer = next(model.get_submodule(stacks[0]).children())
    tolerance = 100 * torch.finfo(next(model.parameters()).dtype).eps
    for row in _different_rows():
        # GPT-2's and GPT-Neo's blocks are one but for where attention is
        attention = next((path for path in (row.attention, *_ATTENTIONS) if _has(layer, path)), None)
        if attention is None or not all(_has(layer, address) for address in row.sites.values()):
            continue
        candidate = replace(
            row,
            name=config.model_type,
            layers=stacks[0],
            attention=attention,
            when={},
            door=_door(model),
            **_learned_positions(model, text_config),
            **_projections(layer.get_submodule(attention)),
        )
        try:
            records = read_sites(model, candidate, token_ids)
        except (KeyError, RuntimeError):  # a module never ran, or is not as wide as the residual stream
            continue
        if max(check_wiring(candidate, sites) for sites in records) < tolerance:
            return candidate
    raise InputError(
        f"'{config.model_type}' needs a row in sinkscope/families.py: its layers are at '{stacks[0]}', "
        f"but no known wiring gives its residual stream to round-off"
    )


def _different_rows() -> list[Family]:
    """Richest rows first: a sequential block also satisfies the parallel equation, which says less."""
    different = {
        (row.attention, row.wiring, tuple(row.sites.items())): row for rows in FAMILIES.values() for row in rows
    }
    return sorted(different.values(), key=lambda row: -len(row.sites))


def _projections(attention: nn.Module) -> dict[str, Any]:
    """Fields of a row. How one projection holds all three cannot be seen from outside: then they stay unknown."""
    known = ("q_proj", "k_proj", "v_proj")
    output = next((name for name in ("o_proj", "out_proj", "c_proj", "dense") if _has(attention, name)), "")
    return {"qkv": known if all(_has(attention, name) for name in known) else (), "fused": "", "output": output}


def _learned_positions(model: nn.Module, config: Any) -> dict[str, Any]:
    """Fields of a row: where positions are learned if a known row's embedding is there."""
    for row in _different_rows():
        if row.position_embedding and _has(model, row.position_embedding):
            where = {"position_embedding": row.position_embedding, "position_offset": row.position_offset}
            return {"positions": "learned"} | where
    return {"positions": _positions(config), "position_embedding": "", "position_offset": 0}


_ATTENTIONS = ("attn.attention", "self_attn", "self_attention", "attention", "attn")


def _has(layer: nn.Module, address: str) -> bool:
    """A module path, or one with .input or .output behind it."""
    path = address.removesuffix("input").removesuffix("output").rstrip(".")
    try:
        layer.get_submodule(path)
    except AttributeError:
        return False
    return True


def _door(model: Any) -> str:
    """What transformers itself goes by when it is asked to change the attention implementation."""
    able = getattr(model, "_can_set_attn_implementation", None)
    return "interface" if able is not None and able() else "interceptor"


def _positions(config: Any) -> str:
    if getattr(config, "alibi", False):
        return "alibi"
    return "rotary" if getattr(config, "rope_parameters", None) else "unknown"

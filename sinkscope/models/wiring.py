"""Numerical checks of a family's row against a model, and the search for a row of a model that has none."""

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from sinkscope.errors import InputError
from sinkscope.models import families
from sinkscope.models.families import Family, first_tensor


@torch.no_grad()
def read_sites(model: nn.Module, family: Family, token_ids: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Every residual-stream site of every layer, each (B,T,D), read with torch's forward hooks and without nnsight.

    Copies of all are kept: for small inputs only.
    """
    records = []
    with ExitStack() as hooks:
        for layer in family.layer_modules(model):
            record: dict[str, torch.Tensor] = {}
            records.append(record)
            for address in {"input", *family.sites.values()}:
                path, _, end = address.rpartition(".")
                module = layer.get_submodule(path)
                if end == "input":
                    keep_input = partial(_keep_input, record, address)
                    hooks.enter_context(module.register_forward_pre_hook(keep_input, with_kwargs=True))
                else:
                    hooks.enter_context(module.register_forward_hook(partial(_keep_output, record, address)))
        model(token_ids)
    return [
        {site: record[address].view(record["input"].shape) for site, address in family.sites.items()}
        for record in records
    ]


@torch.no_grad()
def layer_output(model: nn.Module, family: Family, layer: int, inputs: dict[str, Any]) -> torch.Tensor:
    """(B,T,D): what a layer gives on these inputs of the model, on the CPU."""
    kept: list[torch.Tensor] = []
    path, _, _ = family.sites["layer_out"].rpartition(".")
    module = family.layer_modules(model)[layer].get_submodule(path)
    handle = module.register_forward_hook(lambda module, args, output: kept.append(first_tensor(output).cpu()))
    try:
        model(**inputs)
    finally:
        handle.remove()
    return kept[-1].view(*inputs["input_ids"].shape[:1], -1, kept[-1].shape[-1])


def _keep_input(record: dict[str, torch.Tensor], address: str, module: nn.Module, args: tuple, kwargs: dict) -> None:
    record[address] = (args[0] if args else next(iter(kwargs.values()))).detach().clone()


def _keep_output(record: dict[str, torch.Tensor], address: str, module: nn.Module, args: tuple, output: Any) -> None:
    tensor = first_tensor(output)
    if isinstance(tensor, torch.Tensor):
        record[address] = tensor.detach().clone()


def check_wiring(family: Family, sites: dict[str, torch.Tensor]) -> float:
    """How far one layer is from its wiring equation (head of families.py): largest error ÷ largest entry.

    Args:
        family: the row whose equation is to hold.
        sites: of one layer, as `read_sites` gives them.
    """
    stream = sites["layer_in"].double() + sites["attn_out"].double()
    expected = [(stream, sites["mid"])] if "mid" in sites else []
    if family.wiring != "post-norm":
        expected.append((stream + sites["mlp_out"].double(), sites["layer_out"]))
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in expected)


def calibrate(model: nn.Module, token_ids: torch.Tensor) -> Family:
    """A row for an architecture that has none: the first known row whose wiring equation holds here to round-off.

    The layers are the ModuleList with one entry a layer; every module that the known row names must exist in them.

    Args:
        model: a model whose type has no row.
        token_ids: (B,T), a few tokens to check the equation with.

    Raises:
        InputError: it names what could not be found, so that the missing row can be written by hand.
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
            **_positions(model, text_config),
            **_projections(layer.get_submodule(attention)),
        )
        try:
            records = read_sites(model, candidate, token_ids)
        except (KeyError, RuntimeError):  # a module never ran, or is not as wide as the residual stream
            continue
        if max(check_wiring(candidate, sites) for sites in records) < tolerance:
            return candidate
    raise InputError(
        f"'{config.model_type}' needs a row in sinkscope/models/families.py: its layers are at '{stacks[0]}', "
        f"but no known wiring gives its residual stream to round-off"
    )


def _different_rows() -> list[Family]:
    """Rows with the most sites first: a sequential block satisfies the parallel equation, too, which says less."""
    rows = chain.from_iterable(families.FAMILIES.values())
    different = {(row.attention, row.wiring, tuple(row.sites.items())): row for row in rows}
    return sorted(different.values(), key=lambda row: -len(row.sites))


def _projections(attention: nn.Module) -> dict[str, Any]:
    """Fields of a row. How one projection holds all three cannot be seen from outside: `qkv` is empty then."""
    known = ("q_proj", "k_proj", "v_proj")
    output = next((name for name in ("o_proj", "out_proj", "c_proj", "dense") if _has(attention, name)), "")
    return {"qkv": known if all(_has(attention, name) for name in known) else (), "fused": "", "output": output}


def _positions(model: nn.Module, config: Any) -> dict[str, Any]:
    """Fields of a row; positions are learned where a known row's embedding of them exists."""
    for row in _different_rows():
        if row.position_embedding and _has(model, row.position_embedding):
            where = {"position_embedding": row.position_embedding, "position_offset": row.position_offset}
            return {"positions": "learned"} | where
    others = "rotary" if getattr(config, "rope_parameters", None) else "unknown"
    positions = "alibi" if getattr(config, "alibi", False) else others
    return {"positions": positions, "position_embedding": "", "position_offset": 0}


_ATTENTIONS = ("attn.attention", "self_attn", "self_attention", "attention", "attn")


def _has(layer: nn.Module, address: str) -> bool:
    """Whether a module exists; its address may end in .input or .output."""
    path = address.removesuffix("input").removesuffix("output").rstrip(".")
    try:
        layer.get_submodule(path)
    except AttributeError:
        return False
    return True


def _door(model: Any) -> str:
    """By transformers' own check before it changes the attention implementation."""
    able = getattr(model, "_can_set_attn_implementation", None)
    return "interface" if able is not None and able() else "interceptor"

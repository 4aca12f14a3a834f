"""Finds how a model without a row in FAMILIES is built, by running it on a few tokens."""

import inspect
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from sinkscope.errors import InputError, described
from sinkscope.models.attention_modules import find_attentions, find_projections, is_gated
from sinkscope.models.discovery import ULPS, Event, Layer, record
from sinkscope.models.family import (
    ATTENTION,
    NO_POSITIONS,
    NOT_RUN,
    UNKNOWN_POSITIONS,
    Block,
    Family,
    embedding_weight,
    find_copies,
)
from sinkscope.models.wiring import End, check_wiring, mlp_reads_attention, output_of, record_ends


def calibrate(model: Any, token_ids: torch.Tensor) -> Family:
    """Make a row for an architecture that has none, by the sums that add to the residual stream in every layer.

    It raises InputError if the model fails on these tokens (B,T), or has a form of attention that is not measured.
    """
    name, inputs = model.config.model_type, {"input_ids": token_ids, "use_cache": False}
    if getattr(model.config, "is_encoder_decoder", False):
        raise InputError(f"'{name}' is an encoder–decoder, and only decoders and encoders are measured")
    try:
        other_ids = (token_ids + 1) % len(embedding_weight(model))
        path = layer_stack(model, inputs, inputs | {"input_ids": other_ids})
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise InputError(f"'{name}' fails on {token_ids.numel()} tokens [{described(error)}]") from error
    layers = list(model.get_submodule(path).children())
    door, attention_paths = find_attentions(model, path, layers, inputs)
    records = record(model, layers, inputs)
    for layer, events in enumerate(records):  # layers that read pictures do not run
        if events and not any(event.address == "output" for event in events):
            raise InputError(f"'{name}': layer {layer} does not run on token ids only")
        out = next((event.x for event in reversed(events) if event.address == "output"), None)
        if out is not None and (not out.isfinite().all() or not out.any()):
            gives = "only zeros" if out.isfinite().all() else "NaN or infinite numbers"
            advice = "check its weights, and whether its numbers fit into its dtype"
            raise InputError(f"'{name}': layer {layer} gives {gives}: {advice}")
    blocks = _blocks(model, layers, records, attention_paths, inputs)
    ran = [at for at, events in enumerate(records) if events]
    known = [at for at in ran if blocks[at].wiring != "unknown"]
    stream, tokens, copies = records[ran[0]][0].x, token_ids.shape, None
    if not known or stream.shape[:-1] != tokens:
        copies = find_copies(stream, tokens, getattr(model.config.get_text_config(), "hidden_size", stream.shape[-1]))
        if copies is None and stream.shape[:-1] != tokens:
            raise InputError(
                f"'{name}': its layers take {tuple(stream.shape[:-1])} vectors for {tuple(tokens)} tokens, "
                "so positions in its layers are not those of the text"
            )
    first = next((at for at, block in enumerate(blocks) if block.attention), next(iter(known), 0))
    main = blocks[first]
    attending = {at: layers[at].get_submodule(block.attention) for at, block in enumerate(blocks) if block.attention}
    are_alike = all(block == Block(main.attention, main.sites, main.wiring) for block in blocks)
    attention_fields: dict[str, Any] = {"positions": NO_POSITIONS, "qkv": (), "output": ""}
    if attending:
        modules = list(attending.values())
        attention_fields = {"positions": UNKNOWN_POSITIONS, **_projections(model, modules)}
        if door == "interface":
            attention_fields["gated"] = is_gated(model, modules[0], attention_fields["output"], inputs)
            found = find_projections(model, modules)
            attention_fields["projections"] = dict(zip(attending, found, strict=True))
    bert = ("intermediate.dense", "intermediate.intermediate_act_fn", "output.dense")
    usual = (("mlp",), ("fc1", "activation_fn", "fc2"), bert)
    feed_forward = next((paths for paths in usual if _has(layers[first], *paths)), None)
    address = main.sites.get("mlp_out", "")
    return Family(
        name=name,
        layers=path,
        attention=main.attention,
        sites=main.sites,
        wiring=main.wiring,
        door=door,
        mlp=feed_forward or ((address.partition(".")[0],) if address else ()),
        blocks=() if are_alike else tuple(blocks),
        copies=copies,
        causal=not sees_later_tokens(model, layers[ran[-1]], token_ids),
        first_position=first_position(model, layers[ran[-1]], token_ids),
        **attention_fields,
    )


def _blocks(
    model: Any, layers: list[nn.Module], records: list[list[Event]], attentions: list[str], inputs: dict[str, Any]
) -> list[Block]:
    """Find how each layer is built; a layer that adds 0 is assumed to be wired like others of its class."""
    eps = torch.finfo(next(model.parameters()).dtype).eps
    config = model.config.get_text_config()
    named = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    others = list(named) if len(named) == len(attentions) else ["no softmax attention"] * len(attentions)
    kinds = [ATTENTION if path else other for path, other in zip(attentions, others, strict=True)]
    parts = enumerate(zip(layers, records, attentions, kinds, strict=True))
    views = {at: Layer(*of_layer, eps) for at, of_layer in parts if of_layer[1]}
    found = {at: view.block() for at, view in views.items()}
    alike = {(type(layers[at]), block.attention): block for at, block in found.items() if block}
    blocks = [Block("", {}, "single", kind=NOT_RUN)] * len(layers)
    for at, view in views.items():
        block, other = found[at], alike.get((type(layers[at]), view.attention))
        if block is None and other is not None and check_wiring(other, view.sites(other)) <= ULPS * eps:
            block = other
        # the wiring is unknown: only the layer's input and output are read
        blocks[at] = block or Block(view.attention, {"layer_in": "input", "layer_out": "output"}, "unknown", view.kind)
    first = {type(layers[at]): at for at, block in reversed([*enumerate(blocks)]) if block.wiring == "parallel"}
    in_turn = {kind for kind, at in first.items() if mlp_reads_attention(model, layers[at], blocks[at], inputs)}
    return [
        replace(block, wiring="unknown") if block.wiring == "parallel" and type(layer) in in_turn else block
        for layer, block in zip(layers, blocks, strict=True)
    ]


def _projections(model: Any, attentions: list[nn.Module]) -> dict[str, Any]:
    """Return the projections' fields of a row; `qkv` is empty if their layout is unknown or some layers share keys."""
    several, attention = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value")), attentions[0]
    known = next((names for names in several if all(_has(other, *names) for other in attentions)), ())
    output = next((name for name in ("o_proj", "out_proj", "c_proj", "dense", "wo") if _has(attention, name)), "")
    heads = model.config.get_text_config().num_attention_heads
    widths = [getattr(attention.get_submodule(name), "out_features", 0) for name in known]
    if widths and all(widths):  # else a module is not a plain matrix
        query, key, value = widths
        taken = getattr(attention.get_submodule(output), "in_features", query) if output else query
        is_plain = query % heads == 0 and key == value and key % (query // heads) == 0 and taken == query
        return {"qkv": known if is_plain else (), "fused": "", "output": output}
    return {"qkv": (), "fused": "", "output": output}


def _has(layer: nn.Module, *paths: str) -> bool:
    try:
        return all(layer.get_submodule(path) is not None for path in paths)
    except AttributeError:
        return False


Ends = dict[nn.Module, list[End]]


def layer_stack(model: Any, inputs: dict[str, Any], others: dict[str, Any]) -> str:
    """Return the path of the ModuleList through which the residual stream passes.

    Each entry reads the output of the one before, and the input of the first that runs depends on the tokens: `others`
    are the same inputs of the model with other tokens. If there are several lists, the largest is returned.
    """
    lists = {path: list(module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    entries = {entry for entries in lists.values() for entry in entries}
    ends = record_ends(model, entries, inputs)
    alike = torch.equal(inputs["input_ids"], others["input_ids"])  # true for a vocabulary of one token
    ends_of_others = None if alike else record_ends(model, entries, others)
    chains = [path for path, layers in lists.items() if _pass_tokens(layers, ends, ends_of_others)]
    if not chains:
        runs = [{len(ends.get(layer, ())) // 2 for layer in layers} for layers in lists.values()]
        loops = [run for run, *further in runs if run > 1 and not further]
        why = f" (layers that run {max(loops)} times, in a loop, are not measured)" if loops else ""
        raise InputError(
            f"'{model.config.model_type}': no list of layers through which the tokens pass one by one{why}"
        )
    return max(chains, key=lambda path: sum(parameter.numel() for parameter in model.get_submodule(path).parameters()))


def _pass_tokens(layers: list[nn.Module], ends: Ends, ends_of_others: Ends | None) -> bool:
    """Return whether most modules run once, each on the output of the one before, and the first on the tokens."""
    # Some may not run, such as layers that read pictures. If there are no other tokens to compare with, the input of
    # the first is assumed to depend on the tokens.
    ran = [layer for layer in layers if layer in ends and (ends_of_others is None or layer in ends_of_others)]
    pairs = [ends[layer] for layer in ran]
    if 2 * len(ran) <= len(layers) or any(len(pair) != 2 for pair in pairs):
        return False
    if not all(_equal(before[1], after[0]) for before, after in pairwise(pairs)):
        return False
    return ends_of_others is None or not _equal(ends[ran[0]][0], ends_of_others[ran[0]][0])


def _equal(a: End, b: End) -> bool:
    """Return whether tensors are equal bit for bit; NaN equals NaN."""
    return a.x.shape == b.x.shape and torch.allclose(a.x, b.x, rtol=0, atol=0, equal_nan=True)


@torch.no_grad()
def sees_later_tokens(model: nn.Module, last: nn.Module, token_ids: torch.Tensor) -> bool:
    """Return whether a token changes the last layer's output at earlier tokens."""
    changed = token_ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % len(embedding_weight(model))
    before, after = (output_of(last, model, {"input_ids": ids, "use_cache": False}) for ids in (token_ids, changed))
    length = token_ids.shape[1]
    if before.shape[1] != length:  # the model adds tokens before or after, or has another order of axes
        return False
    return not _are_alike(before[:, : length - 1], after[:, : length - 1])


@torch.no_grad()
def first_position(model: nn.Module, last: nn.Module, token_ids: torch.Tensor) -> int | None:
    """Return the number in `position_ids` of a sequence's first position; None if the model takes none.

    Models like RoBERTa count from the id of their padding token plus one.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return None
    inputs = {"input_ids": token_ids, "use_cache": False}
    expected = output_of(last, model, inputs)
    padding: Any = getattr(model.config, "pad_token_id", None)
    for first in (0, (padding or 0) + 1):
        positions = torch.arange(first, first + token_ids.shape[1], device=token_ids.device).expand_as(token_ids)
        with suppress(RuntimeError, IndexError, ValueError):  # positions of another shape, or fewer than needed
            if _are_alike(expected, output_of(last, model, inputs | {"position_ids": positions})):
                return first
    return None


def _are_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether tensors (B,T,D) are equal up to round-off."""
    eps = max(torch.finfo(a.dtype).eps ** 0.5, 1e-5)  # some parts of a model are in float32
    a, b = a.double(), b.double()
    # relative to each token's own norm: a massive activation would hide differences at other tokens
    return bool(((a - b).norm(dim=-1) <= eps * b.norm(dim=-1).clamp(min=1e-30)).all())

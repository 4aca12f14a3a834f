"""The search for a row of a model that has none: how its layers are built, found by running it on a few tokens."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from sinkscope.errors import InputError, described
from sinkscope.models.attention_modules import find_attentions, is_gated
from sinkscope.models.discovery import ULPS, Event, Layer, record
from sinkscope.models.family import ATTENTION, NO_POSITIONS, NOT_RUN, UNKNOWN_POSITIONS, Block, Family, embedding_weight
from sinkscope.models.found_projections import find_projections
from sinkscope.models.layer_stack import layer_stack
from sinkscope.models.reading_order import first_position, sees_later_tokens
from sinkscope.models.streams import Copies, find_copies
from sinkscope.models.wiring import check_wiring, mlp_reads_attention


def calibrate(model: Any, token_ids: torch.Tensor) -> Family:
    """A row for an architecture that has none: what every layer adds to the residual stream, found numerically.

    Args:
        model: a model whose type has no row.
        token_ids: (B,T), a few tokens to run.

    Raises:
        InputError: it fails by itself, or attends in a form that is not measured.
    """
    name, inputs = model.config.model_type, {"input_ids": token_ids, "use_cache": False}
    if getattr(model.config, "is_encoder_decoder", False):
        raise InputError(f"'{name}' is an encoder–decoder, of which only a decoder or an encoder alone is measured")
    try:
        other_ids = (token_ids + 1) % len(embedding_weight(model))
        path = layer_stack(model, inputs, inputs | {"input_ids": other_ids})
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise InputError(f"'{name}' fails by itself on {token_ids.numel()} tokens [{described(error)}]") from error
    layers = list(model.get_submodule(path).children())
    attentions = find_attentions(model, path, layers, inputs)
    records = record(model, layers, inputs)
    _check_outputs(name, records)
    blocks = _blocks(model, layers, records, attentions.paths, inputs)
    ran = [at for at, events in enumerate(records) if events]
    copies = _copies(model, records[ran[0]][0].x, token_ids, blocks)
    known = [at for at in ran if blocks[at].wiring != "unknown"]
    first = next((at for at, block in enumerate(blocks) if block.attention), next(iter(known), 0))
    main, places = blocks[first], enumerate(blocks)
    attending = {at: layers[at].get_submodule(block.attention) for at, block in places if block.attention}
    are_alike = all(block == Block(main.attention, main.sites, main.wiring) for block in blocks)
    return Family(
        name=name,
        layers=path,
        attention=main.attention,
        sites=main.sites,
        wiring=main.wiring,
        door=attentions.door,
        mlp=_feed_forward(layers[first], main),
        blocks=() if are_alike else tuple(blocks),
        copies=copies,
        causal=not sees_later_tokens(model, layers[ran[-1]], token_ids),
        first_position=first_position(model, layers[ran[-1]], token_ids),
        **_attention_fields(model, attending, attentions.door, inputs),
    )


def _attention_fields(model: Any, attending: dict[int, nn.Module], door: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """Fields of a row that its attention modules decide."""
    if not attending:
        return {"positions": NO_POSITIONS, "qkv": (), "output": ""}
    modules = list(attending.values())
    fields = {"positions": UNKNOWN_POSITIONS, **_projections(model, modules)}
    if door == "interface":
        fields["gated"] = is_gated(model, modules[0], fields["output"], inputs)
        fields["projections"] = dict(zip(attending, find_projections(model, modules), strict=True))
    return fields


def _check_outputs(name: str, records: list[list[Event]]) -> None:
    """Whether every layer that ran gives numbers; one that reads pictures stands aside without one."""
    for layer, events in enumerate(records):
        if events and not any(event.address == "output" for event in events):
            raise InputError(f"'{name}': layer {layer} does not run on token ids alone")
        out = next((event.x for event in reversed(events) if event.address == "output"), None)
        if out is not None and (not out.isfinite().all() or not out.any()):
            gives = "only zeros" if out.isfinite().all() else "NaN or infinite numbers"
            advice = "are its weights what they should be, and does it fit into its dtype?"
            raise InputError(f"'{name}': layer {layer} gives {gives}: {advice}")


def _copies(model: Any, stream: torch.Tensor, token_ids: torch.Tensor, blocks: list[Block]) -> Copies | None:
    """Of the residual stream, as the first layer takes it.

    Raises:
        InputError: it is not in the order of the tokens.
    """
    tokens, config = token_ids.shape, model.config.get_text_config()
    if any(block.wiring != "unknown" for block in blocks) and stream.shape[:-1] == tokens:
        return None
    copies = find_copies(stream, tokens, getattr(config, "hidden_size", stream.shape[-1]))
    if copies is None and stream.shape[:-1] != tokens:
        raise InputError(
            f"'{config.model_type}': its layers take {tuple(stream.shape[:-1])} vectors for {tuple(tokens)} tokens, "
            "so positions in its layers are not those of the text"
        )
    return copies


def _blocks(
    model: Any, layers: list[nn.Module], records: list[list[Event]], attentions: list[str], inputs: dict[str, Any]
) -> list[Block]:
    """How each layer is built. One in which nothing is added (its last projections are 0) is built as its like are.

    One that does not run has no sites.
    """
    eps = torch.finfo(next(model.parameters()).dtype).eps
    kinds = _kinds(model, attentions)
    parts = enumerate(zip(layers, records, attentions, kinds, strict=True))
    views = {at: Layer(*of_layer, eps) for at, of_layer in parts if of_layer[1]}
    found = {at: view.block() for at, view in views.items()}
    alike = {(type(layers[at]), block.attention): block for at, block in found.items() if block}
    blocks = [Block("", {}, "single", kind=NOT_RUN)] * len(layers)
    for at, view in views.items():
        block, other = found[at], alike.get((type(layers[at]), view.attention))
        if block is None and other is not None and check_wiring(other, view.sites(other)) <= ULPS * eps:
            block = other
        blocks[at] = block or view.ends()
    first = {type(layers[at]): at for at, block in reversed([*enumerate(blocks)]) if block.wiring == "parallel"}
    in_turn = {kind for kind, at in first.items() if mlp_reads_attention(model, layers[at], blocks[at], inputs)}
    return [
        replace(block, wiring="unknown") if block.wiring == "parallel" and type(layer) in in_turn else block
        for layer, block in zip(layers, blocks, strict=True)
    ]


def _kinds(model: Any, attentions: list[str]) -> list[str]:
    """What each layer mixes tokens by, as the configuration names it."""
    config = model.config.get_text_config()
    named = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    others = list(named) if len(named) == len(attentions) else ["no softmax attention"] * len(attentions)
    return [ATTENTION if path else other for path, other in zip(attentions, others, strict=True)]


def _feed_forward(layer: nn.Module, block: Block) -> tuple[str, ...]:
    """Fields of a row: the modules that make up the feed-forward network."""
    bert = ("intermediate.dense", "intermediate.intermediate_act_fn", "output.dense")
    usual = (("mlp",), ("fc1", "activation_fn", "fc2"), bert)
    known = next((paths for paths in usual if all(_has(layer, path) for path in paths)), None)
    address = block.sites.get("mlp_out", "")
    return known or ((address.partition(".")[0],) if address else ())


def _projections(model: Any, attentions: list[nn.Module]) -> dict[str, Any]:
    """Fields of a row. How one projection holds all three cannot be seen from outside: `qkv` is empty then, as it is
    where some layers have other keys than their own.
    """
    several, attention = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value")), attentions[0]
    known = next((names for names in several if all(_has(other, name) for other in attentions for name in names)), None)
    output = next((name for name in ("o_proj", "out_proj", "c_proj", "dense", "wo") if _has(attention, name)), "")
    heads = model.config.get_text_config().num_attention_heads
    if known is None:
        return {"qkv": (), "fused": "", "output": output}
    widths = [getattr(attention.get_submodule(name), "out_features", 0) for name in known]
    if not all(widths):  # in a module that is no plain matrix
        return {"qkv": (), "fused": "", "output": output}
    is_plain = widths[0] % heads == 0 and widths[1] == widths[2] and widths[1] % (widths[0] // heads) == 0
    taken = getattr(attention.get_submodule(output), "in_features", widths[0]) if output else widths[0]
    return {"qkv": known if is_plain and taken == widths[0] else (), "fused": "", "output": output}


def _has(layer: nn.Module, path: str) -> bool:
    """Whether a module exists."""
    try:
        layer.get_submodule(path)
    except AttributeError:
        return False
    return True

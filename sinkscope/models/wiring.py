"""Numerical checks of a family's row against a model, and the search for a row of a model that has none."""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from torch import nn

from sinkscope.errors import InputError, described
from sinkscope.models import families
from sinkscope.models.attention_modules import find_attentions, is_gated
from sinkscope.models.discovery import ULPS, Event, Layer, first_floats, record
from sinkscope.models.families import ATTENTION, RESIDUAL_SITES, Block, Family, first_tensor
from sinkscope.models.found_projections import find_projections
from sinkscope.models.streams import Copies, find_copies


@torch.no_grad()
def read_sites(model: nn.Module, family: Family, token_ids: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Every residual-stream site of every layer, each (B,T,D), read with torch's forward hooks and without nnsight.

    Copies of all are kept: for small inputs only.
    """
    records = []
    with ExitStack() as hooks:
        for index, layer in enumerate(family.layer_modules(model)):
            kept: dict[str, torch.Tensor] = {}
            records.append(kept)
            for address in {"input", *family.block(index).sites.values()}:
                path, _, end = address.rpartition(".")
                module = layer.get_submodule(path)
                if end == "input":
                    keep_input = partial(_keep_input, kept, address)
                    hooks.enter_context(module.register_forward_pre_hook(keep_input, with_kwargs=True))
                else:
                    hooks.enter_context(module.register_forward_hook(partial(_keep_output, kept, address)))
        model(token_ids, use_cache=False)
    return [_summed(family, family.block(index), kept) for index, kept in enumerate(records)]


def _summed(family: Family, block: Block, kept: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each site as it enters the residual stream."""
    kept = {address: family.stream(x) for address, x in kept.items()}
    shape = kept["input"].shape
    found = {}
    for site in RESIDUAL_SITES:
        if site not in block.sites:
            continue
        parts = [(term.scale, kept[term.address].view(shape)) for term in block.terms(site)]
        found[site] = sum((x if scale == 1.0 else scale * x for scale, x in parts[1:]), start=parts[0][0] * parts[0][1])
    return found


@torch.no_grad()
def layer_output(model: nn.Module, family: Family, layer: int, inputs: dict[str, Any]) -> torch.Tensor:
    """(B,T,D): what a layer gives on these inputs of the model, on the CPU."""
    kept: list[torch.Tensor] = []
    path, _, _ = family.block(layer).sites["layer_out"].rpartition(".")
    module = family.layer_modules(model)[layer].get_submodule(path)
    handle = module.register_forward_hook(
        lambda module, args, output: kept.append(family.stream(first_tensor(output)).cpu())
    )
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


def check_wiring(block: Block, sites: dict[str, torch.Tensor]) -> float:
    """How far one layer is from its wiring equation (head of families.py): largest error ÷ largest entry.

    Args:
        block: whose equation is to hold.
        sites: of one layer, as `read_sites` gives them.
    """
    stream = sites["layer_in"].double()
    expected = []
    if block.wiring == "unknown":
        return 0.0
    for branch, behind in (("attn_out", "mid"), ("mlp_out", "layer_out")):
        if branch in sites:
            stream = stream + sites[branch].double()
        if behind in sites and (behind == "mid" or block.wiring != "post-norm"):
            expected.append((stream, sites[behind]))
    return max((float((a - b).abs().max() / b.abs().max()) for a, b in expected), default=0.0)


def calibrate(model: Any, token_ids: torch.Tensor) -> Family:
    """A row for an architecture that has none: what every layer adds to the residual stream, found numerically.

    Args:
        model: a model whose type has no row.
        token_ids: (B,T), a few tokens to run.

    Raises:
        InputError: it fails by itself, attends both ways, or in a form that is not measured.
    """
    name, inputs = model.config.model_type, {"input_ids": token_ids, "use_cache": False}
    try:
        path = layer_stack(model, inputs)
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise InputError(f"'{name}' fails by itself on {token_ids.numel()} tokens [{described(error)}]") from error
    layers = list(model.get_submodule(path).children())
    if _sees_later_tokens(model, layers[-1], token_ids):
        raise InputError(f"'{name}' attends both ways, to later tokens too: only causal models are measured")
    attentions = find_attentions(model, path, layers, inputs)
    records = record(model, layers, inputs)
    _check_outputs(name, records)
    blocks = _blocks(model, layers, records, attentions.paths)
    copies = _copies(model, records[0][0].x, token_ids, blocks)
    known = [at for at, block in enumerate(blocks) if block.wiring != "unknown"]
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
        **_attention_fields(model, attending, attentions.door, inputs),
    )


def _attention_fields(model: Any, attending: dict[int, nn.Module], door: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """Fields of a row that its attention modules decide."""
    if not attending:
        return {"positions": "none", "qkv": (), "output": ""}
    modules = list(attending.values())
    fields = _projections(model, modules) | _positions(model, model.config.get_text_config())
    if door == "interface":
        fields["gated"] = is_gated(model, modules[0], fields["output"], inputs)
        fields["projections"] = dict(zip(attending, find_projections(model, modules), strict=True))
    return fields


def _check_outputs(name: str, records: list[list[Event]]) -> None:
    """Whether every layer ran and gives numbers."""
    for layer, events in enumerate(records):
        if not any(event.address == "output" for event in events):
            raise InputError(f"'{name}': layer {layer} does not run on token ids alone")
        out = next(event.x for event in reversed(events) if event.address == "output")
        if not out.isfinite().all() or not out.any():
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


def _blocks(model: Any, layers: list[nn.Module], records: list[list[Event]], attentions: list[str]) -> list[Block]:
    """How each layer is built. One in which nothing is added (its last projections are 0) is built as its like are."""
    eps = torch.finfo(next(model.parameters()).dtype).eps
    kinds = _kinds(model, attentions)
    views = [Layer(*parts) for parts in zip(layers, records, attentions, kinds, [eps] * len(layers), strict=True)]
    found = [view.block() for view in views]
    alike = {(type(layer), block.attention): block for layer, block in zip(layers, found, strict=True) if block}
    blocks = []
    for layer, view, block in zip(layers, views, found, strict=True):
        other = alike.get((type(layer), view.attention))
        if block is None and other is not None and check_wiring(other, view.sites(other)) <= ULPS * eps:
            block = other
        blocks.append(block or view.ends())
    return blocks


@torch.no_grad()
def layer_stack(model: Any, inputs: dict[str, Any]) -> str:
    """The path of the ModuleList through which the residual stream passes: each entry takes what the one before gave.

    Raises:
        InputError: there is none.
    """
    lists = {path: list(module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    ends: dict[nn.Module, list[torch.Tensor]] = {}
    with ExitStack() as hooks:
        for module in {entry for entries in lists.values() for entry in entries}:
            hooks.enter_context(module.register_forward_pre_hook(partial(_keep_end, ends), with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(partial(_keep_end, ends), with_kwargs=True))
        model(**inputs)
    chains = [
        path for path, entries in lists.items() if entries and _is_chain([ends.get(entry, []) for entry in entries])
    ]
    if not chains:
        runs = [{len(ends.get(entry, ())) // 2 for entry in entries} for entries in lists.values()]
        loops = [run for run, *others in runs if run > 1 and not others]
        why = f" (layers that run {max(loops)} times, in a loop, are not measured)" if loops else ""
        raise InputError(
            f"'{model.config.model_type}': no list of layers through which the tokens pass one by one{why}"
        )
    return max(chains, key=lambda path: sum(parameter.numel() for parameter in model.get_submodule(path).parameters()))


def _keep_end(
    ends: dict[nn.Module, list[torch.Tensor]], module: nn.Module, args: tuple, kwargs: dict, *output: Any
) -> None:
    """What a module takes, and then what it gives."""
    x = first_floats(output[0] if output else (*args, *kwargs.values()))
    if x is not None:
        ends.setdefault(module, []).append(x.detach().clone())


def _is_chain(ends: list[list[torch.Tensor]]) -> bool:
    """Whether all entries ran once, and each on what the one before gave."""
    if any(len(pair) != 2 for pair in ends):
        return False
    return all(_equal(before[1], after[0]) for before, after in pairwise(ends))


def _equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Bit for bit, where both may hold NaN."""
    return x.shape == y.shape and torch.allclose(x, y, rtol=0, atol=0, equal_nan=True)


@torch.no_grad()
def _sees_later_tokens(model: nn.Module, last: nn.Module, token_ids: torch.Tensor) -> bool:
    """Whether a token changes what the layers give for the tokens before it."""
    changed = token_ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % len(families.embedding_weight(model))
    kept: list[torch.Tensor] = []
    with last.register_forward_hook(lambda module, args, output: kept.append(first_tensor(output))):
        for ids in (token_ids, changed):
            model(input_ids=ids, use_cache=False)
    length = token_ids.shape[1]
    if kept[0].shape[1] != length:  # tokens of its own before or behind, or another order of axes
        return False
    before, after = (x[:, : length - 1].double() for x in kept)
    # relative to each token's own norm: beside a massive activation nothing else would count
    changes = (after - before).norm(dim=-1) / before.norm(dim=-1).clamp(min=1e-30)
    return float(changes.max()) > max(torch.finfo(kept[0].dtype).eps ** 0.5, 1e-5)  # some parts are in float32


def _kinds(model: Any, attentions: list[str]) -> list[str]:
    """What each layer mixes tokens by, as the configuration names it."""
    config = model.config.get_text_config()
    named = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    others = list(named) if len(named) == len(attentions) else ["no attention"] * len(attentions)
    return [ATTENTION if path else other for path, other in zip(attentions, others, strict=True)]


def _feed_forward(layer: nn.Module, block: Block) -> tuple[str, ...]:
    """Fields of a row: the modules that make up the feed-forward network."""
    usual = (("mlp",), ("fc1", "activation_fn", "fc2"))
    known = next((paths for paths in usual if all(_has(layer, path) for path in paths)), None)
    address = block.sites.get("mlp_out", "")
    return known or ((address.partition(".")[0],) if address else ())


def _projections(model: Any, attentions: list[nn.Module]) -> dict[str, Any]:
    """Fields of a row. How one projection holds all three cannot be seen from outside: `qkv` is empty then, as it is
    where some layers have other keys than their own.
    """
    known, attention = ("q_proj", "k_proj", "v_proj"), attentions[0]
    output = next((name for name in ("o_proj", "out_proj", "c_proj", "dense", "wo") if _has(attention, name)), "")
    heads = model.config.get_text_config().num_attention_heads
    if not all(_has(other, name) for other in attentions for name in known):
        return {"qkv": (), "fused": "", "output": output}
    widths = [getattr(attention.get_submodule(name), "out_features", 0) for name in known]
    if not all(widths):  # in a module that is no plain matrix
        return {"qkv": (), "fused": "", "output": output}
    is_plain = widths[0] % heads == 0 and widths[1] == widths[2] and widths[1] % (widths[0] // heads) == 0
    taken = getattr(attention.get_submodule(output), "in_features", widths[0]) if output else widths[0]
    return {"qkv": known if is_plain and taken == widths[0] else (), "fused": "", "output": output}


def _positions(model: nn.Module, config: Any) -> dict[str, Any]:
    """Fields of a row; positions are learned where a known row's embedding of them exists."""
    for row in chain.from_iterable(families.FAMILIES.values()):
        if row.position_embedding and _has(model, row.position_embedding):
            where = {"position_embedding": row.position_embedding, "position_offset": row.position_offset}
            return {"positions": "learned"} | where
    others = "rotary" if getattr(config, "rope_parameters", None) else "unknown"
    positions = "alibi" if getattr(config, "alibi", False) else others
    return {"positions": positions, "position_embedding": "", "position_offset": 0}


def _has(layer: nn.Module, path: str) -> bool:
    """Whether a module exists."""
    try:
        layer.get_submodule(path)
    except AttributeError:
        return False
    return True

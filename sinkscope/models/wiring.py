"""Numerical checks of a family's row against a model, and the search for a row of a model that has none."""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from sinkscope.errors import InputError, described
from sinkscope.models import families
from sinkscope.models.attention_functions import attending_by
from sinkscope.models.discovery import Layer, first_floats, record
from sinkscope.models.families import ATTENTION, RESIDUAL_SITES, UNKNOWN_POSITIONS, Block, Family, first_tensor


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
    return [_summed(family.block(index), kept) for index, kept in enumerate(records)]


def _summed(block: Block, kept: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Each site as it enters the residual stream."""
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


def check_wiring(block: Block, sites: dict[str, torch.Tensor]) -> float:
    """How far one layer is from its wiring equation (head of families.py): largest error ÷ largest entry.

    Args:
        block: whose equation is to hold.
        sites: of one layer, as `read_sites` gives them.
    """
    stream = sites["layer_in"].double()
    expected = []
    for branch, behind in (("attn_out", "mid"), ("mlp_out", "layer_out")):
        if branch in sites:
            stream = stream + sites[branch].double()
        if behind in sites and (behind == "mid" or block.wiring != "post-norm"):
            expected.append((stream, sites[behind]))
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in expected)


def calibrate(model: Any, token_ids: torch.Tensor) -> Family:
    """A row for an architecture that has none: what every layer adds to the residual stream, found numerically.

    Args:
        model: a model whose type has no row.
        token_ids: (B,T), a few tokens to run.

    Raises:
        InputError: it has no softmax attention, attends both ways, or a layer is not built in a way that is known.
    """
    name, inputs = model.config.model_type, {"input_ids": token_ids, "use_cache": False}
    try:
        path = layer_stack(model, inputs)
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise InputError(f"'{name}' fails by itself on {token_ids.numel()} tokens [{described(error)}]") from error
    layers = list(model.get_submodule(path).children())
    if _sees_later_tokens(model, layers[-1], token_ids):
        raise InputError(f"'{name}' attends both ways, to later tokens too: only causal models are measured")
    door = _door(model)
    attentions = attention_paths(model, path, layers, inputs) if door == "interface" else _named_attentions(layers)
    if not any(attentions):
        raise InputError(f"'{name}' has no softmax attention in any layer")
    eps = torch.finfo(next(model.parameters()).dtype).eps
    kinds = _kinds(model, attentions)
    blocks = []
    for index, events in enumerate(record(model, layers, inputs)):
        block = Layer(layers[index], events, eps, attentions[index]).block(kinds[index]) if events else None
        if block is None:
            raise InputError(
                f"'{name}': what layer {index} adds to the residual stream is not in a form that is known "
                f"({type(layers[index]).__name__} at '{path}.{index}'): it needs a row in sinkscope/models/families.py"
            )
        blocks.append(block)
    first = next(at for at, block in enumerate(blocks) if block.attention)
    main = blocks[first]
    attention = layers[first].get_submodule(main.attention)
    projections = _projections(model, attention)
    return Family(
        name=name,
        layers=path,
        attention=main.attention,
        sites=main.sites,
        wiring=main.wiring,
        door=door,
        mlp=_feed_forward(layers[first], main),
        blocks=()
        if all(block == Block(main.attention, main.sites, main.wiring) for block in blocks)
        else tuple(blocks),
        positions=UNKNOWN_POSITIONS,
        gated=door == "interface" and _is_gated(model, attention, projections["output"], inputs),
        **projections,
    )


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
        raise InputError(f"'{model.config.model_type}': no list of layers through which the tokens pass one by one")
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
    return all(torch.equal(before[1], after[0]) for before, after in pairwise(ends))


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


def attention_paths(model: nn.Module, path: str, layers: list[nn.Module], inputs: dict[str, Any]) -> list[str]:
    """By layer the path of the module that calls transformers' attention function; "" where none does.

    Raises:
        InputError: a layer attends more than once, or in code of its own beside layers that do not.
    """
    names = {module: name for name, module in model.named_modules()}
    callers = [names[module].removeprefix(f"{path}.") for module, _ in _calls(model, inputs) if module in names]
    found: list[list[str]] = [[] for _ in layers]
    for caller in callers:
        index, _, inner = caller.partition(".")
        if index.isdecimal() and int(index) < len(layers):
            found[int(index)].append(inner)
    for index, inner_paths in enumerate(found):
        if len(inner_paths) > 1 and _is_shared(layers[index].get_submodule(inner_paths[0]), layers):
            raise InputError("several layers share one attention module, which is not measured")
        if len(inner_paths) > 1:
            raise InputError(f"layer {index} attends {len(inner_paths)} times, of which one softmax is not the whole")
        own = None if inner_paths else _attention_class(layers[index])
        if own is not None:
            raise InputError(f"layer {index}: its {own} does not call transformers' attention functions")
    return [inner_paths[0] if inner_paths else "" for inner_paths in found]


def _is_shared(module: nn.Module, layers: list[nn.Module]) -> bool:
    return sum(any(part is module for part in layer.modules()) for layer in layers) > 1


@torch.no_grad()
def _calls(model: nn.Module, inputs: dict[str, Any]) -> list[tuple[nn.Module, torch.Tensor]]:
    """The modules that call an attention function of transformers, in their order, and what it gives, (B,T,H,d)."""
    calls: list[tuple[nn.Module, torch.Tensor]] = []

    def listening(own: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("position_bias") is not None:
            raise InputError("its attention adds a learned position bias, which is not measured")
        given = own(module, *args, **kwargs)
        calls.append((module, given[0].detach().clone()))
        return given

    with attending_by(listening):
        model(**inputs)
    return calls


@torch.no_grad()
def _is_gated(model: nn.Module, attention: nn.Module, output: str, inputs: dict[str, Any]) -> bool:
    """Whether the output projection takes what attention gives times factors between 0 and 1 that no module makes."""
    if not output:
        return False
    given: list[torch.Tensor] = []
    with ExitStack() as hooks:
        for module in attention.modules():
            hooks.enter_context(
                module.register_forward_hook(lambda module, args, result: given.append(first_tensor(result)))
            )
        projection = attention.get_submodule(output)
        taken: list[torch.Tensor] = []
        hooks.enter_context(projection.register_forward_pre_hook(lambda module, args: taken.append(args[0].clone())))
        mix = next(mix for module, mix in _calls(model, inputs) if module is attention)
    x, plain = taken[0], mix.flatten(2)
    if x.shape != plain.shape or any(isinstance(other, torch.Tensor) and torch.equal(other, x) for other in given):
        return False
    factors = (x / plain)[plain.abs() > plain.abs().median() / 100]
    return not torch.equal(x, plain) and bool(((factors > 0) & (factors < 1)).all())


# in the names of classes that mix tokens in another way than by a softmax
NO_SOFTMAX = ("Linear", "Lightning", "Delta", "Mamba", "Recurrent", "Retention", "Conv", "Kda", "KDA")


def _attention_class(layer: nn.Module) -> str | None:
    """The class of a layer's softmax attention, by its name; None where it has none."""
    kinds = (type(module).__name__ for module in layer.modules())
    return next((kind for kind in kinds if "Attention" in kind and not any(word in kind for word in NO_SOFTMAX)), None)


def _named_attentions(layers: list[nn.Module]) -> list[str]:
    """By layer the path of its attention module, by the names that are usual."""
    return [
        next((path for path in _ATTENTIONS if _has(layer, path)), "") if _attention_class(layer) else ""
        for layer in layers
    ]


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


def _projections(model: Any, attention: nn.Module) -> dict[str, Any]:
    """Fields of a row. How one projection holds all three cannot be seen from outside: `qkv` is empty then."""
    known = ("q_proj", "k_proj", "v_proj")
    output = next((name for name in ("o_proj", "out_proj", "c_proj", "dense", "wo") if _has(attention, name)), "")
    heads = model.config.get_text_config().num_attention_heads
    if not all(_has(attention, name) for name in known):
        return {"qkv": (), "fused": "", "output": output}
    widths = [getattr(attention.get_submodule(name), "out_features", 0) for name in known]
    if not all(widths):  # in a module that is no plain matrix
        return {"qkv": (), "fused": "", "output": output}
    is_plain = widths[0] % heads == 0 and widths[1] == widths[2] and widths[1] % (widths[0] // heads) == 0
    taken = getattr(attention.get_submodule(output), "in_features", widths[0]) if output else widths[0]
    return {"qkv": known if is_plain and taken == widths[0] else (), "fused": "", "output": output}


_ATTENTIONS = ("attn.attention", "self_attn", "self_attention", "attention", "attn", "multi_head_attention")


def _has(layer: nn.Module, path: str) -> bool:
    """Whether a module exists."""
    try:
        layer.get_submodule(path)
    except AttributeError:
        return False
    return True


def _door(model: Any) -> str:
    """By transformers' own check before it changes the attention implementation."""
    able = getattr(model, "_can_set_attn_implementation", None)
    return "interface" if able is not None and able() else "interceptor"

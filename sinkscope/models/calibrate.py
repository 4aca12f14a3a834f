"""Finds how a model without a row in FAMILIES is built, by running it on a few tokens.

The inputs and outputs of every module of a layer are kept. A branch of the layer is then a module whose output, times a
constant, is the difference between two states of the residual stream (or two parallel modules, such as attention and a
state-space model, or shared and routed experts), in one of the wirings at the head of family.py.

Sums are compared entry by entry up to round-off of the model's dtype, so that only the true sum passes.

Queries, keys and values are found with sequences of one token: rotary positions leave position 0 unrotated, so the
input of attention equals the output of a projection bit for bit, unless a norm, a convolution or a latent is between.
Any order of heads and roles within a module is found: one projection for all three, a latent's up-projection that holds
keys and values, or one module each. Queries and keys may be normalized head by head, because their weights can still be
edited; values may not, because a norm would undo a scaling of them.
"""

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from sinkscope.errors import InputError, described
from sinkscope.models.edits import MATMULS, SOFTMAXES, as_product, attending_by, edited_input
from sinkscope.models.family import (
    ATTENTION,
    FEED_FORWARD,
    NO_POSITIONS,
    NO_SOFTMAX,
    NOT_RUN,
    PASSING,
    UNKNOWN_POSITIONS,
    UNREAD,
    WRONG_INPUTS,
    Block,
    Family,
    Outputs,
    Role,
    Term,
    embedding_weight,
    find_copies,
    input_device,
)
from sinkscope.models.in_memory import error_origin
from sinkscope.models.projections import LINEAR_LAYERS, ROLES
from sinkscope.models.wiring import Event, at_sites, check_wiring, mlp_reads_attention, output_of, record_ends

ULPS = 8  # tolerance in units in the last place of the larger term: a sum of three rounded terms
USUAL_FEED_FORWARDS = (  # the modules of a feed-forward network under usual names
    ("mlp",),
    ("fc1", "activation_fn", "fc2"),
    ("intermediate.dense", "intermediate.intermediate_act_fn", "output.dense"),
)
PROBES = 4  # sequences: two outputs that are equal in all of them are taken to be the same
USUAL_OUTPUTS = ("o_proj", "out_proj", "c_proj", "dense", "wo")  # usual names of the output projection


class AttentionModule(NamedTuple):
    """The attention of one layer."""

    path: str = ""  # path of its module; "" if there is none, or several
    kind: str = ""  # ATTENTION, UNREAD, or "" if no softmax over tokens runs
    unread: str = ""  # why its weights cannot be read


def calibrate(model: Any, token_ids: torch.Tensor) -> Family:
    """Make a row for an architecture that has none; InputError if it fails on these tokens (B,T)."""
    name, inputs = model.config.model_type, {"input_ids": token_ids, "use_cache": False}
    if getattr(model.config, "is_encoder_decoder", False):
        raise InputError(f"'{name}' is an encoder–decoder, and only decoders and encoders are measured")
    other_ids = (token_ids + 1) % len(embedding_weight(model))
    try:
        path = layer_stack(model, inputs, inputs | {"input_ids": other_ids})
    except WRONG_INPUTS as error:
        place, _ = error_origin(error, model)
        where = f", in {place}" if place else ""
        raise InputError(f"'{name}' fails on {token_ids.numel()} tokens{where} [{described(error)}]") from error
    layers = list(model.get_submodule(path).children())
    door, attentions = find_attentions(model, path, layers, inputs)
    records = _recorded_layers(model, layers, inputs)
    blocks = _blocks(model, layers, records, attentions, inputs)
    ran = [layer for layer, events in enumerate(records) if events]
    known = [layer for layer in ran if blocks[layer].wiring != "unknown"]
    stream, tokens, copies = records[ran[0]][0].x, token_ids.shape, None
    if not known or stream.shape[:-1] != tokens:
        copies = find_copies(stream, tokens, getattr(model.config.get_text_config(), "hidden_size", stream.shape[-1]))
        if copies is None and stream.shape[:-1] != tokens:
            raise InputError(
                f"'{name}': its layers take {tuple(stream.shape[:-1])} vectors for {tuple(tokens)} tokens, "
                "so positions in its layers are not those of the text"
            )
    paths = {layer: block.attention for layer, block in enumerate(blocks) if block.attention}
    first = next(iter(paths), next(iter(known), 0))
    main = blocks[first]
    are_alike = all(block == Block(main.attention, main.sites, main.wiring) for block in blocks)
    no_positions = UNKNOWN_POSITIONS if any(block.unread for block in blocks) else NO_POSITIONS
    attention_fields: dict[str, Any] = {"positions": no_positions, "qkv": (), "output": ""}
    if paths:
        modules = [layers[layer].get_submodule(path) for layer, path in paths.items()]
        qkv, output = _projections(model, modules)
        attention_fields = {"positions": UNKNOWN_POSITIONS, "qkv": qkv, "output": output}
        if door == "interface":
            attention_fields["gated"] = is_gated(model, modules[0], output, inputs)
            attention_fields["projections"] = dict(zip(paths, find_projections(model, modules), strict=True))
    address = main.sites.get("mlp_out", "")
    by_address = (address.partition(".")[0],) if address else ()
    mlp = next((parts for parts in USUAL_FEED_FORWARDS if _has_modules(layers[first], *parts)), by_address)
    return Family(
        name=name,
        layers=path,
        attention=main.attention,
        sites=main.sites,
        wiring=main.wiring,
        door=door,
        mlp=mlp,
        down=_last_projection(layers[first], records[first], mlp, address) or Family.down,
        blocks=() if are_alike else tuple(blocks),
        copies=copies,
        causal=not sees_later_tokens(model, layers[ran[-1]], token_ids),
        first_position=first_position(model, layers[ran[-1]], token_ids),
        **attention_fields,
    )


def _recorded_layers(model: Any, layers: Sequence[nn.Module], inputs: Mapping[str, Any]) -> list[list[Event]]:
    """Return the float64 inputs and outputs of the residual stream's size in every layer; [] if it does not run.

    Raises InputError if a layer that runs has no output, or one that no number can be read from.
    """
    ends = record_ends(model, {module for layer in layers for module in layer.modules()}, inputs)
    records: list[list[Event]] = []
    for number, layer in enumerate(layers):
        start = next((event.x for event in ends.get(layer, ()) if event.end == "input"), None)
        events = [
            event._replace(x=event.x.double().view(start.shape), path=path)
            for path, module in layer.named_modules()
            for event in ends.get(module, ())
            if start is not None and event.x.numel() == start.numel() and event.x.shape[-1] == start.shape[-1]
        ]
        records.append(sorted(events, key=lambda event: event.order))
        if not events:  # layers that read pictures do not run
            continue
        name = f"'{model.config.model_type}': layer {number}"
        out = next((event.x for event in reversed(records[-1]) if event.address == "output"), None)
        if out is None:
            raise InputError(f"{name} does not run on token ids only")
        if not out.isfinite().all() or not out.any():
            gives = "only zeros" if out.isfinite().all() else "NaN or infinite numbers"
            raise InputError(f"{name} gives {gives}: check its weights, and whether its numbers fit into its dtype")
    return records


def _blocks(
    model: Any,
    layers: list[nn.Module],
    records: list[list[Event]],
    attentions: list[AttentionModule],
    inputs: dict[str, Any],
) -> list[Block]:
    """Find how each layer is built; a layer that adds 0 is assumed to be wired like others of its class."""
    eps = torch.finfo(next(model.parameters()).dtype).eps
    config = model.config.get_text_config()
    named = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    others = list(named) if len(named) == len(attentions) else [NO_SOFTMAX] * len(attentions)
    kinds = [attention.kind or other for attention, other in zip(attentions, others, strict=True)]
    views: dict[int, _Layer] = {}
    for number, layer in enumerate(layers):
        events = records[number]
        if not events:
            continue
        if kinds[number] == NO_SOFTMAX and not mixes_tokens(model, layer, inputs):
            kinds[number] = PASSING if torch.equal(events[0].x, events[-1].x) else FEED_FORWARD[0]
        views[number] = _Layer(layer, events, attentions[number].path, kinds[number], eps)
    fitting = {number: view.block() for number, view in views.items()}
    alike = {(type(layers[number]), block.attention): block for number, block in fitting.items() if block}
    blocks = [Block("", {}, "single", kind=NOT_RUN)] * len(layers)
    for number, view in views.items():
        block, other = fitting[number], alike.get((type(layers[number]), view.attention))
        if block is None and other is not None and check_wiring(other, at_sites(other, view.known)) <= ULPS * eps:
            block = other
        # the wiring is unknown: only the layer's input and output are read
        wiring = "single" if view.kind == PASSING else "unknown"
        blocks[number] = block or Block(view.attention, {"layer_in": "input", "layer_out": "output"}, wiring, view.kind)
    in_turn: dict[type, bool] = {}  # class of a layer with parallel branches → whether its MLP reads the attention
    for number, (layer, attention) in enumerate(zip(layers, attentions, strict=True)):
        block = blocks[number]
        if block.wiring == "parallel":
            if type(layer) not in in_turn:
                in_turn[type(layer)] = mlp_reads_attention(model, layer, block, inputs)
            if in_turn[type(layer)]:
                block = replace(block, wiring="unknown")
        if attention.unread and block.kind in (UNREAD, NO_SOFTMAX):
            # the configuration may name what mixes the tokens, such as linear attention
            block = replace(block, attention="", unread=attention.unread)
        blocks[number] = block
    return blocks


def _projections(model: Any, attentions: list[nn.Module]) -> tuple[tuple[str, ...], str]:
    """Return `qkv` and `output` of a row; `qkv` is empty if its layout is unknown or some layers share keys."""
    several, attention = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value")), attentions[0]
    known = next((names for names in several if all(_has_modules(other, *names) for other in attentions)), ())
    output = next((name for name in USUAL_OUTPUTS if _has_modules(attention, name)), "")
    heads = model.config.get_text_config().num_attention_heads
    widths = [getattr(attention.get_submodule(name), "out_features", 0) for name in known]
    if not widths or not all(widths):  # a module is not a plain matrix
        return (), output
    query, key, value = widths
    taken = getattr(attention.get_submodule(output), "in_features", query) if output else query
    is_plain = query % heads == 0 and key == value and key % (query // heads) == 0 and taken == query
    return known if is_plain else (), output


def _last_projection(layer: nn.Module, events: list[Event], mlp: tuple[str, ...], mlp_out: str) -> str | None:
    """Return the path of the projection that ends the feed-forward network; None if something else ends it."""
    within = tuple(f"{path}." for path in mlp)
    inside = [event for event in events if event.end == "output" and f"{event.path}.".startswith(within)]
    linear = [event for event in inside if isinstance(layer.get_submodule(event.path), LINEAR_LAYERS)]
    # a norm may follow the network, or it adds the residual stream itself
    ends = [event.x for event in events if event.address == mlp_out] + [event.x for event in inside[-1:]]
    return linear[-1].path if linear and any(torch.equal(linear[-1].x, x) for x in ends) else None


def _has_modules(layer: nn.Module, *paths: str) -> bool:
    return set(paths) <= {path for path, _ in layer.named_modules(remove_duplicate=False)}


# --- the list of layers


def layer_stack(model: Any, inputs: dict[str, Any], others: dict[str, Any]) -> str:
    """Return the path of the ModuleList through which the residual stream passes.

    Most of its entries run once, each on the output of the one before, and the input of the first depends on the
    tokens: `others` are the same inputs of the model with other tokens. Of several lists, the largest is returned.
    """
    lists = {path: list(module) for path, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    entries = {entry for entries in lists.values() for entry in entries}
    ends = record_ends(model, entries, inputs)
    # in a vocabulary of one token there are no others, and the first input is assumed to depend on the tokens
    alike = torch.equal(inputs["input_ids"], others["input_ids"])
    ends_of_others = None if alike else record_ends(model, entries, others)
    chains = []
    for path, layers in lists.items():
        # some may not run, such as layers that read pictures
        ran = [layer for layer in layers if layer in ends and (ends_of_others is None or layer in ends_of_others)]
        pairs = [ends[layer] for layer in ran]
        runs_once = 2 * len(ran) > len(layers) and all(len(pair) == 2 for pair in pairs)
        if not runs_once or not all(_equal(before[1].x, after[0].x) for before, after in pairwise(pairs)):
            continue
        if ends_of_others is None or not _equal(pairs[0][0].x, ends_of_others[ran[0]][0].x):
            chains.append(path)
    if not chains:
        runs = [{len(ends.get(layer, ())) // 2 for layer in layers} for layers in lists.values() if layers]
        loops = [run for run, *further in runs if run > 1 and not further]
        why = f" (layers that run {max(loops)} times, in a loop, are not measured)" if loops else ""
        raise InputError(
            f"'{model.config.model_type}': no list of layers through which the tokens pass one by one{why}"
        )
    return max(chains, key=lambda path: sum(parameter.numel() for parameter in model.get_submodule(path).parameters()))


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether tensors are equal bit for bit; NaN equals NaN."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)


# --- attention modules, and how they make queries, keys and values


def find_attentions(
    model: nn.Module, path: str, layers: list[nn.Module], inputs: Mapping[str, Any]
) -> tuple[str, list[AttentionModule]]:
    """Return the family's `door`, and the attention of every layer, for the list of layers at a path."""
    names = {module: name for name, module in model.named_modules()}
    seen = [(how, names.get(module, "")) for module, how, _ in watch_attention(model, inputs)]
    prefixes = [f"{path}.{index}." for index in range(len(layers))]
    by_layer = [
        [(how, place.removeprefix(prefix)) for how, place in seen if place.startswith(prefix)] for prefix in prefixes
    ]
    ways = {how for ran in by_layer for how, _ in ran}
    door = "interface" if "interface" in ways or "interceptor" not in ways else "interceptor"
    attentions = [_layer_attention(layer, ran, door) for layer, ran in zip(layers, by_layer, strict=True)]
    for layer, attention in zip(layers, attentions, strict=True):
        module = layer.get_submodule(attention.path)
        sharing = [number for number, other in enumerate(layers) if any(part is module for part in other.modules())]
        if attention.path and len(sharing) > 1:
            which = f"layers {', '.join(map(str, sharing))} share one {type(module).__name__}"
            for number in sharing:
                attentions[number] = AttentionModule("", UNREAD, which)
    return door, attentions


def _layer_attention(layer: nn.Module, ran: Sequence[tuple[str, str]], door: str) -> AttentionModule:
    """Return the attention of a layer in which these ran: (how, path) each, as in `watch_attention`."""
    softmaxes = [(how, path) for how, path in ran if how != "product"]
    paths = list(dict.fromkeys(path for _, path in softmaxes or ran))
    kinds = ", ".join(type(layer.get_submodule(path)).__name__ for path in paths)
    if not softmaxes:
        return AttentionModule(unread=f"its {kinds} multiplies tokens with tokens, but by no softmax" if ran else "")
    if len(paths) > 1:
        return AttentionModule("", UNREAD, f"it has {len(paths)} attention modules ({kinds})")
    if any(how == "other" for how, _ in softmaxes):
        return AttentionModule(paths[0], UNREAD, f"its {kinds} takes no softmax of one product of queries and keys")
    if len(softmaxes) > 1:
        why = f"its {kinds} attends {len(softmaxes)} times and combines the results"
        return AttentionModule(paths[0], UNREAD, why)
    if softmaxes[0][0] != door:
        return AttentionModule(paths[0], UNREAD, f"its {kinds} attends in code of its own, unlike other layers")
    return AttentionModule(paths[0], ATTENTION)


@torch.no_grad()
def watch_attention(model: nn.Module, inputs: Mapping[str, Any]) -> list[tuple[nn.Module, str, torch.Tensor | None]]:
    """Run the model, and return in order the modules that compute attention, how, and their mix (B,T,H,d) if known.

    How: by transformers' "interface"; in code of their own that an "interceptor" recognizes; in an "other" form, where
    the softmax over keys does not follow a product; or as a "product" of tokens with tokens without a softmax.
    """
    watch = _Watch(inputs["input_ids"].shape[1])

    def listening(attend: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        watch.is_off = True
        try:
            mix, *rest = attend(module, *args, **kwargs)
        finally:
            watch.is_off = False
        watch.ran.append((module, "interface", mix.detach().clone()))
        return mix, *rest

    with ExitStack() as stack:
        for module in model.modules():
            if next(module.parameters(), None) is not None:  # a dropout or a softmax is not an attention module
                stack.enter_context(module.register_forward_pre_hook(watch.enter))
                stack.enter_context(module.register_forward_hook(watch.leave))
        stack.enter_context(attending_by(model, listening))
        stack.enter_context(watch)
        model(**inputs)
    return watch.ran


class _Watch(TorchFunctionMode):
    """Records the modules that compute attention by a softmax in their own code."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.ran: list[tuple[nn.Module, str, torch.Tensor | None]] = []
        self.length = length  # T
        self.running: list[nn.Module] = []
        self.product = 0  # size of the last product of two batched tensors in the running module
        self.is_square = False  # whether that product is over pairs of tokens, and no softmax has followed
        self.is_off = False

    def enter(self, module: nn.Module, args: Any) -> None:
        self._end_product()
        self.running.append(module)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._end_product()
        self.running.pop()

    def _end_product(self) -> None:
        """Forget the last product, when another module begins or the running one ends."""
        if self.is_square:
            self.ran.append((self.running[-1], "product", None))
        self.product, self.is_square = 0, False

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.is_off or not self.running:
            return result
        if func is torch.einsum:
            product = as_product(*args)
            if product is not None and product.is_stored:
                self.product = result.numel()
                self.is_square |= self._is_over_pairs(result)
        elif func in MATMULS:
            self.product = result.numel() if result.dim() > 2 else 0
            self.is_square |= result.dim() > 2 and self._is_over_pairs(result)
        elif func is F.scaled_dot_product_attention and _attends_to_tokens(self.length, *args, **(kwargs or {})):
            self.ran.append((self.running[-1], "interceptor", None))
        elif func in SOFTMAXES and result.dim() > 2 and self._is_over_pairs(result):
            how, self.is_square = "interceptor" if result.numel() == self.product else "other", False
            self.ran.append((self.running[-1], how, None))
        return result

    def _is_over_pairs(self, x: torch.Tensor) -> bool:
        return x.shape[-2] == x.shape[-1] >= self.length


def _attends_to_tokens(length: int, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    """Return whether the keys of a call are the tokens, and not, for example, states of earlier layers."""
    return query.shape[-2] == key.shape[-2] >= length


@torch.no_grad()
def is_gated(model: nn.Module, attention: nn.Module, output: str, inputs: Mapping[str, Any]) -> bool:
    """Return whether the output projection reads attention's mix times factors in (0, 1), which no module returns."""
    if not output:
        return False
    events = record_ends(model, attention.modules(), inputs)
    x = events[attention.get_submodule(output)][0].x
    mixes = (mix for module, _, mix in watch_attention(model, inputs) if module is attention and mix is not None)
    plain = next(mixes).flatten(2).cpu()
    returned = [event.x for runs in events.values() for event in runs if event.end == "output"]
    if x.shape != plain.shape or any(torch.equal(other, x) for other in returned):
        return False
    factors = (x / plain)[plain.abs() > plain.abs().median() / 100]
    return not torch.equal(x, plain) and bool(((factors > 0) & (factors < 1)).all())


@torch.no_grad()
def find_projections(model: Any, attending: Sequence[nn.Module]) -> list[dict[Role, Outputs]]:
    """Find the module and its outputs of each role in each attention module that uses transformers' interface."""
    states: dict[nn.Module, tuple[torch.Tensor, ...]] = {}
    ends: dict[nn.Module, list[Event]] = {}

    def listening(attend: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        states[module] = tuple(x[:, :, 0].clone().cpu() for x in args[:3])  # (B,heads,d) of query, key and value
        return attend(module, *args, **kwargs)

    modules = {module for attention in attending for module in attention.modules()}
    linear = [module for module in modules if isinstance(module, LINEAR_LAYERS)]
    ids = torch.arange(3, 3 + PROBES, device=input_device(model))[:, None] % len(embedding_weight(model))
    # some models cannot read single tokens
    with suppress(RuntimeError, ValueError, IndexError), attending_by(model, listening):
        ends = record_ends(model, linear, {"input_ids": ids, "use_cache": False})
    outputs = [(module, event.x) for module, runs in ends.items() for event in runs if event.end == "output"]
    # only those with one vector per token
    by_module = {module: x.flatten(1) for module, x in outputs if x.dim() >= 3 and x[0].numel() == x.shape[-1]}
    projections: list[dict[Role, Outputs]] = []
    for attention in attending:
        projected = {path: by_module[module] for path, module in attention.named_modules() if module in by_module}
        columns = {path: {entry: column for column, entry in enumerate(_as_bytes(x))} for path, x in projected.items()}
        projections.append({})
        for role, state in zip(ROLES, states.get(attention, ()), strict=False):
            heads, width = state.shape[1:]
            entries, in_order = _as_bytes(state.flatten(1)), list(range(heads * width))
            # outputs are found by their values, which are distinct, or else by their order before a norm of each head
            exact = [(path, [known[entry] for entry in entries if entry in known]) for path, known in columns.items()]
            candidates = [(path, places) for path, places in exact if len(places) == len(set(places)) == len(entries)]
            if role != "value":
                candidates += [(path, in_order) for path, x in projected.items() if _is_normed(state, x)]
            if candidates:
                path, places = candidates[0]
                by_head = (places[start : start + width] for start in range(0, len(places), width))
                projections[-1][role] = Outputs(path, tuple(map(tuple, by_head)))
    return projections


def _as_bytes(x: torch.Tensor) -> list[bytes]:
    return [entry.tobytes() for entry in x.double().cpu().T.contiguous().numpy()]


def _is_normed(state: torch.Tensor, outputs: torch.Tensor) -> bool:
    """Return whether a state is the outputs in order, times one factor for each sequence and one for each channel."""
    if outputs.shape[1] != state[0].numel():
        return False
    factors = state.double() / outputs.double().view(state.shape)
    by_sequence = factors.median(-1, keepdim=True).values
    by_channel = (factors / by_sequence).median(0, keepdim=True).values
    return bool(((factors - by_sequence * by_channel).abs() <= 0.05 * factors.abs()).double().mean() > 0.9)


# --- the tokens that a token sees, and their positions


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
def mixes_tokens(model: nn.Module, layer: nn.Module, inputs: Mapping[str, Any]) -> bool:
    """Return whether the first vector of a layer's input changes its output at other tokens."""
    before, length = output_of(layer, model, inputs), inputs["input_ids"].shape[1]
    if before.dim() < 3 or before.shape[1] != length:  # another order of axes
        return True
    with edited_input(layer, lambda module, x: torch.cat([x[:, :1].flip(-1), x[:, 1:]], dim=1)):
        after = output_of(layer, model, inputs)
    return not _are_alike(before[:, 1:], after[:, 1:])


@torch.no_grad()
def first_position(model: nn.Module, last: nn.Module, token_ids: torch.Tensor) -> int | None:
    """Return the number in `position_ids` of a sequence's first position; None if the model takes none."""
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


# --- the sums in a layer


class _Branch(NamedTuple):
    """One or two modules whose outputs, times their scales, are added to the residual stream."""

    events: tuple[Event, ...]  # in the order in which they ran
    scales: tuple[float, ...]

    @property
    def last(self) -> Event:
        return self.events[-1]

    @property
    def rank(self) -> tuple:
        """Return a sort key, smaller is better: unscaled outputs first, then outer modules, then early ones."""
        scaled = any(scale != 1.0 for scale in self.scales)
        return (scaled, sum(event.path.count(".") for event in self.events), self.last.order)

    def covers(self, path: str) -> bool:
        """Return whether the module at this path is one of the branch's modules or part of one."""
        return any(_within(path, event.path) for event in self.events)


class _Layer:
    """The inputs and outputs of the modules of one layer, and the search for the sums between them."""

    def __init__(self, module: nn.Module, events: Sequence[Event], attention: str, kind: str, eps: float) -> None:
        self.module = module
        self.attention = attention  # path of the attention module; "" if the layer has none
        self.kind = kind  # see Block
        self.eps = eps
        self.h = next(event for event in events if event.address == "input")
        self.out = next(event for event in reversed(events) if event.address == "output")
        self.inner = [event for event in events if event.path]
        runs = Counter(event.address for event in self.inner)
        # a hook would read only the first of several runs
        inner = [event for event in self.inner if runs[event.address] == 1]
        self.inputs = [event for event in inner if event.end == "input"]
        self.outputs = [event for event in inner if event.end == "output"]
        self.known = {event.address: event.x for event in (*inner, self.h, self.out)}

    def block(self) -> Block | None:
        """Return how this layer is built; None if none of the known sums fits."""
        wiring, attention, mid, mlp, out_sum = self._branches()
        if not wiring:
            return None
        # a single branch needs no check: only it can contain the attention module
        if self.attention and wiring != "single" and not self._carries_attention(attention):
            return None
        norm = self._norm_before(self.h, attention) if attention else None
        mlp_norm = self._norm_before(mid or self.h, mlp) if mlp and wiring != "post-norm" else None
        addresses = {
            "layer_in": "input",
            "attn_norm": norm,
            "attn_out": attention and attention.last.address,
            "mid": mid and mid.address,
            "mlp_norm": None if wiring == "parallel" and mlp_norm == norm else mlp_norm,
            "mlp_out": mlp and mlp.last.address,
            "out_sum": out_sum and out_sum.address,
            "layer_out": "output",
        }
        branches = {site: branch for site, branch in (("attn_out", attention), ("mlp_out", mlp)) if branch}
        for site, branch in branches.items():
            if len(branch.events) > 1:
                addresses[f"{site}, first term"] = branch.events[0].address
        orders = {event.address: event.order for event in (*self.inputs, *self.outputs, self.h, self.out)}
        sites = {site: address for site, address in addresses.items() if address}
        return Block(
            attention=self.attention,
            sites=dict(sorted(sites.items(), key=lambda site: orders[site[1]])),
            wiring=wiring,
            kind=self.kind,
            sums={
                site: tuple(map(Term, (event.address for event in branch.events), branch.scales))
                for site, branch in branches.items()
                if branch.scales != (1.0,)
            },
        )

    def _branches(self) -> tuple[str, _Branch | None, Event | None, _Branch | None, Event | None]:
        """Find wiring, attention branch, mid, MLP branch, out_sum; the wiring is "" if none of the known sums fits."""
        for mid in self.inputs:  # two sequential branches, where a norm that ends the layer may follow the second
            if self._is(mid.x, self.h.x):
                continue
            attention = self._branch(self.h.x, mid.x, before=mid.order)
            if attention is None:
                continue
            mlp = self._branch(mid.x, self.out.x, after=mid.order)
            if mlp is not None:
                return "sequential", attention, mid, mlp, None
            mlp, out_sum = self._normed_branch(mid)
            if mlp is not None:
                return "post-norm", attention, mid, mlp, out_sum
        single = self._terms(self.h.x, self.out.x, self.outputs, 1)
        if single is not None:
            attention, mlp = (None, single) if self.kind in FEED_FORWARD else (single, None)
            return "single", attention, None, mlp, None
        both = self._terms(self.h.x, self.out.x, self.outputs, 2)
        if both is None:
            return "", None, None, None, None
        # attention's branch is the one with the attention module, or else the first
        attention, mlp = (_Branch((event,), (scale,)) for event, scale in zip(both.events, both.scales, strict=True))
        if not attention.covers(self.attention) and mlp.covers(self.attention):
            attention, mlp = mlp, attention
        return "parallel", attention, None, mlp, None

    def _normed_branch(self, mid: Event) -> tuple[_Branch | None, Event | None]:
        """Find the second branch of a post-norm layer, whose output is added to norm(mid), and the sum of both."""
        normed = [self._output_of(taken) for taken in self.inputs if self._is(taken.x, mid.x)]
        for end in (event for event in self.inner if event.end == "input"):
            if end.order < mid.order or self._is(end.x, mid.x):
                continue
            out = self._output_of(end)
            if out is None or not self._is(out.x, self.out.x):  # the norm does not end the layer
                continue
            for stream in filter(None, normed):
                branch = self._branch(stream.x, end.x, after=stream.order, before=end.order)
                if branch is not None:
                    return branch, end
        return None, None

    def _output_of(self, taken: Event) -> Event | None:
        """Return the output of the module that reads this input."""
        later = (event for event in self.inner if event.path == taken.path and event.order > taken.order)
        return next(later, None)

    def _branch(
        self, start: torch.Tensor, end: torch.Tensor, after: int = -1, before: float = float("inf")
    ) -> _Branch | None:
        """Find the branch that makes the step from `start` to `end`: one module, or two children of the layer."""
        between = [event for event in self.outputs if after < event.order < before]
        children = [event for event in between if "." not in event.path]
        return self._terms(start, end, between, 1) or self._terms(start, end, children, 2)

    def _terms(self, start: torch.Tensor, end: torch.Tensor, events: Sequence[Event], count: int) -> _Branch | None:
        """Find the one or two modules that make the step; neither of two contains the other."""
        if count == 2:
            events = [event for event in events if not self._is(event.x, start)]  # else end - start makes any step
        branches = []
        for terms in combinations(events, count):
            paths = [event.path for event in terms]
            if count == 2 and (_within(*paths) or _within(*reversed(paths))):
                continue
            for scales in _scales(end - start, [event.x for event in terms]):
                parts = [scale * event.x for scale, event in zip(scales, terms, strict=True)]
                if all(scales) and self._makes(end, (start, *parts)):
                    branches.append(_Branch(terms, scales))
                    break
        return min(branches, key=lambda branch: branch.rank, default=None)

    def _makes(self, total: torch.Tensor, terms: Sequence[torch.Tensor]) -> bool:
        """Return whether the terms sum to the total up to round-off, and no term is itself only round-off."""
        size = torch.stack([term.abs() for term in terms]).sum(0)
        allowed = ULPS * self.eps * (size + total.abs())
        distance = (total - torch.stack(list(terms)).sum(0)).abs()
        return bool((distance <= allowed).all()) and all(bool((term.abs() > allowed).any()) for term in terms[1:])

    def _is(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        return bool(((a - b).abs() <= ULPS * self.eps * b.abs()).all())

    def _carries_attention(self, branch: _Branch | None) -> bool:
        """Return whether a branch contains the attention module, or reads its output."""
        if branch is None:
            return False
        if branch.covers(self.attention) or any(_within(event.path, self.attention) for event in branch.events):
            return True
        holders = [event for event in self.outputs if _within(self.attention, event.path)]
        takers = [event for event in self.inputs if branch.covers(event.path)]
        return any(torch.equal(holder.x, taker.x) for holder in holders for taker in takers)

    def _norm_before(self, stream: Event, branch: _Branch) -> str | None:
        """Find the norm that reads the stream for a branch: a module without a matrix that runs before the branch."""
        elsewhere = None
        taken_by = {event.path: event for event in self.inputs}
        top = branch.last.path.split(".")[0]
        for norm in self.outputs:
            taken = taken_by.get(norm.path)
            if norm.order >= branch.last.order or taken is None or taken.order < stream.order:
                continue
            if not torch.equal(taken.x, stream.x) or self._is(norm.x, stream.x):
                continue
            if any(parameter.dim() > 1 for parameter in self.module.get_submodule(norm.path).parameters()):
                continue
            takers = [event for event in self.inputs if norm.order < event.order and torch.equal(event.x, norm.x)]
            readers = {taker.path.split(".")[0] for taker in takers}
            if top in readers:
                return norm.address
            if elsewhere is None and readers - {norm.path.split(".")[0]}:
                elsewhere = norm.address  # modules outside the branch also read the norm
        return elsewhere


def _within(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}.")


def _scales(step: torch.Tensor, terms: Sequence[torch.Tensor]) -> list[tuple[float, ...]]:
    """Return the constants to try, such as those for which s·x or s·x + t·y is closest to the step."""
    if len(terms) == 1:
        size = float((terms[0] * terms[0]).sum())
        return [(1.0,), (round(float((step * terms[0]).sum()) / size, 6) if size else 0.0,)]
    pair = torch.stack([x.flatten() for x in terms], 1)
    if not torch.isfinite(pair).all() or torch.linalg.matrix_rank(pair) < 2:
        return []
    closest = torch.linalg.lstsq(pair, step.flatten()[:, None]).solution.flatten().tolist()
    return [tuple(1.0 if abs(scale - 1) < 1e-3 else round(scale, 6) for scale in closest)]

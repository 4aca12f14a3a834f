"""Finds numerically how each layer of a model encodes positions, from the results of its attention instead of its name.

    learned     a learned vector for each position is added to the token embeddings
    sinusoidal  a vector of sines and cosines of the position is added to the token embeddings
    rotary      queries and keys are rotated by their position: their direction depends on it
    alibi       a bias that is linear in the distance of query and key is added to the logits
    relative    a bias that depends on the distance in another way is added to the logits
    none        only the causal mask (NoPE)

All tokens of the text are the same, so that differences between positions come from the positional encoding; and each
layer's attention gets the same vector at all positions, so that the effect of other layers is not attributed to it.
"""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from sinkscope.attention.kernels import MASKED, AttentionCall, upcast
from sinkscope.attention.seam import open_seam, recorded_taps
from sinkscope.models.family import (
    NO_POSITIONS,
    NOT_RUN,
    UNKNOWN_POSITIONS,
    Family,
    embedding_weight,
    input_device,
    number_of_positions,
)
from sinkscope.models.in_memory import weight_in_memory
from sinkscope.models.wiring import first_floats, record_ends
from sinkscope.text.batch import on_cpu

EQUAL_TOKENS = 24  # T5's buckets have a width of one token up to a distance of 15
EQUAL_VECTORS = 1e-3  # vectors are equal up to this relative difference …
IN_EPS = 4  # … or up to this times the dtype's eps, if that is more


@torch.no_grad()
def with_positions(model: PreTrainedModel, family: Family) -> Family:
    """Return the family with the kind of positions of each layer; an unknown kind stays as in the family's row."""
    if not family.has_attention:
        return family
    vocabulary, device = len(embedding_weight(model)), input_device(model)
    length = min(EQUAL_TOKENS, number_of_positions(model, family) or EQUAL_TOKENS)
    one, other = (torch.full((1, length), vocabulary // part, device=device) for part in (2, 3))
    added, embedding, offset = _added_positions(model, family, one, other)
    with open_seam(model, family) as seams, recorded_taps(seams) as attended, ExitStack() as hooks:
        for attention in family.attentions(model).values():
            hooks.enter_context(attention.register_forward_pre_hook(_repeat_last_state, with_kwargs=True))
        model(input_ids=one, use_cache=False)
    by_layer = [""] * len(family.layer_modules(model))
    read = [layer for layer, seen in attended.items() if {"query", "key", "lse"} <= seen.keys()]  # on equal inputs
    turned = on_cpu(_direction_changes(attended[layer][name]) for layer in read for name in ("query", "key"))
    turns = dict(zip(read, zip(turned[::2], turned[1::2], strict=True), strict=True))
    for layer in attended:
        within, call = UNKNOWN_POSITIONS, seams[layer].call
        if layer in turns and call is not None:
            if any(each.all() for each in turns[layer]):
                within = "rotary"
            elif not any(each.any() for each in turns[layer]):
                within = bias_kind(call)
        both = [kind for kind in (added, within) if kind and kind != NO_POSITIONS]
        by_layer[layer] = family.positions if UNKNOWN_POSITIONS in both else " + ".join(both) or NO_POSITIONS
    return replace(
        family,
        positions=" and ".join(sorted({kind for kind in by_layer if kind}, key=NO_POSITIONS.__eq__)),
        layer_positions=tuple(by_layer),
        position_embedding=embedding,
        position_offset=offset,
    )


# --- in the layers


def _repeat_last_state(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Replace the state at every position by the last token's, as a forward pre-hook."""
    state = first_floats((*args, *kwargs.values()))
    assert state is not None
    repeated = state[:, -1:].expand_as(state).contiguous()

    def replaced(value: Any) -> Any:  # some modules take the state several times, as query, key and value
        is_like_state = isinstance(value, torch.Tensor) and value.shape == state.shape
        return repeated if value is state or (is_like_state and torch.equal(value, state)) else value

    return tuple(map(replaced, args)), {name: replaced(value) for name, value in kwargs.items()}


def _direction_changes(x: torch.Tensor) -> torch.Tensor:
    """Return whether any head's vector (1,H,T,d) has another direction than the one before it, (T-1,) bool."""
    # Norms may differ, as for queries that are scaled by the logarithm of their position: all keys see the same factor.
    directions = F.normalize(upcast(x), dim=-1)
    return (directions.diff(dim=2).norm(dim=-1) > _close(x)).any(1)[0]


def _close(x: torch.Tensor) -> float:
    return max(EQUAL_VECTORS, IN_EPS * torch.finfo(x.dtype).eps)


def bias_kind(call: AttentionCall) -> str:
    """Return the kind of bias in the logits of equal queries and keys."""
    logits = call.mask if call.scores is None else call.scores
    if logits is None or logits.dtype == torch.bool:
        return NO_POSITIONS
    rows = [row[row > MASKED] for row in upcast(logits[0, :, -1])]  # by head, for the last query
    steps = [row.diff() for row in rows]
    largest = max(float(row.abs().max()) for row in rows)
    size = max(float(step.abs().max()) if len(step) else 0.0 for step in steps)
    if size <= _close(logits) * largest:
        return NO_POSITIONS
    bends = max(float(step.diff().abs().max()) if len(step) > 1 else 0.0 for step in steps)
    return "alibi" if bends <= _close(logits) * largest else "relative"


# --- before the layers


def _added_positions(
    model: PreTrainedModel, family: Family, one: torch.Tensor, other: torch.Tensor
) -> tuple[str, str, int]:
    """Return the kind of the vectors that are added to the token embeddings by position; "" if there are none.

    `one` and `other` are (1,T), two repeated tokens. For learned vectors, also return the path of the module that holds
    them, and its row of position 0.
    """
    stream, outputs = _before_layers(model, family, one)
    registers = len(stream) - one.shape[1]  # register tokens before the text
    hidden = stream[registers:]
    if not _differs(hidden):
        return "", "", 0
    _, others = _before_layers(model, family, other)
    for path, output in outputs.items():
        depends_on_position_only = path in others and torch.equal(output, others[path])
        if not depends_on_position_only or output.shape != stream.shape or not _differs(output):
            continue
        table = output[registers:]
        if _is_sinusoidal(table, table):
            return "sinusoidal", "", 0
        module = model.get_submodule(path)
        weight = weight_in_memory(module) if hasattr(module, "weight") else None
        if weight is None or weight.shape[1:] != table.shape[1:]:
            return UNKNOWN_POSITIONS, "", 0
        table = table.to(weight.device)
        for row in (weight == table[0]).all(-1).nonzero().flatten().tolist():
            if torch.equal(weight[row : row + len(table)], table):
                return "learned", path, row - registers
        return UNKNOWN_POSITIONS, "", 0
    return "sinusoidal" if _is_sinusoidal(hidden, hidden.diff(dim=0)) else UNKNOWN_POSITIONS, "", 0


def _before_layers(
    model: PreTrainedModel, family: Family, ids: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the input of the first layer (T,D), and the outputs (T,…) of the modules that ran before it, by path."""
    layers = family.layer_modules(model)
    first = next(layer for number, layer in enumerate(layers) if family.block(number).kind != NOT_RUN)
    leaves = {path: module for path, module in model.named_modules() if not next(module.children(), None)}
    before = {path: module for path, module in leaves.items() if not path.startswith(f"{family.layers}.")}
    ends = record_ends(model, [first, *before.values()], {"input_ids": ids, "use_cache": False})
    start = next(event for event in ends[first] if event.end == "input")
    outputs = {
        path: event.x.flatten(0, -2)
        for path, module in before.items()
        for event in ends.get(module, ())
        if event.end == "output" and event.order < start.order
        if event.x.dim() >= 2 and event.x.shape[-2] >= ids.shape[1]
    }
    return family.stream(start.x).flatten(0, -2), outputs


def _differs(x: torch.Tensor) -> bool:
    """Return whether rows (…,T,d) differ from the last one, relative to its norm."""
    exact = upcast(x)
    last = exact[..., -1:, :]
    distance = (exact - last).norm(dim=-1) / last.norm(dim=-1).clamp(min=torch.finfo(exact.dtype).tiny)
    return bool((distance > _close(x)).any())


def _is_sinusoidal(vectors: torch.Tensor, rows: torch.Tensor) -> bool:
    """Return whether every column of `rows` (T,D) is a wave of the position: x(t+1) + x(t-1) = 2 cos(ω) x(t)."""
    # the rows were computed from `vectors`, whose size and dtype decide the round-off
    rows = upcast(rows)
    middle, sides = rows[1:-1], rows[2:] + rows[:-2]
    size = middle.square().sum(0)
    factor = (middle * sides).sum(0) / size.clamp(min=torch.finfo(rows.dtype).tiny)
    return bool((sides - factor * middle).abs().max() <= _close(vectors) * vectors.abs().max())

"""Finds numerically how each layer of a model encodes positions, from what its attention computes, not from its name.

    learned     a learned vector for each position is added to the token embeddings
    sinusoidal  a vector of sines and cosines of the position is added to the token embeddings
    rotary      queries and keys are rotated by their position: their direction depends on it
    alibi       a bias that is linear in the distance of query and key is added to the logits
    relative    a bias that depends on the distance in another way is added to the logits
    none        only the causal mask (NoPE)

All tokens of the text are the same, so that differences between positions come from the positional encoding; and each
layer's attention gets the same vector at all positions, so that a layer is not credited with what others do.
"""

from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from sinkscope.attention.kernels import MASKED, AttentionCall, upcast
from sinkscope.attention.seam import open_seam
from sinkscope.attention.taps import Seam
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
from sinkscope.models.wiring import first_floats

TOKENS = 24  # T5's buckets have a width of one token up to a distance of 15
CLOSE = 1e-3  # vectors are equal up to this relative difference …
ROUNDED = 4  # … or this times the dtype's eps, if that is more


@dataclass
class Seen:
    """Query, key and call of one layer's attention on equal inputs."""

    query: torch.Tensor | None = None  # (1,H,T,d), as is the key
    key: torch.Tensor | None = None
    call: AttentionCall | None = None


@dataclass(frozen=True)
class Added:
    """Vectors of positions that are added to the token embeddings.

    embedding, offset: the path of the module that holds learned vectors, and its row of position 0.
    """

    kind: str
    embedding: str = ""
    offset: int = 0


@torch.no_grad()
def with_positions(model: PreTrainedModel, family: Family) -> Family:
    """Return the family with the kind of positions of each layer; an unknown kind stays as in the family's row."""
    if not family.has_attention:
        return family
    vocabulary, device = len(embedding_weight(model)), input_device(model)
    length = min(TOKENS, number_of_positions(model, family) or TOKENS)
    one, other = (torch.full((1, length), vocabulary // part, device=device) for part in (2, 3))
    added = _added(model, family, one, other)
    by_layer = [""] * len(family.layer_modules(model))
    for layer, seen in _attended(model, family, one).items():
        own = UNKNOWN_POSITIONS
        if seen.query is not None and seen.key is not None and seen.call is not None:
            turns = [_turns(x) for x in (seen.query, seen.key)]
            if any(bool(turned.all()) for turned in turns):
                own = "rotary"
            elif not any(bool(turned.any()) for turned in turns):
                own = _bias(seen.call)
        both = [kind for kind in (added and added.kind, own) if kind and kind != NO_POSITIONS]
        kind = " + ".join(both) or NO_POSITIONS
        by_layer[layer] = family.positions if UNKNOWN_POSITIONS in both else kind
    learned = added if added is not None and added.embedding else Added("")
    return replace(
        family,
        positions=" and ".join(sorted({kind for kind in by_layer if kind}, key=NO_POSITIONS.__eq__)),
        layer_positions=tuple(by_layer),
        position_embedding=learned.embedding,
        position_offset=learned.offset,
    )


# --- in the layers


def _repeat_last_state(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Replace the state at every position by the last token's, as a forward pre-hook."""
    state = first_floats((*args, *kwargs.values()))
    assert state is not None
    repeated = state[:, -1:].expand_as(state).contiguous()

    def given(value: Any) -> Any:  # some modules take the state several times, as query, key and value
        return repeated if isinstance(value, torch.Tensor) and torch.equal(value, state) else value

    return tuple(map(given, args)), {name: given(value) for name, value in kwargs.items()}


def _attended(model: PreTrainedModel, family: Family, ids: torch.Tensor) -> dict[int, Seen]:
    """Return query, key and call of each layer's attention on equal inputs."""
    seen: dict[int, Seen] = {}
    with open_seam(model, family) as seams, ExitStack() as hooks:
        for layer, attention in family.attentions(model).items():
            seen[layer] = Seen()
            hooks.enter_context(attention.register_forward_pre_hook(_repeat_last_state, with_kwargs=True))
            for name in ("query", "key", "lse"):
                keep = partial(_keep, seen[layer], name, seams[layer])
                hooks.enter_context(getattr(seams[layer], name).register_forward_hook(keep))
        model(input_ids=ids, use_cache=False)
    return seen


def _keep(seen: Seen, name: str, seam: Seam, tap: nn.Module, args: tuple, x: torch.Tensor) -> None:
    if name == "lse":
        seen.call = seam.call
    else:
        setattr(seen, name, x)


def _turns(x: torch.Tensor) -> torch.Tensor:
    """Return whether any head's vector (1,H,T,d) has another direction than the one before it, (T-1,) bool.

    Norms may differ, as for queries that are scaled by the logarithm of their position: all keys see the same factor.
    """
    directions = F.normalize(upcast(x), dim=-1)
    return (directions.diff(dim=2).norm(dim=-1) > _close(x)).any(1)[0]


def _close(x: torch.Tensor) -> float:
    return max(CLOSE, ROUNDED * torch.finfo(x.dtype).eps)


def _bias(call: AttentionCall) -> str:
    """Return the kind of bias in the logits of equal queries and keys."""
    logits = call.mask if call.scores is None else call.scores
    if logits is None or logits.dtype == torch.bool:
        return NO_POSITIONS
    last = upcast(logits[0, :, -1])  # (H,T) for the last query
    steps = [row[row > MASKED].diff() for row in last]
    largest = max(float(row[row > MASKED].abs().max()) for row in last)
    size = max(float(step.abs().max()) if len(step) else 0.0 for step in steps)
    if size <= _close(logits) * largest:
        return NO_POSITIONS
    bends = max(float(step.diff().abs().max()) if len(step) > 1 else 0.0 for step in steps)
    return "alibi" if bends <= _close(logits) * largest else "relative"


def _differs(x: torch.Tensor) -> bool:
    """Return whether rows (…,T,d) differ from the last one, relative to its norm."""
    exact = upcast(x)
    last = exact[..., -1:, :]
    distance = (exact - last).norm(dim=-1) / last.norm(dim=-1).clamp(min=torch.finfo(exact.dtype).tiny)
    return bool((distance > _close(x)).any())


# --- before the layers


def _added(model: PreTrainedModel, family: Family, one: torch.Tensor, other: torch.Tensor) -> Added | None:
    """Return the vectors that are added to the token embeddings by position; None if there are none.

    Args:
        one: (1,T), a repeated token.
        other: the same with another token.
    """
    whole, tables = _in_front(model, family, one)
    registers = len(whole) - one.shape[1]  # register tokens before the text
    hidden = whole[registers:]
    if not _differs(hidden):
        return None
    _, others = _in_front(model, family, other)
    for path, table in tables.items():
        is_of_positions = path in others and torch.equal(table, others[path])
        if is_of_positions and table.shape == whole.shape and _differs(table):
            return _classified(model, path, table[registers:], registers)
    return Added("sinusoidal" if _is_sinusoidal(hidden, hidden.diff(dim=0)) else UNKNOWN_POSITIONS)


def _in_front(
    model: PreTrainedModel, family: Family, ids: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the input of the first layer (T,D), and by path the outputs (T,…) of modules that ran before it."""
    hidden: list[torch.Tensor] = []
    given: dict[str, torch.Tensor] = {}

    def keep_hidden(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        x = first_floats((*args, *kwargs.values()))
        if x is not None:
            hidden.append(family.stream(x).flatten(0, -2).clone())

    def keep_given(path: str, module: nn.Module, args: tuple, output: Any) -> None:
        x = first_floats(output)
        if not hidden and x is not None and x.dim() >= 2 and x.shape[-2] >= ids.shape[1]:
            given[path] = x.flatten(0, -2).clone()

    layers = family.layer_modules(model)
    first = next(layer for at, layer in enumerate(layers) if family.block(at).kind != NOT_RUN)
    with ExitStack() as hooks:
        hooks.enter_context(first.register_forward_pre_hook(keep_hidden, with_kwargs=True))
        for path, module in model.named_modules():
            if not next(module.children(), None):
                hooks.enter_context(module.register_forward_hook(partial(keep_given, path)))
        model(input_ids=ids, use_cache=False)
    return hidden[0], given


def _classified(model: PreTrainedModel, path: str, table: torch.Tensor, registers: int) -> Added:
    """Classify a module whose output for the text is `table` (T,D) for any tokens: learned or sinusoidal positions."""
    if _is_sinusoidal(table, table):
        return Added("sinusoidal")
    module = model.get_submodule(path)
    weight = weight_in_memory(module) if hasattr(module, "weight") else None
    if weight is None or weight.shape[1:] != table.shape[1:]:
        return Added(UNKNOWN_POSITIONS)
    starts = (weight == table[0]).all(-1).nonzero().flatten().tolist()
    fits = [row for row in starts if torch.equal(weight[row : row + len(table)], table)]
    return Added("learned", path, fits[0] - registers) if fits else Added(UNKNOWN_POSITIONS)


def _is_sinusoidal(given: torch.Tensor, rows: torch.Tensor) -> bool:
    """Return whether every column of `rows` (T,D) is a wave of the position: x(t+1) + x(t-1) = 2 cos(ω) x(t).

    The rows were computed from `given`, whose size and dtype decide the round-off.
    """
    rows = upcast(rows)
    middle, sides = rows[1:-1], rows[2:] + rows[:-2]
    size = middle.square().sum(0)
    factor = (middle * sides).sum(0) / size.clamp(min=torch.finfo(rows.dtype).tiny)
    return bool((sides - factor * middle).abs().max() <= _close(given) * given.abs().max())

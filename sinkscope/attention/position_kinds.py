"""How a model knows where a token stands, found numerically: by layer, from what its attention does and not its name.

    learned     a vector for each position, of a table with learned rows, is added to the token embeddings
    sinusoidal  the same, of sines and cosines of the position
    rotary      queries and keys are rotated by their position: they point elsewhere at every place
    alibi       a bias that is linear in the distance of query and key is added to the logits
    relative    a bias that depends on the distance in another way
    none        nothing but the causal mask (NoPE)

All tokens of the text are one and the same, so that what differs from place to place is the positions' doing; and each
layer's attention is given one and the same vector everywhere, so that a layer is not credited with what others do.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
from sinkscope.models.discovery import first_floats
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

TOKENS = 24  # T5's buckets are as wide as one token up to a distance of 15
CLOSE = 1e-3  # vectors are the same up to this relative difference …
ROUNDED = 4  # … or this times the dtype's eps, where that is more


@dataclass
class Seen:
    """What one layer's attention has made of equal inputs."""

    query: torch.Tensor | None = None  # (1,H,T,d), as is the key
    key: torch.Tensor | None = None
    call: AttentionCall | None = None


@dataclass(frozen=True)
class Added:
    """Vectors of positions that are added to the token embeddings.

    embedding, offset: the module that holds learned ones, from the model's root, and its row of position 0.
    """

    kind: str
    embedding: str = ""
    offset: int = 0


@torch.no_grad()
def with_positions(model: PreTrainedModel, family: Family) -> Family:
    """The family with the kind of positions that each layer has; what cannot be told stays as its row says."""
    if not family.has_attention:
        return family
    vocabulary, device = len(embedding_weight(model)), input_device(model)
    length = min(TOKENS, number_of_positions(model, family) or TOKENS)
    one, other = (torch.full((1, length), vocabulary // part, device=device) for part in (2, 3))
    added = _added(model, family, one, other)
    kinds = []
    for layer, seen in _attended(model, family, one).items():
        own = _in_attention(seen)
        both = [kind for kind in (added and added.kind, own) if kind and kind != NO_POSITIONS]
        kind = " + ".join(both) or NO_POSITIONS
        kinds.append((layer, family.positions if UNKNOWN_POSITIONS in both else kind))
    by_layer = [""] * len(family.layer_modules(model))
    for layer, kind in kinds:
        by_layer[layer] = kind
    learned = added if added is not None and added.embedding else Added("")
    return replace(
        family,
        positions=" and ".join(sorted({kind for _, kind in kinds}, key=(NO_POSITIONS).__eq__)),
        layer_positions=tuple(by_layer),
        position_embedding=learned.embedding,
        position_offset=learned.offset,
    )


# --- in the layers


@contextmanager
def _one_vector_everywhere(attention: nn.Module) -> Iterator[None]:
    """Give this module the last token's state at every place."""

    def alike(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        state = first_floats((*args, *kwargs.values()))
        assert state is not None
        same = state[:, -1:].expand_as(state).contiguous()

        def given(value: Any) -> Any:  # some are given the state several times, as query, key and value
            return same if isinstance(value, torch.Tensor) and torch.equal(value, state) else value

        return tuple(map(given, args)), {name: given(value) for name, value in kwargs.items()}

    with attention.register_forward_pre_hook(alike, with_kwargs=True):
        yield


def _attended(model: PreTrainedModel, family: Family, ids: torch.Tensor) -> dict[int, Seen]:
    """What each layer's attention makes of equal inputs."""
    seen: dict[int, Seen] = {}
    with open_seam(model, family) as seams, ExitStack() as hooks:
        for layer, attention in family.attentions(model).items():
            seen[layer] = Seen()
            hooks.enter_context(_one_vector_everywhere(attention))
            for name in ("query", "key"):
                tap = getattr(seams[layer], name)
                hooks.enter_context(tap.register_forward_hook(partial(_keep, seen[layer], name)))
            hooks.enter_context(seams[layer].lse.register_forward_hook(partial(_keep_call, seen[layer], seams[layer])))
        model(input_ids=ids, use_cache=False)
    return seen


def _keep(seen: Seen, name: str, tap: nn.Module, args: tuple, x: torch.Tensor) -> None:
    setattr(seen, name, x)


def _keep_call(seen: Seen, seam: Seam, tap: nn.Module, args: tuple, lse: torch.Tensor) -> None:
    seen.call = seam.call


def _in_attention(seen: Seen) -> str:
    """How attention itself tells places apart."""
    if seen.query is None or seen.key is None or seen.call is None:
        return UNKNOWN_POSITIONS
    turns = [_turns(x) for x in (seen.query, seen.key)]
    if any(bool(turned.all()) for turned in turns):
        return "rotary"
    return UNKNOWN_POSITIONS if any(bool(turned.any()) for turned in turns) else _bias(seen.call)


def _turns(x: torch.Tensor) -> torch.Tensor:
    """(1,H,T,d) → (T-1,) bool: whether any head's vector has another direction than the one before. A norm of its own,
    as of queries that are scaled by the logarithm of their position, is the same to all keys.
    """
    directions = F.normalize(upcast(x), dim=-1)
    return (directions.diff(dim=2).norm(dim=-1) > _close(x)).any(1)[0]


def _close(x: torch.Tensor) -> float:
    return max(CLOSE, ROUNDED * torch.finfo(x.dtype).eps)


def _bias(call: AttentionCall) -> str:
    """What depends on the distance in logits of equal queries and keys."""
    logits = call.mask if call.scores is None else call.scores
    if logits is None or logits.dtype == torch.bool:
        return NO_POSITIONS
    last = upcast(logits[0, :, -1])  # (H,T): of the last query
    steps = [row[row > MASKED].diff() for row in last]
    largest = max(float(row[row > MASKED].abs().max()) for row in last)
    size = max(float(step.abs().max()) if len(step) else 0.0 for step in steps)
    if size <= _close(logits) * largest:
        return NO_POSITIONS
    bends = max(float(step.diff().abs().max()) if len(step) > 1 else 0.0 for step in steps)
    return "alibi" if bends <= _close(logits) * largest else "relative"


def _differs(x: torch.Tensor) -> bool:
    """Whether rows (…,T,d) differ from the last one, relative to it."""
    exact = upcast(x)
    last = exact[..., -1:, :]
    distance = (exact - last).norm(dim=-1) / last.norm(dim=-1).clamp(min=torch.finfo(exact.dtype).tiny)
    return bool((distance > _close(x)).any())


# --- in front of them


def _added(model: PreTrainedModel, family: Family, one: torch.Tensor, other: torch.Tensor) -> Added | None:
    """What is added to the token embeddings by position; None where nothing is.

    Args:
        one: (1,T), a token repeated, as is `other`.
    """
    whole, tables = _in_front(model, family, one)
    registers = len(whole) - one.shape[1]  # which stand before the text
    hidden = whole[registers:]
    if not _differs(hidden):
        return None
    _, others = _in_front(model, family, other)
    for path, table in tables.items():
        is_of_positions = path in others and torch.equal(table, others[path])
        if is_of_positions and table.shape == whole.shape and _differs(table):
            return _described(model, path, table[registers:], registers)
    return Added("sinusoidal" if _is_sinusoidal(hidden, hidden.diff(dim=0)) else UNKNOWN_POSITIONS)


def _in_front(
    model: PreTrainedModel, family: Family, ids: torch.Tensor
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What the first layer takes (T,D), and by path what modules that ran before it gave for all places (T,…)."""
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


def _described(model: PreTrainedModel, path: str, table: torch.Tensor, registers: int) -> Added:
    """Learned positions or sinusoidal ones, of a module that gives the text `table` (T,D) whatever its tokens are."""
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
    """Whether every column of `rows` (T,D) is a wave of the position: x(t+1) + x(t-1) = 2 cos(ω) x(t).

    `given` are what they were made from: by the size of these and their dtype, entries are rounded.
    """
    rows = upcast(rows)
    middle, sides = rows[1:-1], rows[2:] + rows[:-2]
    size = middle.square().sum(0)
    factor = (middle * sides).sum(0) / size.clamp(min=torch.finfo(rows.dtype).tiny)
    return bool((sides - factor * middle).abs().max() <= _close(given) * given.abs().max())

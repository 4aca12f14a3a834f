"""What a model computes, by plain transformers, torch's autograd and nothing of sinkscope: in float64, a padded batch.

Attention is dense: in place of transformers' attention functions stands the eager function of the model's own file, and
what it takes is kept with its graph. Its weights are those that it mixes values by: of values that are a basis, the mix
is the weights, with what a model may multiply the mix by afterwards.
"""

import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


@contextmanager
def only_float64() -> Iterator[None]:
    """Modeling code that asks for float32, in a norm or a softmax, gets float64."""
    names = dict.fromkeys(("float32", "float"), torch.float64)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with patch.multiple(torch, **names), patch.object(torch.Tensor, "float", torch.Tensor.double):
            yield
    finally:
        torch.set_default_dtype(default)


@dataclass
class Plain:
    """Of a batch of B sequences; the attention layers in the order in which they ran."""

    start: torch.Tensor  # (B,): the column of each sequence's first token
    lengths: torch.Tensor  # (B,)
    causal: bool = True  # whether a query sees no later keys
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # (B,T,V)
    hidden: list[torch.Tensor] = field(default_factory=list)  # input of each layer, (B,T,D)
    weights: list[torch.Tensor] = field(default_factory=list)  # (B,H,T,T)
    query: list[torch.Tensor] = field(default_factory=list)  # (B,H,T,d), with gradients; so are the others
    key: list[torch.Tensor] = field(default_factory=list)
    value: list[torch.Tensor] = field(default_factory=list)

    def sink_masses(self) -> list[torch.Tensor]:
        """By layer the mean weight on each position of the queries that see it, averaged over sequences, (H,P)."""
        return [self._mean(self._sink_mass(row, weights[row]) for row in self._rows()) for weights in self.weights]

    def norms(self) -> list[torch.Tensor]:
        """By layer the norm of its input at each position, averaged over sequences, (1,P)."""
        return [self._mean(self._own(row, x[row]).norm(dim=-1)[None] for row in self._rows()) for x in self.hidden]

    def grad_norms(self, pathway: str) -> list[torch.Tensor]:
        """By layer the norm over all heads of each position's gradient, summed over sequences, (1,P)."""
        return [self._sum_of_gradients(x.grad) for x in getattr(self, pathway)]

    def _rows(self) -> range:
        return range(len(self.lengths))

    def _own(self, row: int, x: torch.Tensor) -> torch.Tensor:
        """(…,T,D) of one sequence without its padding."""
        first = int(self.start[row])
        return x[..., first : first + int(self.lengths[row]), :]

    def _sink_mass(self, row: int, weights: torch.Tensor) -> torch.Tensor:
        own = self._own(row, self._own(row, weights).transpose(1, 2))  # (H,keys,queries)
        return own.sum(-1) / (torch.arange(own.shape[1], 0, -1) if self.causal else own.shape[1])

    def _mean(self, parts: Iterable[torch.Tensor]) -> torch.Tensor:
        """Of (H,P) by sequence, over those that have the position."""
        longest = int(self.lengths.max())
        padded = [F.pad(part, (0, longest - part.shape[-1])) for part in parts]
        return torch.stack(padded).sum(0) / (self.lengths[:, None] > torch.arange(longest)).sum(0)

    def _sum_of_gradients(self, gradient: torch.Tensor) -> torch.Tensor:
        longest = int(self.lengths.max())
        own = [self._own(row, gradient[row]) for row in self._rows()]
        total = torch.stack([F.pad(x, (0, 0, 0, longest - x.shape[1])) for x in own]).sum(0)
        return total.transpose(0, 1).flatten(1).norm(dim=-1)[None]


def padded_inputs(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, first_position: int | None
) -> dict[str, Any]:
    """As one calls a model of transformers: with a mask, and with positions where it takes them."""
    inputs = {"input_ids": ids, "attention_mask": mask, "use_cache": False}
    if "position_ids" in inspect.signature(model.forward).parameters and first_position is not None:
        inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0) + first_position
    return inputs


def run_plainly(
    model: PreTrainedModel,
    layers: str,
    ids: torch.Tensor,
    mask: torch.Tensor,
    labels: torch.Tensor | None = None,
    backward: bool = True,
    first_position: int | None = 0,
    **told: int,
) -> Plain:
    """A batch of ids (B,T) forward, and its mean cross-entropy backward, of a float64 model.

    Of a model that attends in code of its own there are weights only, as it gives them out.

    Args:
        model: to run.
        layers: path of its list of layers.
        ids: (B,T).
        mask: (B,T), 0 where there is padding.
        labels: (B,T) of an encoder, -100 where nothing is predicted; None: each token predicts the next.
        backward: whether to differentiate.
        first_position: the number that the model gives to a sequence's first position; None: it is not told any.
        told: arguments of the model that have one value for every token.
    """
    found = Plain(mask.int().argmax(1), mask.sum(1), causal=labels is None)
    width = getattr(model.config.get_text_config(), "hidden_size", None)
    handles = [
        layer.register_forward_pre_hook(partial(_keep_input, found, ids.shape, width), with_kwargs=True)
        for layer in model.get_submodule(layers)
    ]
    padded = not mask.all()
    alone = {"input_ids": ids, "use_cache": False}
    inputs = padded_inputs(model, ids, mask, first_position) if padded else alone
    inputs |= {name: torch.full_like(ids, value) for name, value in told.items()}
    try:
        with _dense(model, found), torch.set_grad_enabled(backward):
            given = model.get_input_embeddings()(ids)
            embedded = (given[0] if isinstance(given, tuple) else given).detach().requires_grad_(backward)
            with _in_place_of_the_embeddings(model, embedded):
                found.logits = model(**inputs).logits
            if backward:
                _loss(found.logits, ids, mask.bool(), labels).backward()
    finally:
        for handle in handles:
            handle.remove()
    found.logits = found.logits.detach()
    if not found.weights:
        found.weights = _given_out(model, inputs, found.causal)
    return found


def _loss(logits: torch.Tensor, ids: torch.Tensor, real: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
    if labels is not None:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    predicted = real[:, :-1] & real[:, 1:]
    return F.cross_entropy(logits[:, :-1][predicted], ids[:, 1:][predicted])


@torch.no_grad()
def _given_out(model: PreTrainedModel, inputs: dict[str, Any], causal: bool) -> list[torch.Tensor]:
    """Attention weights that the model itself returns; none where it returns none, or makes them without its mask."""
    given = model(**inputs, output_attentions=True)
    found = [weights for weights in getattr(given, "attentions", None) or () if weights is not None]
    return [] if causal and any(weights.triu(1).any() for weights in found) else found


def _keep_input(
    found: Plain, shape: torch.Size, width: int | None, module: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> None:
    """(B,T,D): the mean of its copies where there are several, (B,T,S,D), (B,T,S·D) or (S,B,T,D)."""
    values = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    x = next(value for value in values if value.is_floating_point()).detach()
    if x.shape[:2] == shape:
        found.hidden.append(x.reshape(*shape, -1, width or x.shape[-1]).mean(2))
    elif x.dim() == 4:
        found.hidden.append(x.mean(0))
    else:  # tokens of all sequences, one behind the other
        found.hidden.append(x.view(*shape, -1))


@contextmanager
def _in_place_of_the_embeddings(model: PreTrainedModel, embedded: torch.Tensor) -> Iterator[None]:
    def instead(module: nn.Module, args: tuple, given: Any) -> Any:
        return (embedded.clone(), *given[1:]) if isinstance(given, tuple) else embedded.clone()

    with model.get_input_embeddings().register_forward_hook(instead):
        yield


@contextmanager
def _dense(model: PreTrainedModel, found: Plain) -> Iterator[None]:
    files = {type(module).__module__ for module in model.modules()}
    tables = [ALL_ATTENTION_FUNCTIONS, *(vars(sys.modules[file]).get("ALL_ATTENTION_FUNCTIONS") for file in files)]

    def attend(
        module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        for name, x in (("query", query), ("key", key), ("value", value)):
            if x.requires_grad:
                x.retain_grad()
            getattr(found, name).append(x)
        mask = attention_mask
        if mask is None or mask.dtype == torch.bool:
            every = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
            bare = every.tril() if getattr(module, "is_causal", True) else every  # as transformers' sdpa function does
            allowed = bare if mask is None else mask
            mask = torch.zeros(allowed.shape, dtype=query.dtype).masked_fill(~allowed, torch.finfo(query.dtype).min)
        own = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
        basis = torch.eye(key.shape[2], dtype=value.dtype).expand(*value.shape[:2], -1, -1)
        with torch.no_grad():
            found.weights.append(own(module, query, key, basis, mask, *args, **kwargs)[0].transpose(1, 2))
        return own(module, query, key, value, mask, *args, **kwargs)

    tables = list({id(table): table for table in tables if table is not None}.values())
    for table, name in product(tables, ("sdpa", "eager")):
        table[name] = attend
    try:
        yield
    finally:
        for table, name in product(tables, ("sdpa", "eager")):
            del table[name]

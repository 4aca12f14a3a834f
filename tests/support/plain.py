"""What a model computes, by plain transformers, torch's autograd and nothing of sinkscope: in float64, one sequence.

Attention is dense: in place of transformers' attention functions stands the eager function of the model's own file,
with a softmax in float64, and what it takes and gives is kept with its graph.
"""

import sys
from collections.abc import Iterator
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


@dataclass
class Plain:
    """Of one sequence; the attention layers in the order in which they ran."""

    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # (T,V)
    hidden: list[torch.Tensor] = field(default_factory=list)  # input of each layer, (T,D)
    weights: list[torch.Tensor] = field(default_factory=list)  # (H,T,T)
    query: list[torch.Tensor] = field(default_factory=list)  # (H,T,d), with gradients; so are the others
    key: list[torch.Tensor] = field(default_factory=list)
    value: list[torch.Tensor] = field(default_factory=list)

    def grad_norms(self, pathway: str) -> list[torch.Tensor]:
        """By layer the norm over all heads of each position's gradient, (T,)."""
        return [x.grad[0].transpose(0, 1).flatten(1).norm(dim=-1) for x in getattr(self, pathway)]


def run_plainly(
    model: PreTrainedModel,
    layers: str,
    ids: torch.Tensor,
    labels: torch.Tensor | None = None,
    predicted: int = 0,
    **told: int,
) -> Plain:
    """One sequence of ids (T,) forward, and its cross-entropy backward, of a float64 model.

    Of a model that attends in code of its own there are weights only, as it gives them out.

    Args:
        labels: (T,) of an encoder, -100 where nothing is predicted; None: each token predicts the next.
        predicted: what the summed loss is divided by; 0: by its own terms, for the mean.
        told: arguments of the model that have one value for every token.
    """
    found = Plain()
    width = getattr(model.config.get_text_config(), "hidden_size", None)
    handles = [
        layer.register_forward_pre_hook(partial(_keep_input, found, len(ids), width), with_kwargs=True)
        for layer in model.get_submodule(layers)
    ]
    try:
        with _dense(model, found), torch.enable_grad():
            given = model.get_input_embeddings()(ids[None])
            embedded = (given[0] if isinstance(given, tuple) else given).detach().requires_grad_(True)
            with _in_place_of_the_embeddings(model, embedded):
                for_tokens = {name: torch.full_like(ids[None], value) for name, value in told.items()}
                logits = model(input_ids=ids[None], use_cache=False, **for_tokens).logits
            given, wanted = (logits[0, :-1], ids[1:]) if labels is None else (logits[0], labels)
            loss = F.cross_entropy(given, wanted, reduction="sum")
            (loss / (predicted or (wanted != -100).sum())).backward()
    finally:
        for handle in handles:
            handle.remove()
    found.logits = logits[0].detach()
    if not found.weights:
        found.weights = _given_out(model, ids, is_causal=labels is None)
    return found


@torch.no_grad()
def _given_out(model: PreTrainedModel, ids: torch.Tensor, is_causal: bool) -> list[torch.Tensor]:
    """Attention weights that the model itself returns; none where it returns none, or makes them without its mask."""
    given = model(input_ids=ids[None], use_cache=False, output_attentions=True)
    found = [weights[0] for weights in getattr(given, "attentions", None) or () if weights is not None]
    return [] if is_causal and any(weights.triu(1).any() for weights in found) else found


def _keep_input(
    found: Plain, length: int, width: int | None, module: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> None:
    """(T,D): the mean of its copies where there are several, (1,T,S,D), (1,T,S·D) or (S,1,T,D)."""
    values = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    x = next(value for value in values if value.is_floating_point()).detach()
    if x.shape[:2] == (1, length):
        found.hidden.append(x.view(length, -1, width or x.shape[-1]).mean(1))
    else:
        found.hidden.append(x[:, 0].mean(0))


@contextmanager
def _in_place_of_the_embeddings(model: PreTrainedModel, embedded: torch.Tensor) -> Iterator[None]:
    def instead(module: nn.Module, args: tuple, given: Any) -> Any:
        return (embedded.clone(), *given[1:]) if isinstance(given, tuple) else embedded.clone()

    with model.get_input_embeddings().register_forward_hook(instead):
        yield


@contextmanager
def _dense(model: PreTrainedModel, found: Plain) -> Iterator[None]:
    softmax = F.softmax
    files = {type(module).__module__ for module in model.modules()}
    tables = [ALL_ATTENTION_FUNCTIONS, *(vars(sys.modules[file]).get("ALL_ATTENTION_FUNCTIONS") for file in files)]

    def in_float64(x: torch.Tensor, dim: int = -1, dtype: Any = None, **_: Any) -> torch.Tensor:
        return softmax(x, dim=dim)

    def attend(
        module: nn.Module, query: Any, key: Any, value: Any, attention_mask: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        for name, x in (("query", query), ("key", key), ("value", value)):
            x.retain_grad()
            getattr(found, name).append(x)
        mask = attention_mask
        if mask is None or mask.dtype == torch.bool:
            every = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
            bare = every.tril() if getattr(module, "is_causal", True) else every  # as transformers' sdpa function does
            allowed = bare if mask is None else mask
            mask = torch.zeros(allowed.shape, dtype=query.dtype).masked_fill(~allowed, torch.finfo(query.dtype).min)
        own = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
        with patch.object(F, "softmax", in_float64):
            mix, weights = own(module, query, key, value, mask, *args, **kwargs)
        found.weights.append(weights[0].detach())
        return mix, weights

    tables = list({id(table): table for table in tables if table is not None}.values())
    for table, name in product(tables, ("sdpa", "eager")):
        table[name] = attend
    try:
        yield
    finally:
        for table, name in product(tables, ("sdpa", "eager")):
            del table[name]

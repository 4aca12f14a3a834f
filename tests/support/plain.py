"""What a model computes, by plain transformers, torch's autograd and nothing of sinkscope: in float64, one sequence.

Attention is dense: in place of transformers' attention functions stands the eager function of the model's own file,
with a softmax in float64, and what it takes and gives is kept with its graph.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
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
    with patch.object(torch, "float32", torch.float64), patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield


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


def run_plainly(model: PreTrainedModel, layers: str, ids: torch.Tensor) -> Plain:
    """One sequence of ids (T,) forward, and its mean cross-entropy backward, of a float64 model."""
    found = Plain()
    handles = [
        layer.register_forward_pre_hook(partial(_keep_input, found), with_kwargs=True)
        for layer in model.get_submodule(layers)
    ]
    try:
        with _dense(found), torch.enable_grad():
            embedded = model.get_input_embeddings()(ids[None]).detach().requires_grad_(True)
            with _in_place_of_the_embeddings(model, embedded):
                logits = model(input_ids=ids[None], use_cache=False).logits
            F.cross_entropy(logits[0, :-1], ids[1:]).backward()
    finally:
        for handle in handles:
            handle.remove()
    found.logits = logits[0].detach()
    return found


def _keep_input(found: Plain, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
    values = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
    found.hidden.append(next(value for value in values if value.is_floating_point())[0].detach())


@contextmanager
def _in_place_of_the_embeddings(model: PreTrainedModel, embedded: torch.Tensor) -> Iterator[None]:
    with model.get_input_embeddings().register_forward_hook(lambda *_: embedded.clone()):
        yield


@contextmanager
def _dense(found: Plain) -> Iterator[None]:
    softmax = F.softmax

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
            allowed = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril() if mask is None else mask
            mask = torch.zeros(allowed.shape, dtype=query.dtype).masked_fill(~allowed, torch.finfo(query.dtype).min)
        own = vars(sys.modules[type(module).__module__])["eager_attention_forward"]
        with patch.object(F, "softmax", in_float64):
            mix, weights = own(module, query, key, value, mask, *args, **kwargs)
        found.weights.append(weights[0].detach())
        return mix, weights

    before = {name: ALL_ATTENTION_FUNCTIONS.get(name) for name in ("sdpa", "eager")}
    for name in before:
        ALL_ATTENTION_FUNCTIONS[name] = attend
    try:
        yield
    finally:
        for name in before:
            del ALL_ATTENTION_FUNCTIONS[name]

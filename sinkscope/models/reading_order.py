"""In which order a model reads: whether a token sees later ones, and with which number its positions begin."""

import inspect
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from sinkscope.models.family import embedding_weight
from sinkscope.models.wiring import given_by


@torch.no_grad()
def sees_later_tokens(model: nn.Module, last: nn.Module, token_ids: torch.Tensor) -> bool:
    """Whether a token changes what the layers give for the tokens before it."""
    changed = token_ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % len(embedding_weight(model))
    before, after = (given_by(last, model, {"input_ids": ids, "use_cache": False}) for ids in (token_ids, changed))
    length = token_ids.shape[1]
    if before.shape[1] != length:  # tokens of its own before or behind, or another order of axes
        return False
    return not _are_alike(before[:, : length - 1], after[:, : length - 1])


@torch.no_grad()
def first_position(model: nn.Module, last: nn.Module, token_ids: torch.Tensor) -> int | None:
    """The number of a sequence's first position where the model is told positions; None where it finds them itself.

    Models of RoBERTa's kind count from behind the number of their padding token.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return None
    inputs = {"input_ids": token_ids, "use_cache": False}
    alone = given_by(last, model, inputs)
    padding: Any = getattr(model.config, "pad_token_id", None)
    for first in (0, (padding or 0) + 1):
        positions = torch.arange(first, first + token_ids.shape[1], device=token_ids.device).expand_as(token_ids)
        with suppress(RuntimeError, IndexError, ValueError):  # positions of another shape, or fewer of them
            if _are_alike(alone, given_by(last, model, inputs | {"position_ids": positions})):
                return first
    return None


def _are_alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether (B,T,D) are the same but for round-off."""
    eps = max(torch.finfo(a.dtype).eps ** 0.5, 1e-5)  # some parts of a model are in float32
    a, b = a.double(), b.double()
    # relative to each token's own norm: beside a massive activation nothing else would count
    return bool(((a - b).norm(dim=-1) <= eps * b.norm(dim=-1).clamp(min=1e-30)).all())

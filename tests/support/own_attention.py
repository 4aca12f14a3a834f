"""Attention that a model of transformers computes in code of its own: what this takes and makes, with its graph.

It is matmul (q, kᵀ) → softmax → matmul (weights, v), or F.scaled_dot_product_attention, made dense here. Heads of keys
and values that such code has copied are taken as the one that they are copies of.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from support.dense_attention import dense_attention

PRODUCTS = (
    *(torch.matmul, torch.bmm, torch.baddbmm),
    *(torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.bmm, torch.Tensor.baddbmm),
)


@dataclass
class Attended:
    """Of one layer, on a batch of B sequences."""

    query: torch.Tensor  # (B,H,T,d), with gradients where the model was differentiated; so are key and value
    key: torch.Tensor  # (B,K,T,d)
    value: torch.Tensor  # (B,K,T,d)
    weights: torch.Tensor  # (B,H,T,T)

    gradients_of: "Attended | None" = None  # of other tokens, an encoder's masked ones

    @property
    def qkv(self) -> tuple[torch.Tensor, ...]:
        return self.query, self.key, self.value

    def retain_gradients(self) -> None:
        for x in self.qkv:
            if x.requires_grad:
                x.retain_grad()

    @property
    def gradients(self) -> tuple[torch.Tensor, ...]:
        """Of query, key and value; zeros where nothing came back."""
        return tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in (self.gradients_of or self).qkv)


class OwnAttention(TorchFunctionMode):
    """Keeps what the layer that is under way attends to by code of its own, of a batch of B sequences of T tokens."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape = shape
        self.begin()

    def begin(self) -> None:
        """A layer begins."""
        self.attended: Attended | None = None
        self.query: torch.Tensor | None = None
        self.key: torch.Tensor | None = None
        self.is_softmax = False
        self.is_told = False  # by an attention function of transformers

    def see(self, attended: Attended) -> None:
        """What an attention function of transformers takes: it counts before other products of the layer."""
        assert not self.is_told, "a layer attends twice"
        self.attended, self.is_told = attended, True

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if self.attended is not None:
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._fused(*args, **kwargs)
        if func in PRODUCTS:
            return self._product(func, args, kwargs)
        if func in (F.softmax, torch.softmax, torch.Tensor.softmax) and self.query is not None:
            self.is_softmax = args[0].shape[-2:] == (self.shape[1],) * 2
        return func(*args, **kwargs)

    def _product(self, func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
        square = (self.shape[1],) * 2
        factors = args[-2:] if len(args) > 1 else (kwargs["batch1"], kwargs["batch2"])
        left, right = factors
        if left.dim() < 3 or right.dim() < 3:
            return func(*args, **kwargs)
        if self.query is None and (left.shape[-2], right.shape[-1]) == square:
            self.query, self.key = self._heads(left), self._one_of_each(self._heads(right.transpose(-1, -2)))
            left = self.query.reshape(left.shape)
            right = self._repeated(self.key, right.transpose(-1, -2)).transpose(-1, -2)
        elif self.is_softmax and left.shape[-2:] == square:
            value = self._one_of_each(self._heads(right))
            self.attended = Attended(self.query, self.key, value, self._heads(left).detach())
            right = self._repeated(value, right)
        if len(args) > 1:
            return func(*args[:-2], left, right, **kwargs)
        return func(*args, **kwargs | {"batch1": left, "batch2": right})

    def _fused(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        key, value = self._one_of_each(key), self._one_of_each(value)
        attended = dense_attention(query, key, value, *args, **kwargs)
        self.attended = Attended(query, key, value, attended.weights.detach())
        return attended.mix

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """(B·H,T,d) or (B,H,T,d) → (B,H,T,d)."""
        return x.reshape(self.shape[0], -1, *x.shape[-2:])

    def _one_of_each(self, x: torch.Tensor) -> torch.Tensor:
        """(B,H,T,d) → (B,K,T,d): without the copies that stand behind each head."""
        heads = x.shape[1]
        copies = (n for n in range(heads, 0, -1) if heads % n == 0)
        copied = next(n for n in copies if torch.equal(x[:, ::n].repeat_interleave(n, 1), x))
        return x[:, ::copied]

    def _repeated(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """(B,K,T,d) → as the model's own code has them."""
        heads = like.numel() // x[:, :1].numel()
        return x.repeat_interleave(heads // x.shape[1], 1).reshape(like.shape)

"""What an attention layer may hold beside its own parts: the taps while it is measured, a further term in the softmax's
denominator, and another operation than softmax.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from sinkscope.attention.kernels import KERNELS, AttentionCall, ForbiddenKeys, upcast
from sinkscope.attention.operations import Operation

NAME = "sinkscope"  # of the attention implementation, and of the seam inside each attention module


class Tap(nn.Module):
    """An identity: a place where nnsight reads, overwrites or differentiates."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Seam(nn.Module):
    """The taps of one attention layer, and how its last call was made."""

    # The order in which the taps run: a trace must ask for them in this order.
    ORDER: ClassVar = {
        "interface": ("query", "key", "value", "lse", "mix"),
        "interceptor": ("query", "key", "lse", "value", "mix"),
    }

    def __init__(self, kernel: str, door: str, causal: bool = True, prefix: int = 0) -> None:
        super().__init__()
        self.kernel = KERNELS[kernel]
        self.causal = causal
        self.prefix = prefix
        self.order = self.ORDER[door]
        self.call: AttentionCall | None = None
        self.forbidden: tuple[ForbiddenKeys, ...] = ()
        self.scaling: float | None = None  # found by the interceptor in its first call
        self.query, self.key, self.value = Tap(), Tap(), Tap()
        self.lse, self.mix = Tap(), Tap()


class Denominator(nn.Module, ABC):
    """A further term in the denominator of every row's softmax: a logit of no token, with no value or its own.

    An attention module with such a submodule, under whatever name, attends with this term.
    """

    called: ClassVar[str] = "further terms in the softmax's denominator"  # where words are made of it
    reads_query: ClassVar[bool] = False
    scaling: float  # of q·k, where the model's own code makes the logits
    is_biased: bool  # whether the model adds a bias by position to the logits (ALiBi)

    @abstractmethod
    def forward(self, query: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """query (B,H,T,d) → logits (B,H,T)."""

    def values(self) -> torch.Tensor | None:
        """(H,d), what the term's weight multiplies; None for nothing."""
        return None

    def mixed(self, mix: torch.Tensor, lse: torch.Tensor, query: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """The heads' mix (B,H,T,d) with the term's value in it; lse (B,H,T) is that with the term."""
        values = self.values()
        if values is None:
            return mix
        weight = (upcast(self(query, call)) - lse).exp().to(mix.dtype)
        return mix + weight[..., None] * values[:, None].to(mix.dtype)

    def added_to(self, call: AttentionCall, query: torch.Tensor, own_bias: torch.Tensor | None = None) -> AttentionCall:
        """The call with this term added to the model's own sink logits, if it has any (gpt-oss).

        own_bias (B|1,H,T) is what ALiBi adds to the logit of the query's own key. Models define ALiBi up to a constant
        per row (MPT counts from the last key); the new logit needs the one with 0 at distance 0.
        """
        logits = upcast(self(query, call))
        if own_bias is not None:
            logits = logits + own_bias
        if call.sink_logits is not None:
            logits = logits.logaddexp(call.sink_logits.to(logits.dtype)[:, None])
        return replace(call, sink_logits=logits)


def denominator_of(attention: nn.Module) -> Denominator | None:
    """The further term of this attention module; None where it has none."""
    return next((child for child in _children(attention) if isinstance(child, Denominator)), None)


class OtherOperation(nn.Module):
    """Another operation than softmax. An attention module with such a submodule, under whatever name, attends by it."""

    operation: Operation
    called: str  # where words are made of it

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """φ of queries (B,H,T,d) or keys (B,K,T,d), of the same shape: what the taps show."""
        return x


def operation_of(attention: nn.Module) -> OtherOperation | None:
    """What this attention module attends by; None for softmax."""
    return next((child for child in _children(attention) if isinstance(child, OtherOperation)), None)


def operations_of(model: nn.Module) -> list[str]:
    """What the operations of a model's layers are called, each once; none where all are softmax."""
    return list(dict.fromkeys(module.called for module in model.modules() if isinstance(module, OtherOperation)))


def attends_by_us(module: nn.Module) -> bool:
    """Whether this is an attention module that transformers' own functions would not compute as it is meant."""
    return any(isinstance(child, Denominator | OtherOperation) for child in _children(module))


def _children(module: nn.Module) -> Iterator[nn.Module]:
    """A module's own parts. PEFT keeps one that it trains as a whole (`modules_to_save`) inside a module of its own,
    as a copy of the original for each adapter.
    """
    for child in module.children():
        wrapper: Any = child
        if "original_module" not in child._modules:
            yield child
        elif wrapper.disable_adapters or not wrapper.active_adapters:
            yield wrapper.original_module
        else:
            yield wrapper.modules_to_save[wrapper.active_adapters[0]]

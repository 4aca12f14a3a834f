"""What an attention layer holds while it is measured: taps to read at, and a further term in the denominator."""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import ClassVar

import torch
from torch import nn

from sinkscope.attention.kernels import KERNELS, AttentionCall, ForbiddenKeys, upcast

NAME = "sinkscope"  # of the attention implementation, and of the seam inside each attention module


RETROFIT = "retrofit"  # of what a retrofit has added to a module, for good


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

    def __init__(self, kernel: str, door: str) -> None:
        super().__init__()
        self.kernel = KERNELS[kernel]
        self.order = self.ORDER[door]
        self.call: AttentionCall | None = None
        self.forbidden: tuple[ForbiddenKeys, ...] = ()
        self.scaling: float | None = None  # found by the interceptor in its first call
        self.query, self.key, self.value = Tap(), Tap(), Tap()
        self.lse, self.mix = Tap(), Tap()


class Denominator(nn.Module, ABC):
    """A retrofit's own term in every row's denominator, a logit with no value; in an attention module as `RETROFIT`."""

    reads_query: ClassVar[bool] = False
    scaling: float  # of q·k, where the model's own code makes the logits,
    is_biased: bool  # and whether it adds to them by position (ALiBi)

    @abstractmethod
    def forward(self, query: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """query (B,H,T,d) → logits (B,H,T)."""

    def added_to(self, call: AttentionCall, query: torch.Tensor, own_bias: torch.Tensor | None = None) -> AttentionCall:
        """The same call with this term in it, beside the model's own where it has one (gpt-oss).

        own_bias (B|1,H,T): what ALiBi adds to the logit of the query's own key. Models give ALiBi up to a constant a
        row, which MPT counts from the last key there is; beside a logit without position it is to be 0 at distance 0.
        """
        logits = upcast(self(query, call))
        if own_bias is not None:
            logits = logits + own_bias
        if call.sink_logits is not None:
            logits = logits.logaddexp(call.sink_logits.to(logits.dtype)[:, None])
        return replace(call, sink_logits=logits)


def denominator_of(module: nn.Module) -> Denominator | None:
    found = getattr(module, RETROFIT, None)
    return found if isinstance(found, Denominator) else None


def has_denominators(model: nn.Module) -> bool:
    return any(denominator_of(module) is not None for module in model.modules())

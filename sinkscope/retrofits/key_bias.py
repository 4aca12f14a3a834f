"""A learned key k* per head with a fixed zero value (WSE §7): one more key to attend to, which contributes nothing.

Its logit is scaling · q_t·k*, with the model's softcap if it has one. k* is not rotated, as it has no position. It
starts at 0, a logit of 0 in every row: no other start lowers every query's logit without looking at data.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch

from sinkscope.attention.kernels import AttentionCall, upcast
from sinkscope.retrofits.retrofit import DenominatorPart, Layer, Retrofit


def bias_logits(query: torch.Tensor, key: torch.Tensor, scaling: float, softcap: float | None = None) -> torch.Tensor:
    """scaling · q_t·k* of each head: query (B,H,T,d), key (H,d) → (B,H,T), float32 or better."""
    query = upcast(query)
    logits = scaling * torch.einsum("bhtd,hd->bht", query, key.to(query.dtype))
    return logits if softcap is None else softcap * (logits / softcap).tanh()


class KeyBias(DenominatorPart):
    """`key` (H,d): one for each query head."""

    called: ClassVar[str] = "key biases"
    reads_query: ClassVar[bool] = True

    def __init__(self, layer: Layer) -> None:
        super().__init__(layer)
        self.key = layer.empty(layer.heads, layer.head_dim)

    def start(self) -> Mapping[str, torch.Tensor]:
        return {"key": torch.zeros_like(self.key)}

    def forward(self, query: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        # a call whose logits the model's own code has made does not say exactly how they were scaled
        scaling = call.scaling if call.scores is None else self.scaling
        return bias_logits(query, self.key, scaling, call.softcap)


class KeyBiases(Retrofit):
    name: ClassVar[str] = "key-bias"
    about: ClassVar[str] = "a learned key per head whose value is zero"
    paper: ClassVar[str] = "WSE §7"

    def part(self, layer: Layer) -> KeyBias:
        return KeyBias(layer)

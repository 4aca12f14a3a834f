"""A learned vector added to every head's output (WSE §7.2, table 4: V biases)."""

from typing import ClassVar

import torch
from pydantic import Field
from torch import nn
from transformers import PreTrainedModel

from sinkscope.models.family import Family
from sinkscope.retrofits.placed_hook import PlacedHook
from sinkscope.retrofits.retrofit import AttentionPart, Layer, Retrofit


class ValueBias(AttentionPart):
    """`bias` (H,d), or (1,d) shared by the heads."""

    def __init__(self, layer: Layer, shared: bool, deviation: float) -> None:
        super().__init__()
        self.heads = layer.heads
        self.bias = layer.empty(1 if shared else layer.heads, layer.head_dim)
        if deviation:
            self.draw_start(layer, deviation)

    def attach(self, layer: Layer, model: PreTrainedModel, family: Family) -> None:
        PlacedHook(layer.output, _added, before=True).watch(layer.attention)

    def forward(self, mix: torch.Tensor) -> torch.Tensor:
        """Every head's mix (B,T,H·d) with its bias."""
        return mix + self.bias.expand(self.heads, -1).flatten().to(mix.dtype)


def _added(part: nn.Module, args: tuple, output: None) -> tuple:
    return (part(args[0]), *args[1:])


class ValueBiases(Retrofit):
    name: ClassVar[str] = "value-bias"
    about: ClassVar[str] = "a learned vector added to each head's output (shared by heads; deviation of the start)"
    paper: ClassVar[str] = "WSE §7"

    shared: bool = False
    deviation: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    def part(self, layer: Layer) -> ValueBias:
        return ValueBias(layer, self.shared, self.deviation)

"""A learned logit b in every row's softmax, with no value: a[t,s] = exp(l[t,s]) / (exp(b) + Σ exp(l[t,·])).

b = −∞ is the pretrained attention, but cannot be trained: ∂a/∂b falls with exp(b). The start is a compromise.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from transformers import PreTrainedModel

from sinkscope.attention.kernels import AttentionCall
from sinkscope.models.family import Family
from sinkscope.retrofits.retrofit import DenominatorPart, Layer, Retrofit


class SinkLogit(DenominatorPart):
    """`logit` (H,): one for each query head."""

    called: ClassVar[str] = "learned sink logits"

    def __init__(self, layer: Layer, first: float) -> None:
        super().__init__(layer)
        self.first = first
        self.logit = layer.empty(layer.heads)

    def start(self) -> Mapping[str, torch.Tensor]:
        return {"logit": torch.full_like(self.logit, self.first)}

    def forward(self, query: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        return self.logit[:, None].expand(query.shape[:3])


class LearnableSink(Retrofit):
    name: ClassVar[str] = "learnable-sink"
    about: ClassVar[str] = (
        "a learned logit per head in the softmax's denominator, with no value (first: where it starts)"
    )
    paper: ClassVar[str] = "S2M §1, gpt-oss"

    first: float = Field(default=-5.0, allow_inf_nan=False)

    def inapplicable(self, model: PreTrainedModel, family: Family) -> str | None:
        if any(hasattr(attention, "sinks") for attention in family.attentions(model).values()):
            return "it has learnable sinks of its own"
        return super().inapplicable(model, family)

    def part(self, layer: Layer) -> SinkLogit:
        return SinkLogit(layer, self.first)

"""Biases of attention: learned keys, value biases (WSE §7.2 and §7.3), and learnable sink logits (S2M §1, gpt-oss).

Softmax off by one (Miller 2023) is a sink logit that is fixed at 0.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from transformers import PreTrainedModel

from sinkscope.attention.kernels import AttentionCall, upcast, without_autocast
from sinkscope.models.family import Family
from sinkscope.retrofits.retrofit import DenominatorPart, Layer, Part, Retrofit, change_mix


class KeyBias(DenominatorPart):
    """A learned key k* with a value v* of its own: one more key to attend to (WSE tables 4, 5 and 13).

        mix[t] = Σ_s a[t,s] v_s + a*[t] v*        a*[t] = exp(scaling · q_t·k* - lse[t])

    v* = 0 contributes nothing (the paper's K biases), a learned v* makes KV biases, and a fixed v* of norm m has a
    cost. The logit has the model's softcap, if there is one. k* has no position, so it is not rotated. By default it
    starts at 0, a logit of 0 in every row: no other start lowers every query's logit without looking at data. The paper
    trains from scratch and starts at N(0, .02²): `deviation=0.02`.

    The parameter `key` (H,n), or (1,n) if shared by the heads, holds the first n ≤ d dimensions of k*; `value` is (H,d)
    or (1,d), if v* is learned.
    """

    called = "key biases"
    reads_query = True

    def __init__(self, layer: Layer, method: "KeyBiases") -> None:
        super().__init__(layer, method)
        self.heads, self.width = layer.heads, layer.head_dim
        rows = 1 if method.shared else layer.heads
        self.key = layer.empty(rows, min(method.dimensions or self.width, self.width))
        if method.value == "learned":
            self.value = layer.empty(rows, self.width)
        self.draw_start(layer, method.deviation)

    def forward(self, query: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        # if the model's own code has computed the logits, the call does not have their exact scale
        scaling = call.scaling if call.scores is None else self.scaling
        key = F.pad(self.key, (0, self.width - self.key.shape[1])).expand(self.heads, -1)
        query = upcast(query)
        with without_autocast(query):
            logits = scaling * torch.einsum("bhtd,hd->bht", query, key.to(query.dtype))
        return logits if call.softcap is None else call.softcap * (logits / call.softcap).tanh()

    def values(self) -> torch.Tensor | None:
        if self.method.value == "zero":
            return None
        if self.method.value == "learned":
            return self.value.expand(self.heads, -1)
        value = torch.zeros(self.width, dtype=torch.float64)
        if self.method.value == "axis":
            value[0] = self.method.norm  # m·e₁ of WSE table 5
        else:
            value += self.method.norm / self.width**0.5  # m·1/√d
        return value.to(self.key).expand(self.heads, -1)


class KeyBiases(Retrofit):
    name = "key-bias"
    about = (
        "a learned key per head, of value zero (value: zero, learned, or fixed on an axis or uniform, of norm; shared "
        "by heads; dimensions that are learned; deviation of the start)"
    )
    paper = "WSE §7"
    part = KeyBias

    value: Literal["zero", "learned", "axis", "uniform"] = "zero"
    norm: float = Field(default=1.0, ge=0, allow_inf_nan=False)  # norm m of a fixed value
    shared: bool = False
    dimensions: int | None = Field(default=None, ge=1)  # d_a, the number of learned dimensions; None: all
    deviation: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_norm(self) -> "KeyBiases":
        if self.norm != 1.0 and self.value not in ("axis", "uniform"):
            raise ValueError("norm applies only to value=axis and value=uniform")
        return self

    def inapplicable(self, model: PreTrainedModel, family: Family) -> str | None:
        if self.value != "zero" and family.door != "interface":
            return f"value={self.value}: its own code mixes the values, and a further one cannot be added there"
        return super().inapplicable(model, family)


class ValueBias(Part):
    """A learned vector added to every head's output (WSE table 4: V biases): `bias` (H,d), or (1,d) if shared."""

    def __init__(self, layer: Layer, method: "ValueBiases") -> None:
        super().__init__()
        self.heads = layer.heads
        self.bias = layer.empty(1 if method.shared else layer.heads, layer.head_dim)
        self.draw_start(layer, method.deviation)

    def attach(self, layer: Layer, model: PreTrainedModel, family: Family) -> None:
        change_mix(layer, lambda part, mix: part(mix))

    def forward(self, mix: torch.Tensor) -> torch.Tensor:
        """Add each head's bias to its mix, (B,T,H·d)."""
        return mix + self.bias.expand(self.heads, -1).flatten().to(mix.dtype)


class ValueBiases(Retrofit):
    name = "value-bias"
    about = "a learned vector added to each head's output (shared by heads; deviation of the start)"
    paper = "WSE §7"
    part = ValueBias

    shared: bool = False
    deviation: float = Field(default=0.0, ge=0, allow_inf_nan=False)


class SinkLogit(DenominatorPart):
    """A learned logit b per query head in every row's softmax, without a value: `logit` (H,).

    a[t,s] = exp(l[t,s]) / (exp(b) + Σ exp(l[t,·])). b = −∞ is the pretrained attention, but it is not trainable,
    because ∂a/∂b falls with exp(b). The starting value is a compromise.
    """

    called = "learned sink logits"

    def __init__(self, layer: Layer, method: "LearnableSink") -> None:
        super().__init__(layer, method)
        self.logit = layer.empty(layer.heads)
        self.starts = {"logit": method.first}

    def forward(self, query: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        return self.logit[:, None].expand(query.shape[:3])


class LearnableSink(Retrofit):
    name = "learnable-sink"
    about = "a learned logit per head in the softmax's denominator, with no value (first: its starting value)"
    paper = "S2M §1, gpt-oss"
    part = SinkLogit

    first: float = Field(default=-5.0, allow_inf_nan=False)

    def inapplicable(self, model: PreTrainedModel, family: Family) -> str | None:
        if any(hasattr(attention, "sinks") for attention in family.attentions(model).values()):
            return "it has learnable sinks of its own"
        return super().inapplicable(model, family)


class One(DenominatorPart):
    """A 1 in every row's denominator: a[t,s] = exp(l[t,s]) / (1 + Σ exp(l[t,·])), a sink logit of 0."""

    called = "a one in the denominator"

    def forward(self, query: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        return torch.zeros_like(upcast(query[..., 0]))


class OffByOne(Retrofit):
    name = "off-by-one"
    about = "softmax off by one: 1 is added to the denominator, so that a query may attend to nothing"
    paper = "Miller 2023"
    part = One

    def inapplicable(self, model: PreTrainedModel, family: Family) -> str | None:
        return LearnableSink().inapplicable(model, family)

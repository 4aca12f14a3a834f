"""V-scale (GS §5): v̂ = φ(‖v‖²) v with φ(r) = r / (r + C), so that hardly any gradient flows through small values.

C = (d σ)² λ for each key/value head: λ = exp(θ), learned, or fixed. λ = 0 is the identity.
"""

import math
from collections.abc import Mapping

import torch
from pydantic import Field, model_validator
from torch import nn

from sinkscope.attention.kernels import upcast
from sinkscope.retrofits.retrofit import Layer, Retrofit, ValuePart


def shrink(value: torch.Tensor, c: torch.Tensor | float) -> torch.Tensor:
    """Return φ(r) = r / (r + C) of r = ‖v‖², (…,d) → (…), in float32 or better; 0 at r = C = 0."""
    r = upcast(value).square().sum(-1)
    return r / (r + c).clamp(min=torch.finfo(r.dtype).tiny)


class ValueScale(ValuePart):
    """V-scale of one layer; with the parameter `theta` (K,) if λ is learned."""

    def __init__(self, layer: Layer, sigma: float, strength: float, learned: bool) -> None:
        super().__init__(layer)
        self.base = (layer.head_dim * sigma) ** 2
        self.strength = strength
        self.theta: nn.Parameter | None = layer.empty(layer.value_heads) if learned else None

    def start(self) -> Mapping[str, torch.Tensor]:
        return {} if self.theta is None else {"theta": torch.full_like(self.theta, math.log(self.strength))}

    def c(self) -> torch.Tensor | float:
        """Return C = (d σ)² λ, (K,); a number if λ is fixed."""
        return self.base * (self.strength if self.theta is None else upcast(self.theta).exp())

    def forward(self, x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return shrink(value, self.c())


class VScale(Retrofit):
    name = "vscale"
    about = (
        "values times r/(r+C), with r their squared norm: small values pass hardly any gradient "
        "(sigma: 0.02, strength: λ at the start, learned)"
    )
    paper = "GS §5"

    sigma: float = Field(default=0.02, gt=0, allow_inf_nan=False)
    strength: float = Field(default=1.0, ge=0, allow_inf_nan=False)  # λ, at the start or fixed
    learned: bool = True

    @model_validator(mode="after")
    def _check_start(self) -> "VScale":
        if self.learned and self.strength == 0:
            raise ValueError("λ = exp(θ) is never 0: use a small strength, or learned=false")
        return self

    def part(self, layer: Layer) -> ValueScale:
        return ValueScale(layer, self.sigma, self.strength, self.learned)

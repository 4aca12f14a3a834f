"""Factors of values or of heads' outputs: VGA, IGA and V-scale.

VGA and IGA have gates g = scale · sigmoid(F W) (VGA §3.1, §3.2, appendix B). At W = 0 the sigmoid is ½ everywhere. With
scale 2 the gate is exactly 1: the retrofitted model starts bit for bit as the pretrained one, where the sigmoid is
steepest. A bias would only approach 1, where the sigmoid is flat. Scale 1 is the papers' own gate, which halves the
values or outputs at the start.

V-scale (GS §5) is v̂ = φ(‖v‖²) v with φ(r) = r / (r + C), so that hardly any gradient flows through small values.
C = (d σ)² λ for each key/value head: λ = exp(θ), learned, or fixed. λ = 0 is the identity.
"""

import math
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import nn

from sinkscope.attention.kernels import upcast
from sinkscope.retrofits.retrofit import GatePart, Layer, OutputPart, Retrofit, ValuePart, gated


class _Gates(GatePart):
    """Gates g = scale · σ(F W), VGA eq. 6, 9 and 16, with a weight (F,heads) that is zero at the start."""

    head_axis = 1

    def __init__(self, layer: Layer, method: "Gated") -> None:
        super().__init__(layer, method)
        width = layer.width if method.reads == "input" else layer.value_heads * layer.head_dim
        self.weight = layer.empty(width, layer.value_heads if isinstance(self, ValuePart) else layer.heads)

    def forward(self, x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        features = x if self.method.reads == "input" else value.flatten(-2)
        return self.method.scale * torch.sigmoid(features @ self.weight)


class ValueGate(_Gates, ValuePart):
    """Gate v̂_j = g_j v_j at key position j, one for each key/value head (VGA eq. 4 and 10)."""

    def pullback(self, x: torch.Tensor, value: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor:
        """VGA eq. 8 and 15, (g I + g (1 − g) W V) u, for gates scale · σ(·) that read all heads; IGA's g u (eq. 5)."""
        weight, scale = upcast(self.weight.detach()), self.method.scale
        features = x if self.method.reads == "input" else value.flatten(-2)
        gate = scale * torch.sigmoid(features @ weight)
        content = gated(upstream, gate)
        if self.method.reads == "input":
            return content
        slope = gate * (1 - gate / scale) * (value * upstream).sum(-1)
        return content + (slope @ weight.T).unflatten(-1, value.shape[-2:])


class OutputGate(_Gates, OutputPart):
    """Gate O_i = g_i ⊙ Attention(Q, K, V)_i at query position i, one for each query head (VGA eq. 17)."""


def _gate_of(layer: Layer, method: "Gated") -> ValueGate | OutputGate:
    return OutputGate(layer, method) if method.placement == "output" else ValueGate(layer, method)


class Gated(Retrofit):
    """A method with gates; `placement`: on the value at the key's position, or on the head's output at the query's."""

    reads: ClassVar[str]  # "value" or "input": the gate is computed from this
    part = _gate_of

    placement: Literal["value", "output"] = "value"
    scale: float = Field(default=2.0, gt=0, allow_inf_nan=False)


class VGA(Gated):
    """Value-state gated attention (VGA §3.2): F is the values of all key/value heads, concatenated."""

    name = "vga"
    about = "gates computed from the values (placement: value or output; scale: 2, so that gates start at 1)"
    paper = "VGA §3.2, app. B"
    reads = "value"


class IGA(Gated):
    """Input-state gated attention (VGA §3.1, Bondarenko et al. 2023): F is the input of the attention."""

    name = "iga"
    about = "gates computed from the attention's input (placement: value or output; scale: 2)"
    paper = "VGA eq. 4, Bondarenko 2023"
    reads = "input"


def shrink(value: torch.Tensor, c: torch.Tensor | float) -> torch.Tensor:
    """Return φ(r) = r / (r + C) of r = ‖v‖², (…,d) → (…), in float32 or better; 0 at r = C = 0."""
    r = upcast(value).square().sum(-1)
    return r / (r + c).clamp(min=torch.finfo(r.dtype).tiny)


class ValueScale(ValuePart):
    """V-scale of one layer; with the parameter `theta` (K,) if λ is learned."""

    def __init__(self, layer: Layer, method: "VScale") -> None:
        super().__init__(layer, method)
        self.base = (layer.head_dim * method.sigma) ** 2
        self.theta: nn.Parameter | None = None
        if method.learned:
            self.theta = layer.empty(layer.value_heads)
            self.starts = {"theta": math.log(method.strength)}

    def c(self) -> torch.Tensor | float:
        """Return C = (d σ)² λ, (K,); a number if λ is fixed."""
        return self.base * (self.method.strength if self.theta is None else upcast(self.theta).exp())

    def forward(self, x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return shrink(value, self.c())

    def pullback(self, x: torch.Tensor, value: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor:
        """GS §5.1: the Jacobian φ(r) I + 2C ÷ (r + C)² v vᵀ."""
        c, r = torch.as_tensor(self.c(), device=value.device).detach(), value.square().sum(-1)
        along = 2 * c / (r + c).square() * (value * upstream).sum(-1)
        return gated(upstream, shrink(value, c)) + along[..., None] * value


class VScale(Retrofit):
    name = "vscale"
    about = (
        "values times r/(r+C), with r their squared norm: small values pass hardly any gradient "
        "(sigma: 0.02, strength: λ at the start, learned)"
    )
    paper = "GS §5"
    part = ValueScale

    sigma: float = Field(default=0.02, gt=0, allow_inf_nan=False)
    strength: float = Field(default=1.0, ge=0, allow_inf_nan=False)  # λ, at the start or fixed
    learned: bool = True

    @model_validator(mode="after")
    def _check_start(self) -> "VScale":
        if self.learned and self.strength == 0:
            raise ValueError("λ = exp(θ) is never 0: use a small strength, or learned=false")
        return self

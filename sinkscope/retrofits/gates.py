"""VGA and IGA: gates on values or on heads' outputs, g = scale · sigmoid(F W) (VGA §3.1, §3.2, appendix B).

At W = 0 the sigmoid is ½ everywhere. With scale 2 the gate is exactly 1: the retrofitted model starts bit for bit as
the pretrained one, where the sigmoid is steepest. A bias would only approach 1, where the sigmoid is flat. Scale 1 is
the papers' own gate, which halves the values or outputs at the start.
"""

from typing import ClassVar, Literal

import torch
from pydantic import Field

from sinkscope.retrofits.retrofit import GatePart, Layer, OutputPart, Retrofit, ValuePart


class _Gates(GatePart):
    """Gates g = scale · σ(F W), VGA eq. 6, 9 and 16, with a weight (F,heads) that is zero at the start."""

    head_axis = 1

    def __init__(self, layer: Layer, reads: str, scale: float) -> None:
        super().__init__(layer)
        self.reads, self.scale = reads, scale
        width = layer.width if reads == "input" else layer.value_heads * layer.head_dim
        self.weight = layer.empty(width, layer.value_heads if isinstance(self, ValuePart) else layer.heads)

    def forward(self, x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        features = x if self.reads == "input" else value.flatten(-2)
        return self.scale * torch.sigmoid(features @ self.weight)


class ValueGate(_Gates, ValuePart):
    """Gate v̂_j = g_j v_j at key position j, one for each key/value head (VGA eq. 4 and 10)."""


class OutputGate(_Gates, OutputPart):
    """Gate O_i = g_i ⊙ Attention(Q, K, V)_i at query position i, one for each query head (VGA eq. 17)."""


PLACEMENTS: dict[str, type[ValueGate] | type[OutputGate]] = {"value": ValueGate, "output": OutputGate}


class Gated(Retrofit):
    """A method with gates; `placement`: on the value at the key's position, or on the head's output at the query's."""

    reads: ClassVar[str]  # "value" or "input": the gate is computed from this

    placement: Literal["value", "output"] = "value"
    scale: float = Field(default=2.0, gt=0, allow_inf_nan=False)

    def part(self, layer: Layer) -> ValueGate | OutputGate:
        return PLACEMENTS[self.placement](layer, self.reads, self.scale)


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

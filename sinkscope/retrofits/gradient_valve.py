"""The two effects of V-scale (GS §5): its factor on the values' gradient alone, or on the values alone.

V-scale changes both passes. GS says that V-scale prevents massive activations because less gradient flows into the
values of the sink. A valve on the gradient alone leaves the forward pass as it is, and a valve on the values alone
leaves the gradient as it would be without a factor; only the first should act like V-scale if GS is right.
"""

from functools import partial
from typing import Any, Literal

import torch
from pydantic import Field, model_validator

from sinkscope.attention.kernels import upcast
from sinkscope.retrofits.gates import shrink
from sinkscope.retrofits.retrofit import Layer, Retrofit, ValuePart, gated

TINY = 1e-30  # keeps 0 ÷ 0 at 0


class OnGradient(torch.autograd.Function):
    """The identity, whose gradient is replaced by `change(gradient)`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, change: Any) -> torch.Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.change(gradient), None


def at_position(gradient: torch.Tensor, factor: torch.Tensor, position: int) -> torch.Tensor:
    """Multiply the gradient (B,T,K,d) at one position by factors (B,K)."""
    changed = gradient.clone()
    changed[:, position] = gated(gradient[:, position], factor)
    return changed


def at_others(gradient: torch.Tensor, factor: torch.Tensor, position: int) -> torch.Tensor:
    """Change the gradient (B,T,K,d) at all positions but one by as much as `at_position` would change it there.

    All other positions have one factor in each sequence and head: the norm of the change, ‖Δ∇v‖ over these positions,
    is |1 − factor| ‖∇v‖ of the position, but at most the whole gradient of the others.
    """
    squares = upcast(gradient).square().sum(-1)  # (B,T,K)
    there = squares[:, position]
    others = (squares.sum(1) - there).clamp(min=0)
    share = (there / others.clamp(min=TINY)).sqrt().clamp(max=1e6)
    of_others = 1 - ((1 - factor) * share).clamp(-1, 1)
    changed = gated(gradient, of_others[:, None].expand_as(squares))
    changed[:, position] = gradient[:, position]
    return changed


class Valve(ValuePart):
    """The valve of one layer. It has no parameters: V-scale's factor is that of λ = 1."""

    def __init__(self, layer: Layer, method: "GradientValve") -> None:
        super().__init__(layer, method)
        self.c = (layer.head_dim * method.sigma) ** 2

    def factor(self, value: torch.Tensor) -> torch.Tensor:
        """(…,K,d) → (…,K): the factor of each head's value, without a gradient of its own."""
        if self.method.factor is not None:
            return upcast(value).new_full(value.shape[:-1], self.method.factor)
        return shrink(value.detach(), self.c)

    def forward(self, x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return the factors of the forward pass: 1 for a valve on the gradient."""
        return self.factor(value) if self.method.acts == "values" else upcast(value).new_ones(value.shape[:-1])

    def change(self, value: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        if self.method.acts == "values":  # the second term is 0, and has the gradient of the value
            return gated(value, factor).detach() + (value - value.detach())
        position = self.method.position
        if position is None:
            return OnGradient.apply(value, partial(gated, factor=self.factor(value)))
        if position >= value.shape[1]:
            return value
        changed = at_others if self.method.control else at_position
        return OnGradient.apply(value, partial(changed, factor=self.factor(value[:, position]), position=position))


class GradientValve(Retrofit):
    name = "gradient-valve"
    about = (
        "V-scale's factor on the values' gradient alone, or on the values alone (acts: gradient, values; position: "
        "of the gradient, all; factor: instead of V-scale's; control: on all other positions, by as much)"
    )
    paper = "GS §5"
    part = Valve

    acts: Literal["gradient", "values"] = "gradient"
    position: int | None = Field(default=None, ge=0)  # the one at which the gradient is changed; None: at all
    factor: float | None = Field(default=None, ge=0, allow_inf_nan=False)  # None: V-scale's r/(r+C) with λ = 1
    control: bool = False
    sigma: float = Field(default=0.02, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _check_position(self) -> "GradientValve":
        if self.acts == "values" and self.position is not None:
            raise ValueError("acts=values acts at all positions: a model that reads from its cache does not see them")
        if self.control and self.position is None:
            raise ValueError("control=true changes the gradient at all positions but one: give position")
        return self

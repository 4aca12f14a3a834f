"""The value state at the sink scaled, its key kept (VGA §1: does the drained value matter?)."""

from contextlib import AbstractContextManager
from typing import ClassVar

import torch
from torch import nn

from sinkscope.errors import InputError
from sinkscope.interventions.intervention import (
    Chosen,
    Indices,
    Intervention,
    Known,
    Real,
    Target,
    chosen,
    edited_positions,
)
from sinkscope.models.projections import Role


class ScaleSinkValue(Intervention):
    name: ClassVar[str] = "scale-sink-value"
    about: ClassVar[str] = "value states at the sink times a factor (layers, key/value heads, positions, factor: 0)"
    paper: ClassVar[str] = "VGA §1"
    control_about: ClassVar[str] = "another position"
    heads_of: ClassVar[Role] = "value"

    layers: Chosen = None
    heads: Chosen = None
    positions: Indices = (0,)
    factor: Real = 0.0

    @classmethod
    def inapplicable(cls, target: Target) -> str | None:
        return target.without_projection("value")

    def begins_at(self, target: Target) -> int:
        return min(target.attending(self.layers))

    def applied(self, target: Target) -> AbstractContextManager[None]:
        if self.factor == 1.0:
            raise InputError(f"{self.name} would change nothing: its factor is 1")
        places: dict[nn.Module, torch.Tensor] = {}
        for layer in target.attending(self.layers):
            projection = target.projection(layer, "value")
            heads = chosen(self.heads, projection.heads)
            places[projection.module] = projection.places[heads].flatten()

        def edit(module: nn.Module, position: int, x: torch.Tensor) -> torch.Tensor:
            x[:, places[module]] *= self.factor
            return x

        return edited_positions(self.name, target, places, self.positions, edit)

    def control(self, known: Known, draw: torch.Generator) -> Intervention:
        return self.at_other_positions(known, draw)

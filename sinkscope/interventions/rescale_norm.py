"""The norm of a token's residual state changed, its direction kept (GS §4: does the norm alone regulate gradients?).

Behind RMSNorm a state c·h is what h is, but for the norm's ε, and what comes back through the norm is 1/c of it. So a
branch computes the same, and its gradient enters the residual stream 1/c times as large.
"""

from contextlib import AbstractContextManager
from typing import Annotated, ClassVar, Self

import torch
from pydantic import Field
from torch import nn

from sinkscope.errors import InputError
from sinkscope.interventions.intervention import (
    Expectation,
    Indices,
    Intervention,
    Known,
    Open,
    Real,
    Target,
    edited_positions,
)
from sinkscope.interventions.massive import sink_massive
from sinkscope.models.edits import edited_input


class RescaleNorm(Intervention):
    """What enters each of the chosen layers is multiplied by the factor, and stays so in the layers behind."""

    name: ClassVar[str] = "rescale-norm"
    about: ClassVar[str] = (
        "what enters a layer at the sink times a factor, its direction kept (layers: the one behind the first massive "
        "activation, positions, factor: 0.5)"
    )
    paper: ClassVar[str] = "GS §4"
    control_about: ClassVar[str] = "another position"
    expects: ClassVar[Expectation] = Expectation.PERPLEXITY_UNHARMED

    layers: Open = None  # None: the layer behind the first at whose output the position has massive activations
    positions: Indices = (0,)
    factor: Annotated[Real, Field(gt=0)] = 0.5

    @classmethod
    def inapplicable(cls, target: Target) -> str | None:
        family = target.family
        if family.copies:
            return "its residual stream has several copies, of which the mean is known"
        if not any("attn_norm" in family.block(layer).sites for layer in range(len(target.layers))):
            return "no norm stands in front of its branches, which would read another state"
        return None

    def resolved(self, known: Known) -> Self:
        if self.layers is not None:
            return self
        massive, _ = sink_massive(self.name, known, self.positions[0], to_name="layers")
        return self.model_copy(update={"layers": (massive[0] + 1,)})

    def begins_at(self, target: Target) -> int:
        return min(self.layers or (0,))

    def applied(self, target: Target) -> AbstractContextManager[None]:
        if self.layers is None:
            raise InputError(f"{self.name}: name the layers")
        if self.factor == 1.0:
            raise InputError(f"{self.name} would change nothing: its factor is 1")

        def edit(module: nn.Module, position: int, x: torch.Tensor) -> torch.Tensor:
            return self.factor * x

        modules = [target.layers[layer] for layer in self.layers]
        return edited_positions(self.name, target, modules, self.positions, edit, edited_input)

    def control(self, known: Known, draw: torch.Generator) -> Intervention:
        return self.at_other_positions(known, draw)

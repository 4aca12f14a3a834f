"""Removal of the first token's embedding, keeping its position (NU intervention 4)."""

from contextlib import AbstractContextManager
from typing import ClassVar

import torch

from sinkscope.interventions.intervention import Expectation, Indices, Intervention, Known, Target, edited_positions


class NullifyFirstEmbedding(Intervention):
    name: ClassVar[str] = "nullify-first-embedding"
    about: ClassVar[str] = "token embedding of position 0 = 0, its position kept (positions)"
    paper: ClassVar[str] = "NU intervention 4"
    control_about: ClassVar[str] = "another token's embedding"
    expects: ClassVar[Expectation] = Expectation.SINK_STAYS

    positions: Indices = (0,)

    def applied(self, target: Target) -> AbstractContextManager[None]:
        embedding = target.model.get_input_embeddings()
        return edited_positions(
            self.name, target, [embedding], self.positions, lambda module, position, x: torch.zeros_like(x)
        )

    def control(self, known: Known, draw: torch.Generator) -> Intervention:
        return self.at_other_positions(known, draw)

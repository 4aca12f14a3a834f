"""Removal of the first token's embedding, with its position kept (NU intervention 4)."""

from contextlib import AbstractContextManager

import torch

from sinkscope.interventions.intervention import Expectation, Indices, Intervention, Target, edited_positions


class NullifyFirstEmbedding(Intervention):
    name = "nullify-first-embedding"
    about = "token embedding of position 0 = 0, its position kept (positions)"
    paper = "NU intervention 4"
    control_about = "another token's embedding"
    redraws = "positions"
    expects = Expectation.SINK_STAYS

    positions: Indices = (0,)

    def applied(self, target: Target) -> AbstractContextManager[None]:
        embedding = target.model.get_input_embeddings()
        return edited_positions(
            self.name, target, [embedding], self.positions, lambda module, position, x: torch.zeros_like(x)
        )

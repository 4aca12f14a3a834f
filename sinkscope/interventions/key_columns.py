"""What W_k reads of a few coordinates taken away (NU intervention 5)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Self

import torch

from sinkscope.errors import InputError
from sinkscope.interventions.intervention import Chosen, Expectation, Intervention, Known, Open, Target, chosen
from sinkscope.interventions.massive import sink_massive
from sinkscope.models.edits import Edit, check_changes, replaced
from sinkscope.models.positions import effective_positions, massive_coordinates
from sinkscope.models.projections import Role


class ZeroKeyColumns(Intervention):
    name: ClassVar[str] = "zero-key-columns"
    about: ClassVar[str] = "W_k reads nothing of these coordinates (layers, key heads, coordinates: the massive ones)"
    paper: ClassVar[str] = "NU intervention 5"
    control_about: ClassVar[str] = "random coordinates"
    expects: ClassVar[Expectation] = Expectation.SINK_FALLS

    heads_of: ClassVar[Role] = "key"

    layers: Chosen = None
    heads: Chosen = None
    coordinates: Open = None  # None: those that are massive in EPE_0, or, without learned positions, in the stream

    @classmethod
    def inapplicable(cls, target: Target) -> str | None:
        reason = target.without_weights("key")
        if reason is None and any(target.projection(at, "key").width != target.width for at in target.attending()):
            return "its key projection does not read the residual stream itself"
        return reason

    def resolved(self, known: Known) -> Self:
        if self.coordinates is not None:
            return self
        family = known.target.family
        if family.position_embedding:
            found = tuple(massive_coordinates(effective_positions(known.target.model, family, 1)[0]))
            if not found:
                raise InputError(f"{self.name}: EPE_0 has no massive coordinates here: name some")
        else:
            _, found = sink_massive(self.name, known, 0)
        return self.model_copy(update={"coordinates": tuple(sorted(found))})

    def begins_at(self, target: Target) -> int:
        return min(target.attending(self.layers))

    @contextmanager
    def applied(self, target: Target) -> Iterator[None]:
        if self.coordinates is None:
            raise InputError(f"{self.name}: name the coordinates")
        coordinates = torch.tensor(self.coordinates)
        edits: list[Edit] = []
        for layer in target.attending(self.layers):
            projection = target.projection(layer, "key")
            heads = torch.tensor(chosen(self.heads, projection.heads))
            weight = projection.weight.detach().clone()
            weight[heads[:, None], :, coordinates] = 0.0
            edits.append((projection.module, "weight", projection.with_weight(weight)))
        check_changes(self.name, edits)
        with replaced(edits):
            yield

    def control(self, known: Known, draw: torch.Generator) -> Intervention:
        return self.at_other_coordinates(known, draw)

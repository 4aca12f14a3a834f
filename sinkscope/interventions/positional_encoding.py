"""Learned positional vectors replaced and exchanged, and with them the effective positional encodings (NU 2 and 3)."""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch

from sinkscope.interventions.intervention import (
    Expectation,
    Index,
    Indices,
    Intervention,
    Known,
    Target,
    random_positions,
)
from sinkscope.models.edits import Edit, check_changes, replaced


class _PositionVectors(Intervention):
    """Rows of the position embedding replaced by others of its rows."""

    expected: ClassVar[bool] = False  # only some models have learned positions

    @classmethod
    def inapplicable(cls, target: Target) -> str | None:
        if target.family.position_embedding:
            return None
        return f"its positions are not learned vectors (they are {target.family.positions})"

    @abstractmethod
    def givers(self) -> dict[int, int]:
        """Position → the position whose vector it gets."""

    @contextmanager
    def applied(self, target: Target) -> Iterator[None]:
        module = target.model.get_submodule(target.family.position_embedding)
        vectors: torch.Tensor = module.weight  # type: ignore[assignment]
        first = target.family.position_offset
        self.check(target, len(vectors) - first)
        changed = vectors.detach().clone()
        for position, giver in self.givers().items():
            changed[first + position] = vectors.detach()[first + giver]
        edits: list[Edit] = [(module, "weight", changed)]
        check_changes(self.name, edits)
        with replaced(edits):
            yield


class ReplaceEpe(_PositionVectors):
    name: ClassVar[str] = "replace-epe"
    about: ClassVar[str] = "position 0 gets another position's vector (positions, source: whose vector)"
    paper: ClassVar[str] = "NU intervention 2"
    control_about: ClassVar[str] = "the same at another position"
    expects: ClassVar[Expectation] = Expectation.SINK_FALLS

    positions: Indices = (0,)
    source: Index = 1

    def givers(self) -> dict[int, int]:
        return dict.fromkeys(self.positions, self.source)

    @property
    def watched(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys((*self.positions, self.source)))

    def control(self, known: Known, draw: torch.Generator) -> Intervention:
        """The same among positions that have no sink."""
        *positions, source = random_positions(len(self.positions) + 1, known, draw, self.watched)
        return ReplaceEpe(positions=tuple(positions), source=source)


class TransplantEpe(_PositionVectors):
    name: ClassVar[str] = "transplant-epe"
    about: ClassVar[str] = "two positions exchange their vectors (source: the sink's, target: where it should go)"
    paper: ClassVar[str] = "NU intervention 3"
    control_about: ClassVar[str] = "the target and a random position exchange theirs"
    expects: ClassVar[Expectation] = Expectation.SINK_MOVES

    source: Index = 0
    target: Index = 1

    def givers(self) -> dict[int, int]:
        return {self.source: self.target, self.target: self.source}

    @property
    def watched(self) -> tuple[int, ...]:
        return (self.source, self.target)

    def control(self, known: Known, draw: torch.Generator) -> Intervention:
        """The target exchanges with a position that is not the sink's."""
        (other,) = random_positions(1, known, draw, self.watched)
        return TransplantEpe(source=other, target=self.target)

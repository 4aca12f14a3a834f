"""Replacement and exchange of learned positions (NU 2 and 3): their vectors, or effective positional encodings."""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal

import torch

from sinkscope.errors import InputError
from sinkscope.interventions.intervention import (
    Expectation,
    Index,
    Indices,
    Intervention,
    Known,
    Target,
    edited_positions,
    random_positions,
)
from sinkscope.models.edits import Edit, check_changes, replaced
from sinkscope.models.projections import effective_positions

MLP_IS_A_TERM = ("sequential", "parallel")  # wirings in which the MLP's output is a term of the layer's output


class _PositionVectors(Intervention):
    """Gives positions the vectors of other positions."""

    expected = False  # only some models have learned positions

    # "embedding": rows of the position embedding, which the first layer's attention reads too; "epe": the part
    # EPE_i = MLP⁽¹⁾(p_i) + p_i of the first layer's output, so that only later layers are affected
    at: Literal["embedding", "epe"] = "embedding"

    @classmethod
    def inapplicable(cls, target: Target) -> str | None:
        if target.family.position_embedding:
            return None
        return f"its positions are not learned vectors (they are {target.family.positions})"

    @abstractmethod
    def givers(self) -> dict[int, int]:
        """Map each changed position to the position whose vector it gets."""

    def check(self, target: Target, length: int | None = None) -> None:
        super().check(target, length)
        if self.at == "epe" and target.family.block(0).wiring not in MLP_IS_A_TERM:
            raise InputError(f"{self.name}: at=epe: the first layer's output is not a sum with its MLP's output")

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
        with replaced(edits) if self.at == "embedding" else self._epe_exchanged(target):
            yield

    def _epe_exchanged(self, target: Target) -> AbstractContextManager[None]:
        """Replace each position's own EPE in the first layer's output by the EPE of its giver."""
        givers = self.givers()
        epe = effective_positions(target.model, target.family, max(*givers, *givers.values()) + 1)
        shifts = {position: epe[giver] - epe[position] for position, giver in givers.items()}
        return edited_positions(
            self.name, target, target.layers[:1], givers, lambda module, position, x: x + shifts[position].to(x)
        )


class ReplaceEpe(_PositionVectors):
    name = "replace-epe"
    about = "position 0 gets another position's vector p (positions, source: the other; at=epe: its EPE instead)"
    paper = "NU intervention 2"
    control_about = "the same at another position"
    expects = Expectation.SINK_FALLS

    positions: Indices = (0,)
    source: Index = 1

    def givers(self) -> dict[int, int]:
        return dict.fromkeys(self.positions, self.source)

    @property
    def watched(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys((*self.positions, self.source)))

    def control(self, known: Known, draw: torch.Generator) -> Intervention:
        """Return the same replacement among positions without a sink."""
        *positions, source = random_positions(len(self.positions) + 1, known, draw, self.watched)
        return ReplaceEpe(positions=tuple(positions), source=source, at=self.at)


class TransplantEpe(_PositionVectors):
    name = "transplant-epe"
    about = "two positions exchange their vectors (source: the sink's position, target: the other; at=epe)"
    paper = "NU intervention 3"
    control_about = "the target and a random position exchange their vectors"
    expects = Expectation.SINK_MOVES

    source: Index = 0
    target: Index = 1

    def givers(self) -> dict[int, int]:
        return {self.source: self.target, self.target: self.source}

    @property
    def watched(self) -> tuple[int, ...]:
        return (self.source, self.target)

    def control(self, known: Known, draw: torch.Generator) -> Intervention:
        """Return the exchange of the target with a position other than the sink's."""
        (other,) = random_positions(1, known, draw, self.watched)
        return TransplantEpe(source=other, target=self.target, at=self.at)

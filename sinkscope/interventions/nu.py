"""The five interventions of NU, on learned positions and query biases, and a control.

1  query bias b_Q removed (its control: perturbed)      2, 3  positions given other positions' vectors
4  the first token's embedding removed                  5     columns of W_k zeroed
"""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch

from sinkscope.errors import InputError
from sinkscope.interventions.intervention import Expectation, Intervention, Known, Target, WeightEdits, edited_positions
from sinkscope.interventions.massive import sink_massive
from sinkscope.interventions.parameters import Chosen, Index, Open, Place, Places, chosen
from sinkscope.models.edits import Edit, check_changes, replaced
from sinkscope.models.projections import effective_positions, massive_coordinates
from sinkscope.retrofits.retrofit import registers_before


class ProjectionEdits(WeightEdits):
    """Edits the query bias (H,d), or the key weight (K,d,D), of the chosen layers and heads."""

    layers: Chosen = None
    heads: Chosen = None

    @abstractmethod
    def edited(self, values: torch.Tensor, layer: int) -> torch.Tensor:
        """Return the new bias (heads,d) or weight (heads,d,D) of some heads of a layer."""

    def edits(self, target: Target) -> list[Edit]:
        edits: list[Edit] = []
        for layer in target.attending(self.layers):
            projection = target.projection(layer, self.heads_of)
            name = "bias" if self.heads_of == "query" else "weight"
            values: torch.Tensor | None = getattr(projection, name)
            if values is None:
                raise InputError(f"{self.name}: layer {layer} has no query bias")
            heads, changed = chosen(self.heads, projection.heads), values.detach().clone()
            changed[heads] = self.edited(changed[heads], layer)
            edits.append((projection.module, name, projection.with_part(name, changed)))
        return edits


def without_query_bias(target: Target) -> str | None:
    return target.without_weights("query") or (None if target.has_query_bias else "its queries have no bias")


class NullifyQueryBias(ProjectionEdits):
    name = "nullify-query-bias"
    expected = False  # only some models have query biases
    requires = (without_query_bias,)
    about = "b_Q = 0 (layers, query heads)"
    paper = "NU intervention 1"
    control_about = "b_Q plus a random vector of its norm"
    expects = Expectation.SINK_FALLS

    def edited(self, values: torch.Tensor, layer: int) -> torch.Tensor:
        return torch.zeros_like(values)

    def control(self, known: Known, draw: torch.Generator) -> Intervention:
        seed = int(torch.randint(2**31, (), generator=draw))
        return PerturbQueryBias(layers=self.layers, heads=self.heads, seed=seed)


class PerturbQueryBias(ProjectionEdits):
    name = "perturb-query-bias"
    expected = False
    requires = (without_query_bias,)
    about = "b_Q plus a vector of its own norm in a random direction: each head's entries, shuffled"
    paper = "control of NU intervention 1"
    is_control = True

    seed: Index = 0

    def edited(self, values: torch.Tensor, layer: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(self.seed + layer)
        order = torch.stack([torch.randperm(values.shape[1], generator=draw) for _ in values])
        signs = torch.randint(2, values.shape, generator=draw).mul(2).sub(1)
        return values + values.gather(1, order.to(values.device)) * signs.to(values)


def without_learned_positions(target: Target) -> str | None:
    is_learned, kind = bool(target.family.position_embedding), target.family.positions
    return None if is_learned else f"its positions are not learned vectors (they are {kind})"


class PositionVectors(Intervention):
    """Gives positions the vectors of other positions."""

    expected = False  # only some models have learned positions
    requires = (without_learned_positions,)

    # "embedding": rows of the position embedding, which the first layer's attention reads too; "epe": the part
    # EPE_i = MLP⁽¹⁾(p_i) + p_i of the first layer's output, so that only later layers are affected
    at: Literal["embedding", "epe"] = "embedding"

    @abstractmethod
    def vector_sources(self) -> dict[int, int]:
        """Map each changed position to the position whose vector it gets."""

    def check(self, target: Target, length: int | None = None) -> None:
        super().check(target, length)
        if self.at == "epe" and target.family.block(0).wiring not in ("sequential", "parallel"):
            raise InputError(f"{self.name}: at=epe: the first layer's output is not a sum with its MLP's output")

    @contextmanager
    def applied(self, target: Target) -> Iterator[None]:
        module, sources = target.model.get_submodule(target.family.position_embedding), self.vector_sources()
        vectors: torch.Tensor = module.weight  # type: ignore[assignment]
        first = target.family.position_offset
        self.check(target, len(vectors) - first)
        changed = vectors.detach().clone()
        for position, source in sources.items():
            changed[first + position] = vectors.detach()[first + source]
        edits: list[Edit] = [(module, "weight", changed)]
        check_changes(self.name, edits)
        edited = replaced(edits)
        if self.at == "epe":  # each position's own EPE in the first layer's output becomes the EPE of its source
            epe = effective_positions(target.model, target.family, max(*sources, *sources.values()) + 1)
            shifts = {position: epe[source] - epe[position] for position, source in sources.items()}
            edited = edited_positions(
                self.name, target, target.layers[:1], sources, lambda module, position, x: x + shifts[position].to(x)
            )
        with edited:
            yield


class ReplaceEpe(PositionVectors):
    name = "replace-epe"
    about = "position 0 gets another position's vector p (positions, source: the other; at=epe: its EPE instead)"
    paper = "NU intervention 2"
    control_about = "the same at another position"
    expects = Expectation.SINK_FALLS

    positions: Places = (0,)
    source: Place = 1

    def vector_sources(self) -> dict[int, int]:
        return dict.fromkeys(self.positions, self.source)

    @property
    def watched(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys((*self.positions, self.source)))

    def control(self, known: Known, draw: torch.Generator) -> Intervention:
        *positions, source = known.draw_positions(len(self.positions) + 1, draw, self.watched)
        return ReplaceEpe(positions=tuple(positions), source=source, at=self.at)


class TransplantEpe(PositionVectors):
    name = "transplant-epe"
    about = "two positions exchange their vectors (source: the sink's position, target: the other; at=epe)"
    paper = "NU intervention 3"
    control_about = "the target and a random position exchange their vectors"
    expects = Expectation.SINK_MOVES

    source: Place = 0
    target: Place = 1

    def vector_sources(self) -> dict[int, int]:
        return {self.source: self.target, self.target: self.source}

    @property
    def watched(self) -> tuple[int, ...]:
        return (self.source, self.target)

    def control(self, known: Known, draw: torch.Generator) -> Intervention:
        (other,) = known.draw_positions(1, draw, self.watched)
        return TransplantEpe(source=other, target=self.target, at=self.at)


def begins_with_registers(target: Target) -> str | None:
    return "its sequences begin with registers, which are not embedded" if registers_before(target.model) else None


class NullifyFirstEmbedding(Intervention):
    name = "nullify-first-embedding"
    requires = (begins_with_registers,)
    about = "token embedding of position 0 = 0, its position kept (positions)"
    paper = "NU intervention 4"
    control_about = "another token's embedding"
    redraws = "positions"
    expects = Expectation.SINK_STAYS

    positions: Places = (0,)

    def applied(self, target: Target) -> AbstractContextManager[None]:
        embedding = target.model.get_input_embeddings()
        return edited_positions(
            self.name, target, [embedding], self.positions, lambda module, position, x: torch.zeros_like(x)
        )


def without_residual_keys(target: Target) -> str | None:
    reads_residual = all(target.projection(layer, "key").width == target.width for layer in target.attending())
    return None if reads_residual else "its key projection does not read the residual stream itself"


class ZeroKeyColumns(ProjectionEdits):
    name = "zero-key-columns"
    about = "W_k does not read these coordinates (layers, key heads, coordinates: the massive ones)"
    paper = "NU intervention 5"
    control_about = "random coordinates"
    redraws = "coordinates"
    expects = Expectation.SINK_FALLS
    heads_of = "key"
    opens = ("coordinates",)
    requires = (lambda target: target.without_weights("key"), without_residual_keys)

    coordinates: Open = None  # None: massive in EPE_0, or in the stream if positions are not learned

    def measured(self, known: Known) -> dict[str, Any]:
        family = known.target.family
        if family.position_embedding:
            massive = tuple(massive_coordinates(effective_positions(known.target.model, family, 1)[0]))
            if not massive:
                raise InputError(f"{self.name}: EPE_0 has no massive coordinates here: name some")
        else:
            _, massive = sink_massive(self.name, known, 0)
        return {"coordinates": tuple(sorted(massive))}

    def edited(self, values: torch.Tensor, layer: int) -> torch.Tensor:
        return values.index_fill(-1, torch.tensor(self.coordinates, device=values.device), 0.0)

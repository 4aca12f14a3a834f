"""Edits of weights: the query bias b_Q removed (NU 1) or perturbed as its control, and columns of W_k zeroed (NU 5)."""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Self

import torch

from sinkscope.errors import InputError
from sinkscope.interventions.intervention import Chosen, Expectation, Index, Intervention, Known, Open, Target, chosen
from sinkscope.interventions.massive import sink_massive
from sinkscope.models.edits import Edit, check_changes, replaced
from sinkscope.models.positions import effective_positions, massive_coordinates
from sinkscope.models.projections import Role


class _QueryBias(Intervention):
    """Edits the query bias (H,d) of the chosen layers and query heads."""

    expected: ClassVar[bool] = False  # only some models have query biases

    layers: Chosen = None
    heads: Chosen = None

    @classmethod
    def inapplicable(cls, target: Target) -> str | None:
        reason = target.without_weights("query")
        if reason is not None:
            return reason
        has_one = any(target.projection(layer, "query").bias is not None for layer in target.attending())
        return None if has_one else "its queries have no bias"

    @abstractmethod
    def edited(self, bias: torch.Tensor, layer: int) -> torch.Tensor:
        """Return the new bias of some heads of a layer, (heads, d) → (heads, d)."""

    def begins_at(self, target: Target) -> int:
        return min(target.attending(self.layers))

    @contextmanager
    def applied(self, target: Target) -> Iterator[None]:
        edits: list[Edit] = []
        for layer in target.attending(self.layers):
            projection = target.projection(layer, "query")
            bias = projection.bias
            if bias is None:
                raise InputError(f"{self.name}: layer {layer} has no query bias")
            heads = chosen(self.heads, projection.heads)
            changed = bias.detach().clone()
            changed[heads] = self.edited(changed[heads], layer)
            edits.append((projection.module, "bias", projection.with_bias(changed)))
        check_changes(self.name, edits)
        with replaced(edits):
            yield


class NullifyQueryBias(_QueryBias):
    name: ClassVar[str] = "nullify-query-bias"
    about: ClassVar[str] = "b_Q = 0 (layers, query heads)"
    paper: ClassVar[str] = "NU intervention 1"
    control_about: ClassVar[str] = "b_Q plus a random vector of its norm"
    expects: ClassVar[Expectation] = Expectation.SINK_FALLS

    def edited(self, bias: torch.Tensor, layer: int) -> torch.Tensor:
        return torch.zeros_like(bias)

    def control(self, known: Known, draw: torch.Generator) -> Intervention:
        seed = int(torch.randint(2**31, (), generator=draw))
        return PerturbQueryBias(layers=self.layers, heads=self.heads, seed=seed)


class PerturbQueryBias(_QueryBias):
    name: ClassVar[str] = "perturb-query-bias"
    about: ClassVar[str] = "b_Q plus a vector of its own norm in a random direction: each head's entries, shuffled"
    paper: ClassVar[str] = "control of NU intervention 1"
    is_control: ClassVar[bool] = True

    seed: Index = 0

    def edited(self, bias: torch.Tensor, layer: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(self.seed + layer)
        order = torch.stack([torch.randperm(bias.shape[1], generator=draw) for _ in bias])
        signs = torch.randint(2, bias.shape, generator=draw).mul(2).sub(1)
        return bias + bias.gather(1, order.to(bias.device)) * signs.to(bias)


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

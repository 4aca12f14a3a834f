"""Edits of weights: the query bias b_Q removed (NU 1) or, as a control, perturbed; and columns of W_k zeroed (NU 5)."""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import torch

from sinkscope.errors import InputError
from sinkscope.interventions.intervention import Chosen, Expectation, Index, Intervention, Known, Open, Target, chosen
from sinkscope.interventions.massive import sink_massive
from sinkscope.models.edits import Edit, check_changes, replaced
from sinkscope.models.projections import effective_positions, massive_coordinates


class _QueryBias(Intervention):
    """Edits the query bias (H,d) of the chosen layers and query heads."""

    expected = False  # only some models have query biases

    layers: Chosen = None
    heads: Chosen = None

    @classmethod
    def inapplicable(cls, target: Target) -> str | None:
        if reason := target.without_weights("query"):
            return reason
        has_one = any(target.projection(layer, "query").bias is not None for layer in target.attending())
        return None if has_one else "its queries have no bias"

    @abstractmethod
    def edited(self, bias: torch.Tensor, layer: int) -> torch.Tensor:
        """Return the new bias of some heads of a layer, (heads, d) → (heads, d)."""

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
    name = "nullify-query-bias"
    about = "b_Q = 0 (layers, query heads)"
    paper = "NU intervention 1"
    control_about = "b_Q plus a random vector of its norm"
    expects = Expectation.SINK_FALLS

    def edited(self, bias: torch.Tensor, layer: int) -> torch.Tensor:
        return torch.zeros_like(bias)

    def control(self, known: Known, draw: torch.Generator) -> Intervention:
        seed = int(torch.randint(2**31, (), generator=draw))
        return PerturbQueryBias(layers=self.layers, heads=self.heads, seed=seed)


class PerturbQueryBias(_QueryBias):
    name = "perturb-query-bias"
    about = "b_Q plus a vector of its own norm in a random direction: each head's entries, shuffled"
    paper = "control of NU intervention 1"
    is_control = True

    seed: Index = 0

    def edited(self, bias: torch.Tensor, layer: int) -> torch.Tensor:
        draw = torch.Generator().manual_seed(self.seed + layer)
        order = torch.stack([torch.randperm(bias.shape[1], generator=draw) for _ in bias])
        signs = torch.randint(2, bias.shape, generator=draw).mul(2).sub(1)
        return bias + bias.gather(1, order.to(bias.device)) * signs.to(bias)


class ZeroKeyColumns(Intervention):
    name = "zero-key-columns"
    about = "W_k does not read these coordinates (layers, key heads, coordinates: the massive ones)"
    paper = "NU intervention 5"
    control_about = "random coordinates"
    redraws = "coordinates"
    expects = Expectation.SINK_FALLS
    heads_of = "key"

    layers: Chosen = None
    heads: Chosen = None
    coordinates: Open = None  # None: massive in EPE_0, or in the stream if positions are not learned

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

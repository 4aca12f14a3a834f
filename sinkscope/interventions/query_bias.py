"""The query bias b_Q removed (NU intervention 1), and its control: b_Q changed as much in a random direction."""

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

import torch

from sinkscope.errors import InputError
from sinkscope.interventions.intervention import Chosen, Expectation, Index, Intervention, Known, Target, chosen
from sinkscope.models.edits import Edit, check_changes, replaced


class _QueryBias(Intervention):
    """The query bias (H,d) edited at the chosen layers and query heads."""

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
        """(heads, d) → (heads, d)."""

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

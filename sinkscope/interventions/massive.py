"""Massive activations set to zero or to their mean, where they are written (S2M §3, Sun et al. 2024)."""

from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import ClassVar, Self

import torch
from torch import nn

from sinkscope.errors import InputError
from sinkscope.interventions.intervention import (
    Expectation,
    Indices,
    Intervention,
    Known,
    Open,
    Reals,
    Target,
    edited_positions,
)


class _Massive(Intervention):
    """Coordinates of the chosen layers' outputs get other values at the chosen positions."""

    layers: Open = None  # None: the first behind which they are massive
    positions: Indices = (0,)
    coordinates: Open = None  # None: those that are massive there

    @classmethod
    def inapplicable(cls, target: Target) -> str | None:
        return "its residual stream has several copies, of which the mean is known" if target.family.copies else None

    def resolved(self, known: Known) -> Self:
        if self.layers is not None and self.coordinates is not None:
            return self
        layer, coordinates = first_massive(self.name, known, self.positions[0], self.layers)
        layers = (layer,) if self.layers is None else self.layers
        return self.model_copy(update={"layers": layers, "coordinates": self.coordinates or tuple(coordinates)})

    @abstractmethod
    def value(self, layer: int, position: int) -> torch.Tensor:
        """What is put there, (coordinates,)."""

    def applied(self, target: Target) -> AbstractContextManager[None]:
        if self.layers is None or self.coordinates is None:
            raise InputError(f"{self.name}: name the layers and the coordinates")
        coordinates = list(self.coordinates)
        layers: dict[int, nn.Module] = {layer: target.layers[layer] for layer in self.layers}
        values = {
            (module, position): self.value(layer, position)
            for layer, module in layers.items()
            for position in self.positions
        }

        def edit(module: nn.Module, position: int, x: torch.Tensor) -> torch.Tensor:
            x[:, coordinates] = values[module, position].to(x)
            return x

        return edited_positions(self.name, target, layers.values(), self.positions, edit)

    def control(self, known: Known, draw: torch.Generator) -> Intervention:
        """At other coordinates, whose means are measured anew."""
        others = self.at_other_coordinates(known, draw).coordinates
        return type(self)(layers=self.layers, positions=self.positions, coordinates=others)


class ZeroMassive(_Massive):
    name: ClassVar[str] = "zero-massive"
    about: ClassVar[str] = "hidden-state coordinates at the sink = 0 (layers, positions, coordinates: the massive ones)"
    paper: ClassVar[str] = "S2M §3"
    control_about: ClassVar[str] = "random coordinates"
    expects: ClassVar[Expectation] = Expectation.PERPLEXITY_COLLAPSES

    def value(self, layer: int, position: int) -> torch.Tensor:
        return torch.zeros(len(self.coordinates or ()))


class MeanMassive(_Massive):
    name: ClassVar[str] = "mean-massive"
    about: ClassVar[str] = "hidden-state coordinates at the sink = their mean over sequences (as zero-massive; means)"
    paper: ClassVar[str] = "S2M §3"
    control_about: ClassVar[str] = "random coordinates"
    expects: ClassVar[Expectation] = Expectation.PERPLEXITY_UNHARMED

    means: Reals | None = None  # by layer, position, coordinate; None: measured

    def resolved(self, known: Known) -> Self:
        chosen = super().resolved(known)
        if chosen.means is not None:
            return chosen
        if known.hidden_means is None:
            raise InputError(f"{self.name}: name the means, one for every layer, position and coordinate")
        means = [
            known.hidden_means(layer, position)[list(chosen.coordinates or ())]
            for layer in chosen.layers or ()
            for position in chosen.positions
        ]
        return chosen.model_copy(update={"means": tuple(torch.cat(means).tolist())})

    def value(self, layer: int, position: int) -> torch.Tensor:
        layers, coordinates = self.layers or (), self.coordinates or ()
        shape = (len(layers), len(self.positions), len(coordinates))
        if self.means is None or len(self.means) != shape[0] * shape[1] * shape[2]:
            raise InputError(f"{self.name}: {shape[0]} × {shape[1]} × {shape[2]} means are needed")
        means = torch.tensor(self.means).view(shape)
        return means[layers.index(layer), self.positions.index(position)]


def first_massive(
    name: str,
    known: Known,
    position: int,
    layers: tuple[int, ...] | None = None,
    to_name: str = "layers and coordinates",
) -> tuple[int, list[int]]:
    """The first layer, of these, at whose output a position has massive activations in at least half of the sequences.

    Args:
        to_name: what the user can name instead.

    Returns:
        The layer, and the coordinates.

    Raises:
        InputError: there is none.
    """
    missing = f"{name}: no massive activations at position {position} are known: name {to_name}"
    if "massive" not in known.tables:
        raise InputError(missing)
    table = known.tables["massive"]
    sequences = table["sequence"].nunique()
    found = table[table["is_massive"] & (table["position"] == position)]
    if layers is not None:
        found = found[found["layer"].isin(layers)]
    counts = found.groupby(["layer", "coordinate"]).size()
    common = counts[counts >= sequences / 2].reset_index()
    if common.empty:
        raise InputError(missing)
    layer = int(common["layer"].min())
    return layer, [int(coordinate) for coordinate in common.loc[common["layer"] == layer, "coordinate"]]

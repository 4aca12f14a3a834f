"""The sink's value state scaled or made constant, with its key kept (VGA §1: does the sink's contribution matter?)."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal, Self

import pandas as pd
import torch
from pydantic import PrivateAttr
from torch import nn

from sinkscope.errors import InputError
from sinkscope.interventions.intervention import (
    Chosen,
    Indices,
    Intervention,
    Known,
    Real,
    Reals,
    Target,
    chosen,
    edited_positions,
)

DECIDED = "is decided by measuring the observable attention, as `sinkscope intervene` does: name layers and heads"
# (layer, position, value states (n, heads · d)) → the new value states
Edit = Callable[[int, int, torch.Tensor], torch.Tensor]


class _AtValues(Intervention):
    """Changes the value states of chosen layers and heads at chosen positions.

    With where=sinks, only key/value heads change that are read by a query head with a sink at one of the positions (in
    at least half of the sequences).
    """

    paper = "VGA §1"
    control_about = "another position"
    redraws = "positions"
    heads_of = "value"

    layers: Chosen = None
    heads: Chosen = None
    positions: Indices = (0,)
    where: Literal["all", "sinks"] = "all"
    _sinks: frozenset[tuple[int, int]] | None = PrivateAttr(None)  # measured (layer, key/value head) pairs

    @classmethod
    def inapplicable(cls, target: Target) -> str | None:
        return target.without_projection("value")

    def resolved(self, known: Known) -> Self:
        if self.where == "all" or self._sinks is not None:  # a control changes the same heads as the intervention
            return self
        if "attention" not in known.tables:
            raise InputError(f"{self.name}: where=sinks {DECIDED}")
        decided = self.model_copy()
        decided._sinks = heads_with_a_sink(known.tables["attention"], self.positions)
        if not decided._sinks:
            raise InputError(f"{self.name}: no head has a sink at position {' or '.join(map(str, self.positions))}")
        return decided

    def heads_in(self, target: Target, layer: int) -> list[int]:
        """Return the key/value heads of a layer to change; raise InputError if the sinks have not been measured."""
        heads = chosen(self.heads, target.projection(layer, "value").heads)
        if self.where == "all":
            return heads
        if self._sinks is None:
            raise InputError(f"{self.name}: where=sinks {DECIDED}")
        return [head for head in heads if (layer, head) in self._sinks]

    @abstractmethod
    def edit(self, target: Target) -> Edit:
        """Return the function that changes values; raise InputError if it would change nothing or needs means."""

    @contextmanager
    def applied(self, target: Target) -> Iterator[None]:
        changed = self.edit(target)
        places: dict[nn.Module, tuple[int, torch.Tensor]] = {}
        for layer in target.attending(self.layers):
            projection = target.projection(layer, "value")
            if heads := self.heads_in(target, layer):
                places[projection.module] = layer, projection.places[heads].flatten()

        def edit(module: nn.Module, position: int, x: torch.Tensor) -> torch.Tensor:
            layer, columns = places[module]
            x[:, columns] = changed(layer, position, x[:, columns]).to(x)
            return x

        with edited_positions(self.name, target, places, self.positions, edit):
            yield


class ScaleSinkValue(_AtValues):
    name = "scale-sink-value"
    about = (
        "value states at the sink times a factor (layers, key/value heads, positions, where: all or sinks, factor: 0)"
    )

    factor: Real = 0.0

    def edit(self, target: Target) -> Edit:
        if self.factor == 1.0:
            raise InputError(f"{self.name} would change nothing: its factor is 1")
        return lambda layer, position, x: x * self.factor


class MeanSinkValue(_AtValues):
    """Replaces the sink's value state by its mean over sequences, so that it adds a constant bias.

    If zero values harm a model but mean values do not, its sink serves as a bias: it is not a no-op, but carries no
    information about the text.
    """

    name = "mean-sink-value"
    about = "value states at the sink = their mean over sequences (layers, key/value heads, positions, where; means)"

    # by layer, position, head and dimension, or one for all; None: measured, and too large to be saved in run.json
    means: Reals | None = None
    _measured: Callable[[int, int], torch.Tensor] | None = PrivateAttr(None)

    @classmethod
    def inapplicable(cls, target: Target) -> str | None:
        if (reason := super().inapplicable(target)) is not None:
            return reason
        modules = [target.projection(layer, "value").module for layer in target.attending()]
        return None if len(set(modules)) == len(modules) else "its layers share a value projection"

    def resolved(self, known: Known) -> Self:
        decided = super().resolved(known)
        if self.means is not None:
            return decided
        if known.value_means is None:
            raise InputError(f"{self.name}: name the means, one for every layer, position, head and dimension")
        for layer in known.target.attending(self.layers):
            for position in self.positions:
                known.value_means(layer, position)  # measured now, while the model is unchanged
        decided = decided.model_copy()
        decided._measured = known.value_means
        return decided

    def edit(self, target: Target) -> Edit:
        values = {
            (layer, position): (target.projection(layer, "value").places.shape, self.heads_in(target, layer))
            for layer in target.attending(self.layers)
            for position in self.positions
        }
        if self._measured is not None:
            found = {at: self._measured(*at).view(shape)[heads].flatten() for at, (shape, heads) in values.items()}
        else:
            sizes, means = [len(heads) * shape[1] for shape, heads in values.values()], self.means or ()
            if len(means) not in (1, sum(sizes)):
                raise InputError(
                    f"{self.name}: {sum(sizes)} means are needed, one by layer, position, head and dimension"
                )
            parts = torch.tensor(means, dtype=torch.float64).expand(sum(sizes)).split(sizes)
            found = dict(zip(values, parts, strict=True))
        return lambda layer, position, x: found[layer, position].expand_as(x)


class ReadValues(_AtValues):
    """Passes the outputs of the value projections at the positions to a callback, without a change."""

    name = "read-values"
    about = "measures the means of mean-sink-value"

    seen: Callable[[int, torch.Tensor], None]  # layer, (n, heads · d)

    def edit(self, target: Target) -> Edit:
        def read(layer: int, position: int, x: torch.Tensor) -> torch.Tensor:
            self.seen(layer, x)
            return x

        return read


def heads_with_a_sink(attention: pd.DataFrame, positions: Iterable[int]) -> frozenset[tuple[int, int]]:
    """Return (layer, key/value head) for each head that is read by a query head with a sink at one of the positions."""
    # a head has a sink if it does in at least half of the sequences
    rows = attention[attention["position"].isin(list(positions)) & (attention["sink_rate"] >= 0.5)]
    return frozenset(zip(rows["layer"].astype(int), rows["kv_head"].astype(int), strict=True))

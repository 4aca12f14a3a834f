"""States at one position, mean over sequences: what mean-massive and mean-sink-value put there."""

from collections.abc import Callable
from typing import ClassVar

import torch

from sinkscope.attention.kernels import upcast
from sinkscope.interventions.sink_value import ReadValues
from sinkscope.measuring.observables.observable import Mean, Observable, Reading, Settings
from sinkscope.text.batch import Batch


class HiddenMean(Observable):
    """The output of every layer at one position."""

    sites: ClassVar[tuple[str, ...]] = ("layer_out",)

    def __init__(self, position: int) -> None:
        super().__init__(Settings())
        self.position = position
        self.mean = Mean()

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        at_position = batch.tokens_at(reading.tensor, self.position + 1)[:, self.position]
        self.mean.add(layer, upcast(at_position))

    def by_layer(self) -> dict[int, torch.Tensor]:
        """Layer → (D,)."""
        return {layer: torch.from_numpy(self.mean[layer]) for layer in self.mean.keys()}  # noqa: SIM118 (not a dict)


class ValueMean(HiddenMean):
    """The mean output of every layer's value projection at one position, (heads · d,). It is not a site of a layer, so
    `reading` hooks the module that interventions on values edit.
    """

    sites: ClassVar[tuple[str, ...]] = ()

    def take(self, layer: int, values: torch.Tensor) -> None:
        """(n, heads · d) of the sequences of a batch that have the position."""
        self.mean.add(layer, upcast(values))


def reading(position: int, into: Callable[[], ValueMean]) -> ReadValues:
    """An intervention that changes nothing and gives the values to what `into` returns: a pass may begin again."""
    return ReadValues(positions=(position,), seen=lambda layer, values: into().take(layer, values))

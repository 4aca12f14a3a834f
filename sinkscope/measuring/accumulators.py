"""What observables are made of: sums over sequences, to which those of other sequences can be added exactly.

Several processes that share a run's sequences out (processes.py) add up what each has seen: every attribute of an
observable that a batch changes for good is an Accumulator, or a dict of them.
"""

import io
from abc import ABC, abstractmethod
from collections import defaultdict
from typing import Any, Self, TypeVar

import torch

Key = TypeVar("Key")
Value = TypeVar("Value")


class Accumulator(ABC):
    """Grows with every batch, whichever comes first."""

    @abstractmethod
    def merge(self, other: Self) -> None:
        """Take in what another one has seen."""


class Sums(dict[Key, Any], Accumulator):
    """Key → the sum of all tensors, or numbers, that were added."""

    def add(self, key: Key, term: Any) -> None:
        self[key] = self[key] + term if key in self else term

    def merge(self, other: Self) -> None:
        for key, term in other.items():
            self.add(key, term)


class Maxima(dict[Key, torch.Tensor], Accumulator):
    """Key → the maximum of all tensors that were added, entry by entry."""

    def add(self, key: Key, x: torch.Tensor) -> None:
        self[key] = torch.maximum(self[key], x) if key in self else x

    def merge(self, other: Self) -> None:
        for key, x in other.items():
            self.add(key, x)


class Lists(defaultdict[Key, list[Value]], Accumulator):
    """Key → all that was appended; whoever reads them brings them into an order of their own."""

    def merge(self, other: Self) -> None:
        for key, values in other.items():
            self[key].extend(values)


def accumulated(holder: object) -> dict[str, Any]:
    """The accumulators of an observable, by the names of its attributes."""
    return {name: value for name, value in vars(holder).items() if is_accumulated(value)}


def is_accumulated(value: object) -> bool:
    if isinstance(value, Accumulator):
        return True
    # of an empty dict it cannot be told: another process's may hold some
    return isinstance(value, dict) and all(isinstance(part, Accumulator) for part in value.values())


def merge(mine: Any, other: Any) -> None:
    """Add to accumulators, or to a dict of them."""
    if isinstance(mine, Accumulator):
        mine.merge(other)
        return
    for key, part in other.items():
        if key in mine:
            merge(mine[key], part)
        else:
            mine[key] = part


def packed(value: Any) -> bytes:
    """To be sent to another process."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def unpacked(data: bytes) -> Any:
    """What another process of this command has packed, on the CPU."""
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)

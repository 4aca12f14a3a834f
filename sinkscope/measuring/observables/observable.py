"""What every observable is, and the running sums that it is made of."""

from abc import ABC, abstractmethod
from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from sinkscope.attention.weights import AttentionRead
from sinkscope.models.family import Family
from sinkscope.options.measuring import ObservableOptions
from sinkscope.results.tables import Columns
from sinkscope.text.batch import Batch

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


# Of the attention modules, in the order in which a forward pass reaches them.
ATTENTION_SITES = ("raw_value", "gate", "attention")

NO_ATTENTION = "no layer attends by a softmax"

LATER = slice(5, 16)  # positions that position 0 is compared with; the same ones whatever --positions says


# What observables read: every option that ObservableOptions declares, fitted to the run's sequences.
Settings = ObservableOptions


class Reading:
    """One site's tensor (B,T,D) on one batch; observables share the statistics that they compute of it."""

    def __init__(self, tensor: torch.Tensor, batch: Batch) -> None:
        self.tensor = tensor
        self.batch = batch
        self._known: dict[Callable, Any] = {}

    def once(self, statistic: Callable[[torch.Tensor, Batch], Any]) -> Any:
        """statistic(tensor, batch), computed by the first observable that asks for it."""
        if statistic not in self._known:
            self._known[statistic] = statistic(self.tensor, self.batch)
        return self._known[statistic]


class Observable:
    """A phenomenon, reduced at once to small running sums while the trace runs.

    A new one is a file of this folder and a line in the register OBSERVABLES.
    """

    name: ClassVar[str]
    about: ClassVar[str]  # one line for `sinkscope list observables`
    sites: ClassVar[tuple[str, ...]]  # residual-stream sites (families.py) and ATTENTION_SITES
    columns: ClassVar[Mapping[str, Columns]] = {}  # its tables, and their columns behind model, condition and layer
    expected: ClassVar[bool] = True  # of any model: where it does not apply, a run and the doctor say so
    by_default: ClassVar[bool] = True  # measured where the user names no observables
    of_equal_tokens: ClassVar[bool] = False  # reads only input in which all tokens of a sequence are one and the same
    backward: ClassVar[bool] = False  # needs gradients: `watch` and `watch_attention` are called, not `see`
    # A follow-up: where these are measured it sees the first sequence, after the pass and aimed by its tables.
    after: ClassVar[tuple[str, ...]] = ()

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @classmethod
    def inapplicable(cls, model: PreTrainedModel, family: Family) -> str | None:
        """Why this model does not have what is measured here; None where it has."""
        only_attention = set(cls.sites) <= set(ATTENTION_SITES)
        return NO_ATTENTION if only_attention and not family.has_attention else None

    @classmethod
    def aimed(cls, settings: Settings, tables: Mapping[str, pd.DataFrame]) -> Self:
        """The observable of a follow-up pass, given the tables of the first pass."""
        return cls(settings)

    def prepare(self, model: PreTrainedModel, family: Family, predicted: int) -> None:
        """Called before the first batch of a run that predicts this many tokens in all."""

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        """One residual-stream site of one layer, the moment it exists."""

    def see_gate(self, layer: int, gate: torch.Tensor, value: torch.Tensor, batch: Batch) -> None:
        """One layer's gates (B,T,heads), of a retrofitted model, and its raw values (B,T,K,d)."""

    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        """One layer's attention."""

    def watch(self, layer: int, site: str, tensor: torch.Tensor, batch: Batch, scale: float) -> None:
        """One residual-stream site of one layer with its graph, to hang hooks on that reduce its gradient. What is
        added to the stream is `scale` times this tensor.
        """

    def watch_attention(self, layer: int, read: AttentionRead, mix: torch.Tensor, batch: Batch) -> None:
        """One layer's attention and its heads' mix (B,T,H,d), with their graph."""

    def watch_raw_value(self, layer: int, value: torch.Tensor, batch: Batch) -> None:
        """One layer's values (B,T,K,d) in front of the gate or scale that a retrofit puts on them, with their graph."""

    def notices(self) -> list[str]:
        """What the user should know of the measurement.

        Raises:
            SinkscopeError: the measurement cannot be used.
        """
        return []

    def tables(self) -> dict[str, pd.DataFrame]:
        """The tables so far: those of `columns`, each beginning with `layer`, without texts of tokens."""
        return {}


class Mean(Accumulator):
    """Running mean over sequences of statistics (…,P), one accumulator per key, summed in float64 where they arise."""

    def __init__(self) -> None:
        self._sum: Sums[Any] = Sums()
        self._count: Sums[Any] = Sums()

    def add(self, key: Any, x: torch.Tensor, present: torch.Tensor | None = None) -> None:
        """x (B,…,P); `present` (B,P) says which sequences have which position (None: all)."""
        count: torch.Tensor | int = x.shape[0]
        if present is not None:
            present = present.to(x.device)
            x = x.masked_fill(~present.view(present.shape[0], *[1] * (x.dim() - 2), present.shape[-1]), 0.0)
            count = present.sum(0)
        self._sum.add(key, x.sum(0, dtype=torch.float64))
        self._count.add(key, count)

    def merge(self, other: Self) -> None:
        self._sum.merge(other._sum)
        self._count.merge(other._count)

    def __getitem__(self, key: Any) -> np.ndarray:
        """NaN where no sequence had the position."""
        return (self._sum[key] / self._count[key]).cpu().numpy()

    def keys(self) -> list[Any]:
        return sorted(self._sum)


def long_form(axes: dict[str, Any], columns: dict[str, np.ndarray]) -> pd.DataFrame:
    """One row an observation: arrays of one shape → columns, with an index column for each axis.

    A scalar in `axes` is a constant column; a sequence is that axis's labels, in the arrays' axis order.
    """
    shape = next(iter(columns.values())).shape
    labels = [np.asarray(label) for label in axes.values() if not np.isscalar(label)]
    grids = iter(np.meshgrid(*labels, indexing="ij")) if labels else iter(())
    frame = {
        name: np.full(int(np.prod(shape)), label) if np.isscalar(label) else next(grids).ravel()
        for name, label in axes.items()
    }
    return pd.DataFrame(frame | {name: array.ravel() for name, array in columns.items()})


class HeadMeans(Accumulator):
    """Means over sequences of statistics by head, (B,H,P) or (B,H): a table with head, kv_head and maybe position."""

    def __init__(self) -> None:
        self._means: dict[str, Mean] = defaultdict(Mean)
        self._groups: dict[int, int] = {}  # layer → query heads to a key/value head

    def add(
        self, layer: int, group: int, statistics: Mapping[str, torch.Tensor], present: torch.Tensor | None = None
    ) -> None:
        """Add one batch of a layer in which `group` query heads share a key/value head; `present` as for Mean."""
        self._groups[layer] = group
        for name, statistic in statistics.items():
            self._means[name].add(layer, statistic, present)

    def merge(self, other: Self) -> None:
        self._groups |= other._groups
        for name, mean in other._means.items():
            self._means[name].merge(mean)

    def __bool__(self) -> bool:
        return bool(self._groups)

    def table(self) -> pd.DataFrame:
        frames = []
        for layer in sorted(self._groups):
            arrays = {name: mean[layer] for name, mean in self._means.items()}
            axes = zip(("head", "position"), next(iter(arrays.values())).shape, strict=False)
            frames.append(long_form({"layer": layer} | {axis: range(size) for axis, size in axes}, arrays))
        return self.with_kv_head(pd.concat(frames, ignore_index=True))

    def with_kv_head(self, table: pd.DataFrame) -> pd.DataFrame:
        """A table with `layer` and `head`, and beside them the key/value head that the query head reads."""
        return table.assign(kv_head=table["head"] // table["layer"].map(self._groups))


class BySequence(Accumulator):
    """Statistics of every sequence, (B,…) a batch, in float32: a table with a row for each sequence, and for each place
    on the further axes.

    What a running mean over sequences cannot give is made from it: the uncertainty of that mean.
    """

    def __init__(self, *axes: str) -> None:
        self._axes = axes  # behind the sequence
        # one growing array: small ones, between large tensors that come and go, would fragment the heap
        self._values = array("f")
        self._parts: dict[tuple, dict[int, tuple[slice, torch.Size]]] = defaultdict(dict)  # labels → first sequence → …
        self._names: tuple[str, ...] = ()

    def add(
        self, batch: Batch, statistics: Mapping[str, torch.Tensor], present: torch.Tensor | None = None, **labels: Any
    ) -> None:
        """Add one batch.

        Args:
            statistics: column → (B,…), in float32 or float64.
            present: (B,P), which sequences have which position, the last axis; the others are NaN. None: all have all.
            labels: columns that are constant here, such as the layer.
        """
        values = torch.stack(list(statistics.values()))
        if present is not None:
            absent = ~present.to(values.device)
            values = values.masked_fill(absent.view(len(absent), *[1] * (values.dim() - 3), -1), torch.nan)
        start = len(self._values)
        self._values.frombytes(values.cpu().numpy().astype(np.float32).tobytes())
        self._parts[tuple(labels.items())][batch.first] = slice(start, len(self._values)), values.shape
        self._names = tuple(statistics)

    def merge(self, other: Self) -> None:
        start = len(self._values)
        self._values.extend(other._values)
        self._names = self._names or other._names
        for labels, parts in other._parts.items():
            for first, (part, shape) in parts.items():
                self._parts[labels][first] = slice(start + part.start, start + part.stop), shape

    def __bool__(self) -> bool:
        return bool(self._parts)

    def table(self) -> pd.DataFrame:
        """By labels, then by sequence: the order of the batches changes nothing."""
        values, frames = np.frombuffer(self._values, np.float32), []
        for labels, parts in sorted(self._parts.items()):
            in_order = sorted(parts.items())
            arrays = np.concatenate([values[part].reshape(shape) for _, (part, shape) in in_order], axis=1)
            sequences = [first + at for first, (_, shape) in in_order for at in range(shape[1])]
            axes = {axis: range(size) for axis, size in zip(self._axes, arrays.shape[2:], strict=True)}
            columns = dict(zip(self._names, arrays, strict=True))
            frames.append(long_form(dict(labels) | {"sequence": sequences} | axes, columns))
        return pd.concat(frames, ignore_index=True)


def later_mean(x: torch.Tensor, present: torch.Tensor | None) -> torch.Tensor:
    """(B,…,P), P ≥ LATER.stop → (B,…): mean over the positions LATER, of those that a sequence has; NaN: it has none.

    Args:
        x: statistics by position.
        present: (B,P), which sequences have which position; None: all have all.
    """
    x = x[..., LATER]
    if present is None:
        return x.mean(-1)
    present = present[:, LATER].to(x.device).view(len(present), *[1] * (x.dim() - 2), -1)
    return x.masked_fill(~present, 0.0).sum(-1) / present.sum(-1)

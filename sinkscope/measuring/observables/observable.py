"""The base class of observables, and the running sums that they keep.

Several processes may share the sequences of a run (measuring/processes.py) and then merge their sums. Therefore every
attribute of an observable that a batch changes permanently is an Accumulator.
"""

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from sinkscope.attention.weights import AttentionRead
from sinkscope.measuring.observables.reductions import filled, long_table, with_kv_head
from sinkscope.measuring.one_pass import TokenSums, token_norms, token_peaks, token_sums
from sinkscope.models.family import Family
from sinkscope.models.feed_forward import FeedForward
from sinkscope.options.measuring import ObservableOptions
from sinkscope.results.tables import KV_HEAD, Columns, names_of
from sinkscope.text.batch import Batch, on_cpu

SumKey = TypeVar("SumKey")
Item = TypeVar("Item")
Statistics = Mapping[str, torch.Tensor]  # by the name of their column
Labels = Sequence[Mapping[str, Any]]  # the other columns, such as the layer, of several layers


class Accumulator:
    """A running reduction over batches that does not depend on their order."""

    def receive(self, by: Callable[..., None], *tensors: torch.Tensor) -> None:
        """Call `by` with the tensors on the CPU: at once, or when `deliver` copies them from their device."""
        if all(x.device.type == "cpu" for x in tensors):
            by(*tensors)
        else:
            vars(self).setdefault("_waiting", []).append((tensors, by))

    def merge(self, other: Self) -> None:
        """Add the batches that another accumulator has seen; by default, merge all attributes that accumulate."""
        for name, part in accumulated(self).items():
            part.merge(vars(other)[name])


class Accumulators(dict[SumKey, Any], Accumulator):
    """Accumulators by key, for example by layer; those of other processes may have other keys."""

    def merge(self, other: Self) -> None:
        for key, part in other.items():
            if key in self:
                self[key].merge(part)
            else:
                self[key] = part


class Sums(dict[SumKey, Any], Accumulator):
    """Maps each key to the sum of the tensors or numbers that were added."""

    def add(self, key: SumKey, term: Any) -> None:
        self[key] = self[key] + term if key in self else term

    def merge(self, other: Self) -> None:
        for key, term in other.items():
            self.add(key, term)

    def add_each(self, keys: Iterable[SumKey], terms: Iterable[Any]) -> None:
        for key, term in zip(keys, terms, strict=True):
            self.add(key, term)


class Maxima(Sums[SumKey]):
    """Maps each key to the elementwise maximum of the tensors that were added."""

    def add(self, key: SumKey, term: torch.Tensor) -> None:
        self[key] = torch.maximum(self[key], term) if key in self else term


class Lists(defaultdict[SumKey, list[Item]], Accumulator):
    """Maps each key to a list of the values that were appended. Their order depends on the batches: sort before use."""

    def merge(self, other: Self) -> None:
        for key, values in other.items():
            self[key].extend(values)


class Rows(Lists[str, Any]):
    """Rows of a table, to which each batch adds some, on the CPU."""

    def add(self, columns: Mapping[str, torch.Tensor | np.ndarray | int]) -> None:
        """Add rows; a number is the same in all of them."""
        for name, column in zip(columns, np.broadcast_arrays(*columns.values()), strict=True):
            self[name].append(np.array(column))  # a copy, so that no larger array stays in memory

    def table(self, *by: str) -> pd.DataFrame:
        """Return the table sorted by some columns, so that the order of batches has no effect."""
        table = pd.DataFrame({name: np.concatenate(parts) for name, parts in self.items()})
        return table.sort_values(list(by), kind="stable", ignore_index=True)


def accumulated(holder: object) -> dict[str, Accumulator]:
    """Return the attributes of an observable or accumulator that accumulate."""
    return {name: value for name, value in vars(holder).items() if isinstance(value, Accumulator)}


def deliver(holders: Iterable[object]) -> None:
    """Copy the tensors for which accumulators wait to the CPU, those of a device together, and pass them on."""
    waiting = [each for holder in holders for each in _waiting_in(holder)]
    parts = iter(on_cpu(x for tensors, _ in waiting for x in tensors))
    for tensors, by in waiting:
        by(*(next(parts) for _ in tensors))


def _waiting_in(holder: object) -> list[tuple[tuple[torch.Tensor, ...], Callable[..., None]]]:
    """Return the tensors that the accumulators in a holder wait for, and clear their lists of these."""
    waiting = list(vars(holder).pop("_waiting", ()))
    parts = [*accumulated(holder).values(), *(holder.values() if isinstance(holder, Accumulators) else ())]
    return waiting + [each for part in parts for each in _waiting_in(part)]


Settings = ObservableOptions  # in a run, `positions` and `window` are limited to the longest sequence

ATTENTION_SITES = ("raw_value", "gate", "attention")  # in the order in which a forward pass reaches them
NEURONS = "neurons"  # the site of the last projection of the feed-forward network


def copied_entries(device: torch.device) -> int:
    """Return how many numbers copies of residual-stream sites hold: on a CPU few enough to stay in its cache."""
    return 2**16 if device.type == "cpu" else 2**26


class Reading:
    """The tensor (B,T,D) of a site or (B,S,T,D) of several, with statistics of its tokens that observables share.

    On an accelerator all of them come from one pass over the tensor; on a CPU each is faster by itself.
    """

    def __init__(self, tensor: torch.Tensor, batch: Batch) -> None:
        self.tensor = tensor
        self.batch = batch
        self.is_on_cpu = tensor.device.type == "cpu"

    @cached_property
    def sums_and_peaks(self) -> tuple[TokenSums, torch.Tensor]:
        return token_sums(self.tensor)

    @cached_property
    def norms(self) -> torch.Tensor:
        return token_norms(self.tensor) if self.is_on_cpu else self.sums_and_peaks[0].norms(self.tensor.shape[-1])

    @cached_property
    def peaks(self) -> torch.Tensor:
        return token_peaks(self.tensor) if self.is_on_cpu else self.sums_and_peaks[1]


@dataclass(frozen=True)
class SiteStack:
    """Sites of a batch in one tensor: as many as `copied_entries` allows, or a single one."""

    sites: Sequence[tuple[int, str, int]]  # layer, site, and the index of its tensor in `reading`, (B,S,T,D)
    reading: Reading


class Pending:
    """Statistics (B,…) of single layers, which stay on their device until all layers of a batch are reduced together.

    A reduction of small tensors costs about the same for one layer as for all.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple, list[tuple[dict[str, Any], Statistics]]] = defaultdict(list)

    def add(self, statistics: Statistics, *alike: Any, **labels: Any) -> None:
        """Keep the statistics of a layer. Layers whose `alike` differ are not reduced together."""
        shapes = ((name, x.shape, x.dtype, x.device) for name, x in statistics.items())
        self._rows[alike, *shapes].append((labels, statistics))

    def take(self) -> Iterator[tuple[tuple, list[dict[str, Any]], dict[str, torch.Tensor]]]:
        """Yield `alike`, the labels of some layers and their statistics (B,L,…), and keep them no longer."""
        for (alike, *_), rows in self._rows.items():
            labels, statistics = zip(*rows, strict=True)
            yield alike, list(labels), {name: torch.stack([x[name] for x in statistics], 1) for name in statistics[0]}
        self._rows.clear()


class Observable:
    """A measurement that reduces tensors to small running sums while the trace runs.

    Each declared table has an accumulator in `statistics`, which `tables` writes if a batch was added: values of single
    sequences if the table has the column `sequence`, else means over them.
    """

    name: ClassVar[str]
    about: ClassVar[str]  # one line for `sinkscope list observables`
    sites: ClassVar[tuple[str, ...]]  # residual-stream sites (families.py), ATTENTION_SITES and NEURONS
    columns: ClassVar[Mapping[str, Columns]] = {}  # its tables, and their columns after model, condition and layer
    expected: ClassVar[bool] = True  # most models have it: runs and the doctor report if it does not apply
    by_default: ClassVar[bool] = True  # measured if the user names no observables
    of_equal_tokens: ClassVar[bool] = False  # needs input in which each sequence repeats a single token
    backward: ClassVar[bool] = False  # needs gradients: `watch` and `watch_attention` are called, not `see`
    reads_mix: ClassVar[bool] = False  # also sees the outputs of heads: `see_mix`
    stacks: ClassVar[bool] = False  # takes several sites of the residual stream at once: `see_stack`, not `see`
    # A follow-up: after a pass with these observables, it sees the first sequence and is configured by their tables.
    after: ClassVar[tuple[str, ...]] = ()

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.pending = Pending()
        self.statistics: Accumulators[str] = Accumulators()  # Means or BySequence, by table
        for table, columns in self.columns.items():
            names = names_of(columns)
            axes = [axis for axis in ("head", "position") if axis in names]
            self.statistics[table] = BySequence(*axes) if "sequence" in names else Means(*axes)

    @classmethod
    def inapplicable(cls, model: PreTrainedModel, family: Family) -> str | None:
        """Return the reason why this observable does not apply to the model, or None if it applies."""
        only_attention = set(cls.sites) <= set(ATTENTION_SITES)
        return family.without_attention if only_attention else None

    @classmethod
    def from_tables(cls, settings: Settings, tables: Mapping[str, pd.DataFrame]) -> Self:
        """Create the observable of a follow-up pass from the tables of the first pass."""
        return cls(settings)

    def prepare(self, model: PreTrainedModel, family: Family, predicted: int) -> None:
        """Prepare for a run, before its first batch. `predicted`: number of tokens that the whole run predicts."""

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        """Reduce the tensor of one residual-stream site, when the forward pass has computed it."""

    def see_stack(self, stack: SiteStack, batch: Batch) -> None:
        """Reduce the tensors of some residual-stream sites."""

    def see_gate(self, layer: int, gate: torch.Tensor, value: torch.Tensor, batch: Batch) -> None:
        """Reduce one layer's gates (B,T,heads) and its values before gating (B,T,K,d)."""

    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        """Reduce one layer's attention."""

    def see_mix(self, layer: int, read: AttentionRead, mix: torch.Tensor, batch: Batch) -> None:
        """Reduce the outputs (B,T,H,d) of one layer's heads, before its output projection and before a gate on them."""

    def see_neurons(self, layer: int, part: FeedForward, args: tuple, batch: Batch) -> None:
        """Reduce the last projection of one layer's feed-forward network, whose module is called with `args`."""

    def again(self, batch: Batch) -> Iterator[Batch]:
        """Yield further batches for this observable alone, such as the same with other tokens, after it saw `batch`."""
        yield from ()

    def watch(self, layer: int, site: str, tensor: torch.Tensor, batch: Batch, scale: float) -> None:
        """Register hooks that reduce the gradient of one residual-stream site.

        `tensor` has its graph; `scale` is the factor of this tensor in the sum that the model adds to the stream.
        """

    def watch_attention(self, layer: int, read: AttentionRead, mix: torch.Tensor, batch: Batch) -> None:
        """Register hooks on one layer's attention and its heads' outputs `mix` (B,T,H,d), with their graph."""

    def watch_raw_value(self, layer: int, x: torch.Tensor, value: torch.Tensor, batch: Batch) -> None:
        """Register hooks on one layer's values (B,T,K,d) before a retrofit's gate or scale, with their graph.

        x (B,T,D) is the input of the attention.
        """

    def finish(self, batch: Batch) -> None:
        """Reduce what was kept of the batch's layers: after the forward pass, or earlier if that is much."""

    def notices(self) -> list[str]:
        """Return notices about the measurement for the user. Raises SinkscopeError if the measurement is not usable."""
        return []

    def tables(self) -> dict[str, pd.DataFrame]:
        """Return the tables declared in `columns`, over the batches so far: with `layer`, without token texts."""
        tables = {name: statistics.table() for name, statistics in self.statistics.items() if statistics}
        return {name: with_kv_head(table) if KV_HEAD in self.columns[name] else table for name, table in tables.items()}


class Means(Accumulator):
    """Running means over sequences of statistics (B, *axes), summed in float64.

    Iterating gives each combination of labels, in order, with its means by name; NaN at positions that no sequence has.
    """

    def __init__(self, *axes: str) -> None:
        self._axes = axes
        self._sums: Sums[tuple] = Sums()  # by labels and names, (names, *axes)
        self._counts: Sums[tuple] = Sums()

    def add(self, statistics: Statistics, present: torch.Tensor | None = None, **labels: Any) -> None:
        """Add a batch's statistics. `labels`: constant columns, such as the layer.

        `present` (B,P) is True where a sequence has the position, the last axis; None means everywhere.
        """
        self.add_layers([labels], {name: x.unsqueeze(1) for name, x in statistics.items()}, present)

    def add_layers(self, rows: Labels, statistics: Statistics, present: torch.Tensor | None = None) -> None:
        """Add statistics (B,L,*axes) of several layers; `present` may be (B,L,P)."""
        sums = torch.stack([filled(x, present).sum(0, dtype=torch.float64) for x in statistics.values()])
        size = len(next(iter(statistics.values())))
        count = torch.tensor(size) if present is None else present.sum(0)
        keys = [(tuple(labels.items()), tuple(statistics)) for labels in rows]  # accelerators call `add` later

        def add(sums: torch.Tensor, count: torch.Tensor) -> None:
            self._sums.add_each(keys, sums.numpy().swapaxes(0, 1))
            self._counts.add_each(keys, count.numpy() if count.dim() > 1 else repeat(count.numpy(), len(keys)))

        self.receive(add, sums, count)

    def __bool__(self) -> bool:
        return bool(self._sums)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], dict[str, np.ndarray]]]:
        means: dict[tuple, dict[str, np.ndarray]] = defaultdict(dict)
        with np.errstate(invalid="ignore"):  # 0 ÷ 0
            for (labels, names), total in self._sums.items():
                means[labels] |= zip(names, total / self._counts[labels, names], strict=True)
        return iter([(dict(labels), means[labels]) for labels in sorted(means)])

    def table(self) -> pd.DataFrame:
        """Return the table sorted by labels."""
        parts = []
        for labels, means in self:
            shape = next(iter(means.values())).shape
            axes = {axis: range(size) for axis, size in zip(self._axes, shape, strict=True)}
            parts.append((labels | axes, means))
        return long_table(parts)


class BySequence(Accumulator):
    """Statistics (B, *axes) of every sequence in float32, from which the uncertainty of their means is computed."""

    def __init__(self, *axes: str) -> None:
        self._axes = axes
        # one growing array: many small arrays between short-lived large tensors would fragment the heap
        self._values = array("f")
        self._parts: dict[tuple, dict[int, tuple[slice, torch.Size]]] = defaultdict(dict)  # labels → first sequence → …
        self._names: tuple[str, ...] = ()

    def add(self, batch: Batch, statistics: Statistics, present: torch.Tensor | None = None, **labels: Any) -> None:
        """Add a batch's statistics, as in `Means.add`."""
        self.add_layers(batch, [labels], {name: x.unsqueeze(1) for name, x in statistics.items()}, present)

    def add_layers(
        self, batch: Batch, rows: Labels, statistics: Statistics, present: torch.Tensor | None = None
    ) -> None:
        """Add statistics (B,L,*axes) of several layers, in float32 or float64; NaN where `present` (B,P) is False."""
        self._names = tuple(statistics)
        values = torch.stack([filled(statistic, present, torch.nan) for statistic in statistics.values()])

        def add(values: torch.Tensor) -> None:
            for labels, of_layer in zip(rows, values.unbind(2), strict=True):
                start = len(self._values)
                self._values.frombytes(of_layer.numpy().astype(np.float32).tobytes())
                self._parts[tuple(labels.items())][batch.first] = slice(start, len(self._values)), of_layer.shape

        self.receive(add, values)

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
        """Return the table sorted by labels, then by sequence, so that the order of batches has no effect."""
        values, tables = np.frombuffer(self._values, np.float32), []
        for labels, parts in sorted(self._parts.items()):
            in_order = sorted(parts.items())
            arrays = np.concatenate([values[part].reshape(shape) for _, (part, shape) in in_order], axis=1)
            sequences = [first + index for first, (_, shape) in in_order for index in range(shape[1])]
            axes = {axis: range(size) for axis, size in zip(self._axes, arrays.shape[2:], strict=True)}
            columns = dict(zip(self._names, arrays, strict=True))
            tables.append((dict(labels) | {"sequence": sequences} | axes, columns))
        return long_table(tables)

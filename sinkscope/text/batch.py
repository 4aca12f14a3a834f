"""A batch of token sequences with the start and end of each, and padding on either side."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F

REGISTER = -1000  # token id of a learned embedding before the text
IGNORED = -100  # the label of a token that is not predicted


def sent(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor of the CPU to a device without waiting for its earlier kernels, which on Apple's is not safe."""
    return x.to(device, non_blocking=device.type != "mps")


def on_cpu(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return tensors of any devices on the CPU; those of a device are copied together, because each copy waits."""
    copied = list(tensors)
    places = defaultdict(list)  # by device
    for place, x in enumerate(copied):
        if x.device.type != "cpu":
            places[x.device].append(place)
    for device, chosen in places.items():
        chosen.sort(key=lambda place: -copied[place].itemsize)  # so that each part is aligned
        packed = torch.cat([copied[place].detach().contiguous().view(-1).view(torch.uint8) for place in chosen])
        there = torch.empty(len(packed), dtype=torch.uint8, pin_memory=device.type == "cuda").copy_(packed)
        for place, part in zip(chosen, there.split([copied[place].nbytes for place in chosen]), strict=True):
            copied[place] = part.view(copied[place].dtype).view(copied[place].shape)
    return copied


def insert_before(x: torch.Tensor, prefix: torch.Tensor, start: torch.Tensor | None) -> torch.Tensor:
    """Insert prefix (n,…) into each row of x (B,T,…) before column `start` (B,), None: 0; returns (B,T+n,…)."""
    rows, columns = x.shape[:2]
    both = torch.cat([prefix.expand(rows, *prefix.shape), x], dim=1)
    if start is None:
        return both
    count = len(prefix)
    column, start = torch.arange(columns + count, device=x.device), start.to(x.device)[:, None]
    taken = torch.where(column < start, column + count, torch.where(column < start + count, column - start, column))
    return both[torch.arange(rows, device=x.device)[:, None], taken]


@dataclass(frozen=True)
class Batch:
    """A batch of sequences: columns index the padded tensor, positions count from a sequence's own first token."""

    token_ids: torch.Tensor  # (B,T)
    attention_mask: torch.Tensor  # (B,T), 1 for real tokens, which are contiguous
    first: int = 0  # index of the first sequence within the run
    labels: torch.Tensor | None = None  # (B,T): the target at each token, or IGNORED; None: its successor
    masked: "Batch | None" = None  # for an encoder: the same sequences with masked tokens, which the encoder predicts
    first_predicted: int = 1  # the first position that is predicted; for a prefix LM the first one after its prefix
    pictures: Mapping[str, torch.Tensor] = field(default_factory=dict)  # the model's arguments for the pictures in it
    texts: tuple[int, ...] | None = None  # the number of each sequence's text; None: there are no copies of a text
    # (B,), in a decoding step: the number of tokens of each sequence before this one; None: complete sequences
    before: torch.Tensor | None = None

    @property
    def numbers(self) -> list[int]:
        """The number of each sequence's text within the run; copies of a text share it."""
        return list(self.texts or range(self.first, self.first + len(self.token_ids)))

    def groups(self, count: int) -> torch.Tensor:
        """(B,): the group of each sequence: the number of its text modulo `count`."""
        return torch.tensor(self.numbers) % count

    @cached_property
    def valid(self) -> torch.Tensor | None:
        """(B,T) bool: real tokens; None if there is no padding."""
        mask = self.attention_mask.bool()
        return None if bool(mask.all()) else mask

    @cached_property
    def _copies(self) -> dict[tuple, torch.Tensor | None]:
        return {}

    def on(self, device: torch.device, name: str, *arguments: Any) -> Any:
        """Return the attribute `name`, or what the method `name` returns, on a device.

        It is computed and copied once for all layers and passes, without waiting for the device's earlier kernels.
        """
        key = device, name, *arguments
        if key not in self._copies:
            tensor = getattr(self, name)(*arguments) if arguments else getattr(self, name)
            self._copies[key] = None if tensor is None else sent(tensor, device)
        return self._copies[key]

    @cached_property
    def registers(self) -> torch.Tensor | None:
        """(B,T) bool: register tokens; None if there are none."""
        registers = self.token_ids == REGISTER
        return registers if bool(registers.any()) else None

    @property
    def of_text(self) -> torch.Tensor | None:
        """(B,T) bool: tokens of the text, without padding and registers; None if there are neither."""
        return self.valid if self.registers is None else self.attention_mask.bool() & ~self.registers

    @cached_property
    def start(self) -> torch.Tensor:
        """(B,): the column of each sequence's position 0."""
        return self.attention_mask.int().argmax(dim=1)

    @cached_property
    def lengths(self) -> torch.Tensor:
        return self.attention_mask.sum(dim=1)

    @property
    def without_padding(self) -> torch.Tensor:
        """(N,): the rows of the sequences that fill all columns."""
        return self.attention_mask.bool().all(1).nonzero()[:, 0]

    @cached_property
    def predicting(self) -> torch.Tensor:
        """(B,T) bool: tokens whose successor is predicted: all except each sequence's last token and a prefix."""
        real = self.attention_mask.bool()
        followed = real & torch.cat([real[:, 1:], torch.zeros_like(real[:, :1])], dim=1)
        return followed & (self.position_ids >= self.first_predicted - 1)

    @cached_property
    def targets(self) -> torch.Tensor:
        """(B,T): the target of the logits at each token, or IGNORED."""
        if self.labels is not None:
            return self.labels
        return self.token_ids.roll(-1, dims=1).masked_fill(~self.predicting, IGNORED)

    @cached_property
    def in_loss(self) -> torch.Tensor:
        """(B,T) bool: tokens on which the loss depends: the predicting ones, or an encoder's complete sequence."""
        if self.labels is None:
            return self.predicting
        return self.attention_mask.bool() & (self.labels != IGNORED).any(dim=1, keepdim=True)

    @cached_property
    def position_ids(self) -> torch.Tensor:
        """(B,T): positions, which a model needs if the padding is on the left."""
        return (self.attention_mask.cumsum(dim=1) - 1).clamp(min=0)

    def with_registers(self, registers: int) -> "Batch":
        """Return the sequences with `registers` register tokens before each, as the model's layers see them."""
        if not registers or self.before is not None:
            return self
        ids = insert_before(self.token_ids, self.token_ids.new_full((registers,), REGISTER), self.start)
        mask = insert_before(self.attention_mask, self.attention_mask.new_ones(registers), self.start)
        labels = self.labels
        if labels is not None:
            labels = insert_before(labels, labels.new_full((registers,), IGNORED), self.start)
        return Batch(ids, mask, self.first, labels, texts=self.texts)

    def repeated(self, times: int) -> "Batch":
        """Return all sequences `times` times, one batch after the other."""

        names = ("token_ids", "attention_mask", "labels")
        tiled = {name: x.repeat(times, 1) for name in names if (x := getattr(self, name)) is not None}
        return replace(self, **tiled, masked=self.masked and self.masked.repeated(times), texts=None)

    def columns(self, positions: int) -> int:
        """Return how many columns hold the first `positions` positions of every sequence."""
        return min(int(self.start.max()) + positions, self.token_ids.shape[1])

    def at_positions(self, x: torch.Tensor, positions: int) -> torch.Tensor:
        """Gather statistics by column (B,…,C) by position (B,…,P); undefined past a sequence's end."""
        if self.valid is None and positions <= x.shape[-1]:
            return x[..., :positions]
        index = self.on(x.device, "columns_of", positions, x.shape[-1])
        for _ in range(x.dim() - 2):
            index = index.unsqueeze(1)
        return x.gather(-1, index.expand(*x.shape[:-1], positions))

    def columns_of(self, positions: int, columns: int) -> torch.Tensor:
        """(B,P): the column of each position, among the first `columns`; the last one past a sequence's end."""
        position = torch.arange(positions, device=self.start.device)
        return (self.start[:, None] + position).clamp(max=columns - 1)

    def tokens_at(self, x: torch.Tensor, positions: int) -> torch.Tensor:
        """Gather tokens by column (B,T,…) by position (B,P,…); zero past a sequence's end."""
        by_position = self.at_positions(x.movedim(1, -1), positions)
        present = self.on(x.device, "present", positions)
        if present is not None:
            by_position = by_position.masked_fill(~present.view(len(present), *[1] * (x.dim() - 2), -1), 0.0)
        return by_position.movedim(-1, 1)

    def present(self, positions: int) -> torch.Tensor | None:
        """(B,P) bool: whether the sequence has this position; None if all sequences have all of them."""
        if self.valid is None and positions <= self.token_ids.shape[1]:
            return None
        return torch.arange(positions, device=self.lengths.device) < self.lengths[:, None]

    def queries(self, positions: int, window: int | None = None, causal: bool = True, prefix: int = 0) -> torch.Tensor:
        """Return how many queries t see a key at position s, (B,P), at least 1 so that it can be a divisor.

        With `window`, only queries with |t - s| < window count; with `causal`, only t ≥ s, except for keys in the
        prefix.
        """
        position = torch.arange(positions, device=self.lengths.device)
        within = int(self.lengths.max()) if window is None else window
        later = (self.lengths[:, None] - position).clamp(min=1, max=within)
        earlier = position.clamp(max=within - 1)
        return later + earlier.where(position < (prefix if causal else positions), 0)

    def keys(self, causal: bool = True, prefix: int = 0) -> torch.Tensor:
        """Return how many keys the query at position t sees, (B,T), without the limit of a sliding window."""
        query, lengths = torch.arange(self.token_ids.shape[1], device=self.lengths.device), self.lengths[:, None]
        return (query + 1).clamp(min=prefix).minimum(lengths) if causal else lengths.expand(-1, len(query))

    def uniform(self, positions: int, window: int, causal: bool = True, prefix: int = 0) -> torch.Tensor:
        """Return the window mass of a key at position s if queries attend to all keys that they see alike, (B,P).

        This is the mean of 1 ÷ `keys` over the queries that `queries` counts, in float64; 0 past a sequence's end. Keys
        outside a sliding window count: without them it would be smaller at position 0.
        """
        position, lengths = torch.arange(positions, device=self.lengths.device), self.lengths[:, None]
        sums = F.pad((1 / self.keys(causal, prefix).double()).cumsum(1), (1, 0))  # over the queries before each
        on_both_sides = position < (prefix if causal else positions)
        first = torch.where(on_both_sides, (position - window + 1).clamp(min=0), position).minimum(lengths)
        last = (position + window).minimum(lengths)
        return (sums.gather(1, last) - sums.gather(1, first)) / self.queries(positions, window, causal, prefix)

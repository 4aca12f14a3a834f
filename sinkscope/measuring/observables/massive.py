"""Massive activations (Sun et al. 2024): a few entries of the residual stream thousands of times the median."""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch

from sinkscope.attention.kernels import upcast
from sinkscope.measuring.observables.observable import Observable, Rows, Settings, SiteStack, copied_entries
from sinkscope.measuring.observables.reductions import filled
from sinkscope.measuring.one_pass import INTEGERS, digit_counts
from sinkscope.results.tables import COORDINATE, POSITION, SEQUENCE, TOKEN, TOKEN_ID, Column
from sinkscope.text.batch import Batch

THRESHOLD = 100.0  # a massive entry is above this …
RATIO = 1000.0  # … and at least this many times the median
TOP = 3  # entries listed for every sequence and layer, massive or not
ENTRIES_AT_ONCE = 2**24  # entries whose histogram is made at once on an accelerator
SAMPLED = 61  # every 61st entry is sampled to locate the median; 61 divides no usual width


class Massive(Observable):
    """Lists the largest and all massive entries, and the magnitude of other tokens at the largest one's coordinate."""

    name = "massive"
    about = "massive activations: layer, token, coordinate, value, and the ratio to the median"
    sites = ("layer_out",)
    stacks = True
    columns: ClassVar = {
        "massive": (
            SEQUENCE, POSITION, TOKEN_ID, TOKEN, COORDINATE,
            Column("value", "the entry"),
            Column("median", "median of the absolute entries of this layer's output on the sequence"),
            Column("ratio", "|value| ÷ median"),
            Column("is_massive", "|value| > 100 and ratio ≥ 1000 (Sun et al. 2024)", kind="truth"),
        ),
        "massive_elsewhere": (
            SEQUENCE, POSITION, COORDINATE,
            Column("largest", "the largest magnitude of this layer's output on the sequence"),
            Column("elsewhere", "median magnitude at its coordinate, over the sequence's other tokens"),
        ),
    }  # fmt: skip

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.rows, self.others = Rows(list), Rows(list)
        self.states: list[tuple[Sequence[int], torch.Tensor, torch.Tensor]] = []  # layers, (B,L,T,D), peaks (B,L,T)

    def see_stack(self, stack: SiteStack, batch: Batch) -> None:
        layers, _, places = zip(*stack.sites, strict=True)
        hidden, peaks = stack.reading.tensor, stack.reading.peaks
        is_copy = hidden.shape[1] > len(places)  # the stack also has other sites
        if is_copy:
            hidden, peaks = (torch.stack([x[:, index] for index in places], dim=1) for x in (hidden, peaks))
        if self.states and self.states[-1][1].device != hidden.device:  # the model is spread over several
            self._reduce(batch)
        self.states.append((layers, hidden, peaks))
        if not is_copy or sum(states.numel() for _, states, _ in self.states) > copied_entries(hidden.device):
            self._reduce(batch)

    def _reduce(self, batch: Batch) -> None:
        """Reduce the states that have been kept."""
        if not self.states:
            return
        of_layers, states, of_tokens = zip(*self.states, strict=True)
        self.states.clear()
        layers = [layer for some in of_layers for layer in some]
        hidden, peaks = (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1) for parts in (states, of_tokens))
        peaks = filled(peaks, batch.on(peaks.device, "valid"), -1.0)
        medians = median_magnitudes(hidden, batch)
        entries, values = largest_entries(hidden, peaks, medians)
        self.rows.receive(partial(self._list_entries, layers, batch), entries, values, medians)
        # magnitudes at the coordinate of each sequence's largest entry, which is on its token with the largest peak
        largest, token = peaks.max(-1)  # (B,L)
        row = hidden.gather(2, token[..., None, None].expand(-1, -1, 1, hidden.shape[-1])).abs()
        coordinate = row.argmax(-1)  # (B,L,1)
        column = upcast(hidden.gather(3, coordinate[..., None].expand(-1, -1, hidden.shape[2], 1))[..., 0]).abs()
        largest_ones = {"largest": largest, "token": token, "coordinate": coordinate[..., 0], "column": column}
        for index, layer in enumerate(layers):
            self.pending.add({name: x[:, index] for name, x in largest_ones.items()}, layer=layer)

    def _list_entries(
        self, layers: Sequence[int], batch: Batch, entries: torch.Tensor, values: torch.Tensor, medians: torch.Tensor
    ) -> None:
        """List the TOP largest and all massive entries of each layer and sequence, largest first.

        `entries` (N,4) are candidates in ascending order of sequence, layer, column and coordinate.
        """
        sequence, layer, column, coordinate = entries.numpy().T
        value, median = values.double().numpy(), medians.double().numpy()[sequence, layer]
        place = sequence * len(layers) + layer
        order = np.lexsort((-np.abs(value), place))  # stable: earlier entries come first on ties
        rank = np.arange(len(order)) - np.searchsorted(place, place)
        listed = order[(rank < TOP) | is_massive(np.abs(value), median)[order]]
        sequence, column = sequence[listed], column[listed]
        self.rows.add({
            "layer": np.array(layers)[layer[listed]],
            "sequence": sequence + batch.first,
            "position": column - batch.start.numpy()[sequence],
            "token_id": batch.token_ids.numpy()[sequence, column],
            "coordinate": coordinate[listed],
            "value": value[listed],
            "median": median[listed],
        })  # fmt: skip

    def finish(self, batch: Batch) -> None:
        self._reduce(batch)
        for _, rows, by_layer in self.pending.take():
            by_layer["column"] = medians_elsewhere(by_layer["column"], by_layer["token"], batch)
            add = partial(self._list_others, np.array([row["layer"] for row in rows]), batch)
            self.others.receive(add, *by_layer.values())

    def _list_others(self, layers: np.ndarray, batch: Batch, *columns: torch.Tensor) -> None:
        largest, token, coordinate, elsewhere = (x.numpy() for x in columns)  # (B,L) each
        sequence, layer = np.indices(largest.shape)
        self.others.add({
            "layer": layers[layer].ravel(), "sequence": sequence.ravel() + batch.first,
            "position": (token - batch.start.numpy()[:, None]).ravel(), "coordinate": coordinate.ravel(),
            "largest": largest.astype(np.float64).ravel(), "elsewhere": elsewhere.ravel(),
        })  # fmt: skip

    def tables(self) -> dict[str, pd.DataFrame]:
        table = self.rows.table("layer", "sequence")  # within a sequence, the largest entry stays first
        table["ratio"] = (table["value"].abs() / table["median"]).fillna(0.0)  # 0 ÷ 0 if a layer gives only zeros
        table["is_massive"] = (table["value"].abs() > THRESHOLD) & (table["ratio"] >= RATIO)
        return {"massive": table, "massive_elsewhere": self.others.table("layer", "sequence")}


def medians_elsewhere(magnitudes: torch.Tensor, token: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the median of magnitudes (B,L,T) of each sequence without one token (B,L), in float64; NaN for one token.

    The median of an even number is the mean of the middle two.
    """
    valid, lengths = (batch.on(magnitudes.device, name) for name in ("valid", "lengths"))
    others = filled(magnitudes.scatter(-1, token[..., None], torch.inf), valid, torch.inf).sort(-1).values
    count = (lengths - 1)[:, None, None]
    middle = torch.cat([(count - 1).clamp(min=0) // 2, count // 2], dim=-1)  # (B,1,2)
    median = others.gather(-1, middle.expand(*token.shape, 2)).mean(-1, dtype=torch.float64)
    return median.where(median.isfinite(), torch.nan)


def largest_entries(
    hidden: torch.Tensor, peaks: torch.Tensor, medians: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return places (N,4) and values (N,) of entries, among them the TOP largest of each state and all massive ones.

    `hidden` is (B,L,T,D), `peaks` (B,L,T), negative for padding, `medians` (B,L). Only the tokens with the largest
    peaks are searched, because no entry is above its token's peak.
    """
    highest = peaks.topk(min(TOP, peaks.shape[-1]))
    entries = hidden.gather(2, highest.indices[..., None].expand(-1, -1, -1, hidden.shape[-1])).abs()
    entries = entries.masked_fill(highest.values[..., None] < 0, 0.0).flatten(2)  # zeros for padding
    least = upcast(entries.topk(min(TOP, entries.shape[-1])).values[..., -1])
    least = torch.minimum(least, (RATIO * medians).clamp(min=THRESHOLD))  # (B,L)
    tokens = (peaks >= least[..., None]).nonzero()
    places = tokens.unbind(1)
    rows = hidden[places]
    token, coordinate = (upcast(rows.abs()) >= least[places[:2]][:, None]).nonzero().unbind(1)
    return torch.cat([tokens[token], coordinate[:, None]], dim=1), rows[token, coordinate]


def is_massive(magnitude: Any, median: Any) -> Any:
    return (magnitude > THRESHOLD) & (magnitude >= RATIO * median)


def median_magnitudes(hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the (lower) median magnitude of each sequence's states (B,L,T,D), (B,L), in float32 or better."""
    if hidden.device.type == "cpu":
        ends = zip(hidden, batch.start.tolist(), (batch.start + batch.lengths).tolist(), strict=True)
        medians = [[median_magnitude(entries) for entries in states[:, start:stop]] for states, start, stop in ends]
        return torch.tensor(medians, dtype=medians[0][0].dtype)
    if batch.valid is not None:  # above all numbers
        hidden = hidden.masked_fill(~batch.on(hidden.device, "valid")[:, None, :, None], torch.inf)
    index = (batch.on(hidden.device, "lengths") * hidden.shape[-1] - 1)[:, None, None] // 2
    parts = hidden.flatten(2).split(max(1, ENTRIES_AT_ONCE // hidden[:, 0].numel()), dim=1)
    return torch.cat([selected_by_digits(part, index) for part in parts], dim=1)


def median_magnitude(x: torch.Tensor) -> torch.Tensor:
    """Return the (lower) median of the absolute entries, as torch.median does, in float32 or better.

    The CPU uses numpy's selection on the bits as integers, which is far faster: floats ≥ 0 sort like their bits.
    """
    if x.device.type != "cpu":
        return row_medians(x.flatten()[None])[0]
    magnitude = upcast(x.abs()).flatten()
    bits = magnitude.view(torch.int64 if magnitude.dtype == torch.float64 else torch.int32)
    median = selected(bits.numpy(), (len(bits) - 1) // 2)
    return torch.from_numpy(median).view(magnitude.dtype)[0]


def row_medians(x: torch.Tensor) -> torch.Tensor:
    """Return the (lower) median magnitude of each row of x (N,E), (N,), in float32 or better, on an accelerator."""
    return selected_by_digits(x, torch.full((1,), (x.shape[-1] - 1) // 2, device=x.device))


def selected_by_digits(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the number at an index (…,1) in ascending order of magnitudes of x (…,N), (…), in float32 or better.

    Floats ≥ 0 sort like their bits. Their first 16 bits are found in a histogram of these, the next 16 in a histogram
    of the numbers with the same first bits.
    """
    rows = x.flatten(0, -2)
    index, prefix = index.expand(*x.shape[:-1], 1).reshape(len(rows), 1), index.new_zeros(len(rows), 1)
    for shift in range(8 * x.itemsize - 16, -1, -16):
        upto = digit_counts(rows, prefix, shift).cumsum(-1)
        digit = torch.searchsorted(upto, index + 1)
        index = index - torch.where(digit > 0, upto.gather(-1, (digit - 1).clamp(min=0)), 0)
        prefix = prefix << 16 | digit
    return upcast(prefix.to(INTEGERS[x.itemsize]).view(x.dtype)).view(x.shape[:-1])


def selected(numbers: np.ndarray, index: int) -> np.ndarray:
    """Return the number at this index in ascending order, (1,), like np.partition."""
    # np.partition is slow on some processors (AVX-512 of AMD's Zen 4: 9 times slower than AVX2). Therefore the number
    # is first looked for between two sample quantiles, four standard deviations to either side, then in all numbers.
    sample = np.sort(numbers[::SAMPLED])
    middle, reach = index * len(sample) // len(numbers), 1 + int(2 * len(sample) ** 0.5)
    low, high = sample[max(0, middle - reach)], sample[min(middle + reach, len(sample) - 1)]
    near = numbers[np.flatnonzero((numbers >= low) & (numbers <= high))]
    place = index - int(np.count_nonzero(numbers < low))
    if not 0 <= place < len(near):
        near, place = numbers, index
    return np.partition(near, place)[place : place + 1]

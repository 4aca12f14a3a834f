"""Massive activations (Sun et al. 2024): a few entries of the residual stream thousands of times the median."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pandas as pd
import torch

from sinkscope.attention.kernels import upcast
from sinkscope.measuring.observables.activation import token_peaks
from sinkscope.measuring.observables.observable import Observable, Reading, Rows, Settings
from sinkscope.measuring.observables.reductions import filled
from sinkscope.results.tables import COORDINATE, POSITION, SEQUENCE, TOKEN, TOKEN_ID, Column
from sinkscope.text.batch import Batch

THRESHOLD = 100.0  # a massive entry is above this …
RATIO = 1000.0  # … and at least this many times the median
TOP = 3  # entries listed for every sequence and layer, massive or not
SAMPLED = 61  # every 61st entry is sampled to locate the median; 61 divides no usual width


class Massive(Observable):
    """Lists the largest and all massive entries, and the magnitude of other tokens at the largest one's coordinate."""

    name = "massive"
    about = "massive activations: layer, token, coordinate, value, and the ratio to the median"
    sites = ("layer_out",)
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

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        hidden = reading.tensor
        columns = zip(batch.start.tolist(), (batch.start + batch.lengths).tolist(), strict=True)
        own = [row[start:stop] for row, (start, stop) in zip(hidden, columns, strict=True)]  # without padding
        medians = torch.stack([median_magnitude(entries) for entries in own])
        entries = largest_entries(hidden, reading.once(token_peaks), medians, batch)
        values = upcast(hidden[entries]).double().cpu()
        sequence, column, coordinate = (index.cpu() for index in entries)
        found = {
            "layer": torch.full_like(sequence, layer),
            "sequence": sequence + batch.first,
            "position": column - batch.start[sequence],
            "token_id": batch.token_ids[sequence, column],
            "coordinate": coordinate,
            "value": values,
            "median": medians.double().cpu()[sequence],
        }
        self.rows.add(found)
        first = np.unique(sequence.numpy(), return_index=True)[1]  # the row of each sequence's largest entry
        peaks = {name: found[name][first].numpy() for name in ("layer", "sequence", "position", "coordinate")}
        with_entries = [own[row] for row in sequence[first].tolist()]  # a sequence of NaN has no entry
        elsewhere = medians_elsewhere(with_entries, peaks["position"].tolist(), peaks["coordinate"].tolist())
        self.others.add(peaks | {"largest": found["value"][first].abs().numpy(), "elsewhere": elsewhere})

    def tables(self) -> dict[str, pd.DataFrame]:
        table = self.rows.table("layer", "sequence")  # within a sequence, the largest entry stays first
        table["ratio"] = (table["value"].abs() / table["median"]).fillna(0.0)  # 0 ÷ 0 if a layer gives only zeros
        table["is_massive"] = (table["value"].abs() > THRESHOLD) & (table["ratio"] >= RATIO)
        return {"massive": table, "massive_elsewhere": self.others.table("layer", "sequence")}


def medians_elsewhere(
    sequences: Sequence[torch.Tensor], positions: Sequence[int], coordinates: Sequence[int]
) -> np.ndarray:
    """Return the median magnitude of each state (length,D) at a coordinate, without one position; NaN for one token."""
    found = []
    for entries, position, coordinate in zip(sequences, positions, coordinates, strict=True):
        column = upcast(entries[:, coordinate]).abs().double().cpu().numpy()
        found.append(np.median(np.delete(column, position)) if len(column) > 1 else np.nan)
    return np.array(found)


def largest_entries(
    hidden: torch.Tensor, peaks: torch.Tensor, medians: torch.Tensor, batch: Batch
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return sequence, column and coordinate (N,) of the TOP largest and all massive entries, largest first.

    Earlier entries come first on ties. `hidden` is (B,T,D), `peaks` (B,T), `medians` (B,). Only the tokens with the
    largest peaks are searched, because no entry is above its token's peak.
    """
    peaks = filled(peaks, batch.valid, -1.0)
    highest = peaks.topk(min(TOP, peaks.shape[1]))
    entries = hidden.gather(1, highest.indices[..., None].expand(-1, -1, hidden.shape[-1])).abs()
    entries = entries.masked_fill(highest.values[..., None] < 0, 0.0).flatten(1)  # zeros for padding
    least = upcast(entries.topk(min(TOP, entries.shape[1])).values[:, -1])
    sequence, column = ((peaks >= least[:, None]) | is_massive(peaks, medians[:, None])).nonzero(as_tuple=True)
    magnitude = upcast(hidden[sequence, column].abs())
    massive = is_massive(magnitude, medians[sequence, None])
    token, coordinate = ((magnitude >= least[sequence, None]) | massive).nonzero(as_tuple=True)
    # largest first within each sequence: two stable sorts, the more significant key last
    order = magnitude[token, coordinate].argsort(descending=True, stable=True)
    order = order[sequence[token[order]].argsort(stable=True)]
    token, coordinate = token[order], coordinate[order]
    sequence, column = sequence[token], column[token]
    rank = torch.arange(len(sequence), device=sequence.device) - torch.searchsorted(sequence, sequence)
    listed = (rank < TOP) | massive[token, coordinate]
    return sequence[listed], column[listed], coordinate[listed]


def is_massive(magnitude: torch.Tensor, median: torch.Tensor) -> torch.Tensor:
    return (magnitude > THRESHOLD) & (magnitude >= RATIO * median)


def median_magnitude(x: torch.Tensor) -> torch.Tensor:
    """Return the (lower) median of the absolute entries, as torch.median does, in float32 or better.

    The CPU uses numpy's selection on the bits as integers, which is far faster: floats ≥ 0 sort like their bits.
    """
    magnitude = upcast(x.abs()).flatten()
    if magnitude.device.type != "cpu":
        return magnitude.median()
    bits = magnitude.view(torch.int64 if magnitude.dtype == torch.float64 else torch.int32)
    found = selected(bits.numpy(), (len(bits) - 1) // 2)
    return torch.from_numpy(found).view(magnitude.dtype)[0]


def selected(numbers: np.ndarray, index: int) -> np.ndarray:
    """Return the number at this index in ascending order, (1,), like np.partition."""
    # np.partition is slow on some processors (AVX-512 of AMD's Zen 4: 9 times slower than AVX2). Therefore the number
    # is first looked for between two sample quantiles, four standard deviations to either side, then in all numbers.
    sample = np.sort(numbers[::SAMPLED])
    middle, reach = index * len(sample) // len(numbers), 1 + int(2 * len(sample) ** 0.5)
    low, high = sample[max(0, middle - reach)], sample[min(middle + reach, len(sample) - 1)]
    near = numbers[np.flatnonzero((numbers >= low) & (numbers <= high))]
    at = index - int(np.count_nonzero(numbers < low))
    if not 0 <= at < len(near):
        near, at = numbers, index
    return np.partition(near, at)[at : at + 1]

"""Massive activations (Sun et al. 2024): few entries of the residual stream, thousands of times the median."""

from typing import ClassVar

import numpy as np
import pandas as pd
import torch

from sinkscope.attention.kernels import upcast
from sinkscope.measuring.accumulators import Lists
from sinkscope.measuring.observables.observable import Observable, Reading, Settings
from sinkscope.results.tables import COORDINATE, POSITION, SEQUENCE, TOKEN, TOKEN_ID, Column
from sinkscope.text.batch import Batch

THRESHOLD = 100.0  # an entry is massive if it is above this …
RATIO = 1000.0  # … and at least this many times the median
TOP = 3  # entries listed for every sequence and layer, massive or not


class Massive(Observable):
    """Table `massive`: of each layer's output and sequence the three largest entries, and every massive one."""

    name = "massive"
    about = "massive activations: layer, token, coordinate, value, and the ratio to the median"
    sites = ("layer_out",)
    columns: ClassVar = {
        "massive": (
            SEQUENCE, POSITION, TOKEN_ID, TOKEN, COORDINATE,
            Column("value", "the entry"),
            Column("median", "of the absolute entries of this layer's output on the sequence"),
            Column("ratio", "|value| ÷ median"),
            Column("is_massive", "|value| > 100 and ratio ≥ 1000 (Sun et al. 2024)", kind="truth"),
        ),
    }  # fmt: skip

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.rows: Lists[str, np.ndarray] = Lists(list)

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        hidden = upcast(reading.tensor)
        width = hidden.shape[-1]
        for index, entries in enumerate(real_tokens(hidden, batch)):
            median, places = largest_entries(entries)
            values = entries.flatten()[places]
            position, coordinate = places // width, places % width
            found = {
                "layer": np.full(len(places), layer),
                "sequence": np.full(len(places), batch.first + index),
                "position": position.cpu().numpy(),
                "token_id": batch.token_ids[index, position.cpu() + batch.start[index]].numpy(),
                "coordinate": coordinate.cpu().numpy(),
                "value": values.cpu().numpy().astype(np.float64),
                "median": np.full(len(places), float(median)),
            }
            for name, column in found.items():
                self.rows[name].append(column)

    def tables(self) -> dict[str, pd.DataFrame]:
        table = pd.DataFrame({name: np.concatenate(parts) for name, parts in self.rows.items()})
        # they come batch by batch: sorted, so that the batch size changes nothing; within a sequence largest first
        table = table.sort_values(["layer", "sequence"], kind="stable", ignore_index=True)
        table["ratio"] = (table["value"].abs() / table["median"]).fillna(0.0)  # 0 ÷ 0 where a layer gives zeros alone
        table["is_massive"] = (table["value"].abs() > THRESHOLD) & (table["ratio"] >= RATIO)
        return {"massive": table}


def real_tokens(hidden: torch.Tensor, batch: Batch) -> list[torch.Tensor]:
    """(B,T,D) → one (length,D) view a sequence, without its padding."""
    starts, lengths = batch.start.tolist(), batch.lengths.tolist()
    return [row[start : start + length] for row, start, length in zip(hidden, starts, lengths, strict=True)]


def largest_entries(entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest entries of one sequence's hidden state (T,D).

    Returns:
        The median of its absolute entries, and the places, in the flattened state, of the TOP largest entries and of
        every massive one, largest first.
    """
    magnitude = entries.abs().flatten()
    median = middle(magnitude)
    values, places = magnitude.topk(min(TOP, magnitude.numel()))
    if not is_massive(values[-1], median):
        return median, places
    massive = int(is_massive(magnitude, median).sum())
    return median, magnitude.topk(max(TOP, massive)).indices


def is_massive(magnitude: torch.Tensor, median: torch.Tensor) -> torch.Tensor:
    return (magnitude > THRESHOLD) & (magnitude >= RATIO * median)


def middle(x: torch.Tensor) -> torch.Tensor:
    """The (lower) median, as torch.median gives it; on the CPU by numpy's partition, which is 15 times faster."""
    if x.device.type != "cpu":
        return x.median()
    place = (x.numel() - 1) // 2
    return torch.tensor(np.partition(x.numpy(), place)[place])

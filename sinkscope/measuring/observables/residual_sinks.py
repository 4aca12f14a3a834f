"""Residual sinks, coordinates that are large at most tokens, and spikes, which few tokens have.

Both are seen by a token's entries ÷ the median of its absolute entries (arXiv 2601.22966; the thresholds are ours). The
null is a random rotation of the states, after which no coordinate is special. A spike's state is nearly the same in
all sequences (arXiv 2603.05498): the mean cosine of all pairs of sequences says how nearly.
"""

from typing import ClassVar

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

from sinkscope.attention.kernels import upcast
from sinkscope.measuring.observables.observable import BySequence, Maxima, Observable, Reading, Settings, Sums
from sinkscope.measuring.observables.reductions import filled
from sinkscope.measuring.observables.sink_tokens import life
from sinkscope.quantization.rotation import random_rotation
from sinkscope.results.tables import COORDINATE, SEQUENCE, Column
from sinkscope.text.batch import Batch

LARGE = 20.0  # an entry is large if it is above this many times the median of its token
MOST_TOKENS = 0.9  # share of tokens at which the coordinate of a residual sink is large
FEW_TOKENS = 0.1  # share of tokens up to which it is the coordinate of a spike
LISTED = 16  # coordinates of a layer that are listed at most, those that are large at the most tokens first
KINDS = RESIDUAL, SPIKE, BETWEEN = "residual sink", "spike", "between"
SHARES = (
    Column("largest_share", "largest share of the tokens at which one coordinate is large: above 20 × the median of "
        "the token's |entries|", "share"),
    Column("rotated_share", "the same after a random rotation of the states", "share"),
)  # fmt: skip


class ResidualSinks(Observable):
    """Finds coordinates that are large at many tokens or few, and compares the largest tokens of all sequences."""

    name = "residual-sinks"
    about = "coordinates that are large at most tokens (residual sinks) or at few (spikes), and the spike's direction"
    sites = ("layer_in", "layer_out")
    by_default = False
    columns: ClassVar = {
        "residual_sinks": (
            COORDINATE,
            Column("kind", "residual sink: large at 90 % of the tokens or more; spike: at 10 % or less; or between",
                kind="text"),
            Column("share", "share of the tokens at which |entry| > 20 × the median of the token's |entries|", "share"),
            Column("ratio_mean", "|entry| ÷ this median, mean over tokens", "ratio"),
            Column("ratio_max", "its largest value", "ratio"),
        ),
        "spikes": (
            Column("norm", "L2 norm of the largest token of each sequence, mean over sequences"),
            Column("norm_ratio", "mean over sequences of the same ÷ the median norm of the sequence's tokens", "ratio"),
            Column("cosine", "cosine of the largest tokens of two sequences, mean over all pairs"),
            Column("cosine_of_others", "the same of the tokens with the median norm"),
            Column("step", "up: the layer with the largest rise of the norm; down: with its largest later fall",
                kind="text"),
            *SHARES,
        ),
        "spikes_by_sequence": (SEQUENCE, Column("norm", "L2 norm of the largest token"), *SHARES),
    }  # fmt: skip

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.sums: Sums[tuple[int, str]] = Sums()
        self.largest: Maxima[int] = Maxima()
        self.by_sequence = BySequence()
        self.rotations: dict[int, torch.Tensor] = {}  # by width

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        if site == "layer_in" and layer > 0:
            return
        hidden = upcast(reading.tensor)
        norms = filled(torch.linalg.vector_norm(hidden, dim=-1), batch.valid, torch.nan)
        medians, middle = norms.nanmedian(-1)
        largest, top = norms.nan_to_num(nan=-1.0).max(-1)
        if site == "layer_in":
            self._add(-1, norm=largest.sum())
            return
        ratios = filled((hidden.abs() / median_entry(hidden)).movedim(-1, 1), batch.valid)  # (B,D,T)
        rotated = self._rotated(hidden)
        rotated = filled((rotated.abs() / median_entry(rotated)).movedim(-1, 1), batch.valid)
        lengths = batch.lengths[:, None].to(hidden.device)
        shares = [(x > LARGE).sum(-1) / lengths for x in (ratios, rotated)]  # (B,D)
        statistics = dict(zip(("largest_share", "rotated_share"), (x.amax(-1) for x in shares), strict=True))
        self.by_sequence.add(batch, {"norm": largest, **statistics}, layer=layer)
        directions = {
            name: F.normalize(hidden[torch.arange(len(hidden)), column], dim=-1).sum(0)
            for name, column in (("top", top), ("middle", middle))
        }
        self._add(
            layer, norm=largest.sum(), norm_ratio=(largest / medians).sum(), count=(ratios > LARGE).sum((0, 2)),
            ratio=ratios.sum((0, 2)), tokens=lengths.sum(), sequences=torch.tensor(len(hidden)), **directions,
        )  # fmt: skip
        self.largest.add(layer, ratios.amax((0, 2)).cpu())

    def _add(self, layer: int, **statistics: torch.Tensor) -> None:
        for name, x in statistics.items():
            self.sums.add((layer, name), x.double().cpu())

    def _rotated(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.shape[-1] not in self.rotations:
            self.rotations[hidden.shape[-1]] = random_rotation(hidden.shape[-1], seed=0)
        return hidden @ self.rotations[hidden.shape[-1]].to(hidden)

    def tables(self) -> dict[str, pd.DataFrame]:
        by_sequence = self.by_sequence.table()
        means = by_sequence.groupby("layer")[[column.name for column in SHARES]].mean()
        rows, listed = [], []
        sequences = float(self.sums[0, "sequences"])
        for layer in means.index:
            own = {name: x for (at, name), x in self.sums.items() if at == layer}
            cosines = [mean_cosine(own[name], sequences) for name in ("top", "middle")]
            rows.append((layer, *(float(own[name]) / sequences for name in ("norm", "norm_ratio")), *cosines))
            share, mean = (own[name].numpy() / float(own["tokens"]) for name in ("count", "ratio"))
            largest = self.largest[layer].numpy()
            order = np.lexsort((-largest, -share))[:LISTED]
            order = order[largest[order] > LARGE]
            kinds = np.select([share >= MOST_TOKENS, share <= FEW_TOKENS], [RESIDUAL, SPIKE], BETWEEN)
            columns = {"coordinate": order, "kind": kinds[order], "share": share[order], "ratio_mean": mean[order]}
            listed.append(pd.DataFrame({"layer": layer, **columns, "ratio_max": largest[order]}))
        spikes = pd.DataFrame(rows, columns=["layer", "norm", "norm_ratio", "cosine", "cosine_of_others"])
        before = float(self.sums[-1, "norm"]) / sequences
        up, down = life(torch.tensor([before, *spikes["norm"]]))
        steps = np.select([spikes.index == up, spikes.index == down], ["up", "down"], "")
        return {
            "residual_sinks": pd.concat(listed, ignore_index=True),
            "spikes": spikes.assign(step=steps).join(means, on="layer"),
            "spikes_by_sequence": by_sequence,
        }


def median_entry(x: torch.Tensor) -> torch.Tensor:
    """Return the median of each token's absolute entries, (…,D) → (…,1)."""
    return x.abs().median(-1, keepdim=True).values.clamp(min=torch.finfo(x.dtype).tiny)


def mean_cosine(total: torch.Tensor, count: float) -> float:
    """Return the mean cosine of all pairs of unit vectors from their sum (D,); NaN for a single vector."""
    return float((total.square().sum() - count) / (count * (count - 1))) if count > 1 else np.nan

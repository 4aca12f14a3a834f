"""Norms of tokens at each site of the residual stream, and of the value states (GS §2)."""

from typing import ClassVar

import numpy as np
import pandas as pd
import torch

from sinkscope.attention.kernels import upcast
from sinkscope.attention.weights import AttentionRead
from sinkscope.measuring.observables.observable import (
    LATER,
    BySequence,
    Maxima,
    Means,
    Observable,
    Reading,
    Settings,
    later_mean,
)
from sinkscope.results.tables import POSITION, SEQUENCE, SITE, Column
from sinkscope.text.batch import Batch

SITES = ("layer_in", "attn_out", "mid", "mlp_out", "layer_out")
SITE_OR_VALUE = Column(
    "site",
    f"{SITE.about}, the mean if a model keeps copies of its residual stream; or value: the values of all heads",
    kind="text",
)


class Activation(Observable):
    """Measures L2 norms by position: `activation` (mean and maximum over sequences) and `activation_by_sequence`."""

    name = "activation"
    about = "L2 norm of the residual stream, branch outputs and value states by position"
    sites = (*SITES, "attention")
    columns: ClassVar = {
        "activation": (
            SITE_OR_VALUE,
            POSITION,
            Column("norm_mean", "L2 norm, mean over sequences"),
            Column("norm_max", "L2 norm, maximum over sequences"),
        ),
        "activation_by_sequence": (
            SITE_OR_VALUE,
            SEQUENCE,
            Column("norm", "L2 norm at position 0 of this sequence"),
            Column("norm_later", "mean over positions 5 to 15"),
            Column("norm_smallest", "smallest of all the sequence's tokens"),
        ),
    }

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.means = Means("position")
        self.by_sequence = BySequence()
        self.maximum: Maxima[tuple[int, str]] = Maxima()

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        self._add(layer, site, reading.once(token_norms), batch)

    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        self._add(layer, "value", value_norms(read.value), batch)

    def _add(self, layer: int, site: str, norms: torch.Tensor, batch: Batch) -> None:
        positions = self.settings.positions
        at_positions = batch.at_positions(norms, LATER.stop)
        everywhere = norms if batch.valid is None else norms.masked_fill(~batch.valid.to(norms.device), torch.inf)
        statistics = {
            "norm": at_positions[:, 0],
            "norm_later": later_mean(at_positions, batch.present(LATER.stop)),
            "norm_smallest": everywhere.amin(1),
        }
        self.by_sequence.add(batch, statistics, layer=layer, site=site)
        norms = batch.at_positions(norms, positions)
        present = batch.present(positions)
        self.means.add({"norm_mean": norms}, present, layer=layer, site=site)
        if present is not None:
            norms = norms.masked_fill(~present.to(norms.device), -torch.inf)
        self.maximum.add((layer, site), norms.amax(0))

    def tables(self) -> dict[str, pd.DataFrame]:
        largest = np.concatenate([norms.cpu().numpy() for _, norms in sorted(self.maximum.items())])
        return {
            "activation": self.means.table().assign(norm_max=largest),
            "activation_by_sequence": self.by_sequence.table(),
        }


def token_norms(x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the L2 norm of each token, (B,T,D) → (B,T), in float32 or better."""
    return torch.linalg.vector_norm(upcast(x), dim=-1)


def token_peaks(x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return each token's largest absolute entry, (B,T,D) → (B,T), in float32 or better."""
    return upcast(torch.maximum(x.amax(-1), -x.amin(-1)))  # faster than a copy of all absolute entries


def value_norms(value: torch.Tensor) -> torch.Tensor:
    """Return the norm of all heads' value states together, (B,K,T,d) → (B,T)."""
    return torch.linalg.vector_norm(upcast(value), dim=(1, 3))

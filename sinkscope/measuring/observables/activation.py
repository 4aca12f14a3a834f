"""Token-wise norms at each site of the residual stream, and of the value states (GS §2)."""

from typing import ClassVar

import pandas as pd
import torch

from sinkscope.attention.kernels import upcast
from sinkscope.attention.weights import AttentionRead
from sinkscope.measuring.observables.observable import Mean, Observable, Reading, Settings, long_form
from sinkscope.results.tables import POSITION, Column
from sinkscope.text.batch import Batch

SITES = ("layer_in", "attn_out", "mid", "mlp_out", "layer_out")


class Activation(Observable):
    """Table `activation`: mean and maximum over sequences of each position's L2 norm."""

    name = "activation"
    about = "L2 norm of the residual stream, branch outputs and value states by position"
    sites = (*SITES, "attention")
    columns: ClassVar = {
        "activation": (
            Column(
                "site",
                "layer_in, attn_out, mid, mlp_out, layer_out (the mean, where a model keeps copies of its residual "
                "stream), or value: that of all heads",
                kind="text",
            ),
            POSITION,
            Column("norm_mean", "L2 norm, mean over sequences"),
            Column("norm_max", "L2 norm, maximum over sequences"),
        ),
    }

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.mean = Mean()
        self.maximum: dict[tuple[int, str], torch.Tensor] = {}

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        self._add(layer, site, reading.once(token_norms), batch)

    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        self._add(layer, "value", value_norms(read.value), batch)

    def _add(self, layer: int, site: str, norms: torch.Tensor, batch: Batch) -> None:
        positions = self.settings.positions
        norms = batch.at_positions(norms, positions)
        present = batch.present(positions)
        self.mean.add((layer, site), norms, present)
        if present is not None:
            norms = norms.masked_fill(~present.to(norms.device), -torch.inf)
        highest = norms.amax(0)
        known = self.maximum.get((layer, site))
        self.maximum[layer, site] = highest if known is None else torch.maximum(known, highest)

    def tables(self) -> dict[str, pd.DataFrame]:
        frames = [
            long_form(
                {"layer": layer, "site": site, "position": range(self.settings.positions)},
                {"norm_mean": self.mean[layer, site], "norm_max": self.maximum[layer, site].cpu().numpy()},
            )
            for layer, site in self.mean.keys()  # noqa: SIM118 (not a dict)
        ]
        return {"activation": pd.concat(frames, ignore_index=True)}


def token_norms(x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """(B,T,D) → (B,T), in float32 or better."""
    return torch.linalg.vector_norm(upcast(x), dim=-1)


def value_norms(value: torch.Tensor) -> torch.Tensor:
    """(B,K,T,d) → (B,T): the norm of all heads' value states together."""
    return torch.linalg.vector_norm(upcast(value), dim=(1, 3))

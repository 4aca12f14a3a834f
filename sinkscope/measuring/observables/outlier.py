"""Outliers that make quantization costly: infinity norm and kurtosis (VGA table 1; Bondarenko et al. 2023)."""

from typing import ClassVar

import pandas as pd
import torch

from sinkscope.attention.kernels import upcast
from sinkscope.measuring.observables.activation import SITES
from sinkscope.measuring.observables.observable import Mean, Observable, Reading, Settings
from sinkscope.results.tables import SITE, Column
from sinkscope.text.batch import Batch

NORMS = ("attn_norm", "mlp_norm")
OF_BONDARENKO = ("attn_out", "mlp_out", "layer_out")  # besides norms, what Bondarenko et al. take the kurtosis of

_MEASURED = (
    Column("max_inf_norm", "largest absolute entry of a sequence, mean over sequences"),
    Column("kurtosis", "mean((x-μ)⁴) ÷ σ⁴ over a sequence's entries, mean over sequences"),
)


class Outlier(Observable):
    """Tables `outlier` and `outlier_norms`: means over sequences."""

    name = "outlier"
    about = "largest absolute entry and kurtosis of each site, by layer"
    sites = (*SITES, *NORMS)
    columns: ClassVar = {
        "outlier": (SITE, *_MEASURED),
        "outlier_norms": (
            Column("site", "attn_norm or mlp_norm: what the norm in front of a branch gives", kind="text"),
            *_MEASURED,
        ),
    }

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.means = {"max_inf_norm": Mean(), "kurtosis": Mean()}

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        self.means["max_inf_norm"].add((layer, site), reading.once(infinity_norm))
        self.means["kurtosis"].add((layer, site), reading.once(kurtosis))

    def tables(self) -> dict[str, pd.DataFrame]:
        places = list(self.means["kurtosis"].keys())
        whole = pd.DataFrame(places, columns=["layer", "site"]).assign(
            **{name: [float(mean[place]) for place in places] for name, mean in self.means.items()}
        )
        is_norm = whole["site"].isin(NORMS)
        return {
            "outlier": whole[~is_norm].reset_index(drop=True),
            "outlier_norms": whole[is_norm].reset_index(drop=True),
        }


def infinity_norm(x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """(B,T,D) → (B,): the largest absolute entry of each sequence."""
    if batch.valid is not None:
        x = x.masked_fill(~batch.valid[..., None].to(x.device), 0.0)
    return upcast(x.abs().flatten(1).amax(1))


def kurtosis(x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """(B,T,D) → (B,): mean((x-μ)⁴) ÷ σ⁴ over the T·D entries of each sequence, not excess."""
    x = upcast(x)
    if batch.valid is None:
        entries: float | torch.Tensor = x.shape[1] * x.shape[2]
    else:
        x = x.masked_fill(~batch.valid[..., None].to(x.device), 0.0)
        entries = (batch.lengths * x.shape[2]).to(x.device)
    mean = x.sum((1, 2)) / entries
    centered = x - mean[:, None, None]
    if batch.valid is not None:
        centered = centered.masked_fill(~batch.valid[..., None].to(x.device), 0.0)
    squares = centered.square_().flatten(1)
    return entries * torch.linalg.vecdot(squares, squares) / squares.sum(1).square()

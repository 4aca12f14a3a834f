"""Outliers that make quantization costly: infinity norm and kurtosis (VGA table 1; Bondarenko et al. 2023)."""

from typing import ClassVar

import pandas as pd
import torch
import torch.nn.functional as F

from sinkscope.attention.kernels import upcast
from sinkscope.measuring.observables.activation import SITES, token_peaks
from sinkscope.measuring.observables.observable import Means, Observable, Reading, Settings
from sinkscope.results.tables import SITE, Column
from sinkscope.text.batch import Batch

NORMS = ("attn_norm", "mlp_norm")
BONDARENKO_SITES = ("attn_out", "mlp_out", "layer_out")  # with norms, the sites of Bondarenko et al.'s kurtosis

_MEASURED = (
    Column("max_inf_norm", "largest absolute entry of a sequence, mean over sequences"),
    Column("kurtosis", "mean((x-μ)⁴) ÷ σ⁴ over a sequence's entries, mean over sequences"),
)


class Outlier(Observable):
    """Averages infinity norm and kurtosis over sequences: tables `outlier` and `outlier_norms`."""

    name = "outlier"
    about = "largest absolute entry and kurtosis of each site, by layer"
    sites = (*SITES, *NORMS)
    columns: ClassVar = {
        "outlier": (SITE, *_MEASURED),
        "outlier_norms": (
            Column("site", "attn_norm or mlp_norm: the output of the norm before a branch", kind="text"),
            *_MEASURED,
        ),
    }

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.means = Means()

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        largest = infinity_norm(reading.once(token_peaks), batch)
        self.means.add({"max_inf_norm": largest, "kurtosis": reading.once(kurtosis)}, layer=layer, site=site)

    def tables(self) -> dict[str, pd.DataFrame]:
        table = self.means.table()
        is_norm = table["site"].isin(NORMS)
        rows = {"outlier": table[~is_norm], "outlier_norms": table[is_norm]}
        return {name: own.reset_index(drop=True) for name, own in rows.items()}


def infinity_norm(peaks: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the largest absolute entry of each sequence (B,) from the largest entries of its tokens (B,T)."""
    return _zero_padding(peaks, batch).amax(1)


def kurtosis(x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return mean((x-μ)⁴) ÷ σ⁴ over the T·D entries of each sequence, (B,T,D) → (B,); not the excess kurtosis.

    Sums of single tokens are added in float64, so that no long sum is in single precision.
    """
    x = upcast(x)
    entries = (batch.lengths * x.shape[2]).to(x.device)
    mean = _zero_padding(x.sum(-1), batch).sum(1, dtype=torch.float64) / entries
    # (x-μ)² in one operation, without a copy of x-μ
    squares = F.mse_loss(x, mean.to(x.dtype)[:, None, None].expand_as(x), reduction="none")
    second = _zero_padding(squares.sum(-1), batch).sum(1, dtype=torch.float64)
    fourth = _zero_padding(torch.linalg.vector_norm(squares, dim=-1), batch).double().square().sum(1)
    return entries * fourth / second.square()


def _zero_padding(x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Set padding to 0, (B,T)."""
    return x if batch.valid is None else x.masked_fill(~batch.valid.to(x.device), 0.0)

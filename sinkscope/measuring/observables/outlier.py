"""Outliers that make quantization costly: infinity norm and kurtosis (VGA table 1; Bondarenko et al. 2023)."""

from typing import ClassVar

import pandas as pd
import torch
import torch.nn.functional as F

from sinkscope.attention.kernels import upcast
from sinkscope.measuring.observables.activation import SITES, token_peaks
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
        self.means["max_inf_norm"].add((layer, site), infinity_norm(reading.once(token_peaks), batch))
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


def infinity_norm(peaks: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Largest absolute entry of each token (B,T) → of each sequence (B,)."""
    return _of_real_tokens(peaks, batch).amax(1)


def kurtosis(x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """(B,T,D) → (B,): mean((x-μ)⁴) ÷ σ⁴ over the T·D entries of each sequence, not excess.

    Sums are taken token by token and added in float64: no long sum is made in single precision.
    """
    x = upcast(x)
    entries = (batch.lengths * x.shape[2]).to(x.device)
    mean = _of_real_tokens(x.sum(-1), batch).sum(1, dtype=torch.float64) / entries
    # (x-μ)² in one operation, without a copy of x-μ
    squares = F.mse_loss(x, mean.to(x.dtype)[:, None, None].expand_as(x), reduction="none")
    second = _of_real_tokens(squares.sum(-1), batch).sum(1, dtype=torch.float64)
    fourth = _of_real_tokens(torch.linalg.vector_norm(squares, dim=-1), batch).double().square().sum(1)
    return entries * fourth / second.square()


def _of_real_tokens(x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """(B,T), 0 at padding."""
    return x if batch.valid is None else x.masked_fill(~batch.valid.to(x.device), 0.0)

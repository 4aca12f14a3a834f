"""Norms of tokens at each site of the residual stream, and of the value states (GS §2), and outliers of the sites."""

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F

from sinkscope.attention.kernels import upcast
from sinkscope.attention.weights import AttentionRead
from sinkscope.measuring.observables.observable import Maxima, Observable, Settings, SiteStack
from sinkscope.measuring.observables.reductions import AFTER_FIRST, LATER, filled, later_mean
from sinkscope.measuring.one_pass import TokenSums, token_norms
from sinkscope.results.tables import POSITION, SEQUENCE, SITE, Column
from sinkscope.text.batch import Batch

STREAM_SITES = ("layer_in", "attn_out", "mid", "mlp_out", "out_sum", "layer_out")
SITE_OR_VALUE = Column(
    "site",
    f"{SITE.about}, the mean if a model keeps copies of its residual stream; or value: the values of all heads",
    kind="text",
)
NORM_SITES = ("attn_norm", "mlp_norm")
OUTLIERS = (
    Column("max_inf_norm", "largest absolute entry of a sequence, mean over sequences"),
    Column("kurtosis", "mean((x-μ)⁴) ÷ σ⁴ over a sequence's entries, mean over sequences"),
)


class Activation(Observable):
    """Measures L2 norms by position: `activation` (mean and maximum over sequences) and `activation_by_sequence`."""

    name = "activation"
    about = "L2 norm of the residual stream, branch outputs and value states by position"
    sites = (*STREAM_SITES, "attention")
    stacks = True
    columns: ClassVar = {
        "activation": (
            SITE_OR_VALUE, POSITION,
            Column("norm_mean", "L2 norm, mean over sequences"),
            Column("norm_max", "L2 norm, maximum over sequences"),
        ),
        "activation_by_sequence": (
            SITE_OR_VALUE, SEQUENCE,
            Column("norm", "L2 norm at position 0 of this sequence"),
            Column("norm_later", "mean over positions 5 to 15"),
            Column("norm_after_first", "mean over positions 1 to 15, as in GS's figures"),
            Column("norm_smallest", "smallest of all the sequence's tokens"),
        ),
    }  # fmt: skip

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.maximum: Maxima[tuple[int, str]] = Maxima()  # by layer and site

    def see_stack(self, stack: SiteStack, batch: Batch) -> None:
        norms = stack.reading.norms
        for layer, site, index in stack.sites:
            self.pending.add({"norm": norms[:, index]}, layer=layer, site=site)

    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        self.pending.add({"norm": value_norms(read.value)}, layer=layer, site="value")

    def finish(self, batch: Batch) -> None:
        positions = self.settings.positions
        for _, rows, by_layer in self.pending.take():
            norms = by_layer["norm"]  # (B,L,T)
            present = batch.on(norms.device, "present", positions)
            at_positions = batch.at_positions(norms, LATER.stop)
            first_present = batch.on(norms.device, "present", LATER.stop)
            statistics = {
                "norm": at_positions[..., 0],
                "norm_later": later_mean(at_positions, first_present),
                "norm_after_first": later_mean(at_positions, first_present, AFTER_FIRST),
                "norm_smallest": filled(norms, batch.on(norms.device, "valid"), torch.inf).amin(-1),
            }
            self.statistics["activation_by_sequence"].add_layers(batch, rows, statistics)
            norms = batch.at_positions(norms, positions)
            self.statistics["activation"].add_layers(rows, {"norm_mean": norms}, present)
            keys = [(row["layer"], row["site"]) for row in rows]
            self.maximum.receive(partial(self.maximum.add_each, keys), filled(norms, present, -torch.inf).amax(0))

    def tables(self) -> dict[str, pd.DataFrame]:
        tables = super().tables()
        tables["activation"]["norm_max"] = np.concatenate([norms.numpy() for _, norms in sorted(self.maximum.items())])
        return tables


class Outlier(Observable):
    """Measures outliers, which make quantization costly, as VGA (table 1) and Bondarenko et al. (2023) do."""

    name = "outlier"
    about = "largest absolute entry and kurtosis of each site, by layer"
    sites = (*STREAM_SITES, *NORM_SITES)
    stacks = True
    columns: ClassVar = {
        "outlier": (SITE, *OUTLIERS),
        "outlier_norms": (
            Column("site", "attn_norm or mlp_norm: the output of the norm before a branch", kind="text"),
            *OUTLIERS,
        ),
    }

    def see_stack(self, stack: SiteStack, batch: Batch) -> None:
        reading = stack.reading
        of_tokens = powers(reading.tensor, batch) if reading.is_on_cpu else reading.sums_and_peaks[0]._asdict()
        of_tokens |= {"peak": reading.peaks}
        for layer, site, index in stack.sites:
            of_site = {name: x[:, index] for name, x in of_tokens.items()}
            self.pending.add(of_site, stack.reading.tensor.shape[-1], layer=layer, site=site)

    def finish(self, batch: Batch) -> None:
        for (width,), rows, by_site in self.pending.take():
            largest = filled(by_site.pop("peak"), batch.valid).amax(-1)
            if "mean" in by_site:
                by_site = powers_of(TokenSums(**by_site), width, batch)
            statistics = {"max_inf_norm": largest, "kurtosis": kurtosis(by_site, width, batch)}
            self.statistics["outlier"].add_layers(rows, statistics)

    def tables(self) -> dict[str, pd.DataFrame]:
        table = self.statistics["outlier"].table()
        is_norm = table["site"].isin(NORM_SITES)
        tables = {"outlier": table[~is_norm], "outlier_norms": table[is_norm]}
        return {name: rows.reset_index(drop=True) for name, rows in tables.items()}


def value_norms(value: torch.Tensor) -> torch.Tensor:
    """Return the norm of all heads' value states together, (B,K,T,d) → (B,T)."""
    return token_norms(value, dim=(1, 3))


def powers(x: torch.Tensor, batch: Batch) -> dict[str, torch.Tensor]:
    """Return Σ(x-μ)² and √Σ(x-μ)⁴ of each token, (B,S,T,D) → (B,S,T); μ is the mean over the sequence's entries."""
    x = upcast(x)
    sums = filled(x.sum(-1), batch.on(x.device, "valid")).sum(-1, dtype=torch.float64)
    mean = sums / entries_of(x.shape[-1], batch, x.device)
    # (x-μ)² in one operation, without a copy of x-μ
    squares = F.mse_loss(x, mean.to(x.dtype)[..., None, None].expand_as(x), reduction="none")
    return {"second": squares.sum(-1), "root_of_fourth": torch.linalg.vector_norm(squares, dim=-1)}


def powers_of(sums: TokenSums, width: int, batch: Batch) -> dict[str, torch.Tensor]:
    """Return the same as `powers` from sums about each token's own mean, (B,S,T)."""
    of_tokens = filled(width * sums.mean, batch.on(sums.mean.device, "valid"))
    mean = of_tokens.sum(-1, dtype=torch.float64) / entries_of(width, batch, sums.mean.device)
    second, fourth = sums.about(mean[..., None], width)
    return {"second": second, "root_of_fourth": fourth.sqrt()}


def kurtosis(powers: Mapping[str, torch.Tensor], width: int, batch: Batch) -> torch.Tensor:
    """Return mean((x-μ)⁴) ÷ σ⁴ over the T·D entries of each sequence, (B,S,T) → (B,S); not the excess kurtosis.

    Sums of single tokens are added in float64, so that no long sum is in single precision.
    """
    valid = batch.on(powers["second"].device, "valid")
    second = filled(powers["second"], valid).sum(-1, dtype=torch.float64)
    fourth = filled(powers["root_of_fourth"], valid).double().square().sum(-1)
    return entries_of(width, batch, second.device) * fourth / second.square()


def entries_of(width: int, batch: Batch, device: torch.device) -> torch.Tensor:
    """Return how many entries the states of each sequence have, (B,1)."""
    return batch.on(device, "lengths")[:, None] * width

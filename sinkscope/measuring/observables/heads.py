"""Scores of heads that may be dormant: by the norm of their output, and by their attention to the first token."""

from typing import ClassVar

import torch

from sinkscope.attention.kernels import upcast
from sinkscope.attention.weights import AttentionRead, row_chunks
from sinkscope.measuring.observables.observable import Observable
from sinkscope.measuring.observables.reductions import mean_over
from sinkscope.results.tables import HEAD, KV_HEAD, Column
from sinkscope.text.batch import Batch


class HeadScores(Observable):
    """Measures the two scores of inactive heads that Sandoval-Segura et al. (2025) call AHON and AWFT.

    The relative norm is their LN variant: on each sequence, the norm ÷ its mean over the heads of the layer.
    """

    name = "head-scores"
    about = "scores of dormant heads: norm of each head's output, alone and in its layer, and mass on the first token"
    sites = ("attention",)
    reads_mix = True
    by_default = False
    columns: ClassVar = {
        "head_scores": (
            HEAD, KV_HEAD,
            Column("output_norm", "norm of the head's output y, mean over tokens (AHON)"),
            Column("relative_norm", "on each sequence, this ÷ its mean over the layer's heads (AHON, LN variant)",
                "ratio"),
            Column("first_mass", "attention to position 0, mean over queries (AWFT)"),
        ),
    }  # fmt: skip

    def see_mix(self, layer: int, read: AttentionRead, mix: torch.Tensor, batch: Batch) -> None:
        valid = batch.on(mix.device, "valid")
        norm = mean_over(torch.linalg.vector_norm(upcast(mix), dim=-1).transpose(1, 2), valid)  # (B,H)
        columns = slice(0, batch.columns(1))
        to_first = torch.cat([read.weights(rows, columns)[0] for rows in row_chunks(read.length)], dim=2)
        statistics = {
            "output_norm": norm,
            "relative_norm": norm / norm.mean(1, keepdim=True),
            "first_mass": mean_over(batch.at_positions(to_first, 1)[..., 0], valid),
        }
        group = read.query.shape[1] // read.key.shape[1]
        self.statistics["head_scores"].add(statistics, layer=layer, group=group)

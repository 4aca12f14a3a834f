"""What intervals of gradient norms are made of: the norm of the run's gradient without each group of its sequences.

The norm of a gradient is that of a sum over sequences. A bootstrap would take some of them twice, and count the square
of their own noise four times; the delete-a-group jackknife takes each once.
"""

import math
from collections.abc import Mapping
from typing import Self

import pandas as pd
import torch

from sinkscope.measuring.accumulators import Accumulator, Sums
from sinkscope.measuring.observables.observable import long_form
from sinkscope.text.batch import IGNORED, Batch

ALL_HEADS = -1
GROUPS = 20  # at most, of sequences
BY_HEAD = ("value",)  # pathways whose single heads have rows, too


class GroupSums(Accumulator):
    """Sums of gradients over groups of sequences; sequence i of a run is in group i modulo GROUPS, so that the batch
    size changes nothing.

    They stay on the model's device: GROUPS · positions · (H + 2K) · d numbers a layer, in float32 37 MB of
    SmolLM2-135M and 0.5 GB of Llama-2-7B (16 positions).
    """

    def __init__(self) -> None:
        self.sums: Sums[tuple[int, str]] = Sums()  # by layer and pathway, (GROUPS,P,heads,d)
        self.predicted: dict[int, int] = {}  # sequence → how many of its tokens the loss is of

    def add(self, key: tuple[int, str], gradient: torch.Tensor, batch: Batch) -> None:
        """Add the gradients (B,P,heads,d) of one batch's sequences at one layer and pathway."""
        if batch.first not in self.predicted:
            self.predicted |= enumerate(predicted_tokens(batch).tolist(), batch.first)
        if key not in self.sums:
            self.sums[key] = gradient.new_zeros(GROUPS, *gradient.shape[1:])
        sums = self.sums[key]
        # as many consecutive sequences are each in another group
        for place, part in enumerate(gradient.split(GROUPS)):
            first = batch.first + place * GROUPS
            groups = torch.arange(first, first + len(part), device=sums.device) % GROUPS
            sums[groups] += part

    def merge(self, other: Self) -> None:
        self.sums.merge(other.sums)
        self.predicted |= other.predicted

    def table(self, totals: Mapping[tuple[int, str], torch.Tensor]) -> pd.DataFrame:
        """Norms of the gradient that the run would have without each group.

        Args:
            totals: by layer and pathway, the gradient of the loss summed over the run, (heads,P,d).
        """
        groups = min(GROUPS, len(self.predicted))
        whole = sum(self.predicted.values())
        others = [whole - sum(self.predicted[i] for i in self.predicted if i % GROUPS == g) for g in range(groups)]
        scales = torch.tensor([1 / count if count else math.nan for count in others], dtype=torch.float64)
        frames = []
        for (layer, pathway), sums in sorted(self.sums.items()):
            without = totals[layer, pathway] - sums[:groups].transpose(1, 2)
            norms = torch.linalg.vector_norm(without, dim=-1) * scales.to(without.device)[:, None, None]
            together = norms.square().sum(1, keepdim=True).sqrt()
            by_head = pathway in BY_HEAD
            heads = [ALL_HEADS, *range(norms.shape[1])] if by_head else [ALL_HEADS]
            columns = torch.cat([together, norms], dim=1) if by_head else together
            axes = {"group": range(groups), "pathway": pathway, "head": heads, "position": range(norms.shape[2])}
            frames.append(long_form({"layer": layer} | axes, {"grad_norm": columns.to(sums.dtype).cpu().numpy()}))
        return pd.concat(frames, ignore_index=True)


def predicted_tokens(batch: Batch) -> torch.Tensor:
    """(B,): of how many tokens of each sequence the loss is. A register token predicts nothing."""
    predicts = batch.targets != IGNORED
    return (predicts if batch.registers is None else predicts & ~batch.registers).sum(1)

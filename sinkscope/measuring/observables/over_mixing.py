"""Over-mixing (Barbero et al. 2025): how far a change of one token spreads over later tokens and layers."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import ClassVar

import pandas as pd
import torch
from transformers import PreTrainedModel

from sinkscope.attention.kernels import upcast
from sinkscope.measuring.observables.observable import Observable, Reading, Settings, Sums
from sinkscope.models.family import Family
from sinkscope.results.tables import SEQUENCE, Column
from sinkscope.text.batch import Batch

SUBSTITUTIONS = 4  # one by one, at evenly spaced positions between the ends of a sequence
DISTANCE_BUCKETS = 32  # distances 1, 2–3, 4–7, …


class OverMixing(Observable):
    """Replaces one token by another of its sequence, and compares all later tokens with those of the unchanged text.

    Every sequence is read again with each substitution, in a further forward pass under the same interventions. A
    sequence of equal tokens has none.
    """

    name = "over-mixing"
    about = f"change of later tokens' states by a changed token, at {SUBSTITUTIONS} positions, by layer and distance"
    sites = ("layer_out",)
    by_default = False
    columns: ClassVar = {
        "over_mixing": (
            Column("distance", "shortest of an octave of distances: 1, 2–3, 4–7 and so on, in tokens",
                kind="whole"),
            Column("change", "‖h − h′‖ ÷ ‖h‖ of the layer's output, mean over tokens, substitutions and sequences"),
        ),
        "over_mixing_by_sequence": (
            SEQUENCE,
            Column("change", "the same on this sequence, mean over all later tokens of each substitution"),
        ),
    }  # fmt: skip

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.by_distance: Sums[int] = Sums()  # layer → (2, DISTANCE_BUCKETS): sums of changes, and their numbers
        self.by_sequence: Sums[tuple[int, int]] = Sums()  # layer, sequence → (2,): sum over substitutions, their number
        self.states: dict[int, torch.Tensor] = {}  # layer → state of the batch's unchanged text
        self.seen = torch.empty(0)  # its token ids (B,T), as the layers see them
        self.unchanged: torch.Tensor | None = None  # the same while it is read again

    @classmethod
    def inapplicable(cls, model: PreTrainedModel, family: Family) -> str | None:
        return None if family.causal else "in an encoder, a token also changes those before it"

    def again(self, batch: Batch) -> Iterator[Batch]:
        self.unchanged = self.seen
        for nth in range(1, SUBSTITUTIONS + 1):
            yield replace(batch, token_ids=substituted(batch, nth / (SUBSTITUTIONS + 1)))
        self.states, self.unchanged = {}, None

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        if self.unchanged is None:
            self.states[layer], self.seen = reading.tensor.clone(), batch.token_ids  # models may add to it in place
            return
        distance = distances(batch, self.unchanged).to(reading.tensor.device)
        change = relative_changes(self.states[layer], reading.tensor).where(distance > 0, 0.0)
        bucket = distance.clamp(min=1).log2().long().clamp(max=DISTANCE_BUCKETS - 1)
        both = torch.stack([change, (distance > 0).to(change)])  # (2,B,T)
        sums = both.new_zeros(2, DISTANCE_BUCKETS).index_add_(1, bucket.flatten(), both.flatten(1))
        self.by_distance.receive(partial(self.by_distance.add, layer), sums.double())

        def add_sequences(sums: torch.Tensor) -> None:
            for sequence, (change, count) in enumerate(sums.T, batch.first):
                if count:
                    self.by_sequence.add((layer, sequence), torch.stack([change / count, torch.ones_like(count)]))

        self.by_sequence.receive(add_sequences, both.sum(2).double())

    def tables(self) -> dict[str, pd.DataFrame]:
        distances = [
            (layer, 2**bucket, float(total / count))
            for layer, sums in sorted(self.by_distance.items())
            for bucket, (total, count) in enumerate(sums.T)
            if count
        ]
        by_sequence = [(*key, float(total / count)) for key, (total, count) in sorted(self.by_sequence.items())]
        return {
            "over_mixing": pd.DataFrame(distances, columns=["layer", "distance", "change"]),
            "over_mixing_by_sequence": pd.DataFrame(by_sequence, columns=["layer", "sequence", "change"]),
        }


def substituted(batch: Batch, share: float) -> torch.Tensor:
    """Replace the token at this share of each sequence by the nearest different one after it, or else before: (B,T)."""
    ids = batch.token_ids.clone()
    for row, start, length in zip(ids, batch.start.tolist(), batch.lengths.tolist(), strict=True):
        text = row[start : start + length].tolist()
        position = min(length - 1, max(1, round(share * (length - 1))))  # position 0 stays
        others = [x for x in (*text[position + 1 :], *reversed(text[1:position])) if x != text[position]]
        row[start + position] = (*others, text[position])[0]
    return ids


def distances(batch: Batch, unchanged: torch.Tensor) -> torch.Tensor:
    """Return how many tokens each real token is after the changed one, (B,T); 0 for the others."""
    differs = batch.token_ids != unchanged
    column = torch.arange(differs.shape[1], device=differs.device)
    is_later = differs.any(1, keepdim=True) & batch.attention_mask.bool()
    return (column - differs.int().argmax(1, keepdim=True)).clamp(min=0).where(is_later, 0)


def relative_changes(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return ‖h − h′‖ ÷ ‖h‖ of states (B,T,D), (B,T)."""
    norm = torch.linalg.vector_norm
    return norm(upcast(before) - upcast(after), dim=-1) / norm(upcast(before), dim=-1)

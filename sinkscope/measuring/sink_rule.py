"""The rule that predicts sink tokens from massive activations (KVSink, 2025), for `kv-plan` and `quantize`."""

from collections.abc import Iterable
from typing import NamedTuple, Self

import pandas as pd

FIRST_TOKENS = 4  # sinks of StreamingLLM, for models without massive activations


class SinkRule(NamedTuple):
    """The rule that predicts sinks: tokens with a large entry of the residual stream at one of these coordinates."""

    layer: int  # whose output is read; -1 if no layer has massive activations, and the first tokens are taken
    coordinates: tuple[int, ...] = ()
    at_least: float = float("nan")  # magnitude: half of the smallest massive activation

    @classmethod
    def of(cls, massive: pd.DataFrame) -> Self:
        """Return the rule for massive activations (Sun et al. 2024) of some texts.

        Its layer is the first that has them in at least half as many texts as any other layer.
        """
        if massive.empty:
            return cls(-1)
        texts = massive.groupby("layer")["sequence"].nunique()
        layer = int(texts.index[texts >= texts.max() / 2][0])
        rows = massive[massive["layer"] == layer]
        return cls(layer, tuple(sorted(map(int, rows["coordinate"].unique()))), float(rows["value"].abs().min()) / 2)

    def sinks(self, entries: pd.DataFrame) -> tuple[int, ...]:
        """Return the positions of the sinks among the largest entries of one text."""
        if self.layer < 0:
            return tuple(range(FIRST_TOKENS))
        is_large = (entries["value"].abs() >= self.at_least) & entries["coordinate"].isin(self.coordinates)
        return tuple(sorted(map(int, entries["position"][is_large & (entries["layer"] == self.layer)].unique())))

    def of_each(self, entries: pd.DataFrame, sequences: Iterable[int]) -> list[tuple[int, ...]]:
        """Return the positions of the sinks of each text, from the table `massive` of all."""
        by_text = dict(iter(entries.groupby("sequence")))
        return [self.sinks(by_text[sequence]) for sequence in sequences]

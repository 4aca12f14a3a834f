"""How much weight goes to the first token of a sliding window (WSE §6, figure 6)."""

from typing import ClassVar

import pandas as pd
from transformers import PreTrainedModel

from sinkscope.attention.weights import AttentionRead, row_chunks
from sinkscope.measuring.observables.observable import BySequence, Observable, Settings
from sinkscope.models.family import Family
from sinkscope.results.tables import SEQUENCE, Column
from sinkscope.text.batch import Batch


class WindowEdge(Observable):
    """a[t, t−w+1], mean over heads and over the queries whose window does not reach the sequence's first token. Layers
    in which every query sees that token have no rows.
    """

    name = "window-edge"
    about = "weight on the first token of a sliding window, of queries that do not see the text's first one (WSE §6)"
    sites = ("attention",)
    expected = False
    columns: ClassVar = {
        "window_edge_by_sequence": (
            SEQUENCE,
            Column("edge_mass", "weight on the window's first token, mean over heads and those queries"),
            Column("edge_queries", "queries whose window does not reach the sequence's first token"),
        ),
    }

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.by_sequence = BySequence()

    @classmethod
    def inapplicable(cls, model: PreTrainedModel, family: Family) -> str | None:
        if getattr(model.config.get_text_config(), "sliding_window", None) is None:
            return "it has no sliding window"
        return super().inapplicable(model, family)

    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        start = batch.start.to(read.lse.device)[:, None, None]
        mass, queries = read.lse.new_zeros(read.lse.shape[:2]), read.lse.new_zeros(len(start))
        for rows in row_chunks(read.length):
            keys = read.keys(rows)
            allowed = read.allowed(rows, keys)
            if allowed is None:
                continue
            weights = read.weights(rows, keys)[0]
            first = allowed.int().argmax(-1).expand(weights.shape[:3])  # of padding queries 0
            edge = (first > start).to(weights.dtype)
            mass += (weights.gather(-1, first[..., None])[..., 0] * edge).sum(-1)
            queries += edge[:, 0].sum(-1)
        if bool(queries.any()):
            mean = mass.mean(1) / queries  # NaN where there are none
            self.by_sequence.add(batch, {"edge_mass": mean, "edge_queries": queries}, layer=layer)

    def tables(self) -> dict[str, pd.DataFrame]:
        if not self.by_sequence:
            return {}
        return {"window_edge_by_sequence": self.by_sequence.table().dropna(ignore_index=True)}

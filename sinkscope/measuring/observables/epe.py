"""What effective positional encodings explain: the states behind the first layer, and the sink's alignment (NU).

EPE_i = MLP⁽¹⁾(p_i) + p_i (positions.py). NU calls it the first-order effect of position i behind the first layer
(§3.2.1), and takes W_k EPE_0 to be why the sink's key is aligned with the query bias (§4.2.2); both checks are left to
do in the paper.
"""

from typing import ClassVar

import pandas as pd
import torch
from transformers import PreTrainedModel

from sinkscope.attention.kernels import upcast
from sinkscope.measuring.accumulators import Sums
from sinkscope.measuring.observables.observable import BySequence, Observable, Reading, Settings, long_form
from sinkscope.measuring.observables.query_bias import QueryBias, key_alignment, key_weight_and_query_bias
from sinkscope.models.family import Family
from sinkscope.models.positions import effective_positions
from sinkscope.results.tables import POSITION, SEQUENCE, Column
from sinkscope.text.batch import Batch

GROUPS = 20  # of sequences, dealt by their number: as many as leave a jackknife of their mean
WHOLE_RUN = -1


class Epe(Observable):
    """Tables `epe_by_group` and `epe_rest_by_sequence`."""

    name = "epe"
    about = "cosine of EPE with the states behind the first layer, and of b_Q with what EPE_0 leaves of a key"
    sites = ("layer_in", "layer_out")
    expected = False
    columns: ClassVar = {
        "epe_by_group": (
            Column("group", "-1: all sequences; else without those of this number modulo 20", kind="whole"),
            POSITION,
            Column("cosine", "cosine of EPE with the mean over sequences of the layer's output at this position"),
        ),
        "epe_rest_by_sequence": (
            SEQUENCE,
            Column("cosine", "cos(W_k (h_0 − EPE_0), b_Q), h_0 the layer's input at position 0; all heads together"),
            Column("cosine_whole", "cos(W_k h_0, b_Q)"),
        ),
    }

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.sums: Sums[int] = Sums()  # group → (P,D) in float64
        self.counts: Sums[int] = Sums()  # group → (P,)
        self.by_sequence = BySequence()

    @classmethod
    def inapplicable(cls, model: PreTrainedModel, family: Family) -> str | None:
        if not family.position_embedding:
            return f"its positions are not learned vectors (they are {family.positions})"
        return QueryBias.inapplicable(model, family)

    def prepare(self, model: PreTrainedModel, family: Family, predicted: int) -> None:
        self.model, self.family = model, family
        self.attending = set(family.attentions(model))
        self.epe = effective_positions(model, family, self.settings.positions)

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        if site == "layer_out" and layer == 0:
            self._add_states(batch.tokens_at(upcast(reading.tensor), self.settings.positions), batch)
        if site == "layer_in" and layer in self.attending:
            first = batch.tokens_at(upcast(reading.tensor), 1)[:, 0]
            self._add_rest(layer, first, batch)

    def _add_states(self, states: torch.Tensor, batch: Batch) -> None:
        """(B,P,D)"""
        present = batch.present(states.shape[1])
        counted = torch.ones(states.shape[:2]) if present is None else present
        for index, state in enumerate(states.double()):
            group = (batch.first + index) % GROUPS
            self.sums.add(group, state)
            self.counts.add(group, counted[index].float().cpu())

    def _add_rest(self, layer: int, first: torch.Tensor, batch: Batch) -> None:
        """(B,D)"""
        weight, bias = key_weight_and_query_bias(self.model, self.family, layer)
        if bias is None:
            return
        rest = first - self.epe[0].to(first)
        cosines = {
            name: key_alignment(x, weight, bias)[:, 0] for name, x in (("cosine", rest), ("cosine_whole", first))
        }
        self.by_sequence.add(batch, cosines, layer=layer)

    def tables(self) -> dict[str, pd.DataFrame]:
        groups = sorted(self.sums)
        total = torch.stack([self.sums[group] for group in groups]).sum(0)
        count = torch.stack([self.counts[group] for group in groups]).sum(0).to(total)
        rows = {WHOLE_RUN: (total, count)}
        if len(groups) > 1:
            rows |= {at: (total - self.sums[at], count - self.counts[at].to(count)) for at in groups}
        cosines = [
            torch.cosine_similarity(summed / number[:, None], self.epe.to(total), dim=-1, eps=0.0)
            for summed, number in rows.values()
        ]
        axes = {"layer": 0, "group": list(rows), "position": range(len(self.epe))}
        table = long_form(axes, {"cosine": torch.stack(cosines).cpu().numpy()})
        return {"epe_by_group": table, "epe_rest_by_sequence": self.by_sequence.table()}

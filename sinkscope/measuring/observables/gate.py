"""Gates of a retrofit or of the model, which may close at the sink, and the values before them (VGA §3.2, GS §5).

The table `geometry` has the norms of the values as they are attended to, after a gate.
"""

from typing import ClassVar

import pandas as pd
import torch
from transformers import PreTrainedModel

from sinkscope.attention.kernels import repeat_heads, upcast
from sinkscope.measuring.observables.observable import Means, Observable, Settings, with_kv_head
from sinkscope.models.family import Family
from sinkscope.results.tables import KV_HEAD, POSITION, Column
from sinkscope.retrofits import has_gates
from sinkscope.text.batch import Batch


class Gate(Observable):
    """Averages gates and norms of raw values over sequences: table `gate`."""

    name = "gate"
    about = "gates of a retrofit or of the model's own, and norms of the values before them, per head and position"
    sites = ("gate",)
    expected = False  # few models have gates
    columns: ClassVar = {
        "gate": (
            Column("head", "key/value head if values are gated, query head if heads' outputs are", kind="whole"),
            KV_HEAD,
            POSITION,
            Column(
                "gate",
                "the factor: scale · σ(·) of VGA and IGA, φ(‖v‖²) of V-scale; for a model's own gate on the channels "
                "of a head's output, its mean over channels, weighted by the squares of the gated entries",
            ),
            Column("raw_value_norm", "L2 norm of the value as it is projected, before any gate"),
        ),
    }

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.means = Means("head", "position")

    @classmethod
    def inapplicable(cls, model: PreTrainedModel, family: Family) -> str | None:
        return None if has_gates(model) or family.gated else "it has no gates, such as those of vga, iga and vscale"

    def see_gate(self, layer: int, gate: torch.Tensor, value: torch.Tensor, batch: Batch) -> None:
        positions = self.settings.positions
        heads = gate.shape[-1]
        norms = torch.linalg.vector_norm(upcast(value), dim=-1).transpose(1, 2)
        by_column = {"gate": upcast(gate).transpose(1, 2), "raw_value_norm": repeat_heads(norms, heads)}
        at_positions = {name: batch.at_positions(x, positions) for name, x in by_column.items()}
        self.means.add(at_positions, batch.present(positions), layer=layer, group=heads // value.shape[2])

    def tables(self) -> dict[str, pd.DataFrame]:
        return {"gate": with_kv_head(self.means.table())}

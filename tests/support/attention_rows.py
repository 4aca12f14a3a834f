"""An observable that keeps every attention weight, layer by layer."""

import torch
from transformers import PreTrainedModel

from sinkscope.attention.weights import AttentionRead
from sinkscope.measuring.observables.observable import Observable, Reading, Settings
from sinkscope.measuring.tracer import open_tracer
from sinkscope.models.families import find_family
from sinkscope.text.batch import Batch


class Rows(Observable):
    name = "rows"
    about = "a test's own"
    sites = ("attention", "layer_out")

    def __init__(self) -> None:
        super().__init__(Settings())
        self.weights: list[torch.Tensor] = []  # (B,H,T,T) in each layer
        self.missing: list[torch.Tensor] = []  # (B,H,T)
        self.values: list[torch.Tensor] = []  # (B,T,K,d)
        self.hidden: list[torch.Tensor] = []  # (B,T,D) after each layer

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        self.hidden.append(reading.tensor.clone())

    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        everything = slice(0, read.length)
        self.weights.append(read.weights(everything, everything)[0].clone())
        self.missing.append(read.missing_mass.clone())
        self.values.append(read.value.transpose(1, 2))


def rows_of(model: PreTrainedModel, ids: torch.Tensor, kernel: str = "sdpa") -> Rows:
    rows = Rows()
    with open_tracer(model, find_family(model), kernel) as tracer:
        tracer.forward(Batch(ids, torch.ones_like(ids)), [rows])
    return rows

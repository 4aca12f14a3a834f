"""An observable that keeps every attention weight, layer by layer."""

import torch

from sinkscope.attention.weights import AttentionRead
from sinkscope.measuring.observables.observable import Observable, Reading, Settings
from sinkscope.text.batch import Batch


class Rows(Observable):
    name = "rows"
    about = "a test's own"
    sites = ("attention", "layer_out")

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
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

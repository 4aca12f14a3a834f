"""An observable that keeps every attention weight, layer by layer."""

import torch

from sinkscope.attention.weights import AttentionRead
from sinkscope.measuring.observables.observable import Observable, Settings
from sinkscope.text.batch import Batch


class Rows(Observable):
    name = "rows"
    about = "a test's own"
    sites = ("attention",)

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.weights: list[torch.Tensor] = []  # (B,H,T,T) each

    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        whole = slice(0, read.length)
        self.weights.append(read.weights(whole, whole)[0])

"""A residual stream in several copies: hyper-connections (Zhu et al. 2024), AltUp (Baykal et al. 2023).

Each layer reads a mixture of the copies and writes to all of them. What is measured as the residual stream is their
mean: it has the size of one copy, it is what these models begin with (the embedding, repeated), and neither order nor
number of the copies changes it.
"""

from dataclasses import dataclass
from typing import Literal

import torch

Layout = Literal["first", "third", "flat"]  # (S,B,T,D), (B,T,S,D), (B,T,S·D)


@dataclass(frozen=True)
class Copies:
    """How a layer's input and output hold the copies."""

    count: int  # S
    layout: Layout

    def apart(self, x: torch.Tensor) -> torch.Tensor:
        """What a layer takes or gives → (B,T,S,D)."""
        if self.layout == "flat":
            return x.unflatten(-1, (self.count, -1))
        return x.movedim(0, 2) if self.layout == "first" else x

    def stream(self, x: torch.Tensor) -> torch.Tensor:
        """What a layer takes or gives → the residual stream (B,T,D)."""
        return self.apart(x).mean(2)


def find_copies(x: torch.Tensor, tokens: torch.Size, width: int) -> Copies | None:
    """How many copies a layer's input x holds; None where it holds one.

    Args:
        x: what a layer takes.
        tokens: (B,T), the shape of the token ids.
        width: D of the residual stream.
    """
    if x.dim() == 4 and x.shape == (*tokens, x.shape[2], width):
        return Copies(x.shape[2], "third")
    if x.dim() == 4 and x.shape == (x.shape[0], *tokens, width):
        return Copies(x.shape[0], "first")
    if x.shape[:-1] == tokens and x.shape[-1] > width and x.shape[-1] % width == 0:
        return Copies(x.shape[-1] // width, "flat")
    return None

"""The loss of a batch and its gradient by the logits, for a few tokens at a time, without a copy of all logits."""

from collections.abc import Iterator
from itertools import product

import numpy as np
import torch
import torch.nn.functional as F

from sinkscope.attention.kernels import upcast
from sinkscope.text.batch import IGNORED, Batch

CHUNK = 8  # tokens per chunk: few enough for their logits to stay in a CPU's cache


def perplexity(loss: float) -> float:
    """Return exp(loss) for a loss per token in nats; infinite on overflow of float64."""
    with np.errstate(over="ignore"):
        return float(np.exp(loss))


def cross_entropies(logits: torch.Tensor, targets: torch.Tensor, reduction: str = "none") -> torch.Tensor:
    """Return the cross-entropies (N,) of logits (…,V) and targets (…) in nats, with 0 where the target is IGNORED."""
    logits = upcast(logits).flatten(0, -2)
    return F.cross_entropy(logits, targets.flatten().to(logits.device), ignore_index=IGNORED, reduction=reduction)


def loss_in_chunks(logits: torch.Tensor, batch: Batch, chunk: int = CHUNK) -> torch.Tensor:
    """Return the cross-entropy summed over the predicted tokens of each sequence: (B,T,V) → (B,), in nats."""
    losses = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
    for row, part in _chunks(logits, chunk):
        losses[row] += cross_entropies(logits[row, part], batch.targets[row, part], reduction="sum")
    return losses


def loss_and_gradient(logits: torch.Tensor, batch: Batch, chunk: int = CHUNK) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses of `loss_in_chunks`, and the gradient (B,T,V) of their sum by the logits, in their dtype.

    The gradient is the softmax minus 1 at the target. Autograd would need two more tensors as large as the logits.
    """
    losses = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
    gradient = torch.empty_like(logits)
    predicting = (batch.targets != IGNORED).to(logits.device)
    targets = batch.targets.to(logits.device).where(predicting, 0)[..., None]
    for row, part in _chunks(logits, chunk):
        losses[row] += cross_entropies(logits[row, part], batch.targets[row, part], reduction="sum")
        shares = upcast(logits[row, part]).softmax(-1)  # exp(log_softmax) is slow where it underflows
        gradient[row, part] = shares.scatter_add_(-1, targets[row, part], -torch.ones_like(shares[:, :1]))
    gradient[~predicting] = 0.0
    return losses, gradient


def _chunks(logits: torch.Tensor, size: int) -> Iterator[tuple[int, slice]]:
    """Yield the sequence and the token slice of each chunk of logits (B,T,V)."""
    for row, start in product(range(len(logits)), range(0, logits.shape[1], size)):
        yield row, slice(start, start + size)

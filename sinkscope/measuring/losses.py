"""The loss of a batch and its gradient by the logits, a few tokens at a time: no copy of all logits is made."""

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F

from sinkscope.attention.kernels import upcast
from sinkscope.text.batch import IGNORED, Batch

CHUNK = 8  # tokens whose loss is computed at once: few enough to stay in a CPU's cache


def perplexity(loss: float) -> float:
    """exp of a loss per token in nats; infinite where that is beyond float64."""
    with np.errstate(over="ignore"):
        return float(np.exp(loss))


def cross_entropies(logits: torch.Tensor, targets: torch.Tensor, reduction: str = "none") -> torch.Tensor:
    """(…,V) and (…) → (N,), or (): cross-entropy in nats, in float32 or better; 0 of a token that predicts nothing."""
    logits = upcast(logits).flatten(0, -2)
    return F.cross_entropy(logits, targets.flatten().to(logits.device), ignore_index=IGNORED, reduction=reduction)


def loss_in_chunks(logits: torch.Tensor, batch: Batch, chunk: int = CHUNK) -> torch.Tensor:
    """(B,T,V) → (B,): cross-entropy summed over each sequence's predicted tokens, of each given those before it or the
    rest of its text, in nats.
    """
    losses = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
    for row, part in _chunks(logits, chunk):
        losses[row] += cross_entropies(logits[row, part], batch.targets[row, part], reduction="sum")
    return losses


def loss_and_gradient(logits: torch.Tensor, batch: Batch, chunk: int = CHUNK) -> tuple[torch.Tensor, torch.Tensor]:
    """As `loss_in_chunks`, and the gradient of their sum by the logits (B,T,V), in their dtype: softmax, less 1 at
    the token that comes. Autograd would make two more tensors as large as the logits.
    """
    losses = torch.zeros(len(logits), dtype=torch.float64, device=logits.device)
    gradient = torch.empty_like(logits)
    predicting = (batch.targets != IGNORED).to(logits.device)
    targets = batch.targets.to(logits.device).where(predicting, 0)[..., None]
    for row, part in _chunks(logits, chunk):
        losses[row] += cross_entropies(logits[row, part], batch.targets[row, part], reduction="sum")
        shares = upcast(logits[row, part]).softmax(-1)  # exp of log-softmax would be slow where it underflows
        gradient[row, part] = shares.scatter_add_(-1, targets[row, part], -torch.ones_like(shares[:, :1]))
    gradient[~predicting] = 0.0
    return losses, gradient


def _chunks(logits: torch.Tensor, size: int) -> Iterator[tuple[int, slice]]:
    """Sequence and tokens of each chunk of (B,T,V)."""
    for row in range(len(logits)):
        for start in range(0, logits.shape[1], size):
            yield row, slice(start, start + size)

"""The loss of a batch and its gradient by the logits, for a few tokens at a time, without a copy of all logits."""

from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F

from sinkscope.attention.kernels import upcast
from sinkscope.text.batch import IGNORED, Batch, sent

# tokens per chunk: on a CPU few enough for their logits to stay in its cache
CHUNK, CHUNK_ELSEWHERE = {"cpu": 8}, 1024


def perplexity(loss: float) -> float:
    """Return exp(loss) for a loss per token in nats; infinite on overflow of float64."""
    with np.errstate(over="ignore"):
        return float(np.exp(loss))


def cross_entropies(logits: torch.Tensor, targets: torch.Tensor, chunk: int | None = None) -> torch.Tensor:
    """Return the cross-entropies (N,) of logits (N,V) and targets (N,) in nats, with 0 where the target is IGNORED."""
    targets = sent(targets, logits.device)
    parts = [
        F.cross_entropy(upcast(logits[part]), targets[part], ignore_index=IGNORED, reduction="none")
        for part in _chunks(logits, chunk)
    ]
    return torch.cat(parts)


def loss_in_chunks(logits: torch.Tensor, batch: Batch, chunk: int | None = None) -> torch.Tensor:
    """Return the cross-entropy summed over the predicted tokens of each sequence: (B,T,V) → (B,), in nats."""
    losses = cross_entropies(logits.flatten(0, 1), batch.on(logits.device, "targets").flatten(), chunk)
    return losses.view(batch.targets.shape).sum(1, dtype=torch.float64)


def loss_and_gradient(
    logits: torch.Tensor, batch: Batch, chunk: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the losses of `loss_in_chunks`, and the gradient (B,T,V) of their sum by the logits, in their dtype.

    The gradient is the softmax minus 1 at the target. Autograd would need two more tensors as large as the logits.
    """
    targets = batch.on(logits.device, "targets").flatten()
    ignored = (targets == IGNORED)[:, None]
    indices = targets[:, None].masked_fill(ignored, 0)
    tokens, losses = logits.flatten(0, 1), []
    gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
    by_token = gradient.view(tokens.shape)
    for part in _chunks(tokens, chunk):  # both from logits that are in the cache
        losses.append(cross_entropies(tokens[part], targets[part], chunk))
        shares = upcast(tokens[part]).softmax(-1)  # exp(log_softmax) is slow where it underflows
        shares.scatter_add_(-1, indices[part], -torch.ones_like(shares[:, :1]))
        by_token[part] = shares.masked_fill_(ignored[part], 0.0)
    return torch.cat(losses).view(batch.targets.shape).sum(1, dtype=torch.float64), gradient


def _chunks(tokens: torch.Tensor, size: int | None) -> Iterator[slice]:
    """Yield the slice of each chunk of `size` tokens (N,V)."""
    size = size or CHUNK.get(tokens.device.type, CHUNK_ELSEWHERE)
    for start in range(0, len(tokens), size):
        yield slice(start, start + size)

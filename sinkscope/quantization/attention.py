"""Attention whose scores and weights are seen, or quantized: no T × T matrix of more than one row chunk is kept."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from sinkscope.attention.kernels import (
    ROW_CHUNK,
    AttentionCall,
    Kernel,
    grouped_matmul,
    masked,
    raw_logits,
    row_weights,
)
from sinkscope.attention.taps import Seam

SCORES, SOFTMAX, KEYS, VALUES = "scores", "softmax output", "keys", "values"  # parts of an attention layer
CACHED = (KEYS, VALUES)
IN_ATTENTION = (SCORES, SOFTMAX, *CACHED)

# (part, all keys or values (B,Hkv,T,D), or rows of scores and weights (B,H,R,T)) → what takes their place
Change = Callable[[str, torch.Tensor], torch.Tensor]


def changed_attention(change: Change, chunk: int = ROW_CHUNK) -> Kernel:
    """A kernel whose keys and values, scores, softcap included and without any mask, and attention weights go through
    `change`.

    A learned sink logit enters the softmax as it is.
    """

    def kernel(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = change(KEYS, key), change(VALUES, value)
        mixes, lses = [], []
        for start in range(0, query.shape[2], chunk):
            rows = slice(start, min(start + chunk, query.shape[2]))
            scores = change(SCORES, raw_logits(query[:, :, rows], key, call))
            logits = masked(scores, call, rows, query.shape[2])
            weights, lse = row_weights(logits, call, rows)
            mixes.append(grouped_matmul(change(SOFTMAX, weights).to(value.dtype), value))
            lses.append(lse)
        return torch.cat(mixes, dim=2), torch.cat(lses, dim=2)

    return kernel


@contextmanager
def attending_with(seams: Mapping[int, Seam], changes: Mapping[int, Change]) -> Iterator[None]:
    """These layers attend with `changed_attention` until the end of the block."""
    before = {layer: seams[layer].kernel for layer in changes}
    try:
        for layer, change in changes.items():
            seams[layer].kernel = changed_attention(change)
        yield
    finally:
        for layer, kernel in before.items():
            seams[layer].kernel = kernel

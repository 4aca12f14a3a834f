"""Attention over a cache from which key/value heads evict tokens: each keeps some sinks and its last tokens.

    t sees s in head k   iff   s ≤ t  and  (s is a sink  or  t − s < window[k])

Tokens keep their positions in the text. The complete text goes through the model in one pass, in blocks of queries
against the keys that their heads keep: time grows with T · window, memory with T.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from sinkscope.attention.kernels import (
    AttentionCall,
    fused_attention,
    grouped_matmul,
    numbers_at_once,
    raw_logits,
    row_weights,
    rows_at_once,
)


def evicting_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: AttentionCall,
    windows: Sequence[int],
    sinks: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute mix (B,H,T,d) and log-sum-exp (B,H,T); `windows` is (K,) in tokens, `sinks` (S,) positions, ascending.

    A window of T tokens or more evicts nothing.
    """
    length, group = query.shape[2], query.shape[1] // key.shape[1]
    if min(windows) >= length:
        return fused_attention(query, key, value, call)
    parts = []
    for at, window in enumerate(windows):
        heads = slice(at * group, (at + 1) * group)
        own = (query[:, heads], key[:, at : at + 1], value[:, at : at + 1], _of_heads(call, heads))
        parts.append(fused_attention(*own) if window >= length else _over_window(*own, window, sinks))
    mixes, lses = zip(*parts, strict=True)
    return torch.cat(mixes, dim=1), torch.cat(lses, dim=1)


def _of_heads(call: AttentionCall, heads: slice) -> AttentionCall:
    """Return the call of some query heads."""
    mask, sinks = call.mask, call.sink_logits
    if mask is not None and mask.shape[1] > 1:
        mask = mask[:, heads]
    if sinks is not None:
        sinks = sinks[:, heads] if sinks.dim() == 3 else sinks[heads]
    return replace(call, mask=mask, sink_logits=sinks)


def _over_window(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall, window: int, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    mixes, lses = [], []
    length, device, row = query.shape[2], query.device, query[:, :, 0, 0].numel()
    block = max(1, rows_at_once(numbers_at_once(device, row * length**2) // row, window + len(sinks)))
    for start in range(0, length, block):
        rows = slice(start, min(start + block, length))
        band = max(0, rows.start - window + 1)  # the first token that is in the window of any of these queries
        kept = torch.cat([sinks[sinks < band], torch.arange(band, rows.stop, device=device)])
        tokens = torch.arange(rows.start, rows.stop, device=device)[:, None]
        visible = (kept <= tokens) & ((tokens - kept < window) | torch.isin(kept, sinks))
        logits = raw_logits(query[:, :, rows], key[:, :, kept], call)
        mask = None if call.mask is None else call.mask[:, :, rows][..., kept]
        if mask is not None and mask.dtype == torch.bool:
            visible = visible & mask
        elif mask is not None:
            logits = logits + mask
        weights, lse = row_weights(logits.masked_fill(~visible, torch.finfo(logits.dtype).min), call, rows)
        mixes.append(grouped_matmul(weights.to(value.dtype), value[:, :, kept]))
        lses.append(lse)
    return torch.cat(mixes, dim=2), torch.cat(lses, dim=2)

"""Attention over a cache from which key/value heads evict tokens: each keeps some sinks and its last tokens.

    t sees s in head k   iff   s ≤ t  and  (s is a sink  or  t − s < window[k])

Tokens keep their positions in the text. The complete text goes through the model in one pass, in blocks of queries
against the keys that their heads keep: time grows with T · window, memory with T.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from sinkscope.attention.kernels import AttentionCall, fused_attention, numbers_at_once, rows_at_once


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
    for head, window in enumerate(windows):
        heads = slice(head * group, (head + 1) * group)
        arguments = (query[:, heads], key[:, head : head + 1], value[:, head : head + 1], _of_heads(call, heads))
        parts.append(fused_attention(*arguments) if window >= length else _over_window(*arguments, window, sinks))
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
        seen_keys = torch.cat([sinks[sinks < band], torch.arange(band, rows.stop, device=device)])
        tokens = torch.arange(rows.start, rows.stop, device=device)[:, None]
        seen = ((seen_keys <= tokens) & ((tokens - seen_keys < window) | torch.isin(seen_keys, sinks)))[None, None]
        if call.mask is not None:
            mask = call.mask[:, :, rows][..., seen_keys]
            seen = seen & mask if mask.dtype == torch.bool else mask.masked_fill(~seen, torch.finfo(mask.dtype).min)
        block_call = replace(call, mask=seen)
        if call.sink_logits is not None and call.sink_logits.dim() == 3:
            block_call = replace(block_call, sink_logits=call.sink_logits[:, :, rows])
        mix, lse = fused_attention(query[:, :, rows], key[:, :, seen_keys], value[:, :, seen_keys], block_call)
        mixes.append(mix)
        lses.append(lse)
    return torch.cat(mixes, dim=2), torch.cat(lses, dim=2)

"""Attention over a cache from which key/value heads evict tokens: each keeps some sinks and its last tokens.

    t sees s in head k   iff   s ≤ t  and  (s is a sink  or  t − s < window[k])

Tokens keep their positions in the text. The complete text goes through the model in one pass, in blocks of queries
against the keys that their heads keep: time grows with T · window, memory with T.

Or the cache is pruned once, after a prompt that is read with all its tokens: a head keeps those with the highest
scores (`EVICTIONS`), as in the presses of kvpress 0.5.2. While decoding, these need nothing. TOVA's paper evicts at
every step, by the weights of each query, and SnapKV's protects fewer last tokens and pools by the maximum.
"""

import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from sinkscope.attention.kernels import AttentionCall, fused_attention, numbers_at_once, rows_at_once, upcast
from sinkscope.attention.weights import AttentionRead
from sinkscope.measuring.sink_rule import FIRST_TOKENS
from sinkscope.text.batch import sent

OBSERVED, POOLED = 64, 5  # SnapKV: the prompt's last queries, at most half of what is kept; tokens that are pooled
FUTURE = 512  # expected attention: positions after the prompt, at most as many as the text has


@lru_cache(maxsize=256)  # each is needed in all layers
def numbers_on(device: torch.device, numbers: tuple[int, ...]) -> torch.Tensor:
    return sent(torch.tensor(numbers, dtype=torch.long), device)


def evicting_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: AttentionCall,
    windows: Sequence[Sequence[int]],
    sinks: Sequence[Sequence[int]],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute mix (B,H,T,d) and log-sum-exp (B,H,T) of one text in every row, with the cache of each row.

    A window of T tokens or more evicts nothing. Heads of all rows with equal windows and sinks are computed together.

    Args:
        windows: (B,K), in tokens.
        sinks: Of each row, the positions that its heads keep, ascending.
    """
    groups, length = key.shape[1], query.shape[2]
    alike = defaultdict[tuple[int, tuple[int, ...]], list[tuple[int, int]]](list)  # rows and heads by what they keep
    for row, (of_heads, positions) in enumerate(zip(windows, sinks, strict=True)):
        for head, window in enumerate(of_heads):
            alike[(window, tuple(positions)) if window < length else (length, ())].append((row, head))
    if call.mask is not None:
        call = replace(call, mask=call.mask[:1])  # that of the text
    if len(alike) == 1:
        return _over_window(query, key, value, call, *next(iter(alike)))
    pairs = list(itertools.chain(*alike.values()))
    order = np.argsort([row * groups + head for row, head in pairs]).tolist()
    rows, heads, back = numbers_on(query.device, (*itertools.chain(*zip(*pairs, strict=True)), *order)).view(3, -1)
    queries = query.unflatten(1, (groups, -1))
    call = _of_heads(call, queries.shape[:4], rows, heads)
    tensors = queries[rows, heads], key[rows, heads][:, None], value[rows, heads][:, None]
    parts, end = [], 0
    for (window, positions), of_kind in alike.items():
        each, end = slice(end, end + len(of_kind)), end + len(of_kind)
        query, key, value = (x[each] for x in tensors)
        parts.append(_over_window(query, key, value, of_sequences(call, each), window, positions))
    mix, lse = (torch.cat(each)[back].unflatten(0, (-1, groups)).flatten(1, 2) for each in zip(*parts, strict=True))
    return mix, lse


def _of_heads(call: AttentionCall, shape: torch.Size, rows: torch.Tensor, heads: torch.Tensor) -> AttentionCall:
    """Return the call of the query heads of some key/value heads, (n,) rows and heads of (B,K,G,T), as n sequences."""
    mask, sinks, (batch, *groups, length) = call.mask, call.sink_logits, shape
    if mask is not None and mask.shape[1] > 1:
        mask = mask[0].unflatten(0, groups)[heads]
    if sinks is not None:
        of_all = (sinks if sinks.dim() == 3 else sinks[:, None]).expand(batch, -1, length)
        sinks = of_all.unflatten(1, groups)[rows, heads]
    return replace(call, mask=mask, sink_logits=sinks)


def of_sequences(call: AttentionCall, sequences: slice) -> AttentionCall:
    """Return the call of some sequences of the batch."""
    mask, sinks = call.mask, call.sink_logits
    if mask is not None and len(mask) > 1:
        mask = mask[sequences]
    return replace(call, mask=mask, sink_logits=sinks[sequences] if sinks is not None and sinks.dim() == 3 else sinks)


def _over_window(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: AttentionCall,
    window: int,
    sinks: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    if window >= query.shape[2]:
        return fused_attention(query, key, value, call)
    mixes, lses = [], []
    length, row = query.shape[2], query[:, :, 0, 0].numel()
    block = max(1, rows_at_once(numbers_at_once(query.device, row * length**2) // row, window + len(sinks)))
    for start in range(0, length, block):
        rows = slice(start, min(start + block, length))
        seen_keys, seen = _keys_of_block(query.device, rows.start, rows.stop, window, sinks)
        block_call = seeing(call, seen, rows, seen_keys)
        mix, lse = fused_attention(query[:, :, rows], key[:, :, seen_keys], value[:, :, seen_keys], block_call)
        mixes.append(mix)
        lses.append(lse)
    return torch.cat(mixes, dim=2), torch.cat(lses, dim=2)


@lru_cache(maxsize=64)  # the same in all layers and texts; kernels keep their bias of a mask as long as the mask
def _keys_of_block(
    device: torch.device, start: int, stop: int, window: int, sinks: tuple[int, ...]
) -> tuple[torch.Tensor | slice, torch.Tensor]:
    """Return the keys (C) that some of the queries from `start` to `stop` see, and which each sees, (1,1,R,C)."""
    sink_keys = numbers_on(device, sinks)
    band = max(0, start - window + 1)  # the first token that is in the window of any of these queries
    keys = torch.cat([sink_keys[: bisect_left(sinks, band)], torch.arange(band, stop, device=device)])
    tokens = torch.arange(start, stop, device=device)[:, None]
    seen = ((keys <= tokens) & ((tokens - keys < window) | torch.isin(keys, sink_keys)))[None, None]
    return keys if band else slice(0, stop), seen


def seeing(call: AttentionCall, seen: torch.Tensor, rows: slice, keys: torch.Tensor | slice) -> AttentionCall:
    """Return the call of some queries over some keys; `seen` (1|B,1|H,R,C) bool has the keys that each query sees."""
    if call.mask is not None:
        mask = call.mask[:, :, rows][..., keys]
        seen = seen & mask if mask.dtype == torch.bool else mask.masked_fill(~seen, torch.finfo(mask.dtype).min)
    sinks = call.sink_logits
    return replace(call, mask=seen, sink_logits=sinks if sinks is None or sinks.dim() < 3 else sinks[:, :, rows])


# --- after the prompt


class PromptRead(NamedTuple):
    """One layer's attention on a prompt of N tokens, and on what follows."""

    attention: AttentionRead
    prompt: int  # N
    budget: int  # tokens that each head keeps
    ahead: torch.Tensor  # (1,H,T,d): queries, rotated as those after the prompt are on average

    def weights_of_last(self, queries: int) -> torch.Tensor:
        """Return the mean weights of the prompt's last queries for the tokens before these, (H,N-queries)."""
        before = slice(0, self.prompt - queries)
        return self.attention.weights(slice(before.stop, self.prompt), before)[0][0].mean(1)

    def by_kv_head(self, scores: torch.Tensor) -> torch.Tensor:
        """Return the mean (K,…) over the query heads (H,…) that read a key/value head."""
        return scores.unflatten(0, (self.attention.key.shape[1], -1)).mean(1)


def snapkv(read: PromptRead) -> torch.Tensor:
    window = min(OBSERVED, max(1, read.budget // 2))
    pooled = F.avg_pool1d(read.weights_of_last(window), POOLED, stride=1, padding=POOLED // 2)
    return F.pad(read.by_kv_head(pooled), (0, window), value=torch.inf)


def tova(read: PromptRead) -> torch.Tensor:
    scores = read.weights_of_last(1).mean(0).expand(read.attention.key.shape[1], -1)
    return F.pad(scores, (0, 1), value=torch.inf)


def expected_attention(read: PromptRead) -> torch.Tensor:
    """Return E[exp(scaling · q·k)] of a normal q, as a share of all tokens but the first four, times ‖v‖."""
    parts, scaling = (read.ahead, read.attention.key, read.attention.value), read.attention.call.scaling
    query, key, value = (upcast(x)[0, :, FIRST_TOKENS : read.prompt] for x in parts)
    mean, keys = query.mean(1, keepdim=True), key.repeat_interleave(len(query) // len(key), 0)
    covariance = (query - mean).mT @ (query - mean) / query.shape[1]
    exponents = scaling * (keys * mean).sum(-1) + scaling**2 / 2 * (keys @ covariance * keys).sum(-1)
    scores = read.by_kv_head(exponents.softmax(-1)) * value.norm(dim=-1)
    return F.pad(scores, (FIRST_TOKENS, 0), value=torch.inf)


EXPECTED = "expected-attention"
Score = Callable[[PromptRead], torch.Tensor]  # of the prompt's tokens, (K,N)
EVICTIONS: dict[str, Score] = {"snapkv": snapkv, "tova": tova, EXPECTED: expected_attention}


def after_eviction(read: AttentionRead, scores: torch.Tensor, counts: Sequence[int], reach: int) -> torch.Tensor:
    """Return the mix (B,H,T-N,d) of the tokens after the prompt, which see each other and what their heads keep.

    The heads of a row keep its number, in `counts`, of the prompt's last `reach` tokens: those with the highest scores
    (B,K,N).
    """
    prompt, heads = scores.shape[2], read.query.shape[1]
    highest = scores[..., prompt - reach :].topk(max(counts)).indices + prompt - reach
    is_high = torch.arange(max(counts), device=scores.device) < numbers_on(scores.device, tuple(counts))[:, None, None]
    is_kept = torch.zeros_like(scores, dtype=torch.bool).scatter(2, highest, is_high.expand_as(highest))
    seen = is_kept.new_ones(len(scores), heads, read.length - prompt, read.length).tril(prompt)
    seen[..., :prompt] = is_kept.repeat_interleave(heads // is_kept.shape[1], 1)[:, :, None]
    call = seeing(read.call, seen, slice(prompt, None), slice(None))
    return fused_attention(read.query[:, :, prompt:], read.key, read.value, call)[0]


def mean_rotation(tables: Any, prompt: int) -> Any:
    """Return cosines and sines (1,T,d), or complex numbers, equal in all rows: the mean of FUTURE rows after a prompt.

    Angles are proportional to positions: those after the prompt are that of its end plus those of the first positions.
    """
    is_pair = isinstance(tables, tuple)
    turns = torch.complex(*(upcast(table) for table in tables)) if is_pair else tables
    mean = (turns[:, prompt : prompt + 1] * turns[:, :FUTURE].mean(1, keepdim=True) / turns[:, :1]).expand_as(turns)
    return tuple(part.to(tables[0].dtype) for part in (mean.real, mean.imag)) if is_pair else mean

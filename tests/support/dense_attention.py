"""F.scaled_dot_product_attention as its documentation defines it, in plain operations, with its weights."""

from typing import NamedTuple

import torch


class DenseAttention(NamedTuple):
    """The tensors of attention, including tensors that a fused kernel does not return."""

    logits: torch.Tensor  # (B,H,T,S), masked
    weights: torch.Tensor  # (B,H,T,S)
    mix: torch.Tensor  # (B,H,T,d)


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> DenseAttention:
    """Compute attention of queries (B,H,T,d) to keys and values (B,K,S,d), each of which H ÷ K heads read."""
    heads, width = query.shape[1], query.shape[-1]
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    logits = query @ key.transpose(2, 3) * (width**-0.5 if scale is None else scale)
    if is_causal:
        assert attn_mask is None
        attn_mask = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        logits = logits.masked_fill(~attn_mask, torch.finfo(logits.dtype).min)  # a row of padding has no key
    elif attn_mask is not None:
        logits = logits + attn_mask
    weights = logits.softmax(-1)
    return DenseAttention(logits, weights, weights @ value)

"""Random attention under every kind of mask and padding, also with scores that the model computed."""

import pytest
import torch
from tiny import padded, ragged_tokens

from sinkscope.attention.kernels import AttentionCall, chunked_attention
from sinkscope.attention.weights import AttentionRead
from sinkscope.text.batch import Batch

SEQUENCES, HEADS, KV_HEADS, WIDTH = 2, 4, 2, 6


def causal_mask(length: int, window: int | None = None) -> torch.Tensor:
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    return seen if window is None else seen.triu(1 - window)


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> tuple[torch.Tensor, ...]:
    """Compute weights, mix and log-sum-exp by the definition; NaN where a query sees no key."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    logits = call.scaling * query @ key.mT
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    mask = causal_mask(query.shape[2]) if call.mask is None else call.mask
    logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    total = logits.exp().sum(-1)
    if call.sink_logits is not None:
        total = total + call.sink_logits.exp()[:, None]
    weights = logits.exp() / total[..., None]
    return weights, weights @ value, total.log()


def call_of(kind: str, length: int, batch: Batch) -> AttentionCall:
    """Return a call with a mask or another extra of some family; masks hide padding keys, as in transformers."""
    seen = causal_mask(length)[None, None] & batch.attention_mask.bool()[:, None, None]
    biases = 0.1 * torch.arange(length, dtype=torch.float64)
    lowest = torch.finfo(torch.float64).min
    return {
        "causal": AttentionCall(None, 0.7),
        "bool mask": AttentionCall(seen, 0.7),
        "window": AttentionCall(seen & causal_mask(length, window=5), 0.7),
        "additive": AttentionCall(biases.masked_fill(~seen, lowest), 0.7),
        "infinite": AttentionCall(biases.masked_fill(~seen, -torch.inf), 0.7),
        "softcap": AttentionCall(seen, 0.7, softcap=2.0),
        "sink": AttentionCall(seen, 0.7, sink_logits=torch.tensor([1.0, -2.0, 0.0, 3.0], dtype=torch.float64)),
    }[kind]


KINDS = ("causal", "bool mask", "window", "additive", "infinite", "softcap", "sink")


def make_read(
    kind: str, length: int = 23, lengths: tuple[int, ...] | None = None, side: str = "right"
) -> AttentionRead:
    """Return random q, k, v under one kind of mask, with the log-sum-exp of the eager kernel."""
    generator = torch.Generator().manual_seed(0)
    batch = padded(ragged_tokens(lengths or (length,) * SEQUENCES), side)
    query, key, value = (
        torch.randn(SEQUENCES, heads, length, WIDTH, generator=generator, dtype=torch.float64)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    call = call_of(kind, length, batch)
    _, lse = chunked_attention(query, key, value, call)
    return AttentionRead(query, key, value, lse, call, batch)


PADDINGS = {"unpadded": (None, "right"), "right": ((23, 15), "right"), "left": ((15, 23), "left")}

# a padded batch always has a mask
EACH_KIND = pytest.mark.parametrize(
    ("kind", "lengths", "side"),
    [
        pytest.param(kind, *padding, id=f"{kind}-{name}")
        for kind in KINDS
        for name, padding in PADDINGS.items()
        if kind != "causal" or name == "unpadded"
    ],
)

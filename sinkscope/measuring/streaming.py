"""Perplexity with a cache of only the last tokens, with or without the first tokens (attention/streaming.py)."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import pandas as pd
import torch
from transformers import PreTrainedModel

from sinkscope.attention.seam import open_seam
from sinkscope.attention.streaming import check_applies, streaming
from sinkscope.errors import InputError, SinkscopeError
from sinkscope.measuring.losses import cross_entropies, perplexity
from sinkscope.models.family import Family, input_device
from sinkscope.results.tables import SEQUENCE, Column, Columns
from sinkscope.text.inputs import TokenInputs

STREAMING_COLUMNS = (
    Column("method", "dense, window, or sinks kept", kind="text"),
    Column("window", "how many of the last tokens are cached; -1: dense", "tokens", kind="whole"),
    Column("keep", "how many of the first tokens are kept, register tokens first", "tokens", kind="whole"),
    Column("bucket", "first token of a bucket of tokens; -1: all tokens", kind="whole"),
    Column("tokens", "number of tokens predicted in the bucket", kind="whole"),
    Column("loss", "mean cross-entropy", "nats per token"),
    Column("perplexity", "exp(loss)"),
)
STREAMING_TABLES: dict[str, Columns] = {
    "streaming": STREAMING_COLUMNS,
    "streaming_by_sequence": (
        *STREAMING_COLUMNS[:3],
        SEQUENCE,
        Column("loss", "mean cross-entropy of the sequence's tokens", "nats per token"),
    ),
}
BUCKETS = 32  # number of buckets of tokens, over the length of the text


class Method(NamedTuple):
    """One way of reading the text: dense, or with a cache of limited size. The first columns of the tables."""

    method: str  # "dense", "window" or "sinks kept"
    window: int  # -1: dense
    keep: int


def measure_streaming(
    model: PreTrainedModel,
    family: Family,
    inputs: TokenInputs,
    windows: tuple[int, ...],
    keep: tuple[int, ...],
    batch_size: int = 1,
) -> dict[str, pd.DataFrame]:
    """Measure loss and perplexity with dense attention and with each window, with and without `keep` first tokens.

    Raises InputError if streaming does not apply to the model, the sequences differ in length, or a cache holds the
    complete text, and SinkscopeError if the losses are not finite.
    """
    check_applies(model, family)
    lengths = {len(ids) for ids in inputs.sequences}
    if len(lengths) > 1:
        raise InputError(f"streaming reads sequences of one length: these have {min(lengths)} to {max(lengths)} tokens")
    methods = _methods(windows, keep, lengths.pop())
    parts: dict[Method, list[torch.Tensor]] = {method: [] for method in methods}
    device = input_device(model)
    with open_seam(model, family) as seams, torch.no_grad():
        for ids in (batch.token_ids for batch in inputs.batches(batch_size)):
            for method in methods:
                limited = method.window >= 0
                with streaming(model, family, seams, method.keep, method.window) if limited else nullcontext():
                    logits = model(input_ids=ids.to(device), use_cache=False).logits
                parts[method].append(token_losses(logits, ids).double().cpu())
    losses = {method: torch.cat(some) for method, some in parts.items()}  # (N,T-1) each
    if not all(bool(loss.isfinite().all()) for loss in losses.values()):
        raise SinkscopeError("the model itself gives NaN or infinite losses; try --dtype float32")
    rows = [row for method, loss in losses.items() for row in _rows(method, loss.sum(0), len(inputs))]
    by_sequence = [
        {"layer": -1, **method._asdict(), "sequence": at, "loss": one}
        for method, loss in losses.items()
        for at, one in enumerate(loss.mean(1).tolist())
    ]
    return {"streaming": pd.DataFrame(rows), "streaming_by_sequence": pd.DataFrame(by_sequence)}


def _methods(windows: tuple[int, ...], keep: tuple[int, ...], length: int) -> list[Method]:
    if not windows or min(windows) < 1:
        raise InputError("at least one window is needed, and each of at least 1 token")
    if min(keep, default=0) < 0:
        raise InputError(f"{min(keep)} of the first tokens cannot be kept: at least 0 are needed")
    kept = sorted({0, *keep})
    most = kept[-1] + max(windows)
    if most > length - 2:  # the last token predicts none
        raise InputError(
            f"a cache of {kept[-1]} + {max(windows)} tokens never slides over a text of {length}, and changes nothing: "
            f"take a window of at most {max(length - 2 - kept[-1], 0)} or a longer text"
        )
    streams = [Method("sinks kept" if n else "window", window, n) for window in sorted(set(windows)) for n in kept]
    return [Method("dense", -1, 0), *streams]


def token_losses(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy (B,T-1), in nats, of tokens given the earlier ones: logits (B,T,V), token_ids (B,T)."""
    sequences = zip(logits[:, :-1], token_ids[:, 1:], strict=True)
    return torch.stack([cross_entropies(*sequence) for sequence in sequences])


def _rows(method: Method, losses: torch.Tensor, sequences: int) -> Iterator[dict[str, Any]]:
    """Yield a method's rows of the table from the losses (T-1,) of tokens 1 … T-1, summed over the sequences."""
    length = len(losses) + 1
    size = max(1, round(length / BUCKETS))
    buckets = {start: losses[max(start, 1) - 1 : start + size - 1] for start in range(0, length, size)}
    for bucket, part in ({-1: losses} | buckets).items():
        if len(part):
            loss = float(part.sum()) / (len(part) * sequences)
            row = {"bucket": bucket, "tokens": len(part) * sequences, "loss": loss, "perplexity": perplexity(loss)}
            yield {"layer": -1, **method._asdict(), **row}

"""Perplexity with a cache of only the last tokens, with or without the first tokens (attention/streaming.py)."""

from contextlib import nullcontext
from typing import Any

import pandas as pd
import torch

from sinkscope.attention.seam import open_seam
from sinkscope.attention.streaming import check_streaming_applies, streaming
from sinkscope.errors import InputError, SinkscopeError
from sinkscope.measuring.engine import Setting, logits_on, run_settings
from sinkscope.measuring.losses import cross_entropies, perplexity
from sinkscope.measuring.subject import Subject
from sinkscope.results.tables import SEQUENCE, Column, Columns
from sinkscope.text.batch import Batch

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


def measure_streaming(
    subject: Subject, windows: tuple[int, ...], keep: tuple[int, ...], batch_size: int = 1
) -> dict[str, pd.DataFrame]:
    """Measure loss and perplexity with dense attention and with each window, with and without `keep` first tokens.

    Raises InputError if streaming does not apply to the model, the sequences differ in length, or a cache holds the
    complete text, and SinkscopeError if the losses are not finite.
    """
    model, family, inputs = subject.loaded.model, subject.family, subject.inputs
    check_streaming_applies(model, family)
    if inputs.shortest != inputs.longest:
        lengths = f"{inputs.shortest} to {inputs.longest} tokens"
        raise InputError(f"streaming reads sequences of one length: these have {lengths}")
    if not windows or min(windows) < 1:
        raise InputError("at least one window is needed, and each of at least 1 token")
    if min(keep, default=0) < 0:
        raise InputError(f"{min(keep)} of the first tokens cannot be kept: at least 0 are needed")
    length, first_tokens = inputs.longest, sorted({0, *keep})
    if first_tokens[-1] + max(windows) > length - 2:  # the last token predicts none
        raise InputError(
            f"a cache of {first_tokens[-1]} + {max(windows)} tokens never slides over a text of {length}, and changes "
            f"nothing: take a window of at most {max(length - 2 - first_tokens[-1], 0)} or a longer text"
        )
    methods = [("dense", -1, 0)]
    for window in sorted(set(windows)):
        methods += [("sinks kept" if first else "window", window, first) for first in first_tokens]

    def read_batch(opened: None, batch: Batch, observables: Any) -> torch.Tensor:
        return token_losses(logits_on(subject, batch), batch.token_ids).double()

    with open_seam(model, family) as seams, torch.no_grad():
        settings = [
            Setting(lambda _, cache=cache: streaming(model, family, seams, *cache), read_batch)  # type: ignore[misc]
            for cache in ((first, window) for _, window, first in methods[1:])
        ]
        passes = run_settings(subject, [Setting(nullcontext, read_batch), *settings], batch_size=batch_size)
    if not all(bool(done.losses.isfinite().all()) for done in passes):
        raise SinkscopeError("the model itself gives NaN or infinite losses; try --dtype float32")
    size = max(1, round(length / BUCKETS))
    rows, by_sequence = [], []
    for method, done in zip(methods, passes, strict=True):
        labels = {"layer": -1, **dict(zip(("method", "window", "keep"), method, strict=True))}
        by_sequence += [
            labels | {"sequence": sequence, "loss": loss} for sequence, loss in enumerate(done.losses.mean(1).tolist())
        ]
        sums = done.losses.sum(0)  # (T-1,): of tokens 1 … T-1
        buckets = {start: sums[max(start, 1) - 1 : start + size - 1] for start in range(0, length, size)}
        for bucket, part in ({-1: sums} | buckets).items():
            if tokens := len(part) * len(inputs):
                loss = float(part.sum()) / tokens
                numbers = {"bucket": bucket, "tokens": tokens, "loss": loss, "perplexity": perplexity(loss)}
                rows.append(labels | numbers)
    return {"streaming": pd.DataFrame(rows), "streaming_by_sequence": pd.DataFrame(by_sequence)}


def token_losses(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy (B,T-1), in nats, of tokens given the earlier ones: logits (B,T,V), token_ids (B,T)."""
    sequences = zip(logits[:, :-1], token_ids[:, 1:], strict=True)
    return torch.stack([cross_entropies(*sequence) for sequence in sequences])

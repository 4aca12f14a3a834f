"""One pass over a run's sequences: batch after batch through the tracer, in batches that fit into memory."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import numpy as np
import pandas as pd
import torch
from accelerate.utils import find_executable_batch_size
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedModel

from sinkscope.errors import SinkscopeError
from sinkscope.measuring.observables.observable import Observable, long_form
from sinkscope.measuring.summary import WHOLE_MODEL
from sinkscope.measuring.tracer import Tracer
from sinkscope.results.tables import SEQUENCE, Column, Columns
from sinkscope.text.batch import Batch
from sinkscope.text.inputs import TokenInputs

TOKENS_PER_BATCH = {"cpu": 2048, "cuda": 16384, "xpu": 16384}  # where --batch-size auto starts

# → (B,): the loss of each sequence, summed over its predicted tokens, where the step makes one
Step = Callable[[Batch, Sequence[Observable]], torch.Tensor | None]
Kind = TypeVar("Kind", bound=Observable)

LOSS_TABLES: dict[str, Columns] = {
    "loss_by_sequence": (
        SEQUENCE,
        Column("predicted", "tokens of the sequence that are predicted", kind="whole"),
        Column("loss", "their mean cross-entropy; NaN where none is predicted", "nats"),
    ),
}


@dataclass(frozen=True)
class Pass(Generic[Kind]):
    """The result of a pass over all batches."""

    observables: list[Kind]
    losses: torch.Tensor  # (N,): of each sequence, summed over its predicted tokens; empty where the step makes none
    batch_size: int  # that fitted into memory

    @property
    def loss(self) -> float:
        """Summed over all predicted tokens."""
        return float(self.losses.sum())

    def loss_tables(self, inputs: TokenInputs) -> dict[str, pd.DataFrame]:
        """The table of LOSS_TABLES; none where the step makes no loss. Its mean over tokens is the run's loss."""
        if not len(self.losses):
            return {}
        predicted = np.array(inputs.predicted)
        with np.errstate(invalid="ignore"):  # 0 ÷ 0 where nothing is predicted
            loss = (self.losses.numpy() / predicted).astype(np.float32)
        columns = {"predicted": predicted, "loss": loss}
        return {"loss_by_sequence": long_form({"layer": WHOLE_MODEL, "sequence": range(len(inputs))}, columns)}


def pass_over(
    tracer: Tracer,
    inputs: TokenInputs,
    fresh: Callable[[], list[Kind]],
    step: Step,
    batch_size: int | Literal["auto"],
    costs: int = 1,
    console: Console | None = None,
) -> Pass[Kind]:
    """Put every batch through `step`; out of memory, start again with new observables and half the batch.

    Args:
        fresh: makes the observables.
        step: one of the tracer's methods: a batch and the observables → its sequences' losses, if it has any.
        batch_size: sequences in a batch; "auto" begins with TOKENS_PER_BATCH.
        costs: memory of a step, in forward passes.

    Raises:
        SinkscopeError: not even one sequence fits into memory.
    """
    tried = 0

    def all_batches(size: int) -> Pass[Kind]:
        nonlocal tried
        tried = size
        observables, losses = fresh(), [torch.zeros(0, dtype=torch.float64)]
        with _progress(console) as advance:
            for batch in batches_of(inputs, size):
                loss = step(batch, observables)
                losses += [] if loss is None else [loss]
                advance(batch.first + len(batch.token_ids), len(inputs))
        return Pass(observables, torch.cat(losses), size)

    size = first_size(inputs, tracer.model, batch_size, costs)
    attempt = find_executable_batch_size(all_batches, starting_batch_size=size, reduce_batch_size_fn=lambda: tried // 2)
    try:
        return attempt()
    except RuntimeError as error:
        if "No executable batch size" not in str(error):
            raise
        raise SinkscopeError(
            "out of memory even with one sequence a batch: "
            "take a shorter --seq-len, --dtype bfloat16 or --device-map auto"
        ) from None


def first_size(inputs: TokenInputs, model: PreTrainedModel, batch_size: int | Literal["auto"], costs: int) -> int:
    """The batch size that `pass_over` tries first."""
    tokens = TOKENS_PER_BATCH.get(model.device.type, TOKENS_PER_BATCH["cpu"]) // costs
    return min(max(1, tokens // inputs.longest) if batch_size == "auto" else batch_size, len(inputs))


def batches_of(inputs: TokenInputs, batch_size: int, padding_side: str = "right") -> Iterator[Batch]:
    first = 0
    for ids, mask in inputs.batches(batch_size, padding_side=padding_side):
        masked = None
        if inputs.masked is not None:
            hidden, labels = inputs.masked_batch(first, len(ids), padding_side)
            masked = Batch(hidden, mask, first, labels)
        yield Batch(ids, mask, first, masked=masked)
        first += len(ids)


@contextmanager
def _progress(console: Console | None) -> Iterator[Callable[[int, int], None]]:
    """Give advance(done, total): a progress bar where the console is a terminal."""
    if console is None or console.quiet or not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TextColumn("sequences"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)

"""A pass runs all batches of a run through the tracer, in batches that fit into memory."""

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import pandas as pd
import torch
from accelerate.utils import find_executable_batch_size
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from transformers import PreTrainedModel

from sinkscope.errors import SinkscopeError
from sinkscope.measuring.observables.observable import Lists, Observable, accumulated, merge
from sinkscope.measuring.observables.reductions import long_table
from sinkscope.measuring.processes import team
from sinkscope.measuring.summary import WHOLE_MODEL
from sinkscope.results.tables import SEQUENCE, Column, Columns
from sinkscope.text.batch import Batch
from sinkscope.text.inputs import TokenInputs

TOKENS_PER_BATCH = {"cpu": 2048, "cuda": 16384, "xpu": 16384}  # where --batch-size auto starts

# returns the loss of each sequence, (B,), summed over its predicted tokens; None if the step computes none
Step = Callable[[Batch, Sequence[Observable]], torch.Tensor | None]
Kind = TypeVar("Kind", bound=Observable)

LOSS_TABLES: dict[str, Columns] = {
    "loss_by_sequence": (
        SEQUENCE,
        Column("predicted", "number of predicted tokens of the sequence", kind="whole"),
        Column("loss", "their mean cross-entropy; NaN where none is predicted", "nats"),
    ),
}


@dataclass(frozen=True)
class Pass(Generic[Kind]):
    """The result of a pass over all batches."""

    observables: list[Kind]
    losses: torch.Tensor  # (N,): the loss of each sequence, summed over its predicted tokens; empty without losses
    batch_size: int  # the one that fitted into memory

    @property
    def loss(self) -> float:
        """The loss summed over all predicted tokens."""
        return float(self.losses.sum())

    def loss_tables(self, inputs: TokenInputs) -> dict[str, pd.DataFrame]:
        """Return the table of LOSS_TABLES, whose mean over tokens is the run's loss; empty without losses."""
        if not len(self.losses):
            return {}
        predicted = np.array(inputs.predicted)
        with np.errstate(invalid="ignore"):  # 0 ÷ 0 where nothing is predicted
            loss = (self.losses.numpy() / predicted).astype(np.float32)
        columns = {"predicted": predicted, "loss": loss}
        return {"loss_by_sequence": long_table([({"layer": WHOLE_MODEL, "sequence": range(len(inputs))}, columns)])}


def pass_over(
    model: PreTrainedModel,
    inputs: TokenInputs,
    fresh: Callable[[], list[Kind]],
    step: Step,
    batch_size: int | Literal["auto"],
    costs: int = 1,
    console: Console | None = None,
) -> Pass[Kind]:
    """Call `step` with every batch; after an out-of-memory error, start again with new observables and half the batch.

    Several processes share the batches. Afterwards each of them has the sums of all.

    `step` is a method of the tracer that needs the memory of `costs` forward passes. Raises SinkscopeError if a batch
    of one sequence does not fit into memory.
    """
    tried = 0
    members = team()

    def all_batches(size: int) -> Pass[Kind]:
        nonlocal tried
        tried = size
        with members.agreeing(), _progress(console, len(inputs)) as advance:
            observables, losses = fresh(), Lists[int, torch.Tensor](list)  # by the batch's first sequence
            for batch in batches_of_mine(inputs, size):
                loss = step(batch, observables)
                losses[batch.first] += [] if loss is None else [loss]
                advance(batch.first + len(batch.token_ids))
            file = io.BytesIO()
            if members.count > 1:
                is_idle = members.place >= len(inputs)  # it reads a batch of another process, which must not count
                torch.save(None if is_idle else ([accumulated(each) for each in observables], losses), file)
        if members.count > 1:
            _add_up(observables, losses, file.getvalue())
        in_order = [loss for _, part in sorted(losses.items()) for loss in part]
        return Pass(observables, torch.cat([torch.zeros(0, dtype=torch.float64), *in_order]), size)

    size = first_size(inputs, model, batch_size, costs)
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


def tables_of(observables: Iterable[Observable]) -> dict[str, pd.DataFrame]:
    return {name: table for observable in observables for name, table in observable.tables().items()}


def first_size(inputs: TokenInputs, model: PreTrainedModel, batch_size: int | Literal["auto"], costs: int) -> int:
    """Return the batch size that `pass_over` tries first: small enough that every process gets a batch."""
    tokens = TOKENS_PER_BATCH.get(model.device.type, TOKENS_PER_BATCH["cpu"]) // costs
    size = max(1, tokens // inputs.longest) if batch_size == "auto" else batch_size
    return min(size, max(1, len(inputs) // team().count))


def batches_of_mine(inputs: TokenInputs, batch_size: int) -> Iterator[Batch]:
    """Yield every n-th batch for n processes. With fewer batches than processes, the others read the first batch."""
    members = team()
    mine = islice(inputs.batches(batch_size), members.place, None, members.count)
    yield next(mine, None) or next(inputs.batches(batch_size))
    yield from mine


def _add_up(observables: Sequence[Observable], losses: Lists[int, torch.Tensor], mine: bytes) -> None:
    """Replace the sums of this process by the sums over all processes, added in their order."""
    total: list[Any] = []
    for part in team().one_by_one(mine):
        # pickled by another process of the same command
        found = torch.load(io.BytesIO(part), map_location="cpu", weights_only=False)
        if found is None:
            continue
        if not total:
            total = list(found)
            continue
        for sums, other in zip(total[0], found[0], strict=False):  # only the first compares with the bare model
            for name in sums:
                merge(sums[name], other[name])
        total[1].merge(found[1])
    for observable, state in zip(observables, total[0], strict=False):
        vars(observable).update(state)
    losses.clear()
    losses.merge(total[1])


@contextmanager
def _progress(console: Console | None, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function advance(done), which updates a progress bar if the console is a terminal."""
    if console is None or console.quiet or not console.is_terminal:
        yield lambda done: None
        return
    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TextColumn("sequences"))
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=total)
        yield lambda done: progress.update(task, completed=done)

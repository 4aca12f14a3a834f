"""A pass runs all batches of a run through the tracer, in batches that fit into memory."""

import io
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from accelerate.utils import find_executable_batch_size
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress
from transformers import PreTrainedModel

from sinkscope.errors import SinkscopeError, counted
from sinkscope.measuring.console import lasting, print_line
from sinkscope.measuring.memory import sequences_that_fit
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.observable import Lists, Observable, Reading, Settings, accumulated
from sinkscope.measuring.observables.reductions import long_table
from sinkscope.measuring.processes import team
from sinkscope.plugins import naming_plugin, package_of
from sinkscope.results.tables import SEQUENCE, WHOLE_MODEL, Column, Columns, check_made
from sinkscope.text.batch import Batch, on_cpu
from sinkscope.text.inputs import TokenInputs

# returns the loss of each sequence, (B,), summed over its predicted tokens; None if the step computes none
BatchStep = Callable[[Batch, Sequence[Observable]], torch.Tensor | None]

LOSS_TABLES: dict[str, Columns] = {
    "loss_by_sequence": (
        SEQUENCE,
        Column("predicted", "number of predicted tokens of the sequence", kind="whole"),
        Column("loss", "their mean cross-entropy; NaN where none is predicted", "nats"),
    ),
}


@dataclass(frozen=True)
class Pass:
    """The result of a pass over all batches."""

    observables: list[Observable]
    losses: torch.Tensor  # (N,): the loss of each sequence, summed over its predicted tokens; empty without losses
    batch_size: int  # the one that fitted into memory
    first: int = 0  # the first layer that was read

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
    fresh: Callable[[], list[Observable]],
    step: BatchStep,
    batch_size: int | Literal["auto"],
    backward: bool = False,
    console: Console | None = None,
    expect: Callable[[float], None] = lambda seconds: None,
    bars: Sequence["ProgressBar"] | None = None,
) -> Pass:
    """Call `step` with every batch; after an out-of-memory error, start again with new observables and half the batch.

    Several processes share the batches. Afterwards each of them has the sums of all.

    `step` is a method of the tracer, which computes gradients if `backward`. The batch size is printed where the user
    left it open or it did not fit. `expect` is called after the first batch with the seconds that the others take.
    `bars` are those of `progress` over several passes; None: of this pass alone.
    Raises SinkscopeError if a batch of one sequence does not fit into memory.
    """
    tried = 0
    members = team()

    def all_batches(size: int) -> Pass:
        nonlocal tried
        tried = size
        drawn = progress(console, model, len(inputs), backward) if bars is None else nullcontext(bars)
        with members.sharing_errors(), drawn as shown:
            observables, losses = fresh(), Lists[int, torch.Tensor](list)  # by the batch's first sequence
            for bar in shown:
                bar.begin()
            start = time.monotonic()
            # every n-th batch for n processes; with fewer batches than processes, the others read the first batch
            mine = islice(inputs.batches(size), members.place, None, members.count)
            for batch in chain([next(mine, None) or next(inputs.batches(size))], mine):
                loss = step(batch, [*observables, *shown])
                losses[batch.first] += [] if loss is None else [loss]
                done = batch.first + len(batch.token_ids)
                if batch.first == 0:
                    expect((time.monotonic() - start) * (len(inputs) - done) / done / members.count)
                for bar in shown:
                    bar.reach(done)
            for bar in shown:
                bar.before += bar.times * len(inputs)
            file = io.BytesIO()
            if members.count > 1:
                is_idle = members.place >= len(inputs)  # it reads a batch of another process, which must not count
                torch.save(None if is_idle else ([accumulated(each) for each in observables], losses), file)
        if members.count > 1:  # replace the sums of this process by those over all, added in their order
            total: Any = None
            for part in members.one_by_one(file.getvalue()):
                # pickled by another process of the same command
                sums = torch.load(io.BytesIO(part), map_location="cpu", weights_only=False)
                if total is None or sums is None:
                    total = total or sums
                    continue
                # only the first process compares with the bare model
                for merged, other in zip(total[0], sums[0], strict=False):
                    for name, accumulator in merged.items():
                        accumulator.merge(other[name])
                total[1].merge(sums[1])
            for observable, state in zip(observables, total[0], strict=False):
                vars(observable).update(state)
            losses = total[1]
        in_order = [loss for _, part in sorted(losses.items()) for loss in part]
        return Pass(observables, torch.cat([torch.zeros(0, dtype=torch.float64), *on_cpu(in_order)]), size)

    with members.sharing_errors():  # a process that has failed exchanges nothing but its error
        size = first_size(inputs, model, batch_size, backward)
    if members.count > 1:  # their devices may have different room
        size = min(members.each(size))
    attempt = find_executable_batch_size(all_batches, starting_batch_size=size, reduce_batch_size_fn=lambda: tried // 2)
    try:
        done: Pass = attempt()
    except RuntimeError as error:
        if "No executable batch size" not in str(error):
            raise
        raise SinkscopeError(
            "out of memory even with one sequence a batch: "
            "take a shorter --seq-len, fewer --positions, --dtype bfloat16 or --device-map auto"
        ) from None
    if console is not None and done.batch_size != batch_size:
        print_line(console, f"{counted(len(inputs), 'sequence')} in batches of {done.batch_size} × {inputs.longest}")
    return done


def tables_of(observables: Iterable[Observable]) -> dict[str, pd.DataFrame]:
    """Return the tables of all observables. Raises SinkscopeError for those of a plugin that fails, or are wrong."""
    tables: dict[str, pd.DataFrame] = {}
    for observable in observables:
        name = getattr(observable, "name", "")
        with naming_plugin(OBSERVABLES, name):
            made = observable.tables()
            if package_of(OBSERVABLES, name):
                check_made(made, observable.columns)
            tables |= made
    return tables


def first_size(
    inputs: TokenInputs, model: PreTrainedModel, batch_size: int | Literal["auto"], backward: bool = False
) -> int:
    """Return the batch size that `pass_over` tries first: it should fit into memory, and every process gets a batch."""
    most = max(1, len(inputs) // team().count)
    if batch_size != "auto":
        return min(batch_size, most)
    return min(sequences_that_fit(model, inputs.longest, backward), most)


class ProgressBar(Observable):
    """A progress bar that moves at every layer. The time left follows from the fastest batch: the first is slow.

    Over several passes it counts how often a sequence is read: once for each setting.
    """

    sites = ("layer_out",)

    def __init__(self, progress: Progress, total: int, layers: int, settings: int, backward: bool) -> None:
        super().__init__(Settings())
        self.backward = backward  # type: ignore[misc]  # sets the attribute of the instance
        self.progress, self.total, self.times = progress, total, settings  # `times`: how often each batch is read
        self.moves = settings * layers * (2 if backward else 1)
        self.before = 0  # sequences read in earlier passes
        self.pace = math.inf  # seconds for a sequence
        self.task = progress.add_task("measuring", total=total, bar=self)
        self.begin()

    def begin(self) -> None:
        """Begin a pass, also again after an out-of-memory error."""
        self.done, self.moved = self.before, 0  # sequences read before this batch, and its layers
        self.began = time.monotonic()

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        self._move(batch)

    def watch(self, layer: int, site: str, tensor: torch.Tensor, batch: Batch, scale: float) -> None:
        self._move(batch)
        if tensor.requires_grad:  # a pass of an experiment with gradients may be a forward one
            tensor.register_hook(lambda _: self._move(batch))

    def _move(self, batch: Batch) -> None:
        self.moved += 1
        share = min(1.0, self.moved / self.moves) * self.times
        self.progress.update(self.task, completed=self.done + share * len(batch.token_ids))

    def reach(self, done: int) -> None:
        """End a batch, after which this number of the pass's sequences is done."""
        now, done = time.monotonic(), self.before + self.times * done
        self.pace = min(self.pace, (now - self.began) / (done - self.done))
        self.done, self.moved, self.began = done, 0, now
        self.progress.update(self.task, completed=done)

    @property
    def left(self) -> str:
        if self.pace == math.inf:
            return ""
        seconds = self.pace * (self.total - self.done) - (time.monotonic() - self.began)
        return f"{lasting(max(0.0, seconds))} left"


@contextmanager
def progress(
    console: Console | None, model: PreTrainedModel, total: int, backward: bool, settings: int = 1
) -> Iterator[list[ProgressBar]]:
    """Yield a progress bar over `total` sequences if the console is a terminal, else none.

    `settings` is the number of settings under which each batch is read, one after the other.
    """
    if console is None or console.quiet or not console.is_terminal:
        yield []
        return
    columns = ("measuring", BarColumn(), MofNCompleteColumn(), "sequences {task.fields[bar].left}")
    layers = model.config.get_text_config().num_hidden_layers
    with Progress(*columns, console=console, transient=True) as drawn:
        yield [ProgressBar(drawn, total, layers, settings, backward)]

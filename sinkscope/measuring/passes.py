"""A pass runs all batches of a run through the tracer, in batches that fit into memory."""

import io
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from accelerate.utils import find_executable_batch_size
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress
from transformers import PreTrainedModel

from sinkscope.attention.seam import open_seam
from sinkscope.errors import SinkscopeError, counted, was_interrupted
from sinkscope.interventions.intervention import UntouchedError
from sinkscope.measuring.console import lasting, print_line
from sinkscope.measuring.memory import sequences_that_fit
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.observable import Lists, Observable, Reading, Settings, accumulated, merge
from sinkscope.measuring.observables.reductions import long_table
from sinkscope.measuring.processes import team
from sinkscope.measuring.subject import Subject
from sinkscope.measuring.tracer import Tracer, model_inputs
from sinkscope.models.edits import Beginning, beginning_at
from sinkscope.plugins import blaming, package_of
from sinkscope.results.tables import SEQUENCE, WHOLE_MODEL, Column, Columns, check_made
from sinkscope.text.batch import Batch
from sinkscope.text.inputs import TokenInputs

# returns the loss of each sequence, (B,), summed over its predicted tokens; None if the step computes none
Step = Callable[[Batch, Sequence[Observable]], torch.Tensor | None]

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
    step: Step,
    batch_size: int | Literal["auto"],
    backward: bool = False,
    console: Console | None = None,
    expect: Callable[[float], None] = lambda seconds: None,
) -> Pass:
    """Call `step` with every batch; after an out-of-memory error, start again with new observables and half the batch.

    Several processes share the batches. Afterwards each of them has the sums of all.

    `step` is a method of the tracer, which computes gradients if `backward`. The batch size is printed where the user
    left it open or it did not fit. `expect` is called after the first batch with the seconds that the others take.
    Raises SinkscopeError if a batch of one sequence does not fit into memory.
    """
    tried = 0
    members = team()

    def all_batches(size: int) -> Pass:
        nonlocal tried
        tried = size
        with members.agreeing(), _progress(console, model, len(inputs), backward) as bar:
            observables, losses = fresh(), Lists[int, torch.Tensor](list)  # by the batch's first sequence
            start = time.monotonic()
            for batch in batches_of_mine(inputs, size):
                loss = step(batch, [*observables, *bar])
                losses[batch.first] += [] if loss is None else [loss]
                done = batch.first + len(batch.token_ids)
                if batch.first == 0:
                    expect((time.monotonic() - start) * (len(inputs) - done) / done / members.count)
                for each in bar:
                    each.reach(done)
            file = io.BytesIO()
            if members.count > 1:
                is_idle = members.place >= len(inputs)  # it reads a batch of another process, which must not count
                torch.save(None if is_idle else ([accumulated(each) for each in observables], losses), file)
        if members.count > 1:
            _add_up(observables, losses, file.getvalue())
        in_order = [loss for _, part in sorted(losses.items()) for loss in part]
        return Pass(observables, torch.cat([torch.zeros(0, dtype=torch.float64), *in_order]), size)

    with members.agreeing():  # a process that has failed exchanges nothing but its error
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
        with blaming(OBSERVABLES, name):
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
    on_cpu = model.device.type in ("cpu", "meta")
    return min(sequences_that_fit(model, inputs.longest, backward, on_cpu), most)


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


class _Bar(Observable):
    """A progress bar that moves at every layer. The time left follows from the fastest batch: the first is slow."""

    sites = ("layer_out",)

    def __init__(self, progress: Progress, total: int, layers: int) -> None:
        super().__init__(Settings())
        self.progress, self.total, self.moves = progress, total, layers * (2 if self.backward else 1)
        self.done, self.moved = 0, 0  # sequences of the batches before, and layers of this one
        self.began, self.pace = time.monotonic(), math.inf  # of this batch; seconds for a sequence
        self.task = progress.add_task("measuring", total=total, bar=self)

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        self._move(batch)

    def watch(self, layer: int, site: str, tensor: torch.Tensor, batch: Batch, scale: float) -> None:
        self._move(batch)
        tensor.register_hook(lambda _: self._move(batch))

    def _move(self, batch: Batch) -> None:
        self.moved += 1
        share = min(1.0, self.moved / self.moves)
        self.progress.update(self.task, completed=self.done + share * len(batch.token_ids))

    def reach(self, done: int) -> None:
        """End a batch, after which this number of sequences is done."""
        now = time.monotonic()
        self.pace = min(self.pace, (now - self.began) / (done - self.done))
        self.done, self.moved, self.began = done, 0, now
        self.progress.update(self.task, completed=done)

    @property
    def left(self) -> str:
        if self.pace == math.inf:
            return ""
        seconds = self.pace * (self.total - self.done) - (time.monotonic() - self.began)
        return f"{lasting(max(0.0, seconds))} left"


class _BackwardBar(_Bar):
    backward = True


@contextmanager
def _progress(console: Console | None, model: PreTrainedModel, total: int, backward: bool) -> Iterator[list[_Bar]]:
    """Yield a progress bar if the console is a terminal, else none."""
    if console is None or console.quiet or not console.is_terminal:
        yield []
        return
    columns = ("measuring", BarColumn(), MofNCompleteColumn(), "sequences {task.fields[bar].left}")
    layers = model.config.get_text_config().num_hidden_layers
    with Progress(*columns, console=console, transient=True) as progress:
        yield [(_BackwardBar if backward else _Bar)(progress, total, layers)]


# --- several changes of one model that do not affect its first layers, which run only once for each batch

Tables = Mapping[str, pd.DataFrame]
TracerStep = Callable[[Tracer, Batch, Sequence[Observable]], torch.Tensor | None]  # a method of the tracer

FEW = 2  # sequences on which starting at a later layer is tried


@dataclass(frozen=True)
class Change:
    """How a change of the model is measured."""

    layer: int  # the first layer that it changes, ≥ 1
    open: Callable[[Beginning | None], AbstractContextManager[Tracer]]  # opens the changed model's tracer
    make: Callable[[], list[Observable]] = list  # creates its observables for one pass


def passes_over(subject: Subject, kernel: str, changes: Sequence[Change], step: TracerStep, *sizes: Any) -> list[Pass]:
    """Measure all changes, in the order of their first layers, on each batch of one pass. Returns a pass for each.

    `sizes` are the last arguments of `pass_over`. Raises UntouchedError if no batch had the positions of a change.
    """
    model, family = subject.loaded.model, subject.family
    groups: list[list[Observable]] = []  # by change, like `untouched`
    untouched: list[list[UntouchedError]] = []
    batches = 0

    def fresh() -> list[Observable]:
        nonlocal batches
        batches = 0
        groups[:] = [change.make() for change in changes]
        untouched[:] = [[] for _ in changes]
        return [observable for group in groups for observable in group]

    def measure(batch: Batch, _: Sequence[Observable]) -> torch.Tensor | None:
        """Measure one batch. Returns the losses under each change, (B,changes), if the step computes losses."""
        nonlocal batches
        batches += 1
        beginning: Beginning | None = None
        losses: list[torch.Tensor | None] = []
        for change, own, missed in zip(changes, groups, untouched, strict=True):
            if beginning is None or beginning.layer < change.layer:  # run the unchanged model up to this layer
                inputs = model_inputs(model, batch, False, family.first_position)
                with open_seam(model, family, kernel):
                    beginning = beginning_at(change.layer, model, family.layer_modules(model), inputs, beginning)
            try:
                with change.open(beginning) as tracer:
                    losses.append(step(tracer, batch, own))
            except UntouchedError as error:  # reported at the end, since another batch may have the position
                missed.append(error)
        made = [loss for loss in losses if loss is not None]
        return torch.stack(made, dim=1) if made else None

    done = pass_over(model, subject.inputs, fresh, measure, *sizes)
    for errors in untouched:
        if errors and len(errors) == batches:
            raise errors[0]
    by_change = done.losses.unbind(1) if done.losses.dim() > 1 else [done.losses] * len(changes)
    return [Pass(group, loss, done.batch_size) for group, loss in zip(groups, by_change, strict=True)]


def whole_pass(subject: Subject, change: Change, step: TracerStep, *sizes: Any) -> Pass:
    """Measure a change in one pass over all layers. `sizes` are as in `passes_over`."""
    with change.open(None) as tracer:
        return pass_over(tracer.model, subject.inputs, change.make, partial(step, tracer), *sizes)


def few_of(subject: Subject) -> Subject:
    return replace(subject, inputs=subject.inputs.part(0, FEW))


def resumes(
    subject: Subject, kernel: str, change: Change, unchanged: Tables | None, step: TracerStep, *sizes: Any
) -> bool:
    """Return whether a change that starts at its layer has bit for bit the results of a whole pass.

    It is tried on `few_of` the sequences. The change is measured twice and the second pass compared, because the first
    must not leave a trace in the model. `unchanged`, the unchanged model's tables on the same sequences, fill in what a
    pass over some layers lacks.
    """
    few = few_of(subject)
    try:
        resumed = passes_over(few, kernel, [change, change], step, *sizes)[-1]
    except Exception as error:  # for example, layers share state; a complete pass works or reports the error
        if was_interrupted(error):
            raise
        return False
    tables, whole = tables_of(resumed.observables), whole_pass(few, change, step, *sizes)
    if unchanged is not None:
        tables = completed(tables, change.layer, unchanged)
    return are_the_same(tables, tables_of(whole.observables)) and torch.equal(resumed.losses, whole.losses)


def completed(tables: Tables, layer: int, unchanged: Tables) -> dict[str, pd.DataFrame]:
    """Complete tables of the layers from `layer` on by the rows of earlier layers from the unchanged model."""
    return {
        name: pd.concat([unchanged[name][unchanged[name]["layer"] < layer], table], ignore_index=True)
        for name, table in tables.items()
    }


def are_the_same(some: Tables, others: Tables) -> bool:
    """Return whether the tables are equal bit for bit."""
    return some.keys() == others.keys() and all(table.equals(others[name]) for name, table in some.items())

"""Measures several changes of one model that do not affect its first layers, and computes those layers only once.

For each batch the unchanged layers run once; then every change runs with its observables, starting at the first layer
that it changes. Only the input of that layer is kept, and only for the current batch.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from sinkscope.attention.seam import open_seam
from sinkscope.errors import was_interrupted
from sinkscope.interventions.intervention import UntouchedError
from sinkscope.measuring.observables.observable import Observable
from sinkscope.measuring.passes import Pass, pass_over, tables_of
from sinkscope.measuring.subject import Subject
from sinkscope.measuring.tracer import Tracer, model_inputs
from sinkscope.models.edits import Beginning, beginning_at
from sinkscope.text.batch import Batch

Tables = Mapping[str, pd.DataFrame]
TracerStep = Callable[[Tracer, Batch, Sequence[Observable]], torch.Tensor | None]  # a method of the tracer

FEW = 2  # sequences on which starting at a later layer is tried


@dataclass(frozen=True)
class Change:
    """How a change of the model is measured."""

    layer: int  # the first layer that it changes, ≥ 1
    open: Callable[[Beginning | None], AbstractContextManager[Tracer]]  # opens the changed model's tracer
    make: Callable[[], list[Observable]] = list  # creates its observables for one pass


def passes_over(
    subject: Subject, kernel: str, changes: Sequence[Change], step: TracerStep, *sizes: Any
) -> list[Pass[Observable]]:
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


def resumes(
    change: Change,
    passes_from: Callable[[list[Change]], list[Pass[Observable]]],
    whole: Callable[[], Pass[Observable]],
    unchanged: Callable[[], Tables] = dict,
) -> bool:
    """Return whether a change that starts at its layer has bit for bit the tables and losses of a whole pass.

    It is measured twice and the second pass compared, because the first must not leave a trace in the model.
    """
    try:
        resumed = passes_from([change, change])[-1]
    except Exception as error:  # for example, layers share state; a complete pass works or reports the error
        if was_interrupted(error):
            raise
        return False
    tables, complete = completed(tables_of(resumed.observables), change.layer, unchanged()), whole()
    return are_the_same(tables, tables_of(complete.observables)) and torch.equal(resumed.losses, complete.losses)


def completed(tables: Tables, layer: int, unchanged: Tables) -> dict[str, pd.DataFrame]:
    """Complete tables of the layers from `layer` on by the rows of earlier layers from the unchanged model."""
    return {
        name: pd.concat([unchanged[name][unchanged[name]["layer"] < layer], table], ignore_index=True)
        for name, table in tables.items()
    }


def are_the_same(some: Tables, others: Tables) -> bool:
    """Return whether the tables are equal bit for bit."""
    return some.keys() == others.keys() and all(table.equals(others[name]) for name, table in some.items())

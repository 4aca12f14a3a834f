"""Measures several changes of one model that do not affect its first layers, and computes those layers only once.

For each batch the unchanged layers run once; then every change runs with its observables, starting at the first layer
that it changes. Only the input of that layer is kept, and only for the current batch.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import pandas as pd
import torch

from sinkscope.attention.seam import open_seam
from sinkscope.errors import was_interrupted
from sinkscope.interventions.intervention import UntouchedError
from sinkscope.measuring.observables.observable import Observable
from sinkscope.measuring.passes import Pass
from sinkscope.measuring.subject import Subject
from sinkscope.measuring.tracer import Tracer, model_inputs
from sinkscope.models.edits import Beginning, beginning_at
from sinkscope.text.batch import Batch

Tables = Mapping[str, pd.DataFrame]

FEW = 2  # sequences on which starting at a later layer is tried


@dataclass(frozen=True)
class Change:
    """How a change of the model is measured.

    Attributes:
        layer: The first layer that it changes, ≥ 1.
        open: Opens the changed model's tracer, which starts at the given beginning or at the first layer.
        make: Creates its observables for one pass.
    """

    layer: int
    open: Callable[[Beginning | None], AbstractContextManager[Tracer]]
    make: Callable[[], list[Observable]] = list


@dataclass
class Resumed:
    """A step of `pass_over` that measures all changes on a batch, in the order of their first layers.

    `step` is a method of the tracer.
    """

    subject: Subject
    kernel: str
    changes: Sequence[Change]
    step: Callable[[Tracer, Batch, Sequence[Observable]], torch.Tensor | None]
    _ends: list[int] = field(default_factory=list)  # end of each change's observables in the list of all
    _batches: int = 0
    _untouched: list[list[UntouchedError]] = field(default_factory=list)

    def fresh(self) -> list[Observable]:
        """Create the observables of all changes, in one list."""
        groups = [change.make() for change in self.changes]
        self._ends = torch.tensor([len(group) for group in groups]).cumsum(0).tolist()
        self._batches, self._untouched = 0, [[] for _ in groups]
        return [observable for group in groups for observable in group]

    def __call__(self, batch: Batch, observables: Sequence[Observable]) -> torch.Tensor | None:
        """Measure one batch. Returns the losses under each change, (B,changes), if the step computes losses."""
        self._batches += 1
        beginning: Beginning | None = None
        losses: list[torch.Tensor | None] = []
        for place, (change, own) in enumerate(zip(self.changes, self._by_change(observables), strict=True)):
            if beginning is None or beginning.layer < change.layer:
                beginning = self._run_unchanged(change.layer, batch, beginning)
            try:
                with change.open(beginning) as tracer:
                    losses.append(self.step(tracer, batch, own))
            except UntouchedError as error:  # reported at the end, since another batch may have the position
                self._untouched[place].append(error)
        made = [loss for loss in losses if loss is not None]
        return torch.stack(made, dim=1) if made else None

    def _run_unchanged(self, layer: int, batch: Batch, before: Beginning | None) -> Beginning | None:
        """Run the unchanged model, with seams as under a tracer, up to this layer."""
        model, family = self.subject.loaded.model, self.subject.family
        inputs = model_inputs(model, batch, False, family.first_position)
        with open_seam(model, family, self.kernel):
            return beginning_at(layer, model, family.layer_modules(model), inputs, before)

    def _by_change(self, observables: Sequence[Observable]) -> list[Sequence[Observable]]:
        starts = [0, *self._ends[:-1]]
        return [observables[start:end] for start, end in zip(starts, self._ends, strict=True)]

    def passes(self, done: Pass[Observable]) -> list[Pass[Observable]]:
        """Split the pass of all changes into one pass for each.

        Raises:
            UntouchedError: No batch had the positions of a change.
        """
        for errors in self._untouched:
            if errors and len(errors) == self._batches:
                raise errors[0]
        losses = done.losses.unbind(1) if done.losses.dim() > 1 else [done.losses] * len(self.changes)
        groups = self._by_change(done.observables)
        return [Pass(list(group), loss, done.batch_size) for group, loss in zip(groups, losses, strict=True)]


def tried(passes_from: Callable[[list[Change]], list[Pass[Observable]]], change: Change) -> Pass[Observable] | None:
    """Return the pass of a change that starts at its layer, or None if the model cannot start there.

    The change is measured twice and the second pass returned, because the first must leave no trace.
    """
    try:
        *_, resumed = passes_from([change, change])
    except Exception as error:  # for example, layers share state; a whole pass works or reports the error
        if was_interrupted(error):
            raise
        return None
    return resumed


def completed(tables: Tables, layer: int, unchanged: Tables) -> dict[str, pd.DataFrame]:
    """Complete tables of the layers from `layer` on by the rows of earlier layers from the unchanged model."""
    return {
        name: pd.concat([unchanged[name][unchanged[name]["layer"] < layer], table], ignore_index=True)
        for name, table in tables.items()
    }


def are_the_same(some: Tables, others: Tables) -> bool:
    """Compare tables bit for bit."""
    return some.keys() == others.keys() and all(table.equals(others[name]) for name, table in some.items())

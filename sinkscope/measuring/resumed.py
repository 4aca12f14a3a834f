"""Several changes of one model that leave its first layers alone: what these give is computed once for all of them.

Batch by batch the unchanged layers run once; then every change, with its observables, from the first layer on that it
changes. Of a batch only the one tensor that enters that layer is kept, and of no other batch anything.
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

FEW = 2  # sequences on which it is tried whether a model can begin behind its first layer


@dataclass(frozen=True)
class Change:
    """How a change of the model is measured.

    layer: the first that it changes, from 1 on.
    open: the changed model's tracer, which begins where it is told to, or at the beginning.
    make: its observables for one pass.
    """

    layer: int
    open: Callable[[Beginning | None], AbstractContextManager[Tracer]]
    make: Callable[[], list[Observable]] = list


@dataclass
class Resumed:
    """A step of `pass_over` that measures all changes on a batch; those of later layers come later.

    step: one of the tracer's methods.
    """

    subject: Subject
    kernel: str
    changes: Sequence[Change]
    step: Callable[[Tracer, Batch, Sequence[Observable]], torch.Tensor | None]
    _ends: list[int] = field(default_factory=list)  # of each change's observables among all
    _batches: int = 0
    _untouched: list[list[UntouchedError]] = field(default_factory=list)

    def fresh(self) -> list[Observable]:
        """The observables of all changes, one after the other."""
        groups = [change.make() for change in self.changes]
        self._ends = torch.tensor([len(group) for group in groups]).cumsum(0).tolist()
        self._batches, self._untouched = 0, [[] for _ in groups]
        return [observable for group in groups for observable in group]

    def __call__(self, batch: Batch, observables: Sequence[Observable]) -> torch.Tensor | None:
        """→ (B,changes): the losses under each of them, if the step makes any."""
        self._batches += 1
        beginning: Beginning | None = None
        losses: list[torch.Tensor | None] = []
        for place, (change, own) in enumerate(zip(self.changes, self._by_change(observables), strict=True)):
            if beginning is None or beginning.layer < change.layer:
                beginning = self._unchanged_before(change.layer, batch, beginning)
            try:
                with change.open(beginning) as tracer:
                    losses.append(self.step(tracer, batch, own))
            except UntouchedError as error:  # told at the end; another batch may hold the position
                self._untouched[place].append(error)
        made = [loss for loss in losses if loss is not None]
        return torch.stack(made, dim=1) if made else None

    def _unchanged_before(self, layer: int, batch: Batch, before: Beginning | None) -> Beginning | None:
        """Where the model begins at this layer on a batch, unchanged and with its seams in as under a tracer."""
        model, family = self.subject.loaded.model, self.subject.family
        inputs = model_inputs(model, batch, False, family.first_position)
        with open_seam(model, family, self.kernel):
            return beginning_at(layer, model, family.layer_modules(model), inputs, before)

    def _by_change(self, observables: Sequence[Observable]) -> list[Sequence[Observable]]:
        starts = [0, *self._ends[:-1]]
        return [observables[start:end] for start, end in zip(starts, self._ends, strict=True)]

    def passes(self, done: Pass[Observable]) -> list[Pass[Observable]]:
        """That of each change, from that of all.

        Raises:
            UntouchedError: no batch held what is changed.
        """
        for errors in self._untouched:
            if errors and len(errors) == self._batches:
                raise errors[0]
        losses = done.losses.unbind(1) if done.losses.dim() > 1 else [done.losses] * len(self.changes)
        groups = self._by_change(done.observables)
        return [Pass(list(group), loss, done.batch_size) for group, loss in zip(groups, losses, strict=True)]


def tried(passes_from: Callable[[list[Change]], list[Pass[Observable]]], change: Change) -> Pass[Observable] | None:
    """The pass of a change that begins at its layer: the second of two, since nothing of the first may be left; None
    where the model cannot begin there.
    """
    try:
        *_, resumed = passes_from([change, change])
    except Exception as error:  # what layers share, say: a whole pass does without, or tells it
        if was_interrupted(error):
            raise
        return None
    return resumed


def completed(tables: Tables, layer: int, unchanged: Tables) -> dict[str, pd.DataFrame]:
    """Tables of layers from this one on, with the rows of the layers before it as they are unchanged."""
    return {
        name: pd.concat([unchanged[name][unchanged[name]["layer"] < layer], table], ignore_index=True)
        for name, table in tables.items()
    }


def are_the_same(some: Tables, others: Tables) -> bool:
    """Bit for bit."""
    return some.keys() == others.keys() and all(table.equals(others[name]) for name, table in some.items())

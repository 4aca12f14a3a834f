"""One engine for settings × texts: a model reads the same texts under every setting, whose cost is the change of loss.

`quantize`, `kv-plan`, `doctor --dtype`, `intervene` and streaming run their settings here.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from rich.console import Console

from sinkscope.attention.seam import open_seam
from sinkscope.errors import counted, was_interrupted
from sinkscope.interventions.intervention import UntouchedError
from sinkscope.measuring.console import lasting, print_line
from sinkscope.measuring.observables.observable import Observable
from sinkscope.measuring.passes import Pass, ProgressBar, pass_over, progress, tables_of
from sinkscope.measuring.subject import Subject
from sinkscope.measuring.tracer import Tracer, logits_of, model_inputs
from sinkscope.models.edits import Beginning, run_to_layer
from sinkscope.results.statistics import resamplings_of
from sinkscope.text.batch import Batch
from sinkscope.text.inputs import TokenInputs

FEW = 2  # sequences on which starting at a later layer is tried
LONG_RUN = 60.0  # seconds from which a line says how long the passes take

TablesByName = Mapping[str, pd.DataFrame]
# reads a batch by what a setting has opened, for example a tracer; returns a value, (B,), or values, (B,…), of each
# sequence, such as its loss summed over predicted tokens; None if it has none
ReadBatch = Callable[[Any, Batch, Sequence[Observable]], torch.Tensor | None]


@dataclass(frozen=True)
class Setting:
    """A change of the model, and what is read under it."""

    open: Callable[[Beginning | None], AbstractContextManager[Any]]  # changes the model until the end of a block
    read: ReadBatch = Tracer.forward_with_loss
    layer: int = 0  # the first layer that it changes
    observables: Callable[[], list[Observable]] = list  # creates those of one pass
    inputs: TokenInputs | None = None  # the text that is read under it, if not the subject's; as many sequences


def run_settings(
    subject: Subject,
    settings: Sequence[Setting],
    *,
    kernel: str = "sdpa",
    batch_size: int | Literal["auto"] = "auto",
    backward: bool = False,
    console: Console | None = None,
    unchanged: Callable[[], TablesByName] | None = None,
    by_batch: bool | None = None,
) -> list[Pass]:
    """Read the subject's texts under every setting, in one pass over all batches each. Returns a pass for each.

    Settings that all begin at a later layer are read together, batch by batch, and the earlier layers run once for each
    batch, provided that a trial on FEW sequences gives bit for bit the results of a complete pass.

    Args:
        kernel: The attention kernel of the layers before a later beginning.
        backward: Whether `read` computes gradients.
        unchanged: Makes the unchanged model's tables on `first_few` the subject, which a trial of observables needs.
        by_batch: Whether every batch is read under all settings, in the order of their first layers, before the next
            batch, so that outputs can be compared with those of the first setting; None: if it saves layers.

    Raises:
        UntouchedError: no batch had the positions of a setting.
    """
    if not settings:
        return []
    how: dict[str, Any] = {"kernel": kernel, "batch_size": batch_size, "backward": backward, "console": console}
    if by_batch is None:
        latest = max(settings, key=lambda setting: setting.layer)
        begins_later = all(setting.layer > 0 and setting.inputs is None for setting in settings)
        begins_later = begins_later and subject.family.causal and not backward
        by_batch = begins_later and _resumes(subject, latest, unchanged, how)
    model, inputs = subject.loaded.model, subject.inputs
    total = sum(len(setting.inputs or inputs) for setting in settings)

    def announce(seconds: float) -> None:
        if console is not None and seconds > LONG_RUN:
            what = f"{counted(len(inputs), 'sequence')} under {counted(len(settings), 'setting')}"
            print_line(console, f"{what}: about {lasting(seconds)} left")

    passes: list[Pass] = []
    with progress(console, model, total, backward, len(settings) if by_batch else 1) as bars:
        if by_batch:
            return _by_batch(subject, settings, bars, announce, how)
        for setting in settings:
            start = time.monotonic()
            with setting.open(None) as opened:
                read, texts = partial(setting.read, opened), setting.inputs or inputs
                done = pass_over(model, texts, setting.observables, read, batch_size, backward, console, bars=bars)
            if not passes:
                announce((time.monotonic() - start) * (len(settings) - 1))
            passes.append(done)
            batch_size = done.batch_size
    return passes


def _by_batch(
    subject: Subject,
    settings: Sequence[Setting],
    bars: Sequence[ProgressBar],
    announce: Callable[[float], None],
    how: Mapping[str, Any],
) -> list[Pass]:
    """Read each batch under all settings; see `run_settings`."""
    model, family = subject.loaded.model, subject.family
    order = sorted(range(len(settings)), key=lambda index: settings[index].layer)
    observables: list[list[Observable]] = []  # by setting, like `untouched`
    untouched: list[list[UntouchedError]] = []
    batches = 0

    def fresh() -> list[Observable]:
        nonlocal batches
        batches = 0
        observables[:] = [setting.observables() for setting in settings]
        untouched[:] = [[] for _ in settings]
        return [observable for group in observables for observable in group]

    def read(batch: Batch, _: Sequence[Observable]) -> torch.Tensor | None:
        """Return the values of one batch under each setting, (B,settings,…), if there are any."""
        nonlocal batches
        batches += 1
        beginning: Beginning | None = None
        values: dict[int, torch.Tensor] = {}
        for index in order:
            setting = settings[index]
            if setting.layer > (beginning.layer if beginning else 0):  # run the unchanged model up to this layer
                inputs = model_inputs(model, batch, False, family.first_position)
                with open_seam(model, family, how["kernel"]):
                    beginning = run_to_layer(setting.layer, model, family.layer_modules(model), inputs, beginning)
            try:
                with setting.open(beginning) as opened:
                    value = setting.read(opened, batch, [*observables[index], *bars])
                    if value is not None:
                        values[index] = value
            except UntouchedError as error:  # reported at the end, since another batch may have the position
                untouched[index].append(error)
        return torch.stack([values[index] for index in sorted(values)], dim=1) if values else None

    sizes = how["batch_size"], how["backward"], how["console"]
    done = pass_over(model, subject.inputs, fresh, read, *sizes, announce, bars)
    for errors in untouched:
        if errors and len(errors) == batches:
            raise errors[0]
    values = done.losses.unbind(1) if done.losses.dim() > 1 else [done.losses] * len(settings)
    return [
        replace(done, observables=group, losses=value, first=setting.layer)
        for group, value, setting in zip(observables, values, settings, strict=True)
    ]


def logits_on(subject: Subject, batch: Batch) -> torch.Tensor:
    """Return the logits (B,T,V) of the model as it is now on a batch."""
    model = subject.loaded.model
    return logits_of(model(**model_inputs(model, batch, True, subject.family.first_position)))


def first_few(subject: Subject) -> Subject:
    return replace(subject, inputs=subject.inputs.part(0, FEW))


def _resumes(
    subject: Subject, setting: Setting, unchanged: Callable[[], TablesByName] | None, how: Mapping[str, Any]
) -> bool:
    """Return whether a setting that is read from its first layer on has bit for bit the results of a complete pass.

    It is tried on `first_few` the sequences. The setting is read twice and the second pass compared, because the first
    must not leave a trace in the model. The tables of the unchanged model fill in what a pass over some layers lacks.
    """
    few = first_few(subject)
    try:
        resumed = run_settings(few, [setting, setting], by_batch=True, **how)[-1]
    except Exception as error:  # layers may share state, for example; a complete pass works or reports the error
        if was_interrupted(error):
            raise
        return False
    (whole,) = run_settings(few, [setting], by_batch=False, **how)
    tables = tables_of(resumed.observables)
    if unchanged is not None:
        tables = completed(tables, setting.layer, unchanged())
    return tables_equal(tables, tables_of(whole.observables)) and torch.equal(resumed.losses, whole.losses)


def completed(tables: TablesByName, layer: int, unchanged: TablesByName) -> dict[str, pd.DataFrame]:
    """Complete tables of the layers from `layer` on by the rows of earlier layers from the unchanged model."""
    return {
        name: pd.concat([unchanged[name][unchanged[name]["layer"] < layer], table], ignore_index=True)
        for name, table in tables.items()
    }


def tables_equal(some: TablesByName, others: TablesByName) -> bool:
    """Return whether the tables are equal bit for bit."""
    return some.keys() == others.keys() and all(table.equals(others[name]) for name, table in some.items())


def resampled_cost(
    losses: np.ndarray, base: np.ndarray, predicted: Sequence[int] | np.ndarray, texts: Sequence[int]
) -> np.ndarray:
    """Return (1 + draws,) replicates of a cost in nats per token, from losses (N,) under a setting and without it.

    Args:
        losses, base: of each sequence, summed over its `predicted` tokens (N,).
        texts: The number of each sequence's text: copies of one are drawn together.
    """
    weights = resamplings_of(texts)
    with np.errstate(invalid="ignore", divide="ignore"):  # a single text has no interval
        return (weights @ (losses - base)) / (weights @ np.array(predicted))

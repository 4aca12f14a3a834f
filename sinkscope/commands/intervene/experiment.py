"""An experiment measures the unchanged model, then every arm and its random controls, by the same code."""

import math
from collections import defaultdict
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import pandas as pd
import torch
from rich.console import Console

from sinkscope.attention.kernels import upcast
from sinkscope.errors import InputError, SinkscopeError, described, was_interrupted
from sinkscope.interventions import Known, Target
from sinkscope.interventions.intervention import Stack, expectation, random_controls
from sinkscope.interventions.sink import ReadValues
from sinkscope.measuring.console import print_part
from sinkscope.measuring.engine import ReadBatch, Setting, completed, first_few, run_settings
from sinkscope.measuring.measure import choose, prepared, publish, settings_of
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.observable import Means, Observable, Reading, Settings
from sinkscope.measuring.parity import parity_check
from sinkscope.measuring.passes import LOSS_TABLES, Pass, first_size, tables_of
from sinkscope.measuring.streaming import measure_streaming
from sinkscope.measuring.subject import Subject
from sinkscope.measuring.summary import arm_metrics, with_next
from sinkscope.measuring.tracer import Tracer, open_tracer
from sinkscope.options.measuring import ALWAYS, RunConfig
from sinkscope.results.run import BEFORE, RunData
from sinkscope.retrofits.retrofit import registers_before
from sinkscope.text.batch import Batch

MEAN_MAPS = "mean-maps"  # measured for every arm, and for the first draw of its controls
CONTROL_TABLES = ("attention", "attention_by_sequence", "loss_by_sequence", "arm_maps")
ANALYZED_ONLY = ("attention_heads_by_sequence",)  # tables that arms do not keep


class MeanAt(Observable):
    """The mean at one position of every layer's output, for mean-massive, or of its values, for mean-sink-value."""

    sites = ("layer_out",)

    def __init__(self, position: int, of_values: bool) -> None:
        super().__init__(Settings())
        self.position = position
        self.of_values = of_values  # not a site: `ReadValues` reads them
        self.mean = Means()

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        if not self.of_values:
            self.take(layer, batch.tokens_at(reading.tensor, self.position + 1)[:, self.position])

    def take(self, layer: int, x: torch.Tensor) -> None:
        """Add x (n,D) of the n sequences of a batch that have the position."""
        self.mean.add({"mean": upcast(x)}, layer=layer)


class MeasuredArm(NamedTuple):
    """The measurements of the model under one stack of interventions."""

    tables: dict[str, pd.DataFrame]  # raw tables of the observables
    loss: float  # per predicted token; NaN where none was computed


@dataclass
class Experiment:
    """Measures the arms of one model on one input and collects their tables."""

    subject: Subject
    config: RunConfig
    wanted: Mapping[str, Stack]  # label of each arm → its interventions, applied in this order
    draws: int  # number of random controls of each arm
    lenient: bool  # skip arms that do not apply and record the reason, instead of raising InputError
    console: Console
    without_controls: Container[str] = ()  # labels
    without_loss: Container[str] = ()  # labels of arms, or BEFORE, whose logits are not computed
    # A run of the same subject with the same settings, which replaces measuring the unchanged model if it has all
    # tables. It has no mean maps, and the arms then have none either.
    analyzed: RunData | None = None
    records: dict[str, dict[str, Any]] = field(default_factory=dict)  # label → its entry in the manifest
    skipped: dict[str, str] = field(default_factory=dict)  # label → why it does not apply
    errors: dict[str, Exception] = field(default_factory=dict)  # label → the error with which it failed
    interrupt: BaseException | None = None  # an interrupt after at least one finished arm
    batch_size: int = 0  # a size that fitted into memory
    parity_error: float | None = None  # parity error of the unchanged model
    notices: dict[str, None] = field(default_factory=dict)  # notices for the user, in order
    _parts: dict[str, list[pd.DataFrame]] = field(default_factory=lambda: defaultdict(list))
    _means: dict[tuple[int, bool], dict[int, torch.Tensor]] = field(default_factory=dict)  # (position, of values)

    def run(self) -> dict[str, pd.DataFrame]:
        """Measure the unchanged model, then every arm and its controls. Returns tables with the arm as `condition`.

        The results of an arm that fails are discarded, and the other arms are kept.

        Raises InputError if an arm does not apply or names something that the model does not have, and the first error
        if all arms failed (see `failed` for the others). KeyboardInterrupt is raised only before the first arm is
        finished; a later one is stored in `interrupt`.
        """
        resolved = self.resolved()
        for number, (label, stack) in enumerate(resolved.items(), 1):
            print_part(self.console, label, number, len(resolved))
            before = {name: len(parts) for name, parts in self._parts.items()}
            try:
                self._measure(label, stack)
            except BaseException as error:
                self.records.pop(label, None)
                for name, parts in self._parts.items():
                    del parts[before.get(name, 0) :]
                if was_interrupted(error) and self.records:
                    self.interrupt = error
                    break
                if was_interrupted(error) or not isinstance(error, Exception):
                    raise
                if self.lenient and isinstance(error, InputError):  # it would change nothing
                    self.skipped[label] = str(error).removeprefix(f"{label}: ")
                else:
                    self.errors[label] = error
        if self.errors and not self.records:
            raise next(iter(self.errors.values()))
        return {name: pd.concat(parts, ignore_index=True) for name, parts in self._parts.items() if parts}

    def resolved(self) -> dict[str, Stack]:
        """Measure the unchanged model, and decide the open parameters of every arm.

        Raises InputError if an arm does not apply or names something that the model does not have.
        """
        subject, model, family = self.subject, self.subject.loaded.model, self.subject.family
        lengths = [len(ids) + registers_before(model) for ids in subject.inputs.sequences]
        self.wanted = {arm: tuple(one.from_the_start(lengths) for one in stack) for arm, stack in self.wanted.items()}
        known = self.known = Known(Target(model, family, seams={}), min(lengths))
        if unread := family.without_attention:
            name = subject.loaded.name
            raise InputError(f"the effect of interventions on sinks cannot be measured on {name}: {unread}")
        for label, stack in self.wanted.items():
            reasons = [reason for part in stack if (reason := part.inapplicable(known.target))]
            if reasons and not self.lenient:
                raise InputError(f"{label} does not apply to {subject.loaded.name}: {reasons[0]}")
            if reasons:
                self.skipped[label] = reasons[0]
                continue
            for part in () if self.lenient else stack:  # below, they are skipped
                part.check(known.target, known.length)
        if BEFORE not in self.without_loss:
            subject.need_loss()
        observables = self.config.observables or ()
        named = [name for name in observables if not OBSERVABLES[name].by_default and name != MEAN_MAPS]
        needed = LOSS_TABLES.keys() | {table for name in named for table in OBSERVABLES[name].columns}
        if self.analyzed and not (needed <= set(self.analyzed.tables) and max(self._watched()) < self.config.positions):
            self.analyzed = None
        for name in observables:
            if OBSERVABLES[name].after:
                raise InputError(f"--observables {name} does not apply: it is measured on one model, not on arms")
        self.chosen = choose(subject, self.config)
        if self.analyzed is not None:
            self.chosen = replace(self.chosen, first=tuple(name for name in self.chosen.first if name != MEAN_MAPS))
        if any(stack[0].measured_by == "pass" for stack in self.wanted.values()):
            if self.analyzed is None:
                check = parity_check(subject, self.config, self.chosen.backward)
                step = self._step(BEFORE not in self.without_loss)
                done = self._pass((), lambda: [*self._fresh(-1), *check.fresh()], step)
                self.parity_error = check.error
                self.before = self._arm(BEFORE, -1, done)
            else:
                self.before = self._reuse_run(self.analyzed)
            known.tables, known.means = dict(self.before.tables), self._mean
            # what interventions read, unless it is measured anyway
            read = dict.fromkeys(name for stack in self.wanted.values() for part in stack for name in part.reads)
            names = [name for name in read if name not in self.chosen.first]
            names = [name for name in names if OBSERVABLES[name].inapplicable(model, family) is None]
            if names:
                settings = settings_of(subject, self.config)
                done = self._pass((), lambda: prepared(names, settings, subject), Tracer.forward)
                self._collect(tables := tables_of(done.observables), BEFORE)
                known.tables |= tables
        resolved: dict[str, Stack] = {}
        for label, stack in self.wanted.items():
            if label in self.skipped:
                continue
            try:
                decided = tuple(part.resolved(known) for part in stack)
                for part in decided:
                    part.check(known.target, known.length)
                resolved[label] = decided
            except InputError as error:
                if not self.lenient:
                    raise
                self.skipped[label] = str(error).removeprefix(f"{label}: ")
        return resolved

    @property
    def failed(self) -> dict[str, str]:
        """Label → the reason why its measurement failed or did not start."""
        reasons = {
            label: str(error) if isinstance(error, SinkscopeError) else described(error)
            for label, error in self.errors.items()
        }
        if self.interrupt is not None:
            ended = {*self.records, *self.errors, *self.skipped}
            reasons |= {label: "interrupted" for label in self.wanted if label not in ended}
        return reasons

    def _watched(self) -> set[int]:
        watched = [part.watched for stack in self.wanted.values() for part in stack if part.watched]
        return {0, *(position for positions in watched for position in with_next(positions))}

    def _reuse_run(self, run: RunData) -> MeasuredArm:
        """Take the unchanged model's tables and loss from a run instead of measuring them."""
        self.parity_error = run.manifest["parity"]
        wanted = {name for chosen in self.chosen.first for name in OBSERVABLES[chosen].columns} | LOSS_TABLES.keys()
        tables = {name: run.tables[name] for name in run.tables if name in wanted - {*ANALYZED_ONLY}}
        for name, table in tables.items():
            self._parts[name].append(table.assign(condition=BEFORE))
        by_sequence = tables["loss_by_sequence"]
        loss = by_sequence["loss"] @ by_sequence["predicted"] / self.subject.inputs.num_predicted
        return MeasuredArm(tables, float(loss))

    def _measure(self, label: str, stack: Stack) -> None:
        """Measure an arm and its controls, each in one pass of the tracer; a streaming arm by perplexity only."""
        subject, target, asked = self.subject, self.known.target, self.wanted[label]
        alone = len(stack) == 1  # no paper has expectations for a stack of several interventions
        controls: list[Stack] = []
        if stack[0].measured_by == "pass" and label not in self.without_controls:
            controls = random_controls(stack, self.known, self.config.seed, self.draws)
        record = self.records[label] = {
            "asked": [str(part) for part in asked],
            "do": [str(part) for part in stack],
            "paper": asked[0].paper if alone else "",
            "expects": expectation(asked[0], target) if alone else "",
            "watched": list(dict.fromkeys(position for part in stack for position in part.watched)),
            "controls": [[str(part) for part in control] for control in controls],
        }
        if stack[0].measured_by == "streaming":  # measured with every size of the cache
            caches = stack[0].model_dump()
            size = self.batch_size or first_size(subject.inputs, subject.loaded.model, self.config.batch_size)
            self._collect(measure_streaming(subject, caches["window"], caches["keep"], size), label)
            return
        stacks = [stack, *controls]
        conditions = [(label, -1), *((f"{label} control {draw}", draw) for draw in range(len(controls)))]
        # layers before the first that is changed are unaffected, which is tried: then all stacks are measured together
        layer = min(part.begins_at(target) for each in stacks for part in each)
        read = self._step(label not in self.without_loss)
        settings = [
            self._setting(each, partial(self._fresh, draw), read, layer)
            for each, (_, draw) in zip(stacks, conditions, strict=True)
        ]
        by_batch = None if self.analyzed is None else False
        done = run_settings(subject, settings, unchanged=lambda: self._on_few, by_batch=by_batch, **self._options)
        measured = [self._arm(*condition, one) for condition, one in zip(conditions, done, strict=True)]
        window = settings_of(subject, self.config).window
        effects = [
            arm_metrics(arm.tables, record["watched"], arm.loss, window).assign(arm=name, draw=draw)
            for name, draw, arm in (
                (BEFORE, -1, self.before), ("after", -1, measured[0]),
                *(("control", draw, arm) for draw, arm in enumerate(measured[1:])),
            )
        ]  # fmt: skip
        self._collect({"effect": pd.concat(effects, ignore_index=True).assign(name=" ".join(record["do"]))}, label)

    @cached_property
    def _on_few(self) -> dict[str, pd.DataFrame]:
        """The unchanged model's tables on the sequences on which `resumes` tries every arm."""
        unchanged = self._setting((), partial(self._fresh, -1), self._step(False))
        return tables_of(run_settings(first_few(self.subject), [unchanged], **self._options)[0].observables)

    def _setting(self, stack: Stack, make: Callable[[], list[Observable]], read: ReadBatch, layer: int = 0) -> Setting:
        opened = partial(open_tracer, self.subject.loaded.model, self.subject.family, self.config.attn, stack)
        return Setting(opened, read, layer, make)

    def _fresh(self, draw: int) -> list[Observable]:
        """Create the observables of an arm (draw -1) or of a control (a draw from 0 on)."""
        names = [name for name in self.chosen.first if draw < 1 or name != MEAN_MAPS]
        return prepared(names, settings_of(self.subject, self.config, max(self._watched()) + 1), self.subject)

    def _step(self, with_loss: bool) -> ReadBatch:
        if self.chosen.backward:
            return Tracer.forward_backward
        return Tracer.forward_with_loss if with_loss else Tracer.forward

    def _arm(self, condition: str, draw: int, done: Pass) -> MeasuredArm:
        """Collect the tables of a pass under `condition`; layers that the pass skipped get the unchanged model's rows.

        `draw` is the number of the control; -1: no control.
        """
        self.batch_size = done.batch_size
        raw = tables_of(done.observables)
        raw = completed(raw, done.first, self.before.tables) if done.first else raw
        raw |= done.loss_tables(self.subject.inputs)
        asked = (table for name in self.chosen.first if name not in ALWAYS for table in OBSERVABLES[name].columns)
        names = raw.keys() - ANALYZED_ONLY if draw < 0 else {*CONTROL_TABLES, *asked}
        collected = {name: table for name, table in raw.items() if name in names}
        if draw >= 0:  # there are many controls, and effects are only read at these positions
            by_sequence = raw["attention_by_sequence"]
            collected["attention_by_sequence"] = by_sequence[by_sequence["position"].isin(self._watched())]
        self.notices |= dict.fromkeys(notice for observable in done.observables for notice in observable.notices())
        self._collect(collected, condition)
        return MeasuredArm(raw, done.loss / self.subject.inputs.num_predicted if len(done.losses) else math.nan)

    def _mean(self, layer: int, position: int, of_values: bool = False) -> torch.Tensor:
        """Return the unchanged model's mean at a position: a layer's output (D,), or its values (heads · d,)."""
        if (position, of_values) not in self._means:
            latest: list[MeanAt] = []  # replaced when the pass starts again with a smaller batch

            def fresh() -> list[Observable]:
                latest[:] = [MeanAt(position, of_values)]
                return list(latest)

            read = ReadValues(positions=(position,), seen=lambda layer, x: latest[0].take(layer, x))
            self._pass((read,) if of_values else (), fresh, Tracer.forward)
            by_layer = {labels["layer"]: torch.from_numpy(means["mean"]) for labels, means in latest[0].mean}
            self._means[position, of_values] = by_layer
        return self._means[position, of_values][layer]

    def _pass(self, stack: Stack, make: Callable[[], list[Observable]], read: ReadBatch) -> Pass:
        return run_settings(self.subject, [self._setting(stack, make, read)], **self._options)[0]

    @property
    def _options(self) -> dict[str, Any]:
        """How settings are run; a batch size that fitted is used again."""
        size = self.batch_size or self.config.batch_size
        return {
            "kernel": self.config.attn, "batch_size": size, "backward": self.chosen.backward, "console": self.console
        }  # fmt: skip

    def _collect(self, raw: Mapping[str, pd.DataFrame], condition: str) -> None:
        for name, table in publish(raw, self.subject.loaded, condition).items():
            self._parts[name].append(table)

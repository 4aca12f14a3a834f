"""An experiment measures the unchanged model, then every arm and its random controls, by the same code."""

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import pandas as pd
import torch
from rich.console import Console

from sinkscope.attention.kernels import upcast
from sinkscope.errors import InputError, SinkscopeError, described, was_interrupted
from sinkscope.interventions import Known, Target
from sinkscope.interventions.intervention import Stack, expectation, random_controls
from sinkscope.interventions.sink import ReadValues
from sinkscope.measuring.console import print_part
from sinkscope.measuring.engine import Read, Setting, completed, few_of, run_settings
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
from sinkscope.text.batch import Batch

Condition = tuple[str, int]  # its name in the tables, and the number of the control; -1: no control

MAPS = "mean-maps"  # measured for every arm, and for the first draw of its controls
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

    def by_layer(self) -> dict[int, torch.Tensor]:
        return {labels["layer"]: torch.from_numpy(means["mean"]) for labels, means in self.mean}


@dataclass(frozen=True)
class Arm:
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
    parity_error: float | None = None  # for the unchanged model
    notices: dict[str, None] = field(default_factory=dict)  # notices for the user, in order
    _parts: dict[str, list[pd.DataFrame]] = field(default_factory=lambda: defaultdict(list))
    _means: dict[tuple[int, bool], dict[int, torch.Tensor]] = field(default_factory=dict)  # by position, of values

    def run(self) -> dict[str, pd.DataFrame]:
        """Measure the unchanged model, then every arm and its controls. Returns tables with the arm as `condition`.

        Raises InputError if an arm does not apply or names something that the model does not have, and the first error
        if all arms failed (see `failed` for the others). KeyboardInterrupt is raised only before the first arm is
        finished; a later one is stored in `interrupt`.
        """
        resolved = self.resolved()
        for number, (label, stack) in enumerate(resolved.items(), 1):
            print_part(self.console, label, number, len(resolved))
            measure = self._by_streaming if stack[0].measured_by == "streaming" else self._by_pass
            try:
                with self._isolated_failure(label):
                    measure(label, stack, self.known)
            except BaseException as error:
                if not (self.records and was_interrupted(error)):
                    raise
                self.interrupt = error
                break
        if self.errors and not self.records:
            raise next(iter(self.errors.values()))
        return {name: pd.concat(parts, ignore_index=True) for name, parts in self._parts.items() if parts}

    def resolved(self) -> dict[str, Stack]:
        """Measure the unchanged model, and decide the open parameters of every arm.

        Raises InputError if an arm does not apply or names something that the model does not have.
        """
        length = min(len(ids) for ids in self.subject.inputs.sequences)
        known = self.known = Known(Target(self.subject.loaded.model, self.subject.family, seams={}), length)
        self._check_arms(known)
        if BEFORE not in self.without_loss:
            self.subject.need_loss()
        named = [name for name in self.config.observables or () if not OBSERVABLES[name].by_default and name != MAPS]
        needed = LOSS_TABLES.keys() | {table for name in named for table in OBSERVABLES[name].columns}
        if self.analyzed and not (needed <= set(self.analyzed.tables) and max(self._watched()) < self.config.positions):
            self.analyzed = None
        closer = next((name for name in self.config.observables or () if OBSERVABLES[name].after), None)
        if closer is not None:
            raise InputError(f"--observables {closer} does not apply: it is measured on one model, not on arms")
        self.chosen = choose(self.subject, self.config)
        if self.analyzed is not None:
            self.chosen = replace(self.chosen, first=tuple(name for name in self.chosen.first if name != MAPS))
        if any(stack[0].measured_by == "pass" for stack in self.wanted.values()):
            self.before = self._measured_before() if self.analyzed is None else self._taken_from(self.analyzed)
            known.tables, known.hidden_means = {**self.before.tables, **self._read_before()}, self._mean
            known.value_means = partial(self._mean, of_values=True)
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
            settled = {*self.records, *self.errors, *self.skipped}
            reasons |= {label: "interrupted" for label in self.wanted if label not in settled}
        return reasons

    def _check_arms(self, known: Known) -> None:
        """Check, before anything is measured, that every arm applies and that its layers and heads exist."""
        if unread := self.subject.family.without_attention:
            name = self.subject.loaded.name
            raise InputError(f"the effect of interventions on sinks cannot be measured on {name}: {unread}")
        for label, stack in self.wanted.items():
            reasons = [reason for part in stack if (reason := part.inapplicable(known.target))]
            if reasons and not self.lenient:
                raise InputError(f"{label} does not apply to {self.subject.loaded.name}: {reasons[0]}")
            if reasons:
                self.skipped[label] = reasons[0]
                continue
            for part in stack:
                part.check(known.target, known.length)

    def _watched(self) -> set[int]:
        watched = [part.watched for wanted in self.wanted.values() for part in wanted if part.watched]
        return {0, *(position for positions in watched for position in with_next(positions))}

    def _measured_before(self) -> Arm:
        check = parity_check(self.subject, self.config, self.chosen.backward)
        asked = sorted({at for stack in self.wanted.values() for part in stack for at in part.reads_means})

        def fresh() -> list[Observable]:
            return [*self._fresh(-1), *(MeanAt(position, of_values=False) for position in asked), *check.fresh()]

        done = self._pass((), fresh, self._step(BEFORE not in self.without_loss))
        self.parity_error = check.error
        self._means |= {(one.position, False): one.by_layer() for one in done.observables if isinstance(one, MeanAt)}
        return self._arm(BEFORE, -1, done)

    def _read_before(self) -> dict[str, pd.DataFrame]:
        """Measure on the unchanged model what interventions read, unless it is measured anyway."""
        read = dict.fromkeys(name for stack in self.wanted.values() for part in stack for name in part.reads)
        model, family = self.subject.loaded.model, self.subject.family
        names = [name for name in read if name not in self.chosen.first]
        names = [name for name in names if OBSERVABLES[name].inapplicable(model, family) is None]
        if not names:
            return {}
        settings = settings_of(self.subject, self.config)
        done = self._pass((), lambda: prepared(names, settings, self.subject), Tracer.forward)
        self._collect(tables := tables_of(done.observables), BEFORE)
        return tables

    def _taken_from(self, run: RunData) -> Arm:
        """Take the unchanged model's tables and loss from a run instead of measuring them."""
        self.parity_error = run.manifest["parity"]
        wanted = {name for chosen in self.chosen.first for name in OBSERVABLES[chosen].columns} | LOSS_TABLES.keys()
        tables = {name: run.tables[name] for name in run.tables if name in wanted - {*ANALYZED_ONLY}}
        for name, table in tables.items():
            self._parts[name].append(table.assign(condition=BEFORE))
        by_sequence = tables["loss_by_sequence"]
        loss = by_sequence["loss"] @ by_sequence["predicted"] / self.subject.inputs.num_predicted
        return Arm(tables, float(loss))

    @contextmanager
    def _isolated_failure(self, label: str) -> Iterator[None]:
        """Discard the results of an arm that fails, and keep the other arms."""
        kept = {name: len(parts) for name, parts in self._parts.items()}
        try:
            yield
        except BaseException as error:
            self.records.pop(label, None)
            for name, parts in self._parts.items():
                del parts[kept.get(name, 0) :]
            if was_interrupted(error) or not isinstance(error, Exception):
                raise
            if self.lenient and isinstance(error, InputError):  # it would change nothing
                self.skipped[label] = str(error).removeprefix(f"{label}: ")
            else:
                self.errors[label] = error

    def _record(self, label: str, resolved: Stack, target: Target) -> dict[str, Any]:
        """Return an arm's entry in the manifest. No paper has expectations for a stack of several interventions."""
        alone = len(resolved) == 1
        return {
            "asked": [str(part) for part in self.wanted[label]],
            "do": [str(part) for part in resolved],
            "paper": self.wanted[label][0].paper if alone else "",
            "expects": expectation(self.wanted[label][0], target) if alone else "",
            "watched": list(dict.fromkeys(position for part in resolved for position in part.watched)),
            "controls": [],
        }

    def _by_pass(self, label: str, resolved: Stack, known: Known) -> None:
        """Measure an arm and its controls, each in one pass of the tracer."""
        record = self.records[label] = self._record(label, resolved, known.target)
        draws = 0 if label in self.without_controls else self.draws
        controls = random_controls(resolved, known, self.config.seed, draws)
        record["controls"] = [[str(part) for part in control] for control in controls]
        stacks = {(label, -1): resolved}
        stacks |= {(f"{label} control {draw}", draw): control for draw, control in enumerate(controls)}
        measured = self._each_measured(stacks, known.target, label not in self.without_loss)
        arms = [(BEFORE, -1, self.before)]
        arms += [
            ("after" if draw < 0 else "control", draw, arm) for (_, draw), arm in zip(stacks, measured, strict=True)
        ]
        window = settings_of(self.subject, self.config).window
        effects = [
            arm_metrics(arm.tables, record["watched"], arm.loss, window).assign(arm=name, draw=draw)
            for name, draw, arm in arms
        ]
        self._collect({"effect": pd.concat(effects, ignore_index=True).assign(name=" ".join(record["do"]))}, label)

    def _by_streaming(self, label: str, resolved: Stack, known: Known) -> None:
        """Measure the perplexity of the text with every size of the cache."""
        subject, (part,) = self.subject, resolved  # such an arm has one part only (see `wanted_arms`)
        caches = part.model_dump()
        size = self.batch_size or first_size(subject.inputs, subject.loaded.model, self.config.batch_size)
        tables = measure_streaming(subject, caches["window"], caches["keep"], size)
        self._collect(tables, label)
        self.records[label] = self._record(label, resolved, known.target)

    def _each_measured(self, stacks: Mapping[Condition, Stack], target: Target, with_loss: bool) -> list[Arm]:
        """Measure an arm and its controls together from the first layer that any of them changes, or one by one."""
        layer = min(part.begins_at(target) for stack in stacks.values() for part in stack)
        settings = [
            self._setting(stack, partial(self._fresh, draw), self._step(with_loss), layer)
            for (_, draw), stack in stacks.items()
        ]
        # layers before the first that is changed are unaffected, which is tried
        by_batch = None if self.analyzed is None else False
        done = run_settings(self.subject, settings, unchanged=lambda: self._few, by_batch=by_batch, **self._how)
        return [self._arm(*condition, one) for condition, one in zip(stacks, done, strict=True)]

    @cached_property
    def _few(self) -> dict[str, pd.DataFrame]:
        """The unchanged model's tables on the sequences on which `resumes` tries every arm."""
        unchanged = self._setting((), partial(self._fresh, -1), self._step(False))
        return tables_of(run_settings(few_of(self.subject), [unchanged], **self._how)[0].observables)

    def _setting(self, stack: Stack, make: Callable[[], list[Observable]], read: Read, layer: int = 0) -> Setting:
        opened = partial(open_tracer, self.subject.loaded.model, self.subject.family, self.config.attn, stack)
        return Setting(opened, read, layer, make)

    def _fresh(self, draw: int) -> list[Observable]:
        """Create the observables of an arm (draw -1) or of a control (a draw from 0 on)."""
        names = [name for name in self.chosen.first if draw < 1 or name != MAPS]
        return prepared(names, settings_of(self.subject, self.config, max(self._watched()) + 1), self.subject)

    def _step(self, with_loss: bool) -> Read:
        if self.chosen.backward:
            return Tracer.forward_backward
        return Tracer.forward_with_loss if with_loss else Tracer.forward

    def _arm(self, condition: str, draw: int, done: Pass) -> Arm:
        """Collect the tables of a pass under `condition`; layers that it left out have the unchanged model's rows."""
        self.batch_size = done.batch_size
        raw = tables_of(done.observables)
        raw = completed(raw, done.first, self.before.tables) if done.first else raw
        raw |= done.loss_tables(self.subject.inputs)
        asked = (table for name in self.chosen.first if name not in ALWAYS for table in OBSERVABLES[name].columns)
        kept = raw.keys() - ANALYZED_ONLY if draw < 0 else {*CONTROL_TABLES, *asked}
        collected = {name: table for name, table in raw.items() if name in kept}
        if draw >= 0:  # there are many controls, and effects are only read at these positions
            by_sequence = raw["attention_by_sequence"]
            collected["attention_by_sequence"] = by_sequence[by_sequence["position"].isin(self._watched())]
        self.notices |= dict.fromkeys(notice for observable in done.observables for notice in observable.notices())
        self._collect(collected, condition)
        return Arm(raw, done.loss / self.subject.inputs.num_predicted if len(done.losses) else math.nan)

    def _mean(self, layer: int, position: int, of_values: bool = False) -> torch.Tensor:
        """Return the unchanged model's mean at a position: a layer's output (D,), or its values (heads · d,)."""
        if (position, of_values) not in self._means:
            latest: list[MeanAt] = []  # replaced when the pass starts again with a smaller batch

            def fresh() -> list[Observable]:
                latest[:] = [MeanAt(position, of_values)]
                return list(latest)

            read = ReadValues(positions=(position,), seen=lambda layer, x: latest[0].take(layer, x))
            self._pass((read,) if of_values else (), fresh, Tracer.forward)
            self._means[position, of_values] = latest[0].by_layer()
        return self._means[position, of_values][layer]

    def _pass(self, stack: Stack, make: Callable[[], list[Observable]], read: Read) -> Pass:
        return run_settings(self.subject, [self._setting(stack, make, read)], **self._how)[0]

    @property
    def _how(self) -> dict[str, Any]:
        """How settings are run; a batch size that fitted is used again."""
        size = self.batch_size or self.config.batch_size
        return {
            "kernel": self.config.attn, "batch_size": size, "backward": self.chosen.backward, "console": self.console
        }  # fmt: skip

    def _collect(self, raw: Mapping[str, pd.DataFrame], condition: str) -> None:
        for name, table in publish(raw, self.subject.loaded, condition).items():
            self._parts[name].append(table)

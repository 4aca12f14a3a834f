"""An experiment: the model as it is, then every arm and its random controls, measured by the same code."""

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal

import pandas as pd
import torch
from rich.console import Console

from sinkscope.attention.kernels import upcast
from sinkscope.errors import InputError, SinkscopeError, described, was_interrupted
from sinkscope.interventions import Known, Target
from sinkscope.interventions.intervention import Stack, expectation, random_controls
from sinkscope.interventions.sink_value import ReadValues
from sinkscope.measuring.console import print_part
from sinkscope.measuring.measure import Chosen, choose, prepared, settings_of, tables_of
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.observable import NO_ATTENTION, Mean, Observable, Reading, Settings
from sinkscope.measuring.parity import parity_check
from sinkscope.measuring.passes import LOSS_TABLES, Kind, Pass, first_size, pass_over
from sinkscope.measuring.resumed import FEW, Change, Resumed, are_the_same, completed, tried
from sinkscope.measuring.streaming import measure_streaming
from sinkscope.measuring.subject import Subject
from sinkscope.measuring.summary import arm_metrics
from sinkscope.measuring.tables import publish
from sinkscope.measuring.tracer import Tracer, open_tracer
from sinkscope.options.measuring import ALWAYS, RunConfig
from sinkscope.results.run import RunData
from sinkscope.text.batch import Batch

Condition = tuple[str, int]  # as tables name it, and which control it is; -1: none

MAPS = "mean-maps"  # of every arm but a control's later draws
CONTROL_TABLES = ("attention", "attention_by_sequence", "loss_by_sequence", "arm_maps")
ANALYZED_ONLY = ("attention_heads_by_sequence",)  # tables of these observables that no arm keeps
BEFORE = "before"


class HiddenMean(Observable):
    """The output of every layer at one position."""

    sites: ClassVar[tuple[str, ...]] = ("layer_out",)

    def __init__(self, position: int) -> None:
        super().__init__(Settings())
        self.position = position
        self.mean = Mean()

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        at_position = batch.tokens_at(reading.tensor, self.position + 1)[:, self.position]
        self.mean.add(layer, upcast(at_position))

    def by_layer(self) -> dict[int, torch.Tensor]:
        """Layer → (D,)."""
        return {layer: torch.from_numpy(self.mean[layer]) for layer in self.mean.keys()}  # noqa: SIM118 (not a dict)


class ValueMean(HiddenMean):
    """The mean output of every layer's value projection at one position, (heads · d,). It is not a site of a layer, so
    `reading` hooks the module that interventions on values edit.
    """

    sites: ClassVar[tuple[str, ...]] = ()

    def take(self, layer: int, values: torch.Tensor) -> None:
        """(n, heads · d) of the sequences of a batch that have the position."""
        self.mean.add(layer, upcast(values))


def reading(position: int, into: Callable[[], ValueMean]) -> ReadValues:
    """An intervention that changes nothing and gives the values to what `into` returns: a pass may begin again."""
    return ReadValues(positions=(position,), seen=lambda layer, values: into().take(layer, values))


@dataclass(frozen=True)
class Arm:
    """What was measured of the model under one stack of interventions."""

    tables: dict[str, pd.DataFrame]  # as the observables give them
    loss: float  # per predicted token; NaN where none was computed


@dataclass
class Experiment:
    """One model on one input: its arms are measured one after the other, and their tables are collected.

    `lenient`: an arm that does not apply is skipped, and the reason kept; otherwise it is an InputError.
    `analyzed`: a run of the same subject with the same settings: where it has all that is compared, the model as it is
    is not measured again. It has no mean maps, and then the arms have none.
    """

    subject: Subject
    config: RunConfig
    wanted: Mapping[str, Stack]  # label → interventions, applied in this order
    draws: int  # random controls of an arm
    lenient: bool
    console: Console
    without_controls: Container[str] = ()  # labels
    without_loss: Container[str] = ()  # labels of arms of which no logits are made
    analyzed: RunData | None = None
    records: dict[str, dict[str, Any]] = field(default_factory=dict)  # label → what was done, for the manifest
    skipped: dict[str, str] = field(default_factory=dict)  # label → why it was not
    errors: dict[str, Exception] = field(default_factory=dict)  # label → with which it broke off
    interrupt: BaseException | None = None  # that ended it after arms had been finished
    batch_size: int = 0  # that fitted
    parity_error: float | None = None  # of the model as it is
    notices: dict[str, None] = field(default_factory=dict)  # what the user should know of the measuring, in order
    _parts: dict[str, list[pd.DataFrame]] = field(default_factory=lambda: defaultdict(list))
    _means: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)  # position → layer → (D,)
    _value_means: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)  # likewise → (heads · d,)
    _few: dict[str, pd.DataFrame] | None = None  # tables of the model as it is, on the first sequences

    def run(self) -> dict[str, pd.DataFrame]:
        """Measure the model as it is, then every arm and its controls.

        Returns:
            The tables by name; their `condition` is the arm.

        Raises:
            InputError: an arm does not apply, or names what the model does not have.
            Exception: with which the first arm broke off, where none is left. Of others see `failed`.
            KeyboardInterrupt: before the first arm was finished. Later ones are kept as `interrupt`.
        """
        length = min(len(ids) for ids in self.subject.inputs.sequences)
        known = Known(Target(self.subject.loaded.model, self.subject.family, seams={}), length)
        self._check_arms(known)
        self.subject.need_loss()
        if self.analyzed and not self._has_all(self.analyzed):
            self.analyzed = None
        self.chosen = self._choose()
        if any(_way(stack) == "pass" for stack in self.wanted.values()):
            self.before = self._measured_before() if self.analyzed is None else self._taken_from(self.analyzed)
            known.tables, known.hidden_means = self.before.tables, self._hidden_mean
            known.value_means = self._value_mean
        resolved = self._resolved(known)
        for place, (label, stack) in enumerate(resolved.items(), 1):
            print_part(self.console, label, place, len(resolved))
            try:
                with self._failing_alone(label):
                    self.WAYS[_way(stack)](self, label, self.wanted[label], stack, known)
            except BaseException as error:
                if not (self.records and was_interrupted(error)):
                    raise
                self.interrupt = error
                break
        if self.errors and not self.records:
            raise next(iter(self.errors.values()))
        return {name: pd.concat(parts, ignore_index=True) for name, parts in self._parts.items() if parts}

    @property
    def failed(self) -> dict[str, str]:
        """Label → why its measuring broke off, or did not begin."""
        reasons = {
            label: str(error) if isinstance(error, SinkscopeError) else described(error)
            for label, error in self.errors.items()
        }
        if self.interrupt is not None:
            reasons |= {label: "interrupted" for label in self.wanted if not self._is_settled(label)}
        return reasons

    def _is_settled(self, label: str) -> bool:
        return label in self.records or label in self.errors or label in self.skipped

    def _check_arms(self, known: Known) -> None:
        """Before anything is measured: does every arm apply, and does the model have what it names?"""
        if not self.subject.family.has_attention:
            name = self.subject.loaded.name
            raise InputError(f"what interventions do to sinks cannot be measured on {name}: {NO_ATTENTION}")
        for label, stack in self.wanted.items():
            reasons = [reason for part in stack if (reason := part.inapplicable(known.target))]
            if reasons and not self.lenient:
                raise InputError(f"{label} does not apply to {self.subject.loaded.name}: {reasons[0]}")
            if reasons:
                self.skipped[label] = reasons[0]
                continue
            for part in stack:
                part.check(known.target, known.length)

    def _has_all(self, run: RunData) -> bool:
        """Whether a run has the loss, and what is watched."""
        return LOSS_TABLES.keys() <= set(run.tables) and max(self._watched()) < self.config.positions

    def _watched(self) -> set[int]:
        """Positions at which effects are read."""
        return {0, *(at for wanted in self.wanted.values() for part in wanted for at in part.watched)}

    def _measured_before(self) -> Arm:
        check = parity_check(self.subject, self.config, self.chosen.costs)
        asked = {at for stack in self.wanted.values() for part in stack for at in part.reads_means}
        means: list[HiddenMean] = []

        def extra() -> list[Observable]:
            means[:] = [HiddenMean(position) for position in sorted(asked)]
            return [*means, *check.fresh()]

        before = self._measured(BEFORE, -1, (), extra=extra)
        self.parity_error = check.error
        self._keep_means(means)
        return before

    def _taken_from(self, run: RunData) -> Arm:
        """The model as it is, from a run's tables."""
        self.parity_error = run.manifest["parity"]
        wanted = {name for chosen in self.chosen.first for name in OBSERVABLES[chosen].columns} | LOSS_TABLES.keys()
        tables = {name: run.tables[name] for name in run.tables if name in wanted - {*ANALYZED_ONLY}}
        for name, table in tables.items():
            self._parts[name].append(table.assign(condition=BEFORE))
        by_sequence = tables["loss_by_sequence"]
        loss = by_sequence["loss"] @ by_sequence["predicted"] / self.subject.inputs.num_predicted
        return Arm(tables, float(loss))

    def _choose(self) -> Chosen:
        """The observables of every arm."""
        closer = next((name for name in self.config.observables or () if OBSERVABLES[name].after), None)
        if closer is not None:
            raise InputError(f"--observables {closer} does not apply: it looks closer at one model, not at arms")
        chosen = choose(self.subject, self.config)
        if self.analyzed is None:
            return chosen
        return replace(chosen, first=tuple(name for name in chosen.first if name != MAPS))

    def _resolved(self, known: Known) -> dict[str, Stack]:
        """Label → what it is, once all that was left open is decided; before any arm is measured."""
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

    @contextmanager
    def _failing_alone(self, label: str) -> Iterator[None]:
        """Nothing of an arm that fails is kept, and nothing of other arms is lost."""
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

    def _by_pass(self, label: str, stack: Stack, resolved: Stack, known: Known) -> None:
        """Before, after and controls, each in one pass of the tracer."""
        record = self.records[label] = _record(stack, resolved, known.target)
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
        effects = [
            arm_metrics(arm.tables, record["watched"], arm.loss).assign(arm=name, draw=draw) for name, draw, arm in arms
        ]
        self._collect({"effect": pd.concat(effects, ignore_index=True).assign(name=" ".join(record["do"]))}, label)

    def _by_streaming(self, label: str, stack: Stack, resolved: Stack, known: Known) -> None:
        """The text read anew with every cache, by perplexity alone."""
        subject, (part,) = self.subject, resolved
        caches = part.model_dump()
        model, inputs = subject.loaded.model, subject.inputs
        size = self.batch_size or first_size(inputs, model, self.config.batch_size, costs=1)
        tables = measure_streaming(model, subject.family, inputs, caches["window"], caches["keep"], size)
        self._collect(tables, label)
        self.records[label] = _record(stack, resolved, known.target)

    WAYS: ClassVar[dict[str, Callable[..., None]]] = {"pass": _by_pass, "streaming": _by_streaming}

    def _each_measured(self, stacks: Mapping[Condition, Stack], target: Target, with_loss: bool) -> list[Arm]:
        """An arm and its controls: together from the first layer that any of them changes, or one after the other."""
        layer = min(part.begins_at(target) for stack in stacks.values() for part in stack)
        if not self._resumes_at(layer, next(iter(stacks.values())), with_loss):
            return [self._measured(*condition, stack, with_loss=with_loss) for condition, stack in stacks.items()]
        changes = [self._change(layer, stack, draw) for (_, draw), stack in stacks.items()]
        done = self._passes_from(changes, self.subject, with_loss)
        return [self._arm(*condition, one, layer) for condition, one in zip(stacks, done, strict=True)]

    def _resumes_at(self, layer: int, stack: Stack, with_loss: bool) -> bool:
        """Whether such arms are measured from this layer on, those before it being as they are anyway.

        Whether a model can begin at a layer, and an observable be told by layers, is tried on the first sequences: the
        tables have to be bit for bit those of a whole pass.
        """
        if not layer or self.chosen.backward or self.analyzed is not None or not self.subject.family.causal:
            return False
        few = replace(self.subject, inputs=self.subject.inputs.part(0, FEW))
        resumed = tried(lambda changes: self._passes_from(changes, few, with_loss), self._change(layer, stack, -1))
        if resumed is None:
            return False
        make, step = partial(self._fresh, -1), self._step(with_loss)
        if self._few is None:
            self._few = tables_of(self._pass(make, step, (), few).observables)
        whole = self._pass(make, step, stack, few)
        tables = completed(tables_of(resumed.observables), layer, self._few)
        return are_the_same(tables, tables_of(whole.observables)) and torch.equal(resumed.losses, whole.losses)

    def _change(self, layer: int, stack: Stack, draw: int) -> Change:
        loaded, family = self.subject.loaded, self.subject.family
        return Change(
            layer, partial(open_tracer, loaded.model, family, self.config.attn, stack), partial(self._fresh, draw)
        )

    def _measured(
        self,
        condition: str,
        draw: int,
        stack: Stack,
        extra: Callable[[], list[Observable]] = list,
        with_loss: bool = True,
    ) -> Arm:
        """One pass with these interventions applied; its tables are kept under `condition`."""
        done = self._pass(lambda: [*self._fresh(draw), *extra()], self._step(with_loss), stack)
        return self._arm(condition, draw, done)

    def _fresh(self, draw: int) -> list[Observable]:
        """The observables of an arm, or of a control (a draw from 0 on)."""
        names = [name for name in self.chosen.first if draw < 1 or name != MAPS]
        return prepared(names, settings_of(self.subject, self.config, max(self._watched()) + 1), self.subject)

    def _step(self, with_loss: bool) -> Callable[[Tracer, Batch, Sequence[Observable]], torch.Tensor | None]:
        if self.chosen.backward:
            return Tracer.forward_backward
        return Tracer.forward_with_loss if with_loss else Tracer.forward

    def _arm(self, condition: str, draw: int, done: Pass[Observable], first: int = 0) -> Arm:
        """What was measured in a pass, its tables kept under `condition`; of the layers before `first` those of the
        model as it is. Of a control only the attention by position, the loss and what was asked for are kept, by
        sequence at the watched positions alone, and of the first draw the maps.
        """
        self.batch_size = done.batch_size
        raw = tables_of(done.observables)
        raw = completed(raw, first, self.before.tables) if first else raw
        raw |= done.loss_tables(self.subject.inputs)
        asked = (table for name in self.chosen.first if name not in ALWAYS for table in OBSERVABLES[name].columns)
        kept = raw.keys() - ANALYZED_ONLY if draw < 0 else {*CONTROL_TABLES, *asked}
        collected = {name: table for name, table in raw.items() if name in kept}
        if draw >= 0:  # there are many controls, and effects are read at these positions
            by_sequence = raw["attention_by_sequence"]
            collected["attention_by_sequence"] = by_sequence[by_sequence["position"].isin(self._watched())]
        self.notices |= dict.fromkeys(notice for observable in done.observables for notice in observable.notices())
        self._collect(collected, condition)
        return Arm(raw, done.loss / self.subject.inputs.num_predicted if len(done.losses) else math.nan)

    def _hidden_mean(self, layer: int, position: int) -> torch.Tensor:
        """(D,): the output of a layer at a position of the model as it is, mean over sequences."""
        if position not in self._means:
            self._keep_means(self._pass(lambda: [HiddenMean(position)], Tracer.forward, ()).observables)
        return self._means[position][layer]

    def _keep_means(self, measured: Iterable[HiddenMean]) -> None:
        for hidden in measured:
            self._means[hidden.position] = hidden.by_layer()

    def _value_mean(self, layer: int, position: int) -> torch.Tensor:
        """(heads · d,): what a layer's value projection gives at a position of the model as it is, likewise."""
        if position not in self._value_means:
            latest: list[ValueMean] = []

            def fresh() -> list[ValueMean]:
                latest[:] = [ValueMean(position)]
                return list(latest)

            stack = (reading(position, lambda: latest[0]),)
            self._value_means[position] = self._pass(fresh, Tracer.forward, stack).observables[0].by_layer()
        return self._value_means[position][layer]

    def _pass(
        self,
        fresh: Callable[[], list[Kind]],
        step: Callable[[Tracer, Batch, Sequence[Observable]], torch.Tensor | None],
        stack: Stack,
        subject: Subject | None = None,
    ) -> Pass[Kind]:
        """One pass over the inputs, or over those of another subject of the same model."""
        model, family, inputs = self.subject.loaded.model, self.subject.family, (subject or self.subject).inputs
        with open_tracer(model, family, self.config.attn, stack) as tracer:
            return pass_over(model, inputs, fresh, lambda *batch: step(tracer, *batch), *self._sizes)

    def _passes_from(self, changes: Sequence[Change], subject: Subject, with_loss: bool) -> list[Pass[Observable]]:
        resumed = Resumed(subject, self.config.attn, changes, self._step(with_loss))
        return resumed.passes(pass_over(subject.loaded.model, subject.inputs, resumed.fresh, resumed, *self._sizes))

    @property
    def _sizes(self) -> tuple[int | Literal["auto"], int, Console]:
        """Of a pass's batches, what fitted once fitting again; its costs; and where it says how far it is."""
        return self.batch_size or self.config.batch_size, self.chosen.costs, self.console

    def _collect(self, raw: Mapping[str, pd.DataFrame], condition: str) -> None:
        for name, table in publish(raw, self.subject.loaded, condition).items():
            self._parts[name].append(table)


def _way(stack: Stack) -> str:
    """How an arm is measured; what is not measured in passes stands alone (`wanted_arms` sees to it)."""
    return stack[0].measured_by


def _record(stack: Stack, resolved: Stack, target: Target) -> dict[str, Any]:
    """An arm's entry in the manifest. No paper says what to expect of a stack of several."""
    alone = len(stack) == 1
    return {
        "asked": [str(part) for part in stack],
        "do": [str(part) for part in resolved],
        "paper": stack[0].paper if alone else "",
        "expects": expectation(stack[0], target) if alone else "",
        "watched": list(dict.fromkeys(position for part in resolved for position in part.watched)),
        "controls": [],
    }

"""An experiment: the model as it is, then every arm and its random controls, measured by the same code."""

import math
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import pandas as pd
import torch
from rich.console import Console

from sinkscope.attention.kernels import upcast
from sinkscope.errors import InputError, SinkscopeError, described, was_interrupted
from sinkscope.interventions import Intervention, Known, Target
from sinkscope.interventions.expectations import expectation
from sinkscope.measuring.console import print_part
from sinkscope.measuring.effects import arm_metrics
from sinkscope.measuring.measure import Chosen, choose, prepared, settings_of, tables_of
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.observable import NO_ATTENTION, Mean, Observable, Reading, Settings
from sinkscope.measuring.parity import parity_check
from sinkscope.measuring.passes import LOSS_TABLES, Kind, Pass, pass_over
from sinkscope.measuring.streaming import measure_streaming
from sinkscope.measuring.subject import Subject
from sinkscope.measuring.tables import publish
from sinkscope.measuring.tracer import Tracer, open_tracer
from sinkscope.options.measuring import ALWAYS, RunConfig
from sinkscope.results.run import RunData
from sinkscope.text.batch import Batch

Stack = tuple[Intervention, ...]

MAPS = "mean-maps"  # of every arm but a control's later draws
CONTROL_TABLES = ("attention", "attention_by_sequence", "loss_by_sequence", "arm_maps")
ANALYZED_ONLY = ("attention_heads_by_sequence",)  # tables of these observables that no arm keeps
BEFORE = "before"


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
        before = self._measured(BEFORE, (), extra=check.fresh)
        self.parity_error = check.error
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
        with_loss = label not in self.without_loss
        arms = [(BEFORE, -1, self.before), ("after", -1, self._measured(label, resolved, with_loss=with_loss))]
        draws = 0 if label in self.without_controls else self.draws
        for draw, control in enumerate(_controls(resolved, known, self.config.seed, draws)):
            record["controls"].append([str(part) for part in control])
            measured = self._measured(f"{label} control {draw}", control, draw, with_loss=with_loss)
            arms.append(("control", draw, measured))
        effects = [
            arm_metrics(arm.tables, record["watched"], arm.loss).assign(arm=name, draw=draw) for name, draw, arm in arms
        ]
        self._collect({"effect": pd.concat(effects, ignore_index=True).assign(name=" ".join(record["do"]))}, label)

    def _by_streaming(self, label: str, stack: Stack, resolved: Stack, known: Known) -> None:
        """The text read anew with every cache, by perplexity alone."""
        subject, (part,) = self.subject, resolved
        caches = part.model_dump()
        table = measure_streaming(
            subject.loaded.model, subject.family, subject.inputs, caches["window"], caches["keep"]
        )
        self._collect({"streaming": table}, label)
        self.records[label] = _record(stack, resolved, known.target)

    WAYS: ClassVar[dict[str, Callable[..., None]]] = {"pass": _by_pass, "streaming": _by_streaming}

    def _measured(
        self,
        condition: str,
        stack: Sequence[Intervention],
        draw: int = -1,
        extra: Callable[[], list[Observable]] = list,
        with_loss: bool = True,
    ) -> Arm:
        """One pass with these interventions applied; its tables are kept under `condition`. Of a control (a draw from
        0 on) only the attention by position, the loss and what was asked for are kept, by sequence at the watched
        positions alone, and of the first draw the maps.
        """
        names = [name for name in self.chosen.first if draw < 1 or name != MAPS]
        watched = self._watched()
        settings = settings_of(self.subject, self.config, max(watched) + 1)

        def fresh() -> list[Observable]:
            return [*prepared(names, settings, self.subject), *extra()]

        forward = Tracer.forward_with_loss if with_loss else Tracer.forward
        done = self._pass(fresh, Tracer.forward_backward if self.chosen.backward else forward, stack)
        self.batch_size = done.batch_size
        raw = tables_of(done.observables) | done.loss_tables(self.subject.inputs)
        asked = (table for name in self.chosen.first if name not in ALWAYS for table in OBSERVABLES[name].columns)
        kept = raw.keys() - ANALYZED_ONLY if draw < 0 else {*CONTROL_TABLES, *asked}
        collected = {name: table for name, table in raw.items() if name in kept}
        if draw >= 0:  # there are many controls, and effects are read at these positions
            collected["attention_by_sequence"] = raw["attention_by_sequence"].query("position in @watched")
        self.notices |= dict.fromkeys(notice for observable in done.observables for notice in observable.notices())
        self._collect(collected, condition)
        return Arm(raw, done.loss / self.subject.inputs.num_predicted if len(done.losses) else math.nan)

    def _hidden_mean(self, layer: int, position: int) -> torch.Tensor:
        """(D,): the output of a layer at a position of the model as it is, mean over sequences."""
        if position not in self._means:
            (hidden,) = self._pass(lambda: [_HiddenMean(position)], Tracer.forward, ()).observables
            self._means[position] = {layer: torch.from_numpy(hidden.mean[layer]) for layer in hidden.mean.keys()}  # noqa: SIM118
        return self._means[position][layer]

    def _pass(
        self,
        fresh: Callable[[], list[Kind]],
        step: Callable[[Tracer, Batch, Sequence[Observable]], torch.Tensor | None],
        stack: Sequence[Intervention],
    ) -> Pass[Kind]:
        subject, config = self.subject, self.config
        size = self.batch_size or config.batch_size  # what fitted once fits again
        with open_tracer(subject.loaded.model, subject.family, config.attn, stack) as tracer:
            costs = self.chosen.costs
            return pass_over(
                tracer, subject.inputs, fresh, lambda *batch: step(tracer, *batch), size, costs, self.console
            )

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


def _controls(stack: Stack, known: Known, seed: int, draws: int) -> list[Stack]:
    """The stack with each part replaced by its random control where it has one, `draws` times, all different if there
    are so many; empty where no part has a control.
    """
    generator = torch.Generator().manual_seed(seed)
    found: list[Stack] = []
    for _ in range(20 * draws):
        if len(found) == draws:
            break
        controls = [part.control(known, generator) for part in stack]
        if all(control is None for control in controls):
            break
        drawn = tuple((control or part).resolved(known) for part, control in zip(stack, controls, strict=True))
        if drawn not in found:
            found.append(drawn)
    return found


class _HiddenMean(Observable):
    """The output of every layer at one position, mean over sequences: what mean-massive puts there."""

    sites = ("layer_out",)

    def __init__(self, position: int) -> None:
        super().__init__(Settings())
        self.position = position
        self.mean = Mean()

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        at_position = batch.tokens_at(reading.tensor, self.position + 1)[:, self.position]
        self.mean.add(layer, upcast(at_position))

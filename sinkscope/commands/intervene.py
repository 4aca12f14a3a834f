"""`intervene`: every arm of an experiment measured by the same code: before, after, and random controls."""

import os
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pandas as pd
import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from sinkscope.attention.kernels import upcast
from sinkscope.commands.analyze import publish
from sinkscope.errors import InputError
from sinkscope.interventions import INTERVENTIONS, Intervention, Known, Target, parse_all
from sinkscope.interventions.streaming_window import StreamingWindow
from sinkscope.measuring.console import print_part
from sinkscope.measuring.manifest import Facts, make_manifest
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.close_ups import MeanMaps
from sinkscope.measuring.observables.observable import Mean, Observable, Reading, Settings
from sinkscope.measuring.passes import pass_over
from sinkscope.measuring.streaming import measure_streaming
from sinkscope.measuring.subject import ModelLike, Subject, config_of, load_subject
from sinkscope.measuring.tracer import open_tracer
from sinkscope.options.measuring import DRAWS, RunConfig
from sinkscope.report.effects import arm_metrics
from sinkscope.report.run import Run, finished
from sinkscope.results.folders import check_output
from sinkscope.results.tables import shape_table
from sinkscope.text.batch import Batch

MEASURED = ("attention", "massive")  # of every arm
CONTROL_TABLES = ("attention", "arm_maps")
BEFORE = "before"

Do = str | Intervention | Iterable[str | Intervention]


def intervene(
    model: ModelLike = None,
    do: Do | None = None,
    *,
    arms: Mapping[str, Do] | Literal["all"] | None = None,
    draws: int = DRAWS,
    tokenizer: PreTrainedTokenizerBase | None = None,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    quiet: bool = True,
    config: RunConfig | None = None,
    figures: Iterable[str] | None = None,
    **options: Any,
) -> Run:
    """Measure a model before and after interventions, and under random controls of the same kind.

    `do` is one intervention or several stacked in their order ("zero-massive:layers=11,coordinates=507"); `arms`
    are several such experiments by name, or "all": every intervention that applies, the others with the reason.
    `model` and `options` as for `analyze`.

    → a Run with the tables `effect`, `attention`, `massive` and `arm_maps` of every arm (their `condition`), and
    `streaming` where that was asked for.

    Errors: InputError for what does not exist, does not apply, or would change nothing, before anything is written;
    the model is then as it was, and so it is afterwards.
    """
    start = time.time()
    wanted = wanted_arms(do, arms)
    if draws < 0:
        raise InputError(f"--draws {draws}: it must be 0 or more")
    if options.get("observables") or (config and config.observables):
        raise InputError(f"`intervene` always measures {' and '.join(MEASURED)}: leave `observables` out")
    config = config or config_of(model, options)
    folder = None if out is None else check_output(out, overwrite)
    console = Console(stderr=True, quiet=quiet)
    subject = load_subject(model, tokenizer, config, console)

    done = _measure_arms(subject, config, wanted, draws, lenient=arms == "all", console=console)
    manifest = make_manifest(subject, config, Facts(done.batch_size), list(done.tables), start)
    manifest |= {"command": "intervene", "draws": draws, "arms": done.records, "skipped": done.skipped}
    return finished(Run(manifest, done.tables, folder), console, figures)


def wanted_arms(do: Do | None, arms: Mapping[str, Do] | Literal["all"] | None) -> dict[str, tuple[Intervention, ...]]:
    """Label → its stack. Errors: InputError where nothing or both were named."""
    if (do is None) == (arms is None):
        raise InputError("name what to do: `sinkscope list interventions` shows what there is")
    if arms == "all":
        return {name: (kind(),) for name, kind in INTERVENTIONS.items() if not kind.is_control}
    if arms is None:
        stack = parse_all(do)  # type: ignore[arg-type]
        arms = {"+".join(part.name for part in stack): stack}
    wanted = {label: parse_all(stack) for label, stack in arms.items()}
    for label, stack in wanted.items():
        if not stack:
            raise InputError(f"arm '{label}' does nothing: name an intervention")
        if label == BEFORE:
            raise InputError(f"an arm cannot be called '{BEFORE}', which is the model as it is")
        if len(stack) > 1 and any(isinstance(part, StreamingWindow) for part in stack):
            raise InputError(f"{StreamingWindow.name} stands alone: it is measured by perplexity only")
    return wanted


@dataclass
class _Measured:
    """What came of all arms."""

    tables: dict[str, pd.DataFrame]
    records: dict[str, dict[str, Any]]  # label → what was done, for the manifest
    skipped: dict[str, str]  # label → why it was not
    batch_size: int


def _measure_arms(
    subject: Subject,
    config: RunConfig,
    wanted: Mapping[str, tuple[Intervention, ...]],
    draws: int,
    lenient: bool,
    console: Console,
) -> _Measured:
    """The model as it is, then every arm and its controls. `lenient`: what does not apply is skipped, with the reason.

    Errors: InputError for an arm that does not apply or names what there is not, before anything is measured.
    """
    target = Target(subject.loaded.model, subject.family, seams=[])  # to plan by: no attention is touched
    length = min(len(ids) for ids in subject.inputs.sequences)
    skipped = _check_arms(wanted, target, length, subject.loaded.name, lenient)
    positions = [at + 1 for stack in wanted.values() for part in stack for at in part.watched]
    bench = _Bench(subject, config, console, positions=max([config.positions, *positions]))
    records: dict[str, dict[str, Any]] = {}

    alone = all(isinstance(stack[0], StreamingWindow) for stack in wanted.values())
    before = None if alone else bench.measure(BEFORE, ())
    known = Known(target, length, before.tables if before else {}, bench.hidden_mean)
    for place, (label, stack) in enumerate(wanted.items(), 1):
        if label in skipped:
            continue
        print_part(console, label, place, len(wanted))
        try:
            decided = _decided(stack, known)
            if isinstance(decided[0], StreamingWindow):
                bench.measure_streaming(label, decided[0])
        except InputError as error:
            if not lenient:
                raise
            skipped[label] = str(error).removeprefix(f"{label}: ")
            continue
        records[label] = _record(stack, decided)
        if before is None or isinstance(decided[0], StreamingWindow):
            continue
        arms = [(BEFORE, -1, before), ("after", -1, bench.measure(label, decided))]
        for draw, control in enumerate(_controls(decided, known, config.seed, draws)):
            records[label]["controls"].append([str(part) for part in control])
            arms.append(("control", draw, bench.measure(f"{label} control {draw}", control, draw)))
        bench.note_effect(label, records[label], arms)
    return _Measured(bench.tables(), records, skipped, bench.batch_size)


def _check_arms(
    wanted: Mapping[str, tuple[Intervention, ...]], target: Target, length: int, model: str, lenient: bool
) -> dict[str, str]:
    """Label → why this model does not allow it. Errors: InputError for that where it is not `lenient`, and for
    parameters that name what there is not.
    """
    skipped: dict[str, str] = {}
    for label, stack in wanted.items():
        reasons = [reason for part in stack if (reason := part.inapplicable(target))]
        if reasons and not lenient:
            raise InputError(f"{label} does not apply to {model}: {reasons[0]}")
        if reasons:
            skipped[label] = reasons[0]
        else:
            for part in stack:
                part.check(target, length)
    return skipped


def _decided(stack: Sequence[Intervention], known: Known) -> tuple[Intervention, ...]:
    """The stack with no parameter left open."""
    decided = tuple(part.resolved(known) for part in stack)
    for part in decided:
        part.check(known.target, known.length)
    return decided


def _record(stack: Sequence[Intervention], decided: Sequence[Intervention]) -> dict[str, Any]:
    """Of an arm, for the manifest. Nobody has said what to expect of a stack."""
    return {
        "asked": [str(part) for part in stack],
        "do": [str(part) for part in decided],
        "paper": stack[0].paper if len(stack) == 1 else "",
        "expects": stack[0].expects if len(stack) == 1 else "",
        "watched": list(dict.fromkeys(position for part in decided for position in part.watched)),
        "controls": [],
    }


def _controls(stack: Sequence[Intervention], known: Known, seed: int, draws: int) -> list[tuple[Intervention, ...]]:
    """The stack with every part that has one replaced by its random control, `draws` times, no two alike where there
    are so many; none where no part has a control.
    """
    generator = torch.Generator().manual_seed(seed)
    found: list[tuple[Intervention, ...]] = []
    for _ in range(20 * draws):
        if len(found) == draws:
            break
        controls = [part.control(known, generator) for part in stack]
        if all(control is None for control in controls):
            break
        chosen = tuple((control or part).resolved(known) for part, control in zip(stack, controls, strict=True))
        if chosen not in found:
            found.append(chosen)
    return found


@dataclass(frozen=True)
class _Arm:
    tables: dict[str, pd.DataFrame]  # as the observables give them
    loss: float  # per predicted token


@dataclass
class _Bench:
    """One model on one input, where arm after arm is measured and its tables are collected."""

    subject: Subject
    config: RunConfig
    console: Console
    positions: int  # how many are reported
    batch_size: int = 0
    collected: dict[str, list[pd.DataFrame]] = field(default_factory=lambda: defaultdict(list))
    _means: dict[int, dict[int, torch.Tensor]] = field(default_factory=dict)  # position → layer → (D,)

    @property
    def settings(self) -> Settings:
        longest = self.subject.inputs.longest
        return Settings(min(self.positions, longest), min(self.config.window, longest), self.config.epsilon)

    def measure(self, condition: str, stack: Sequence[Intervention], draw: int = -1) -> _Arm:
        """One pass with these interventions applied; its tables are kept under `condition`. Of a control (a draw from
        0 on) only the attention by head and position, and of the first its maps.
        """

        def fresh() -> list[Observable]:
            observables: list[Observable] = [OBSERVABLES[name](self.settings) for name in MEASURED]
            return observables + ([MeanMaps()] if draw < 1 else [])

        with open_tracer(self.subject.loaded.model, self.subject.family, self.config.attn, stack) as tracer:
            size = self.batch_size or self.config.batch_size
            done = pass_over(tracer, self.subject.inputs, fresh, tracer.forward_with_loss, size, console=self.console)
        self.batch_size = done.batch_size
        raw = {name: table for observable in done.observables for name, table in observable.tables().items()}
        kept = raw if draw < 0 else {name: raw[name] for name in CONTROL_TABLES if name in raw}
        for name, table in publish(kept, self.subject.loaded, condition).items():
            self.collected[name].append(table)
        return _Arm(raw, done.loss / self.subject.inputs.num_predicted)

    def hidden_mean(self, layer: int, position: int) -> torch.Tensor:
        """(D,): the hidden state behind a layer at a position of the model as it is, mean over sequences."""
        if position not in self._means:
            with open_tracer(self.subject.loaded.model, self.subject.family, self.config.attn) as tracer:
                size = self.batch_size or self.config.batch_size
                done = pass_over(tracer, self.subject.inputs, lambda: [_HiddenMean(position)], tracer.forward, size)
            (observable,) = done.observables
            assert isinstance(observable, _HiddenMean)
            layers = observable.mean.keys()
            self._means[position] = {layer: torch.from_numpy(observable.mean[layer]) for layer in layers}
        return self._means[position][layer]

    def measure_streaming(self, label: str, part: StreamingWindow) -> None:
        table = measure_streaming(
            self.subject.loaded.model, self.subject.family, self.subject.inputs, part.window or (), part.keep
        )
        self.collected["streaming"].append(shape_table("streaming", table, self.subject.loaded.name, label, {}))

    def note_effect(self, label: str, record: Mapping[str, Any], arms: Sequence[tuple[str, int, _Arm]]) -> None:
        parts = [
            arm_metrics(measured.tables, record["watched"], measured.loss).assign(arm=arm, draw=draw)
            for arm, draw, measured in arms
        ]
        table = pd.concat(parts, ignore_index=True).assign(name=" ".join(record["do"]))
        self.collected["effect"].append(shape_table("effect", table, self.subject.loaded.name, label, {}))

    def tables(self) -> dict[str, pd.DataFrame]:
        return {name: pd.concat(parts, ignore_index=True) for name, parts in self.collected.items()}


class _HiddenMean(Observable):
    """The hidden state behind every layer at one position, mean over sequences."""

    about = "what mean-massive puts in the place of massive activations"
    sites = ("layer_out",)

    def __init__(self, position: int) -> None:
        super().__init__(Settings())
        self.position = position
        self.mean = Mean()

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        at_position = batch.tokens_at(reading.tensor, self.position + 1)[:, self.position]
        self.mean.add(layer, upcast(at_position))

    def tables(self) -> dict[str, pd.DataFrame]:
        return {}

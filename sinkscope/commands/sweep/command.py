"""The command `sweep`: measures a grid of models × revisions × inputs × settings × commands, cell by cell.

file.py describes the file, cells.py the folder, output.py the comparison. The same command resumes a sweep.
"""

import os
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Unpack

import pandas as pd
from rich.console import Console, RenderableType
from rich.console import Group as Stack
from rich.live import Live
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel

from sinkscope.commands.printout import Printout
from sinkscope.commands.run.command import check_figures
from sinkscope.commands.sweep import factor_study
from sinkscope.commands.sweep.cells import COMMAND, CellFolders
from sinkscope.commands.sweep.file import TRAINING, Cell, Sweep, read_sweep
from sinkscope.commands.sweep.options import SweepOptions
from sinkscope.commands.sweep.output import SweepComparison, summary_tables
from sinkscope.commands.sweep.pools import follow, open_pool, run_groups, split
from sinkscope.commands.sweep.tables import Measured, SweepTables, sweep_tables
from sinkscope.commands.sweep.worker import Event, Group, Reads, State, Task, changes, devices_for, load_key
from sinkscope.errors import InputError, SinkscopeError, counted, described, one_line, unknown
from sinkscope.figures import FIGURES
from sinkscope.html_page import Contents
from sinkscope.measuring.console import lasting, print_line
from sinkscope.measuring.memory import training_memory
from sinkscope.measuring.processes import team, together
from sinkscope.measuring.subject import memory_of
from sinkscope.models.files import (
    AWAY,
    SPARE,
    HubAway,
    evict,
    find_settings,
    free_room,
    gigabytes,
    is_on_hub,
    missing_weights,
    quiet,
)
from sinkscope.models.loading import on_meta, read_config, read_once, sketched
from sinkscope.options.files import named_file, user_path
from sinkscope.options.keywords import SweepKeywords
from sinkscope.options.option import checked
from sinkscope.options.output import OutputOptions
from sinkscope.options.register import records
from sinkscope.options.signatures import with_options
from sinkscope.output.result import Shown, both, figure_failure, written
from sinkscope.results.manifest import make_manifest
from sinkscope.results.metrics import METRICS
from sinkscope.results.papers import WSE_TABLE_1
from sinkscope.results.tables import blaming_tables

# options that do not affect results
IGNORED_OPTIONS = {"file", "quick", "dry_run", "engine", "address", "workers", "shard", "retry", "evict"}
MOST_FAILURES = 5  # failures that the final message names
MARGIN = 1.2


@dataclass(frozen=True)
class Size:
    """The size of one model."""

    model: PreTrainedModel | None = None  # on the meta device; None if the configuration cannot be read
    download: int = 0  # bytes that must still be downloaded from the hub
    reason: str = ""  # why the configuration cannot be read
    waits: bool = False  # it is on the hub, which cannot be reached

    @property
    def parameters(self) -> int | None:
        return None if self.model is None else sum(parameter.numel() for parameter in self.model.parameters())

    def memory(self, options: Any) -> int:
        """Estimate the bytes that a cell needs; 0 if the size is not known."""
        if self.model is None:
            return 0
        if options.trains:
            return int(MARGIN * training_memory(self.model, options))
        return int(MARGIN * memory_of(self.model, options).peak(self.model.dtype))


@dataclass(frozen=True)
class Planned:
    """A cell with its state and the size of its model."""

    cell: Cell
    state: State
    message: str = ""  # why it failed, which parts of a finished cell failed, or why it is measured again
    size: Size = Size()

    def is_wanted(self, retry: bool) -> bool:
        """Return whether to measure the cell; a failed cell, also one that failed in parts, only with --retry."""
        return self.state == State.WAITING or (retry and bool(self.message))

    @property
    def memory(self) -> int:
        return self.size.memory(self.cell.options)


@dataclass(frozen=True)
class SweepRun(Shown):
    """The result of a sweep."""

    sweep: Sweep  # as read from its file
    plan: Sequence[Planned]  # the cells of this shard in their final states
    tables: SweepTables | None  # the tables of all cells that are done; None after a dry run
    folder: Path
    failed_figures: Mapping[str, str] = field(default_factory=dict)  # figure that could not be drawn → reason

    @property
    def failure(self) -> str:
        """Return on one line which cells and figures failed; "" if none did."""
        failed = [each for each in self.plan if each.state == State.FAILED or each.message]
        cells = ""
        if failed and self.tables is not None:
            first = {each.message: each.cell.name for each in reversed(failed)}
            messages = list(dict.fromkeys(each.message for each in failed))[:MOST_FAILURES]
            named = [f"{first[message]}: {message}" for message in messages]
            others = len(failed) - len(named)
            named += [f"and {others} more"] if others else []
            cells = f"{len(failed)} of {len(self.plan)} cells failed (--retry tries them again): {'; '.join(named)}"
        return both(cells, figure_failure({"failed_figures": self.failed_figures}))

    @property
    def contents(self) -> Contents:
        """The contents of the page of the comparison."""
        return Contents.of_folder(CellFolders(self.folder).comparison)

    @property
    def summary_tables(self) -> Mapping[str, pd.DataFrame]:
        """The summary tables of all cells that are done, by title."""
        return {} if self.tables is None else summary_tables(self.tables)

    @property
    def summary(self) -> pd.DataFrame:
        """The number of cells by model and state."""
        rows = pd.DataFrame([(each.cell.model, str(each.state)) for each in self.plan], columns=["model", "state"])
        counts = pd.crosstab(rows["model"], rows["state"]).reindex(rows["model"].unique())
        return counts.reindex(columns=[str(state) for state in State if str(state) in counts]).reset_index()


def command(options: SweepOptions, output: OutputOptions) -> Printout:
    given = {name: getattr(options, name) for name in options.model_fields_set - {"file"}}
    done = sweep(options.file, **output.where, **given)
    if done.tables is None:
        return Printout(done, tables={"cells": table_of(done.plan)})
    tables = {"cells": done.summary, METRICS["sink_rate"].short: done.tables.overview}
    trainings = done.tables.tables.get(factor_study.TABLE, pd.DataFrame())
    if not trainings.empty:
        tables["trainings at their last step"] = factor_study.at_a_glance(trainings)
    printed = {name: table for name, table in tables.items() if not table.empty}
    return Printout(done, tables=printed, folder=done.folder, failure=done.failure)


def check(found: Sweep) -> None:
    """Check the options and figures of all cells before a model is loaded."""
    commands = found.content.commands
    with named_file(found.path):
        for name in found.content.figures:
            if name not in FIGURES:
                raise InputError(f"figure {unknown(name, FIGURES)}")
            if FIGURES[name].command not in commands:
                raise InputError(f"figure '{name}' is of none of these commands: {', '.join(commands)}")
        for entry in found.content.models:
            if entry.paper is not None and entry.paper not in WSE_TABLE_1:
                raise InputError(f"the `paper` of {entry.label} {unknown(entry.paper, WSE_TABLE_1)}")
    for cell in found.cells:
        with named_file(found.path, f"{cell.told}: "):
            # every command of a cell has this check
            records()[cell.command].imported().check(cell.options)
            check_figures(_figures(found, cell.command), cell.command, getattr(cell.options, "observables", None))


@with_options(SweepOptions)
def sweep(
    file: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    quiet: bool = True,
    page: bool = True,
    **options: Unpack[SweepKeywords],
) -> SweepRun:
    """Measure the cells of a sweep that are not done yet, and compare all cells that are done.

    A script must call it under `if __name__ == "__main__":`, since it starts processes. Under `accelerate launch`, all
    launched processes measure each cell together.

    Args:
        file: a YAML file, or the name of a sweep that comes with sinkscope.
        out: the folder; runs/FILE if None.
        overwrite: measure everything again.
        quiet: print nothing.
        page: also write index.html of the comparison; `show` makes the page of a cell.
        **options: those of the command line, which are listed below.

    Raises:
        InputError: the file or an option is wrong, or the folder holds something else; nothing was measured.
        SinkscopeError: the comparison cannot be written.
    """
    start = time.time()
    asked = checked(SweepOptions, {"file": os.fspath(file), **options})
    given = {name: getattr(asked, name) for name in asked.model_fields_set - IGNORED_OPTIONS}
    found = read_sweep(asked.file, given, asked.quick)
    check(found)
    folders = CellFolders(user_path(out or asked.folder()))
    if overwrite and asked.part != (1, 1):
        raise InputError("--overwrite removes the cells of all shards: delete the folder before they are started")
    at, of = asked.part  # parts of equal size; the cells of a model stay together
    mine = found.cells[len(found.cells) * (at - 1) // of : len(found.cells) * at // of]
    if asked.dry_run:
        return SweepRun(found, sized(planned(mine, folders, Reads())), None, folders.folder)
    with together(asked.device_map) as members:
        if not members.is_first:
            return follow(members)
        done = _swept(asked, found, mine, folders, overwrite, members.console(quiet), start, page)
        return members.of_the_first(lambda: done)


def _swept(
    asked: SweepOptions,
    found: Sweep,
    mine: Sequence[Cell],
    folders: CellFolders,
    overwrite: bool,
    console: Console,
    start: float,
    page: bool,
) -> SweepRun:
    """Measure the cells of this shard that are not done yet, and write the comparison."""
    if team().count > 1 and (trained := [cell for cell in mine if cell.command in TRAINING]):
        raise InputError(f"{trained[0].told}: under `accelerate launch`, train with the command itself")
    manifest = make_manifest(COMMAND, _record(found), start, cells=[cell.name for cell in found.cells])
    # the pool is opened before anything is written: Ray may be missing
    with (
        closing(open_pool(asked, found.content.commands, team())) as pool,
        folders.begun(manifest, overwrite, asked.part),
    ):
        folders.repair({cell.name for cell in mine})
        plan = planned(mine, folders, reads := Reads())
        for why, count in Counter(each.message for each in plan if each.state == State.WAITING).items():
            if why:
                print_line(console, f"{counted(count, 'cell')} measured again: {why}")
        for each in plan:
            if each.state == State.DONE:  # a sweep may be killed before it deletes an earlier failure
                folders.forget(each.cell.name)
        todo = sized(
            (each for each in plan if each.is_wanted(asked.retry)), also_local=pool.workers > 1 or asked.engine == "ray"
        )
        waiting = [each for each in todo if each.size.waits]
        if waiting:  # they are not recorded as failed, so that the same command measures them
            todo = [each for each in todo if not each.size.waits]
            models = len({each.cell.source for each in waiting})
            what = f"{counted(len(waiting), 'cell')} of {counted(models, 'model')}"
            print_line(console, f"{AWAY}: {what} not measured; the same command does when it can be")
        if asked.address is None:  # other machines have other disks
            check_disk(todo, pool.workers if asked.evict else None)
        tasks = {}
        for cell in (each.cell for each in todo):
            target, figures = folders.run(cell.name).absolute(), _figures(found, cell.command)
            tasks[cell.name] = Task(cell.name, cell.command, cell.options, target, figures, reads.of(cell.options))
        groups = split(groups_of(todo, tasks), pool.workers)
        leaving = Leaving(found.cells, folders, tasks, reads) if asked.evict else None
        progress, failed = Progress(len(todo)), {each.cell.name: AWAY for each in waiting}
        if todo:
            print_line(
                console, f"{counted(len(todo), 'cell')} to measure, with {counted(len(groups), 'load')} of a model"
            )
        is_live = console.is_terminal and not console.quiet
        with Live(progress, console=console, refresh_per_second=2, transient=True) if is_live else nullcontext():
            for event in run_groups(groups, pool):
                progress.hear(event, console)
                if event.state == State.FAILED:
                    failed[event.name] = event.message
                    with suppress(OSError):  # a full disk, which the summary reports
                        folders.fail(event.name, event.message)
                elif event.state == State.DONE:
                    folders.forget(event.name)
                if leaving is not None and event.state in (State.DONE, State.FAILED):
                    leaving.look(event.name, console)
        folders.repair({cell.name for cell in mine})  # remainders of killed workers
        plan = planned(mine, folders, reads)
        for at, each in enumerate(plan):
            if each.state == State.WAITING:  # it failed, and the failure may not have been written
                message = failed.get(each.cell.name, "it was not measured")
                plan[at] = replace(each, state=State.FAILED, message=message)
        comparison = compared(found, folders, start, page, reads)
    return SweepRun(found, plan, comparison.compared, folders.folder, comparison.manifest.get("failed_figures", {}))


def compared(found: Sweep, folders: CellFolders, start: float, page: bool, reads: Reads) -> SweepComparison:
    """Compare the finished cells of all shards, and write the comparison."""
    measured = [
        Measured(cell, folders.run(cell.name), manifest)
        for cell in found.cells
        if (manifest := done_cell(cell, folders, reads)[0]) is not None
    ]
    with blaming_tables():
        comparison = SweepComparison.of(sweep_tables(measured), _record(found), start, folders.comparison)
    with folders.shared():
        return written(comparison, page)


def _figures(found: Sweep, command: str) -> tuple[str, ...]:
    """Return the figures that the cells of a command draw."""
    return tuple(name for name in found.content.figures if FIGURES[name].command == command)


def _record(found: Sweep) -> dict[str, Any]:
    """Return the content of the file and the options of the command line, for run.json."""
    return {"content": found.content.model_dump(mode="json", exclude_unset=True), "given": dict(found.given)}


# ------------------------------------------------------------------- the plan: states of cells, and sizes of models


def planned(cells: Iterable[Cell], folders: CellFolders, reads: Reads) -> list[Planned]:
    """Return all cells with their states. The message of a finished cell names its failed arms, runs and figures."""
    plan = []
    for cell in cells:
        manifest, message = done_cell(cell, folders, reads)
        if manifest is not None:
            failed = (manifest.get("failed") or {}) | (manifest.get("failed_figures") or {})
            message = one_line("; ".join(f"{name}: {reason}" for name, reason in failed.items())) if failed else ""
            plan.append(Planned(cell, State.DONE, message))
        elif (failure := folders.failure(cell.name)) is not None:
            plan.append(Planned(cell, State.FAILED, failure.error))
        else:
            plan.append(Planned(cell, State.WAITING, message))
    return plan


def sized(plan: Iterable[Planned], also_local: bool = True) -> list[Planned]:
    """Return the plan with the sizes of the models; each model is examined once.

    Local models need not be examined, which takes seconds for a GGUF file, if their memory decides nothing.
    """
    sizes: dict[tuple, Size] = {}
    found: list[Planned] = []
    for each in plan:
        options = each.cell.options
        key = load_key(options)
        if key not in sizes:
            is_asked = also_local or is_on_hub(getattr(options, "model", None))
            is_away = any(size.waits for size in sizes.values())  # asked once
            sizes[key] = size_of(options, only_cached=is_away) if is_asked else Size()
        found.append(replace(each, size=sizes[key]))
    return found


def done_cell(cell: Cell, folders: CellFolders, reads: Reads) -> tuple[dict[str, Any] | None, str]:
    """Return the manifest of a cell with unchanged options and inputs; else None, and why an old one is not valid."""
    found, why = folders.manifest(cell.name, cell.command, cell.config)
    if found is None or why or (why := changes(found.get("read"), reads.of(cell.options))):
        return None, why
    return (found, "") if found["tables"] and found.get("drawn", True) else (None, "")


def size_of(options: Any, only_cached: bool = False) -> Size:
    """Return the size of a model, computed from its configuration alone; `only_cached`: without asking the hub."""
    try:
        if options.trains and hasattr(options, "config"):  # from random weights
            from sinkscope.commands.train.architectures import architecture  # other sweeps need no training

            return Size(on_meta(architecture(options.config)))
        with quiet(), read_once():
            files = find_settings(options.model, options.revision, options.gguf_file, only_cached)
            config = read_config(files, options.trust_remote_code)
            model = sketched(files, config, options.dtype, options.device_map)
    except HubAway:
        return Size(reason=AWAY, waits=True)
    except SinkscopeError as error:
        return Size(reason=one_line(error))
    except Exception as error:  # building a model may raise any error
        return Size(reason=described(error))
    return Size(model, missing_weights(files.source, files.folder) if files.commit is not None else 0)


def check_disk(todo: Iterable[Planned], at_once: int | None) -> None:
    """Raise InputError before any download if the disk cannot hold `at_once` of the models (None: all of them)."""
    downloads = {each.cell.source: each.size.download for each in todo}
    needed, free = sum(sorted(downloads.values(), reverse=True)[:at_once]), free_room()
    if needed and needed + SPARE > free:
        advice = "" if at_once else "--evict removes each when its cells are done; or "
        raise InputError(
            f"the models that are still on the hub take {gigabytes(needed)}, and the disk of their cache has "
            f"{gigabytes(free)} left: {advice}make room, or set HF_HOME to a folder on another disk"
        )


def groups_of(todo: Iterable[Planned], tasks: Mapping[str, Task]) -> list[Group]:
    """Group the cells that are to be measured by the loaded model that they share."""
    groups: dict[tuple, list[Planned]] = {}
    for each in todo:
        groups.setdefault(load_key(each.cell.options), []).append(each)
    return [
        Group(
            tuple(tasks[each.cell.name] for each in group),
            max(each.memory for each in group),
            devices_for(group[0].cell.options.device_map),
        )
        for group in groups.values()
    ]


def table_of(plan: Iterable[Planned]) -> pd.DataFrame:
    """Return the table that --dry-run shows."""
    rows = [
        (
            each.cell.name,
            each.cell.model,
            "?" if each.size.parameters is None else f"{each.size.parameters:,}",
            "?" if each.size.parameters is None else gigabytes(each.memory),
            gigabytes(each.size.download) if each.size.download else "",
            str(each.state),
            each.message or each.size.reason,
        )
        for each in plan
    ]
    return pd.DataFrame(rows, columns=["cell", "model", "parameters", "memory", "download", "state", "note"])


# ---------------------------------------------------------------------------------------------------------- --evict

Source = tuple[str, str | None]  # repository and revision


class Leaving:
    """Remove a model from the hub's cache when no cell of any shard needs it any more."""

    def __init__(self, cells: Iterable[Cell], folders: CellFolders, todo: Collection[str], reads: Reads) -> None:
        self._folders, self._todo, self._reads = folders, set(todo), reads
        self._waiting: dict[Source, list[Cell]] = defaultdict(list)  # cells that were not finished at the last check
        self._sources: dict[str, Source] = {}
        for cell in cells:
            model, revision = cell.source
            if model is not None and is_on_hub(model):
                self._sources[cell.name] = (model, revision)
                self._waiting[model, revision].append(cell)

    def look(self, name: str, console: Console) -> None:
        """Remove the model of a cell that has ended, unless another cell still needs it."""
        self._todo.discard(name)
        source = self._sources.get(name)
        if source is None:
            return
        self._waiting[source] = left = [
            cell
            for cell in self._waiting[source]
            if cell.name in self._todo or planned([cell], self._folders, self._reads)[0].state == State.WAITING
        ]
        if not left and (freed := evict(*source)):
            print_line(console, f"{source[0]}: {gigabytes(freed)} removed from the hub's cache")


# ----------------------------------------------------------------------------------------------------- its progress


@dataclass
class Progress:
    """The progress of the cells that are to be measured: a live table on a terminal, lines elsewhere."""

    total: int  # number of cells
    running: dict[str, float] = field(default_factory=dict)  # name → start time
    ended: Counter[State] = field(default_factory=Counter)  # state → number of cells that ended in it
    start: float = field(default_factory=time.monotonic)

    def hear(self, event: Event, console: Console) -> None:
        """Count an event, and print a line if a cell has ended. With a live table, only failures are printed."""
        if event.state == State.RUNNING:
            self.running[event.name] = time.monotonic()
            return
        self.running.pop(event.name, None)
        self.ended[event.state] += 1
        if event.state == State.FAILED:
            print_line(console, f"{event.name}: failed: {event.message}")
        elif not console.is_terminal:
            print_line(console, f"{event.name}: done in {lasting(event.seconds)} ({self.summary})")

    @property
    def summary(self) -> str:
        """Return for example «12 of 40 done, 1 failed · 3.1 cells a minute · 9 min left»."""
        text = f"{self.ended[State.DONE]} of {self.total} done"
        text += f", {self.ended[State.FAILED]} failed" if self.ended[State.FAILED] else ""
        count, seconds = self.ended.total(), time.monotonic() - self.start
        if not count:
            return text
        left = seconds / count * (self.total - count)
        return f"{text} · {count / max(seconds / 60, 1e-9):.3g} cells a minute · {lasting(left)} left"

    def __rich__(self) -> RenderableType:
        table = Table("cell", "state", "time")
        for name, began in self.running.items():
            table.add_row(Text(name), str(State.RUNNING), lasting(time.monotonic() - began))
        return Stack(table, Text(self.summary))

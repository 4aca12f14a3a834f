"""The command `sweep`: measures a grid of models × revisions × inputs × settings × commands, cell by cell.

file.py describes the file, cells.py the folder, output.py the comparison. The same command resumes a sweep.
"""

import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Unpack

import pandas as pd
from rich.console import Console, RenderableType
from rich.console import Group as Stack
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sinkscope.commands.printout import Printout
from sinkscope.commands.run.command import check_figures
from sinkscope.commands.sweep import factor_study
from sinkscope.commands.sweep.cells import COMMAND, CellFolders, Planned, planned, with_sizes
from sinkscope.commands.sweep.file import TRAINING, Cell, Sweep, read_sweep
from sinkscope.commands.sweep.options import SweepOptions
from sinkscope.commands.sweep.output import SweepComparison, summary_tables
from sinkscope.commands.sweep.pools import follow, open_pool, run_groups, split
from sinkscope.commands.sweep.tables import SweepTables, sweep_tables
from sinkscope.commands.sweep.worker import Event, Group, Reads, State, Task, devices_for, load_key
from sinkscope.errors import InputError, counted, unknown
from sinkscope.figures import FIGURES, KINDS
from sinkscope.html_page import Contents
from sinkscope.measuring.console import lasting, print_line
from sinkscope.measuring.processes import team, together
from sinkscope.models.files import AWAY, SPARE, evict, free_room, gigabytes, is_on_hub
from sinkscope.options.files import named_file, user_path
from sinkscope.options.keywords import SweepKeywords
from sinkscope.options.option import checked
from sinkscope.options.output import OutputOptions
from sinkscope.options.register import records
from sinkscope.options.signatures import with_options
from sinkscope.output.result import Displayable, both, figure_failure, written
from sinkscope.results.manifest import make_manifest
from sinkscope.results.metrics import METRICS
from sinkscope.results.papers import WSE_TABLE_1
from sinkscope.results.tables import blaming_tables

# options that do not affect results
IGNORED_OPTIONS = {"file", "quick", "dry_run", "gpu", "engine", "address", "workers", "shard", "retry", "evict"}
OF_TRAININGS = KINDS["arms of a training"]
OF_CELLS = FIGURES | OF_TRAININGS
MOST_FAILURES = 5  # failures that the final message names


@dataclass(frozen=True)
class SweepRun(Displayable):
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
    typed = {name: getattr(options, name) for name in options.model_fields_set - {"file"}}
    done = sweep(options.file, **output.where, **typed)
    if done.tables is None:
        columns = ["cell", "model", "parameters", "memory", "download", "state", "note"]
        rows = []
        for each in done.plan:
            cell, size, is_known = each.cell, each.size, each.size.parameters is not None
            parameters, memory = (f"{size.parameters:,}", gigabytes(each.memory)) if is_known else ("?", "?")
            download = gigabytes(size.download) if size.download else ""
            note = each.message or size.reason
            rows.append((cell.name, cell.model, parameters, memory, download, str(each.state), note))
        tables = {"cells": pd.DataFrame(rows, columns=columns), "trainings": costs_of(done.plan, options.gpu)}
        tables["arms"] = arms_of(done.plan)
        return Printout(done, tables={name: table for name, table in tables.items() if not table.empty})
    tables = {"cells": done.summary, METRICS["sink_rate"].short: done.tables.overview}
    trainings = done.tables.tables.get(factor_study.STUDY, pd.DataFrame())
    if not trainings.empty:
        tables["trainings at their last step"] = factor_study.at_a_glance(trainings)
    printed = {name: table for name, table in tables.items() if not table.empty}
    return Printout(done, tables=printed, folder=done.folder, failure=done.failure)


def costs_of(plan: Iterable[Planned], gpu: str) -> pd.DataFrame:
    """Return what the trainings of a plan take, all arms and seeds of a cell together, and the hours of all."""
    trainings = [each for each in plan if each.cell.command in TRAINING and each.size.model is not None]
    if not trainings:
        return pd.DataFrame()
    from sinkscope.commands.train.arms import parse_methods  # most sweeps need no training
    from sinkscope.commands.train.cost import GPUS, Cost

    rows, hours = [], []
    for each in trainings:
        options, cost = each.cell.options, Cost(each.size.model, each.cell.options)  # type: ignore[arg-type]
        arms = len(parse_methods(options.method)) * options.seeds
        hours.append(arms * cost.hours(GPUS[gpu]))
        sizes = gigabytes(int(cost.memory)), gigabytes(cost.disk(arms))
        rows.append((each.cell.setting, arms, f"{options.steps:,}", f"{cost.tokens / 1e9:.3g} B", *sizes, hours[-1]))
    rows.append(("all", "", "", "", "", "", sum(hours)))
    columns = ["setting", "arms", "steps", "tokens of an arm", "memory", "disk", f"hours on one {gpu}"]
    return pd.DataFrame(rows, columns=columns).assign(**{columns[-1]: lambda t: t[columns[-1]].map("{:,.1f}".format)})


def arms_of(plan: Iterable[Planned]) -> pd.DataFrame:
    """Return the arms of a plan's trainings: their methods, seeds, and the claims that read each of them."""
    cells = [each for each in plan if each.cell.command in TRAINING and each.size.model is not None]
    if not cells:
        return pd.DataFrame()
    from sinkscope.commands.claims.planned import claims_of_arms, training_to_come  # most sweeps need no claims
    from sinkscope.commands.claims.studies import PLAIN
    from sinkscope.commands.train.arms import parse_methods

    trainings = [
        training_to_come(
            each.cell.command,
            each.cell.model,
            each.cell.options.model_dump(mode="json"),
            each.size.model.config.to_dict(),  # type: ignore[union-attr]
            parse_methods(each.cell.options.method),
            each.size.parameters or 0,
        )
        for each in cells
    ]
    seeds: dict[tuple[str, str], set[int]] = defaultdict(set)
    for arm in (arm for training in trainings for arm in training.arms):
        typed = ",".join(f"{name}={value}" for name, value in arm.parameters.items())
        seeds[arm.label, f"{arm.method}:{typed}" if typed else arm.method].add(arm.seed)
    claims, rows = claims_of_arms(trainings), []
    for (label, method), of_arm in seeds.items():
        answers = ", ".join(claims[label]) + " (one seed decides none)" * (len(of_arm) == 1 and bool(claims[label]))
        if method == PLAIN and len(seeds) > 1:
            answers = f"{answers}; the others are compared with it".removeprefix("; ")
        rows.append((label, method, len(of_arm), answers))
    return pd.DataFrame(rows, columns=["arm", "method", "seeds", "claims that read it"])


def check(sweep: Sweep) -> None:
    """Check the options and figures of all cells before a model is loaded."""
    commands = sweep.content.commands
    with named_file(sweep.path):
        for name in sweep.content.figures:
            if name not in OF_CELLS:
                raise InputError(f"figure {unknown(name, OF_CELLS)}")
            if not any(name in figures_of(sweep, command) for command in commands):
                raise InputError(f"figure '{name}' is of none of these commands: {', '.join(commands)}")
        for entry in sweep.content.models:
            if entry.paper is not None and entry.paper not in WSE_TABLE_1:
                raise InputError(f"the `paper` of {entry.label} {unknown(entry.paper, WSE_TABLE_1)}")
    for cell in sweep.cells:
        with named_file(sweep.path, f"{cell.description}: "):
            records()[cell.command].imported().check(cell.options)  # every command of a cell has this check
            if cell.command not in TRAINING:
                check_figures(figures_of(sweep, cell.command), cell.command, getattr(cell.options, "observables", None))


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
    overrides = {name: getattr(asked, name) for name in asked.model_fields_set - IGNORED_OPTIONS}
    content = read_sweep(asked.file, overrides, asked.quick)
    check(content)
    folders = CellFolders(user_path(out or asked.folder()))
    if overwrite and asked.part != (1, 1):
        raise InputError("--overwrite removes the cells of all shards: delete the folder before they are started")
    part, parts = asked.part  # of equal size; the cells of a model stay together
    shard = content.cells[len(content.cells) * (part - 1) // parts : len(content.cells) * part // parts]
    if asked.dry_run:
        return SweepRun(content, with_sizes(planned(shard, folders, Reads())), None, folders.folder)
    with together(asked.device_map) as members:
        if not members.is_first:
            return follow(members)
        done = _measure_cells(asked, content, shard, folders, overwrite, members.console(quiet), start, page)
        return members.of_the_first(lambda: done)


def _measure_cells(
    asked: SweepOptions,
    sweep: Sweep,
    shard: Sequence[Cell],
    folders: CellFolders,
    overwrite: bool,
    console: Console,
    start: float,
    page: bool,
) -> SweepRun:
    """Measure the cells of this shard that are not done yet, and write the comparison of all."""
    if team().count > 1 and (trained := [cell for cell in shard if cell.command in TRAINING]):
        raise InputError(f"{trained[0].description}: under `accelerate launch`, train with the command itself")
    record = {"content": sweep.content.model_dump(mode="json", exclude_unset=True), "given": dict(sweep.overrides)}
    manifest = make_manifest(COMMAND, record, start, cells=[cell.name for cell in sweep.cells])
    # the pool is opened before anything is written: Ray may be missing
    with (
        closing(open_pool(asked, sweep.content.commands, team())) as pool,
        folders.begun(manifest, overwrite, asked.part),
    ):
        folders.repair({cell.name for cell in shard})
        plan = planned(shard, folders, reads := Reads())
        for why, count in Counter(each.message for each in plan if each.state == State.WAITING).items():
            if why:
                print_line(console, f"{counted(count, 'cell')} measured again: {why}")
        for each in plan:
            if each.state == State.DONE:  # a sweep may be killed before it deletes an earlier failure
                folders.forget(each.cell.name)
        # with --retry also failed cells, and those of which a part failed
        wanted = [each for each in plan if each.state == State.WAITING or (asked.retry and each.message)]
        todo = with_sizes(wanted, also_local=pool.workers > 1 or asked.engine == "ray")
        waiting = [each for each in todo if each.size.waits]
        if waiting:  # they are not recorded as failed, so that the same command measures them
            todo = [each for each in todo if not each.size.waits]
            models = len({each.cell.source for each in waiting})
            what = f"{counted(len(waiting), 'cell')} of {counted(models, 'model')}"
            print_line(console, f"{AWAY}: {what} not measured; the same command does when it can be")
        if asked.address is None:  # other machines have other disks
            check_disk(todo, pool.workers if asked.evict else None)
        by_load: dict[tuple, list[Planned]] = {}
        for each in todo:
            by_load.setdefault(load_key(each.cell.options), []).append(each)
        groups = []
        for load in by_load.values():
            tasks = [
                Task(cell.name, cell.command, cell.options, folder.absolute(), figures_of(sweep, cell.command), read)
                for cell, folder, read in ((each.cell, each.folder, reads.of(each.cell.options)) for each in load)
            ]
            memory, device_map = max(each.memory for each in load), load[0].cell.options.device_map
            groups.append(Group(tuple(tasks), memory, devices_for(device_map)))
        groups = split(groups, pool.workers)
        progress, failed = Progress(len(todo)), {each.cell.name: AWAY for each in waiting}
        unmeasured = {each.cell.name: each.cell for each in todo}
        needing: dict[tuple[str | None, str | None], list[Cell]] = defaultdict(list)  # model and revision → its cells
        for cell in sweep.cells:
            needing[cell.source].append(cell)
        if todo:
            loads = counted(len(groups), "load")
            print_line(console, f"{counted(len(todo), 'cell')} to measure, with {loads} of a model")
        is_live = console.is_terminal and not console.quiet
        with Live(progress, console=console, refresh_per_second=2, transient=True) if is_live else nullcontext():
            for event in run_groups(groups, pool):
                progress.count(event, console)
                if event.state == State.FAILED:
                    failed[event.name] = event.message
                    with suppress(OSError):  # a full disk, which the summary reports
                        folders.fail(event.name, event.message)
                elif event.state == State.DONE:
                    folders.forget(event.name)
                if asked.evict and event.state in (State.DONE, State.FAILED):
                    model, revision = source = unmeasured.pop(event.name).source
                    if model is None or not is_on_hub(model):
                        continue
                    needing[source] = [  # also cells of other shards
                        cell
                        for cell in needing[source]
                        if cell.name in unmeasured or planned([cell], folders, reads)[0].state == State.WAITING
                    ]
                    if not needing[source] and (freed := evict(model, revision)):
                        print_line(console, f"{model}: {gigabytes(freed)} removed from the hub's cache")
        folders.repair({cell.name for cell in shard})  # remainders of killed workers
        plan = planned(sweep.cells, folders, reads)
        with blaming_tables():
            tables = sweep_tables([each for each in plan if each.state == State.DONE])
            cells = list(dict.fromkeys(cell for table in tables.tables.values() for cell in table["cell"]))
            manifest = make_manifest(COMMAND, record, start, tables.tables, cells=cells)
            comparison = SweepComparison(manifest, tables.tables, folders.comparison, compared=tables)
        with folders.shared():
            comparison = written(comparison, page)
    names = {cell.name for cell in shard}
    plan = [each for each in plan if each.cell.name in names]
    for place, each in enumerate(plan):
        if each.state == State.WAITING:  # it failed, and the failure may not have been written
            message = failed.get(each.cell.name, "it was not measured")
            plan[place] = replace(each, state=State.FAILED, message=message)
    return SweepRun(sweep, plan, tables, folders.folder, comparison.manifest.get("failed_figures", {}))


def figures_of(sweep: Sweep, command: str) -> tuple[str, ...]:
    """Return the figures that the cells of a command draw."""
    if command in TRAINING:
        return tuple(name for name in sweep.content.figures if name in OF_TRAININGS)
    return tuple(name for name in sweep.content.figures if name in FIGURES and FIGURES[name].command == command)


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


@dataclass
class Progress:
    """The progress of the cells that are to be measured: a live table on a terminal, lines elsewhere."""

    total: int  # number of cells
    running: dict[str, float] = field(default_factory=dict)  # name → start time
    ended: Counter[State] = field(default_factory=Counter)  # state → number of cells that ended in it
    start: float = field(default_factory=time.monotonic)

    def count(self, event: Event, console: Console) -> None:
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
        ended, seconds = self.ended.total(), time.monotonic() - self.start
        if not ended:
            return text
        left = seconds / ended * (self.total - ended)
        return f"{text} · {ended / max(seconds / 60, 1e-9):.3g} cells a minute · {lasting(left)} left"

    def __rich__(self) -> RenderableType:
        table = Table("cell", "state", "time")
        for name, began in self.running.items():
            table.add_row(Text(name), str(State.RUNNING), lasting(time.monotonic() - began))
        return Stack(table, Text(self.summary))

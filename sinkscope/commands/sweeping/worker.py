"""The worker of a sweep: loads one model, measures its cells in turn, and reports the state of each."""

import gc
import logging
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Any

from sinkscope.commands.sweeping.reads import changes
from sinkscope.errors import LONGEST, InputError, SinkscopeError, described, is_out_of_memory, one_line, was_interrupted
from sinkscope.measuring.processes import team
from sinkscope.options.training import ArmOptions
from sinkscope.results.folders import resumable
from sinkscope.results.manifest import noting


class State(StrEnum):
    """The state of a cell."""

    WAITING = "to do"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class Task:
    """One cell, with all that a worker needs to measure it."""

    name: str
    command: str
    options: Any
    folder: Path
    figures: tuple[str, ...] = ()
    read: Mapping[str, str] = field(default_factory=dict)  # input → digest, computed before the measurement


@dataclass(frozen=True)
class Group:
    """Cells of one model in one dtype on the same devices, for which the model is loaded once."""

    tasks: tuple[Task, ...]  # in their order
    memory: int = 0  # estimated bytes that a worker needs; 0 if not known


@dataclass(frozen=True)
class Event:
    """A change of the state of a cell."""

    name: str  # of the cell
    state: State
    message: str = ""  # the error of a cell that failed, on one line
    seconds: float = 0.0  # duration, including the time to load the model


LOADED_BY = ("model", "revision", "gguf_file", "dtype", "device_map", "trust_remote_code", "allow_pickle")


def load_key(options: Any) -> tuple:
    """Return a key that is equal for cells that can share a loaded model."""
    if isinstance(options, ArmOptions):  # a training loads its own model
        return (type(options).__name__, options.model_dump_json())
    return (*(getattr(options, name) for name in LOADED_BY), options.adapter)


def settle() -> None:
    """Prepare a new process as a worker: silence libraries, and freeze the garbage collector's present objects, so that
    the collections at the start of each pass are fast.
    """
    gc.freeze()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def measured(group: Group) -> Iterator[Event]:
    """Measure the cells of a group one by one. An error becomes the event of its cell."""
    models: dict[str, Any] = {}
    for task in group.tasks:
        yield Event(task.name, State.RUNNING)
        start = time.monotonic()
        try:
            with team().agreeing(), noting(read=dict(task.read)):
                _measure(task, models)
        except Exception as error:  # also unexpected errors: the other cells are still measured
            if was_interrupted(error):
                raise KeyboardInterrupt from None
            if isinstance(error, SinkscopeError):
                message = one_line(error, LONGEST)
            elif is_out_of_memory(error):
                message = "memory ran out: take a shorter seq-len, dtype bfloat16 or device-map auto"
            else:
                message = f"unexpected {described(error)}"
            yield Event(task.name, State.FAILED, message, time.monotonic() - start)
        else:
            yield Event(task.name, State.DONE, seconds=time.monotonic() - start)


def _measure(task: Task, models: dict[str, Any]) -> None:
    """Run the command of a cell, which resumes its folder, or replaces it if its options or inputs have changed."""
    function = getattr(import_module(f"sinkscope.commands.{task.command}"), task.command)
    # a sweep may have hundreds of cells: `show` makes the page of one when it is needed
    where = {"out": task.folder, "overwrite": not _can_resume(task), "page": False}
    if task.command == "train":
        function(options=task.options, figures=False, **where)
    elif task.command == "retrofit":
        function(task.options.model, config=task.options, figures=False, **where)
    elif task.command in ("claims", "benchmark"):
        function(_loaded(task.options, models), config=task.options, **where)
    else:
        function(_loaded(task.options, models), config=task.options, figures=task.figures, **where)


def _can_resume(task: Task) -> bool:
    """Return whether an interrupted command can resume in its folder."""
    if not type(task.options).resumable:
        return False
    recorded = task.options.model_dump(mode="json", exclude={"method"})  # as run.json records the options of a training
    try:
        found = resumable(task.folder, task.command, {"config": recorded})
        return found is not None and not changes(found.get("read"), task.read)
    except InputError:
        return False


def _loaded(options: Any, models: dict[str, Any]) -> Any:
    """Return the model of a group, which its first cell loads. If that fails, all cells fail with the same error."""
    if options.adapter is not None:  # merged into the weights by the command that loads them
        return options.model
    if not models:
        from sinkscope.commands.load import load

        try:
            models["loaded"] = load(**{name: getattr(options, name) for name in LOADED_BY})
        except Exception as error:
            models["error"] = error
    if "error" in models:
        raise models["error"]
    return models["loaded"]

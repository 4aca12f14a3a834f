"""The worker of a sweep: loads one model, measures its cells in turn, and reports the state of each.

`Reads` computes digests of the files that a cell reads. A cell is done while they are unchanged.
"""

import gc
import hashlib
import logging
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import constants, dataset_info

from sinkscope.errors import LONGEST_LINE, InputError, SinkscopeError, one_line, was_interrupted
from sinkscope.measuring.console import PrintableStream
from sinkscope.measuring.processes import team
from sinkscope.measuring.subject import check_memory
from sinkscope.models.adapters import ADAPTER_CONFIG, find_adapter
from sinkscope.models.files import SMALL_FILES, fetch, find_settings, is_on_hub, quiet
from sinkscope.options.files import kind_of, names_in, user_path
from sinkscope.options.measuring import DEMO_NAME
from sinkscope.options.register import records
from sinkscope.plugins import failure_of, load_plugins
from sinkscope.results.folders import resumable
from sinkscope.results.manifest import MANIFEST, noting
from sinkscope.text.sources import DRAWN, TEXTS


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
    devices: int = 0  # accelerators that it uses, where there are any; ALL: those of a machine


@dataclass(frozen=True)
class Event:
    """A change of the state of a cell."""

    name: str  # name of the cell
    state: State
    message: str = ""  # the error of a cell that failed, on one line
    seconds: float = 0.0  # duration, including the time to load the model


ALL = 1_000_000  # more accelerators than a machine has


def devices_for(device_map: str | None) -> int:
    """Return how many accelerators a cell uses, if there are any; a numbered one exists only if a worker sees ALL."""
    return {"cpu": 0, None: 1, "cuda": 1, "xpu": 1}.get(device_map, ALL)


LOADED_BY = ("model", "revision", "gguf_file", "dtype", "device_map", "trust_remote_code", "allow_pickle")


def load_key(options: Any) -> tuple:
    """Return a key that is equal for cells that can share a loaded model."""
    if options.trains:  # a training loads its own model
        return (type(options).__name__, options.model_dump_json())
    return (*(getattr(options, name) for name in LOADED_BY), options.adapter)


def prepare_worker() -> None:
    """Prepare a new process as a worker: silence libraries, and freeze the garbage collector's present objects, so that
    the collections at the start of each pass are fast.
    """
    gc.freeze()
    if not isinstance(sys.stderr, PrintableStream):  # output of libraries must not end a cell
        sys.stdout = sys.stderr = PrintableStream(sys.stderr)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def measured(group: Group) -> Iterator[Event]:
    """Measure the cells of a group one by one. An error becomes the event of its cell."""
    models: dict[str, Any] = {}
    for task in group.tasks:
        yield Event(task.name, State.RUNNING)
        start, state, message = time.monotonic(), State.DONE, ""
        try:
            with team().sharing_errors(), noting(read=dict(task.read)):
                _measure(task, models)
        except Exception as error:  # also unexpected errors: the other cells are still measured
            if was_interrupted(error):
                raise KeyboardInterrupt from None
            state, message = State.FAILED, one_line(failure_of(error)[0], LONGEST_LINE)
        yield Event(task.name, state, message, time.monotonic() - start)


def _measure(task: Task, models: dict[str, Any]) -> None:
    """Run the command of a cell, which resumes its folder, or replaces it if its options or inputs have changed."""
    load_plugins()  # a worker process has not loaded them
    function = getattr(records()[task.command].imported(), task.command)
    # a sweep may have hundreds of cells: `show` makes the page of one when it is needed
    where = {"out": task.folder, "overwrite": not can_resume(task), "page": False}
    if task.command == "train":
        function(options=task.options, figures=task.figures, **where)
    elif task.command == "retrofit":
        function(task.options.model, config=task.options, figures=task.figures, **where)
    elif task.command in ("claims", "benchmark"):
        function(_loaded(task.options, models), config=task.options, **where)
    else:
        function(_loaded(task.options, models), config=task.options, figures=task.figures, **where)


def can_resume(task: Task) -> bool:
    """Return whether an interrupted command can resume in its folder: with equal options and unchanged inputs."""
    if not type(task.options).resumable:
        return False
    recorded = task.options.model_dump(mode="json", exclude={"method"})  # as run.json records the options of a training
    try:
        manifest = resumable(task.folder, task.command, {"config": recorded})
    except InputError:
        return False
    return manifest is not None and not changes(manifest.get("read"), task.read)


def _loaded(options: Any, models: dict[str, Any]) -> Any:
    """Return the model of a group, which its first cell loads. If that fails, all cells fail with the same error."""
    if options.adapter is not None:  # merged into the weights by the command that loads them
        return options.model
    if not models:
        from sinkscope.commands.load import load

        check = None if getattr(options, "force", True) else partial(check_memory, config=options)
        try:
            models["loaded"] = load(**{name: getattr(options, name) for name in LOADED_BY}, check=check)
        except Exception as error:
            models["error"] = error
    if "error" in models:
        raise models["error"]
    return models["loaded"]


# --------------------------------------------------------------------------------------------------- what cells read

# options that name what a cell reads besides its model; a dataset replaces the text
TEXT_OPTIONS = ("input", "text")
READ_OPTIONS = ("dataset", *TEXT_OPTIONS, "adapter", "tokenizer", "config", "task_path")


class Reads:
    """Compute digests; each file is read only once, so that all cells are compared with the same state of it."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], str | None] = {}  # arguments of `digest_of` → its result

    def of(self, options: Any) -> dict[str, str]:
        """Map each input of a command with these options to its digest, or to its commit on the hub.

        Inputs that cannot be found now are omitted: nothing could be measured with them either. Tokens drawn from a
        seed have no digest, since the options hold the seed.
        """
        sources: dict[str, tuple[Any, ...]] = {}
        if hasattr(options, "model"):
            where = (getattr(options, name, None) for name in ("model", "revision", "gguf_file"))
            sources[f"model {options.model or DEMO_NAME}"] = ("model", *where)
        for name in READ_OPTIONS:
            value = getattr(options, name, None)
            is_replaced = name in TEXT_OPTIONS and getattr(options, "dataset", None) is not None
            if value is not None and not is_replaced:
                sources[f"{name} {value}"] = (name, value)
        for folder in getattr(options, "from_", None) or ():
            sources[f"run {folder}"] = ("from_", Path(folder) / MANIFEST)
        for source in sources.values():
            if source not in self._known:
                try:
                    with quiet():
                        self._known[source] = digest_of(*source)
                except (SinkscopeError, OSError):  # the error is reported when the cell is measured
                    self._known[source] = None
        digests = {what: self._known[source] for what, source in sources.items()}
        return {what: digest for what, digest in digests.items() if digest is not None}


def digest_of(option: str, value: Any, revision: str | None = None, gguf_file: str | None = None) -> str | None:
    """Return the digest of the files that an option names, or their commit on the hub.

    None if there are none: for names of tasks and architectures, for drawn tokens, and for files that do not exist.
    """
    if option == "model":
        if is_on_hub(value):
            return fetch(str(value), revision, ["config.json"])[0].name
        files = find_settings(value, revision, gguf_file)
        is_folder = value is not None and kind_of(user_path(value)) == "folder"
        small = _small_files(files.folder) if is_folder else []
        return files.commit or _digest([*small, *(files.folder / name for name in files.weights)])
    if option == "adapter":
        adapter = find_adapter(value, allow_pickle=True)
        return adapter.commit or _digest([adapter.folder / ADAPTER_CONFIG, adapter.folder / adapter.weights])
    if option in TEXT_OPTIONS and (value in TEXTS or value in DRAWN):
        return hashlib.sha256(TEXTS[value]().encode()).hexdigest() if value in TEXTS else None
    name = value.partition(":")[0] if option == "dataset" else value
    path = user_path(name)
    kind = kind_of(path)
    if option == "dataset" and kind is None:
        try:
            return None if constants.is_offline_mode() else dataset_info(name).sha
        except Exception:  # an error of the hub or the network
            return None
    if option == "tokenizer":
        if kind != "folder":
            return fetch(value, None, [f"*{ending}" for ending in SMALL_FILES])[0].name
        return _digest(_small_files(path))
    if option == "config" and kind == "folder":
        path, kind = path / "config.json", kind_of(path / "config.json")
    if kind is None:
        return None
    return _digest([path] if kind == "file" else [each for each in path.rglob("*") if each.is_file()])


def _small_files(folder: Path) -> list[Path]:
    """Return the files of a model with settings, tokenizer and code."""
    return [folder / name for name in names_in(folder) if name.endswith(SMALL_FILES)]


def _digest(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        with path.open("rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def changes(before: Mapping[str, str] | None, now: Mapping[str, str]) -> str:
    """Return why a cell must be measured again; "" if its inputs are unchanged."""
    changed = [what for what, digest in now.items() if (before or {}).get(what) != digest]
    return f"{', '.join(changed)} changed since" if changed else ""

"""The worker of a sweep: loads one model, measures its cells in turn, and reports the state of each.

`Reads` computes digests of the files that a cell reads. A cell is done while they are unchanged.
"""

import gc
import hashlib
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import constants, dataset_info

from sinkscope.errors import LONGEST, InputError, SinkscopeError, described, is_out_of_memory, one_line, was_interrupted
from sinkscope.measuring.console import Plain
from sinkscope.measuring.processes import team
from sinkscope.measuring.subject import check_memory
from sinkscope.models.adapters import ADAPTER_CONFIG, find_adapter
from sinkscope.models.files import SMALL_FILES, fetch, find_settings, is_on_hub, quiet
from sinkscope.options.files import kind_of, names_in, user_path
from sinkscope.options.measuring import DEMO_NAME
from sinkscope.options.register import records
from sinkscope.plugins import load_plugins, plugin_of
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

    name: str  # of the cell
    state: State
    message: str = ""  # the error of a cell that failed, on one line
    seconds: float = 0.0  # duration, including the time to load the model


ALL = 1_000_000  # more accelerators than a machine has


def devices_for(device_map: str | None) -> int:
    """Return how many accelerators a cell uses where there are any. A numbered one is only there among all of them."""
    return {"cpu": 0, None: 1, "cuda": 1, "xpu": 1}.get(device_map, ALL)


LOADED_BY = ("model", "revision", "gguf_file", "dtype", "device_map", "trust_remote_code", "allow_pickle")


def load_key(options: Any) -> tuple:
    """Return a key that is equal for cells that can share a loaded model."""
    if options.trains:  # a training loads its own model
        return (type(options).__name__, options.model_dump_json())
    return (*(getattr(options, name) for name in LOADED_BY), options.adapter)


def settle() -> None:
    """Prepare a new process as a worker: silence libraries, and freeze the garbage collector's present objects, so that
    the collections at the start of each pass are fast.
    """
    gc.freeze()
    if not isinstance(sys.stderr, Plain):  # what libraries print ends no cell, and is no result
        sys.stdout = sys.stderr = Plain(sys.stderr)
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
                plugin = plugin_of(error)
                message = (
                    f"the plugin {plugin} failed [{described(error)}]" if plugin else f"unexpected {described(error)}"
                )
            yield Event(task.name, State.FAILED, message, time.monotonic() - start)
        else:
            yield Event(task.name, State.DONE, seconds=time.monotonic() - start)


def _measure(task: Task, models: dict[str, Any]) -> None:
    """Run the command of a cell, which resumes its folder, or replaces it if its options or inputs have changed."""
    load_plugins()  # in a process of its own
    function = getattr(records()[task.command].imported(), task.command)
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

        check = None if getattr(options, "force", True) else partial(check_memory, config=options)
        try:
            models["loaded"] = load(**{name: getattr(options, name) for name in LOADED_BY}, check=check)
        except Exception as error:
            models["error"] = error
    if "error" in models:
        raise models["error"]
    return models["loaded"]


# --------------------------------------------------------------------------------------------------- what cells read


class Reads:
    """Compute digests; each file is read only once, so that all cells are compared with the same state of it."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], str | None] = {}

    def of(self, options: Any) -> dict[str, str]:
        """Map each input of a command with these options to its digest, or to its commit on the hub.

        Inputs that cannot be found now are omitted: nothing could be measured with them either. Tokens drawn from a
        seed have no digest, since the options hold the seed.
        """
        asked: dict[str, tuple[Any, ...]] = {}
        if hasattr(options, "model"):
            asked[f"model {options.model or DEMO_NAME}"] = (
                _of_model, options.model, getattr(options, "revision", None), getattr(options, "gguf_file", None),
            )  # fmt: skip
        for name, find in _DIGEST_OF.items():
            given = getattr(options, name, None)
            is_read = find is not _of_text or getattr(options, "dataset", None) is None
            if given is not None and is_read:
                asked[f"{name} {given}"] = (find, given)
        for folder in getattr(options, "from_", None) or ():
            asked[f"run {folder}"] = (_of_files, (Path(folder) / MANIFEST,))
        return {what: digest for what, source in asked.items() if (digest := self._digest(*source)) is not None}

    def _digest(self, find: Callable[..., str | None], *source: Any) -> str | None:
        key = (find, *source)
        if key not in self._known:
            try:
                with quiet():
                    self._known[key] = find(*source)
            except (SinkscopeError, OSError):  # the error is reported when the cell is measured
                self._known[key] = None
        return self._known[key]


def changes(before: Mapping[str, str] | None, now: Mapping[str, str]) -> str:
    """Return why a cell must be measured again; "" if its inputs are unchanged."""
    if before is None:
        return "it was made by an older sinkscope, which did not record what it read"
    changed = [what for what, digest in now.items() if before.get(what) != digest]
    return f"{', '.join(changed)} changed since" if changed else ""


def _of_files(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        with path.open("rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _of_model(model: str | None, revision: str | None, gguf_file: str | None) -> str:
    if is_on_hub(model):
        return fetch(str(model), revision, ["config.json"])[0].name
    files = find_settings(model, revision, gguf_file)
    if files.commit is not None:
        return files.commit
    is_folder = model is not None and kind_of(user_path(model)) == "folder"
    return _of_files([*_small(files.folder if is_folder else None), *(files.folder / name for name in files.weights)])


def _small(folder: Path | None) -> list[Path]:
    """Return the files of a model with settings, tokenizer and code."""
    return [] if folder is None else [folder / name for name in names_in(folder) if name.endswith(SMALL_FILES)]


def _of_adapter(adapter: str) -> str:
    files = find_adapter(adapter, allow_pickle=True)
    return files.commit or _of_files([files.folder / ADAPTER_CONFIG, files.folder / files.weights])


def _of_tokenizer(source: str) -> str:
    if kind_of(user_path(source)) == "folder":
        return _of_files(_small(user_path(source)))
    return fetch(source, None, [f"*{ending}" for ending in SMALL_FILES])[0].name


def _of_text(source: str) -> str | None:
    """Return None for tokens drawn from a seed and for tasks."""
    if source in TEXTS:
        return hashlib.sha256(TEXTS[source]().encode()).hexdigest()
    return None if source in DRAWN else _of_path(source)


def _of_path(source: str) -> str | None:
    """Return the digest of a file or of all files of a folder; None if it does not exist."""
    path = user_path(source)
    kind = kind_of(path)
    if kind is None:
        return None
    return _of_files([path] if kind == "file" else [each for each in path.rglob("*") if each.is_file()])


def _of_dataset(spec: str) -> str | None:
    name = spec.partition(":")[0]
    if kind_of(user_path(name)) is not None:
        return _of_path(name)
    try:
        return None if constants.is_offline_mode() else dataset_info(name).sha
    except Exception:  # an error of the hub or the network
        return None


def _of_config(source: str) -> str | None:
    """Return None for the name of an architecture."""
    path = user_path(source)
    return _of_path(str(path / "config.json" if kind_of(path) == "folder" else path))


# option → the function that computes the digest of its value; a dataset replaces the text
_DIGEST_OF: dict[str, Callable[[str], str | None]] = {
    "dataset": _of_dataset,
    "input": _of_text,
    "text": _of_text,
    "adapter": _of_adapter,
    "tokenizer": _of_tokenizer,
    "config": _of_config,
    "task_path": _of_path,
}

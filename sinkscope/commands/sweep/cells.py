"""The cells of a sweep: their folder, their states, and the sizes of their models.

OUT/run.json             the sweep, and the names of its cells
OUT/cells/NAME/          the run folder of the cell
OUT/failed/NAME.json     the error with which the cell ended
OUT/comparison/          the comparison of all cells that are done

A cell is done if its run folder exists, because the folder appears when it is complete. Several processes may work on
different cells at once; files that all of them write are written under the lock of OUT.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from transformers import PreTrainedModel

from sinkscope.commands.sweep.file import Cell
from sinkscope.commands.sweep.worker import Reads, State, changes, load_key
from sinkscope.errors import InputError, SinkscopeError, described, one_line
from sinkscope.measuring.memory import LIBRARY_BYTES
from sinkscope.measuring.subject import memory_of
from sinkscope.models.files import AWAY, HubUnreachable, find_settings, is_on_hub, missing_weights, quiet
from sinkscope.models.loading import meta_model, on_meta, read_config, read_once
from sinkscope.options.files import read_json
from sinkscope.options.measuring import PERMISSIONS
from sinkscope.options.recipe import COMPARISON
from sinkscope.results.folders import alone_in, check_no_link, check_output, new_folder
from sinkscope.results.manifest import MANIFEST, read_manifest, write_manifest
from sinkscope.results.swap import TEMPORARY_PREFIX, locked, new_file, remove, repair, temporary_parts

COMMAND = "sweep"
CELLS, FAILED = "cells", "failed"
PATIENCE = 60.0  # seconds that one process waits for another to finish a short piece of writing
WORKERS_END = 2.0  # seconds that the workers of a killed sweep take to end
MEMORY_MARGIN = 1.2


class Failure(BaseModel):
    """The error of a cell that has no run folder."""

    error: str
    attempts: int = 1


@dataclass(frozen=True)
class CellFolders:
    """The paths in the folder of a sweep, and the methods that write them."""

    folder: Path

    def run(self, name: str) -> Path:
        return self.folder / CELLS / name

    def failure_file(self, name: str) -> Path:
        return self.folder / FAILED / f"{name}.json"

    @property
    def comparison(self) -> Path:
        return self.folder / COMPARISON

    @contextmanager
    def begun(self, manifest: Mapping[str, Any], overwrite: bool, part: tuple[int, int] = (1, 1)) -> Iterator[None]:
        """Start or resume the sweep in its folder, and lock the i-th of n parts (i, n) of its cells.

        Raises InputError if the folder contains another result, cannot be written, or another process works on the same
        part.
        """
        real = self.folder.resolve()
        listed = {**manifest, "files": [f"{name}/" for name in (CELLS, COMPARISON, FAILED)]}
        with ExitStack() as stack:
            with self.shared():
                is_new = overwrite or not (self.folder / MANIFEST).exists()
                if is_new:
                    check_output(self.folder, overwrite, (COMMAND,))
                else:
                    read_manifest(self.folder, (COMMAND,))
                    check_no_link(self.folder)
                lock = real.with_name(f"{real.name}-part-{part[0]}-{part[1]}")
                stack.enter_context(alone_in(lock, patience=WORKERS_END))
                try:
                    with new_folder(self.folder) if is_new else nullcontext(self.folder) as folder:
                        write_manifest(folder, listed)
                    for name in (CELLS, FAILED):
                        (self.folder / name).mkdir(exist_ok=True)
                except OSError as error:
                    raise SinkscopeError(f"writing {self.folder} failed: {one_line(error)}") from error
            yield

    def shared(self) -> AbstractContextManager[Path]:
        """Lock the complete folder for a moment. Raises InputError if another process keeps the lock."""
        return alone_in(self.folder, patience=PATIENCE)

    def repair(self, names: Collection[str]) -> None:
        """Finish or undo the half-written files of these cells after the last worker of a killed sweep has ended."""
        for path in list((self.folder / CELLS).glob(f"{TEMPORARY_PREFIX}*")):
            name, _ = temporary_parts(path)
            if name in names:
                with locked(self.run(name), PATIENCE):
                    repair(self.run(name))
        for path in list((self.folder / FAILED).glob(f"{TEMPORARY_PREFIX}*")):
            if temporary_parts(path)[0].removesuffix(".json") in names:
                remove(path)

    def failure(self, name: str) -> Failure | None:
        """Return the failure of a cell; None if it did not fail or the file is damaged."""
        try:
            return Failure.model_validate(read_json(self.failure_file(name)))
        except (InputError, ValidationError):
            return None

    def fail(self, name: str, error: str) -> None:
        before = self.failure(name)
        failure = Failure(error=error, attempts=1 + (before.attempts if before else 0))
        path = self.failure_file(name)
        path.parent.mkdir(exist_ok=True)
        with new_file(path) as fresh:
            fresh.write_text(json.dumps(failure.model_dump(), indent=2) + "\n", encoding="utf-8")

    def forget(self, name: str) -> None:
        """Delete the record of a failure, because the cell is done or is tried again."""
        remove(self.failure_file(name))


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


@dataclass(frozen=True)
class Planned:
    """A cell with its state and the size of its model."""

    cell: Cell
    folder: Path
    state: State
    message: str = ""  # why it failed, which parts of a finished cell failed, or why it is measured again
    manifest: Mapping[str, Any] = field(default_factory=dict, repr=False)  # its run.json, if it is done
    size: Size = Size()

    @property
    def memory(self) -> int:
        """Estimate the bytes that the cell needs; 0 if the size is not known."""
        model, options = self.size.model, self.cell.options
        if model is None:
            return 0
        if options.trains:
            from sinkscope.commands.train.cost import Cost  # most sweeps need no training

            needed = LIBRARY_BYTES + int(Cost(model, options).memory)
        else:
            needed = memory_of(model, options).peak(model.dtype)
        return int(MEMORY_MARGIN * needed)


def planned(cells: Iterable[Cell], folders: CellFolders, reads: Reads) -> list[Planned]:
    """Return all cells with their states. The message of a finished cell names its failed arms, runs and figures."""
    plan = []
    for cell in cells:
        folder, failure, manifest = folders.run(cell.name), folders.failure(cell.name), None
        message = ""
        try:
            manifest = read_manifest(folder, (cell.command,))
        except InputError:
            message = "its folder cannot be read" if (folder / MANIFEST).exists() else ""
        if manifest is not None:
            recorded, config = manifest["config"], cell.options.model_dump(mode="json", exclude=set(PERMISSIONS))
            if any(recorded.get(name, value) != value for name, value in config.items()):  # arms hold a `method`
                message = "it was measured with other options"
            else:
                message = changes(manifest.get("read"), reads.of(cell.options))
        # a resumable command lists its tables when it has finished
        if manifest is not None and not message and manifest["tables"] and manifest.get("drawn", True):
            failed = (manifest.get("failed") or {}) | (manifest.get("failed_figures") or {})
            message = one_line("; ".join(f"{name}: {reason}" for name, reason in failed.items())) if failed else ""
            plan.append(Planned(cell, folder, State.DONE, message, manifest))
        elif failure is not None:
            plan.append(Planned(cell, folder, State.FAILED, failure.error))
        else:
            plan.append(Planned(cell, folder, State.WAITING, message))
    return plan


def with_sizes(plan: Iterable[Planned], also_local: bool = True) -> list[Planned]:
    """Return the plan with the sizes of the models; each model is examined once.

    Local models need not be examined, which takes seconds for a GGUF file, if their memory decides nothing.
    """
    sizes: dict[tuple, Size] = {}
    for each in (plan := list(plan)):
        options = each.cell.options
        if load_key(options) not in sizes:
            is_asked = also_local or is_on_hub(getattr(options, "model", None))
            is_away = any(size.waits for size in sizes.values())  # asked once
            sizes[load_key(options)] = size_of(options, only_cached=is_away) if is_asked else Size()
    return [replace(each, size=sizes[load_key(each.cell.options)]) for each in plan]


def size_of(options: Any, only_cached: bool = False) -> Size:
    """Return the size of a model, computed from its configuration alone; `only_cached`: without asking the hub."""
    try:
        if options.trains and hasattr(options, "config"):  # from random weights
            from sinkscope.commands.train.architectures import architecture  # other sweeps need no training

            return Size(on_meta(architecture(options.config)))
        with quiet(), read_once():
            files = find_settings(options.model, options.revision, options.gguf_file, only_cached)
            config = read_config(files, options.trust_remote_code)
            model = meta_model(files, config, options.dtype, options.device_map)
    except HubUnreachable:
        return Size(reason=AWAY, waits=True)
    except SinkscopeError as error:
        return Size(reason=one_line(error))
    except Exception as error:  # building a model may raise any error
        return Size(reason=described(error))
    return Size(model, missing_weights(files.source, files.folder) if files.commit is not None else 0)

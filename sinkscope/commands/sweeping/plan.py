"""The plan of a sweep: which cells are done, and how large the models are, computed without their weights.

`Leaving` at the end implements `--evict`.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from rich.console import Console

from sinkscope.commands.sweeping.worker import Group, Reads, State, Task, changes, load_key
from sinkscope.errors import InputError, SinkscopeError, described, one_line
from sinkscope.measuring.console import print_line
from sinkscope.measuring.passes import TOKENS_PER_BATCH
from sinkscope.models.files import SPARE, evict, find_settings, free_room, gigabytes, is_on_hub, missing_weights, quiet
from sinkscope.models.loading import count_parameters, read_config, read_once, stays_on_cpu
from sinkscope.options.sweep_file import Cell
from sinkscope.options.training import ArmOptions, TrainOptions
from sinkscope.results.cells import CellFolders
from sinkscope.training.architectures import architecture

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
AT_LEAST = 700 << 20  # bytes of a process that has imported the libraries
MARGIN = 1.2
QUESTION_TOKENS = 128  # approximate length of a question of a benchmark


@dataclass(frozen=True)
class Size:
    """The size of one model."""

    parameters: int | None = None  # None if the configuration cannot be read
    weights: int = 0  # bytes
    vocabulary: int = 0  # number of tokens
    download: int = 0  # bytes that must still be downloaded from the hub
    reason: str = ""  # why the configuration cannot be read

    def memory(self, options: Any) -> int:
        """Estimate the bytes that measuring needs: weights, the file they are read from, and the logits of one batch,
        which are the largest tensor of a pass. 0 if the size is not known.
        """
        if self.parameters is None:
            return 0
        if isinstance(options, ArmOptions):  # weights, their copy, gradients and AdamW's two moments
            logits = 3 * options.batch_size * options.block_length * self.vocabulary * BYTES["float32"]
            return int(MARGIN * (AT_LEAST + 5 * self.parameters * BYTES["float32"] + logits))
        length = getattr(options, "seq_len", QUESTION_TOKENS)
        if options.batch_size == "auto":
            tokens = TOKENS_PER_BATCH["cpu" if stays_on_cpu(options.device_map) else "cuda"]
        else:
            tokens = options.batch_size * length
        logits = max(tokens, length) * self.vocabulary * BYTES["float32"]
        return int(MARGIN * (AT_LEAST + 2 * self.weights + logits))


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
    found = []
    for each in plan:
        options = each.cell.options
        key = load_key(options)
        if key not in sizes:
            sizes[key] = size_of(options) if also_local or is_on_hub(getattr(options, "model", None)) else Size()
        found.append(replace(each, size=sizes[key]))
    return found


def done_cell(cell: Cell, folders: CellFolders, reads: Reads) -> tuple[dict[str, Any] | None, str]:
    """Return the manifest of a cell with unchanged options and inputs; else None, and why an old one is not valid."""
    found, why = folders.manifest(cell.name, cell.command, cell.config)
    if found is None or why or (why := changes(found.get("read"), reads.of(cell.options))):
        return None, why
    return (found, "") if found["tables"] and found.get("drawn", True) else (None, "")


def size_of(options: Any) -> Size:
    """Return the size of a model, computed from its configuration alone."""
    try:
        if isinstance(options, TrainOptions):
            config, files = architecture(options.config), None
            parameters = count_parameters(config)
        else:
            with quiet(), read_once():
                files = find_settings(options.model, options.revision, options.gguf_file)
                config = read_config(files, options.trust_remote_code)
                parameters = count_parameters(config)
    except SinkscopeError as error:
        return Size(reason=one_line(error))
    except Exception as error:  # building a model may raise any error
        return Size(reason=described(error))
    text = config.get_text_config()
    vocabulary = int(getattr(text, "vocab_size", 0) or 0)
    if files is None:  # `train` creates it
        return Size(parameters, parameters * BYTES["float32"], vocabulary)
    stored = str(getattr(text, "dtype", None) or "float32").removeprefix("torch.")
    dtype = options.dtype or ("float32" if files.gguf or stays_on_cpu(options.device_map) else stored)
    download = missing_weights(files.source, files.folder) if files.commit is not None else 0
    return Size(parameters, parameters * BYTES.get(dtype, 4), vocabulary, download)


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
        Group(tuple(tasks[each.cell.name] for each in group), max(each.memory for each in group))
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

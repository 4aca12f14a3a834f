"""What a sweep has to do: the size of its models, found without their weights, and which cells are done."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from sinkscope.commands.sweeping.reads import Reads, changes
from sinkscope.commands.sweeping.worker import Group, State, Task, load_key
from sinkscope.errors import InputError, SinkscopeError, described, one_line
from sinkscope.measuring.passes import TOKENS_PER_BATCH
from sinkscope.models.files import SPARE, find_settings, free_room, gigabytes, is_on_hub, missing_weights, quiet
from sinkscope.models.loading import count_parameters, read_config, read_once, stays_on_cpu
from sinkscope.options.sweep_file import Cell
from sinkscope.options.training import ArmOptions, TrainOptions
from sinkscope.results.cells import CellFolders
from sinkscope.training.architectures import architecture

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
AT_LEAST = 700 << 20  # bytes of a process with its libraries
MARGIN = 1.2
OF_A_QUESTION = 128  # tokens of a benchmark's, about
GGUF_BITS = 1.5  # that a parameter takes in a GGUF file, at least
LARGEST_VOCABULARY = 1 << 18


@dataclass(frozen=True)
class Size:
    """Of one model.

    Attributes:
        parameters: how many it has; None where its configuration cannot be read.
        weights: their bytes.
        vocabulary: tokens.
        download: bytes that are still on the hub.
        reason: why it cannot be read.
    """

    parameters: int | None = None
    weights: int = 0
    vocabulary: int = 0
    download: int = 0
    reason: str = ""

    def memory(self, options: Any) -> int:
        """Bytes that measuring it takes, about: of the loaded weights and what they are read from, and of one batch's
        logits, which are the largest of what a pass makes. 0 where its size is not known.
        """
        if self.parameters is None:
            return 0
        if isinstance(options, ArmOptions):  # weights, their copy, gradients and AdamW's two moments
            logits = 3 * options.batch_size * options.block_length * self.vocabulary * BYTES["float32"]
            return int(MARGIN * (AT_LEAST + 5 * self.parameters * BYTES["float32"] + logits))
        on_cpu = stays_on_cpu(options.device_map)
        batch = options.batch_size
        length = getattr(options, "seq_len", OF_A_QUESTION)
        tokens = TOKENS_PER_BATCH["cpu" if on_cpu else "cuda"] if batch == "auto" else batch * length
        logits = max(tokens, length) * self.vocabulary * BYTES["float32"]
        return int(MARGIN * (AT_LEAST + 2 * self.weights + logits))


@dataclass(frozen=True)
class Planned:
    """A cell, and what is known of it before it is measured."""

    cell: Cell
    state: State
    message: str = ""  # why a cell failed, parts of one that is done failed, or it is measured again
    size: Size = Size()

    def is_wanted(self, retry: bool) -> bool:
        """Whether it is to be measured: what failed, also in parts, only with --retry."""
        return self.state == State.WAITING or (retry and bool(self.message))

    @property
    def memory(self) -> int:
        return self.size.memory(self.cell.options)


def planned(cells: Iterable[Cell], folders: CellFolders, reads: Reads) -> list[Planned]:
    """All cells with their states."""
    return [Planned(cell, *state_of(cell, folders, reads)) for cell in cells]


def sized(plan: Iterable[Planned], share: float = 0.0) -> list[Planned]:
    """The same with the sizes of their models, each found once.

    Args:
        share: bytes that each worker can have. What surely takes no more gets no size, unless it is on the hub: the
            header of a GGUF file takes seconds to read. Infinite for one worker, which shares with no other.
    """
    sizes: dict[tuple, Size] = {}
    found = []
    for each in plan:
        options = each.cell.options
        key = load_key(options)
        if key not in sizes:
            sizes[key] = Size() if surely_fits(options, share) else size_of(options)
        found.append(replace(each, size=sizes[key]))
    return found


def surely_fits(options: Any, share: float) -> bool:
    """Whether measuring a model that is here takes no more than so many bytes, as far as its file's size can tell."""
    model = getattr(options, "model", None)
    if is_on_hub(model) or not share:
        return False
    if share == math.inf:
        return True
    if isinstance(options, TrainOptions):
        return False
    try:
        gguf = find_settings(model, options.revision, options.gguf_file).gguf
    except SinkscopeError:  # what is wrong is said of the cell when it is measured
        return False
    if gguf is None:
        return False
    most = int(Path(gguf).stat().st_size * 8 / GGUF_BITS)
    return Size(most, most * BYTES["float32"], LARGEST_VOCABULARY).memory(options) <= share


def state_of(cell: Cell, folders: CellFolders, reads: Reads) -> tuple[State, str]:
    """Whether a cell is done or has failed, and what was said of it then; or why it is measured again."""
    manifest, why = done_cell(cell, folders, reads)
    if manifest is not None:
        return State.DONE, partly_failed(manifest)
    failure = folders.failure(cell.name)
    return (State.WAITING, why) if failure is None else (State.FAILED, failure.error)


def done_cell(cell: Cell, folders: CellFolders, reads: Reads) -> tuple[dict[str, Any] | None, str]:
    """The manifest of a cell that is done: it was measured with the same options, and what it read has not changed.

    Returns:
        The manifest, and ""; or None, and why what is there is measured again, "" where nothing is there.
    """
    found, why = folders.manifest(cell.name, cell.command, cell.config)
    if found is None or why or (why := changes(found.get("read"), reads.of(cell.options))):
        return None, why
    return (found, "") if found["tables"] else (None, "")


def partly_failed(manifest: Mapping[str, Any]) -> str:
    """What failed of a cell that is done: arms of `intervene`, runs of `claims`."""
    failed = manifest.get("failed") or {}
    return one_line("; ".join(f"{name}: {reason}" for name, reason in failed.items())) if failed else ""


def size_of(options: Any) -> Size:
    """The size of a model, from its configuration alone."""
    if isinstance(options, TrainOptions):
        return _size_of_new(options)
    try:
        with quiet(), read_once():
            files = find_settings(options.model, options.revision, options.gguf_file)
            config = read_config(files, options.trust_remote_code)
            parameters = count_parameters(config)
    except SinkscopeError as error:
        return Size(reason=one_line(error))
    except Exception as error:  # whatever building a model raises
        return Size(reason=described(error))
    text = config.get_text_config()
    stored = str(getattr(text, "dtype", None) or "float32").removeprefix("torch.")
    dtype = options.dtype or ("float32" if files.gguf or stays_on_cpu(options.device_map) else stored)
    vocabulary = int(getattr(text, "vocab_size", 0) or 0)
    download = missing_weights(files.source, files.folder) if files.commit is not None else 0
    return Size(parameters, parameters * BYTES.get(dtype, 4), vocabulary, download)


def _size_of_new(options: TrainOptions) -> Size:
    """Of a model that begins with random weights."""
    try:
        config = architecture(options.config)
        parameters = count_parameters(config)
    except Exception as error:
        return Size(reason=described(error))
    return Size(parameters, parameters * BYTES["float32"], config.get_text_config().vocab_size)


def check_disk(todo: Iterable[Planned], at_once: int | None) -> None:
    """Find before anything is downloaded that the disk cannot hold the models.

    Args:
        todo: the cells that are to be measured.
        at_once: how many models are there at the same time; None: all of them stay.

    Raises:
        InputError: it cannot.
    """
    downloads = {each.cell.source: each.size.download for each in todo}
    needed, free = sum(sorted(downloads.values(), reverse=True)[:at_once]), free_room()
    if needed and needed + SPARE > free:
        advice = "" if at_once else "--evict removes each when its cells are done; or "
        raise InputError(
            f"the models that are still on the hub take {gigabytes(needed)}, and the disk of their cache has "
            f"{gigabytes(free)} left: {advice}make room, or set HF_HOME to a folder on another disk"
        )


def part_of(cells: Sequence[Cell], part: tuple[int, int]) -> Sequence[Cell]:
    """One of so many parts of equal size, in which the cells of a model stay together."""
    at, of = part
    return cells[len(cells) * (at - 1) // of : len(cells) * at // of]


def groups_of(todo: Iterable[Planned], tasks: Mapping[str, Task]) -> list[Group]:
    """The cells that are to be measured, by the load that they share."""
    groups: dict[tuple, list[Planned]] = {}
    for each in todo:
        groups.setdefault(load_key(each.cell.options), []).append(each)
    return [
        Group(tuple(tasks[each.cell.name] for each in group), max(each.memory for each in group))
        for group in groups.values()
    ]


def table_of(plan: Iterable[Planned]) -> pd.DataFrame:
    """What --dry-run shows."""
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

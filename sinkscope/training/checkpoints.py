"""The checkpoints that transformers' Trainer leaves in a folder, and what can go wrong in hours of writing them."""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sinkscope.errors import InputError, SinkscopeError, is_out_of_memory, one_line

_NAME = re.compile(r"checkpoint-(\d+)")
# what a checkpoint holds besides the model: of one process, of several, of FSDP
RESUMED_FROM = (
    *("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "trainer_state.json"),
    *("rng_state_*.pth", "optimizer.bin", "pytorch_model_fsdp.bin"),
)
# signs, in the errors of torch's and safetensors' writers, that the disk refused
_DISK = ("No space left", "I/O error", "file write failed", "PytorchStreamWriter", "enforce fail", "os error")


def checkpoints(folder: Path) -> list[Path]:
    """All checkpoints in a folder, complete or not, by their step."""
    return sorted((path for path in folder.iterdir() if _NAME.fullmatch(path.name)), key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def last_checkpoint(folder: Path) -> Path | None:
    """The last complete checkpoint."""
    return next((path for path in reversed(checkpoints(folder)) if _is_complete(path)), None)


def incomplete(folder: Path) -> list[Path]:
    """Checkpoints that a kill has left half written: the Trainer would count them among those that it keeps."""
    return [path for path in checkpoints(folder) if not _is_complete(path)]


def _is_complete(checkpoint: Path) -> bool:
    """The Trainer writes the state last; of a checkpoint that it was deleting, any file may be missing."""
    needed = ("config.json", "model*.safetensors", "optimizer.*", "scheduler.pt")  # FSDP's is optimizer.bin
    return all(any(checkpoint.glob(name)) for name in needed) and logs_of(checkpoint) is not None


def logs_of(checkpoint: Path) -> list[dict[str, Any]] | None:
    """The Trainer's log history; None if the checkpoint has no readable state."""
    try:
        return json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    except (OSError, ValueError, TypeError, KeyError):
        return None


def keep_models(training: Path, kept: Path) -> None:
    """Move a finished training's checkpoints, without what is only needed to resume: three times the model's size."""
    for checkpoint in checkpoints(training):
        for path in (path for name in RESUMED_FROM for path in checkpoint.glob(name)):
            path.unlink()
        checkpoint.replace(kept / checkpoint.name)


def check_room(folder: Path, needed: int) -> None:
    """Raise InputError if a disk cannot hold what will be written: now, and not after hours.

    Args:
        folder: whose present content will be replaced.
        needed: bytes.
    """
    held = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(folder).free + held
    if free < needed:
        raise InputError(
            f"{folder} has {free / 2**30:.1f} GB left on its disk and its checkpoints need {needed / 2**30:.1f}: "
            "make room, or name another folder"
        )


@contextmanager
def failures(folder: Path) -> Iterator[None]:
    """Turn the errors of full memory and full disks into messages that say what is kept.

    An incomplete checkpoint is deleted after an error of the disk, since it takes up room and cannot be used.

    Args:
        folder: of the training.

    Raises:
        SinkscopeError: memory ran out, or writing failed. Other errors pass unchanged.
    """
    try:
        yield
    except (SinkscopeError, KeyboardInterrupt):
        raise
    except Exception as error:
        last = last_checkpoint(folder) if folder.is_dir() else None
        kept = f"the training up to step {step_of(last)} is kept" if last else "what was reached is kept"
        if is_out_of_memory(error):
            raise SinkscopeError(
                "memory ran out: take a smaller --batch-size with more --accumulation, a shorter --block-length, or "
                f"--bf16 ({kept})"
            ) from error
        if isinstance(error, OSError) or any(sign in str(error) for sign in _DISK):
            for path in incomplete(folder) if folder.is_dir() else ():
                shutil.rmtree(path)
            raise SinkscopeError(
                f"writing to {folder} failed [{one_line(error)}]: {kept}; make room and repeat the command to go on"
            ) from error
        raise

"""Faults at a chosen moment: before the n-th time that a process changes something on the disk below a folder.

Python's audit hooks are called for every change except writes of compiled libraries, for which they are called when
files are opened or renamed. A hook stays until its process ends, so use it in forked processes.
"""

import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd

from sinkscope.results.manifest import foreign_files

RENAMES = ("os.rename",)
WRITES = ("open", "os.mkdir", "os.rename")  # a full disk refuses these; a rename represents the writing before it
CHANGES = (*WRITES, "os.remove", "os.rmdir")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def before_change(number: int, folder: Path, act: Callable[[], Any], events: tuple[str, ...] = CHANGES) -> None:
    """Do `act` before the n-th change below a folder (from 1 on) and before every later one."""
    root, count = str(folder.resolve()), 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal count
        if event in events and _changes(event, arguments, root):
            count += 1
            if count >= number:
                act()

    sys.addaudithook(hook)


def _changes(event: str, arguments: tuple, root: str) -> bool:
    path = arguments[0]
    if not isinstance(path, str | bytes | os.PathLike):  # an open file's number
        return False
    if event == "open" and not (arguments[2] or 0) & WRITING:
        return False
    name = os.fsdecode(path)
    return os.path.abspath(name).startswith(root) or (event in ("os.remove", "os.rmdir") and arguments[1] != -1)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refuse() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def assert_same_folder(out: Path, unbroken: Path) -> None:
    """Compare files, weights, tables and lists of files, and check that nothing else is left."""
    files = {path.relative_to(unbroken) for path in unbroken.rglob("*") if path.is_file()}
    assert {path.relative_to(out) for path in out.rglob("*") if path.is_file()} == files
    for path in files:
        if path.suffix == ".safetensors":
            assert (out / path).read_bytes() == (unbroken / path).read_bytes(), path
        if path.suffix == ".parquet":
            pd.testing.assert_frame_equal(pd.read_parquet(out / path), pd.read_parquet(unbroken / path))
        if path.name == "run.json":
            ours, others = (json.loads((folder / path).read_text())["files"] for folder in (out, unbroken))
            assert ours == others, path
    assert not list(foreign_files(out))
    assert list(out.parent.iterdir()) == [out]

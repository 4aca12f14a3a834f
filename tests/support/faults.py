"""Faults at a chosen moment: before the n-th time that a process changes something on the disk below a folder.

Python's audit hooks are called for every change except writes of compiled libraries, for which they are called when
files are opened or renamed. A hook stays until its process ends, so use it in forked processes.
"""

import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

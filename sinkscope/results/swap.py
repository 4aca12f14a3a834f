"""Safe writing: locks, temporary names that can be found again after a kill, and renames.

A folder or file NAME is written as .sinkscope-NAME-new and renamed; between the two renames, an earlier NAME is
.sinkscope-NAME-old. The next command on NAME therefore finds and repairs what a killed process has left. The lock is
the file .sinkscope-NAME-lock: the system releases it when its process ends, and the next command removes the file.
Folders may come from anywhere: links under these names are removed and not followed.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

TEMPORARY_PREFIX = ".sinkscope-"  # the prefix of all temporary names
NEW, OLD, LOCK = "new", "old", "lock"
MOMENT = 0.1  # seconds: longer than two renames, and the time in which another process makes its lock file again


def beside(path: Path, what: str) -> Path:
    return path.with_name(f"{TEMPORARY_PREFIX}{path.name}-{what}")


def temporary_parts(path: Path) -> tuple[str, str]:
    """Return NAME and NEW, OLD or LOCK for a temporary name."""
    name, _, what = path.name.removeprefix(TEMPORARY_PREFIX).rpartition("-")
    return name, what


@contextmanager
def locked(path: Path, patience: float = MOMENT) -> Iterator[None]:
    """Lock a folder or file, which need not exist, against other processes and threads.

    Raises BlockingIOError if another keeps the lock for `patience` seconds, and another OSError if the lock file cannot
    be made.
    """
    lock = FileLock(beside(path, LOCK), timeout=patience, poll_interval=MOMENT / 20)
    try:
        lock.acquire()
    except Timeout:
        raise BlockingIOError from None
    try:
        yield
    finally:
        with suppress(OSError):  # Windows cannot remove an open file; there, filelock removes it
            os.unlink(lock.lock_file)  # while the lock is held: a waiting process sees that the file was removed
        lock.release()


def repair(path: Path) -> None:
    """Finish or undo the interrupted writing of a folder or file; the caller holds its lock."""
    new, old = beside(path, NEW), beside(path, OLD)
    remove(new)
    if old.is_symlink():  # a link is not ours, and it would become `path`
        remove(old)
    if not old.exists():
        return
    if path.exists():
        with suppress(OSError):  # the next process removes it
            os.replace(old, new)  # a half-removed folder must not look like the old one
        remove(new)
    else:
        os.replace(old, path)


def repair_within(folder: Path) -> None:
    """Finish or undo the interrupted writing of everything in a folder."""
    for path in list(folder.rglob(f"{TEMPORARY_PREFIX}*")):
        name, what = temporary_parts(path)
        if name and what in (NEW, OLD):
            repair(path.with_name(name))
        else:
            remove(path)


def find_again(path: Path) -> bool:
    """Return whether a missing folder exists again: another process was replacing it, or a killed one had moved it."""
    path = path.resolve()
    if not path.name or not beside(path, OLD).exists():
        return False
    with suppress(OSError), locked(path):  # the other process holds the lock, or the disk cannot be written
        repair(path)
    return path.exists()


def remove(path: Path) -> None:
    """Remove a file or a folder; errors of the disk are ignored."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary file that becomes `path` when the block ends without an error; links are replaced."""
    fresh = beside(path, NEW)
    try:
        remove(fresh)
        os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
        yield fresh
        os.replace(fresh, path)
    except BaseException:
        remove(fresh)
        raise

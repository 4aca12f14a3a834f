"""Safe writing: locks, temporary names that can be found again after a kill, and renames.

A folder or file NAME is written as .sinkscope-NAME-new and renamed; between the two renames, an earlier NAME is
.sinkscope-NAME-old. The next command on NAME therefore finds and repairs what a killed process has left. The lock is
the file .sinkscope-NAME-lock: the system releases it when its process ends, and the next command removes the file.
Folders may come from anywhere: links under these names are removed and not followed.
"""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

PREFIX = ".sinkscope-"  # the prefix of all temporary names
NEW, OLD, LOCK = "new", "old", "lock"
MOMENT = 0.1  # seconds: longer than two renames, and the time in which another process makes its lock file again


def beside(path: Path, what: str) -> Path:
    return path.with_name(f"{PREFIX}{path.name}-{what}")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a folder or file, which need not exist, against other processes and threads.

    Raises:
        BlockingIOError: it is locked already.
        OSError: the lock file cannot be made.
    """
    lock = FileLock(beside(path, LOCK), timeout=MOMENT, poll_interval=MOMENT / 20)
    made = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
    os.close(os.open(lock.lock_file, made, 0o644))  # filelock would report some of these failures as a lock
    try:
        lock.acquire()
    except Timeout:
        raise BlockingIOError from None
    except OSError:
        remove(Path(lock.lock_file))
        raise
    try:
        yield
    finally:
        with suppress(OSError):  # Windows cannot remove an open file; there, filelock removes it
            os.unlink(lock.lock_file)  # while the lock is held: a waiting process sees that the file was removed
        lock.release()


def put_in_place(path: Path) -> None:
    """Replace a folder by its new version; if that fails, the folder is unchanged and the new version is removed."""
    try:
        if path.exists():
            os.replace(path, beside(path, OLD))
        os.replace(beside(path, NEW), path)
    finally:
        put_right(path)


def put_right(path: Path) -> None:
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


def put_right_within(folder: Path) -> None:
    """Finish or undo the interrupted writing of everything in a folder."""
    for path in list(folder.rglob(f"{PREFIX}*")):
        name, _, what = path.name.removeprefix(PREFIX).rpartition("-")
        if name and what in (NEW, OLD):
            put_right(path.with_name(name))
        else:
            remove(path)


def find_again(path: Path) -> bool:
    """Return whether a missing folder exists again: another process was replacing it, or a killed one had moved it."""
    path = path.resolve()
    if not path.name or not beside(path, OLD).exists():
        return False
    try:
        with locked(path):
            put_right(path)
    except BlockingIOError:  # locked by the other process
        time.sleep(MOMENT)
    except OSError:  # a disk that cannot be written
        return False
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

"""What makes writing safe: one process at a time, temporary names that are found again, and renames.

A folder or file NAME is written as .sinkscope-NAME-new and renamed. What stands in its way is .sinkscope-NAME-old for
the time between two renames. Since these names follow from NAME, whoever comes next to NAME finds what a kill has left
and puts it right. The lock is the file .sinkscope-NAME-lock, which the system releases when its process ends.
"""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sinkscope.results.locks import acquire, release

PREFIX = ".sinkscope-"  # how the names of all that is unfinished begin
NEW, OLD, LOCK = "new", "old", "lock"
MOMENT = 0.1  # seconds: more than the time between two renames


def beside(path: Path, what: str) -> Path:
    return path.with_name(f"{PREFIX}{path.name}-{what}")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Have a folder or file to oneself, against other processes and threads.

    Args:
        path: need not exist; its parent must.

    Raises:
        BlockingIOError: another has it.
        OSError: the lock file cannot be made.
    """
    file = beside(path, LOCK)
    handle = acquire(file)
    try:
        yield
    finally:
        release(file, handle)


def put_in_place(path: Path) -> None:
    """Let what was written as `new` take the place of a folder; if it cannot, all is as before but for `new`."""
    try:
        if path.exists():
            os.replace(path, beside(path, OLD))
        os.replace(beside(path, NEW), path)
    finally:
        put_right(path)


def put_right(path: Path) -> None:
    """Finish or undo what was broken off while a folder or file was written; whoever calls has it to itself."""
    new, old = beside(path, NEW), beside(path, OLD)
    remove(new)
    if not old.exists():
        return
    if path.exists():
        with suppress(OSError):  # whoever comes next removes it
            os.replace(old, new)  # half removed it must not look like what was there before
        remove(new)
    else:
        os.replace(old, path)


def put_right_within(folder: Path) -> None:
    """The same for all that is in a folder."""
    for path in list(folder.rglob(f"{PREFIX}*")):
        name, _, what = path.name.removeprefix(PREFIX).rpartition("-")
        if name and what in (NEW, OLD):
            put_right(path.with_name(name))
        else:
            remove(path)


def find_again(path: Path) -> bool:
    """Whether a folder that is missing is back: another process was about to replace it, or a kill left it aside."""
    path = path.resolve()
    if not path.name or not beside(path, OLD).exists():
        return False
    try:
        with locked(path):
            put_right(path)
    except BlockingIOError:  # the other process has it
        time.sleep(MOMENT)
    except OSError:  # a disk that cannot be written
        return False
    return path.exists()


def remove(path: Path) -> None:
    """A file or a folder, as far as the disk allows."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary file that becomes `path` when the block ends well, and vanishes when it does not."""
    fresh = beside(path, NEW)
    try:
        yield fresh
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise

"""A file that one process or thread holds at a time, and that the system lets go of when its process ends.

Unix locks a whole file, and a file that is open can be removed: another process may then hold a lock on a file that is
no longer there, and has to look. Windows locks bytes of it, and a file that is open cannot be removed.
"""

import os
from contextlib import suppress
from pathlib import Path

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    import msvcrt

    IS_UNIX = False
else:
    IS_UNIX = True

ATTEMPTS = 20  # at a lock file that vanishes in the meantime


def acquire(file: Path) -> int:
    """Hold a file, which is made if need be. Returns what `release` takes.

    Raises:
        BlockingIOError: another process or thread holds it.
        OSError: it cannot be made.
    """
    for _ in range(ATTEMPTS):
        handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(handle)
        except BlockingIOError:
            os.close(handle)
            raise
        except OSError:  # a file system without locks
            return handle
        if not IS_UNIX or _is_named(handle, file):
            return handle
        os.close(handle)  # its last holder has removed it meanwhile
    raise BlockingIOError


def release(file: Path, handle: int) -> None:
    """Let go of a file and remove it."""
    if not IS_UNIX:
        os.close(handle)  # or it could not be removed; nor can it where somebody else has opened it since
    with suppress(OSError):
        file.unlink()
    if IS_UNIX:
        os.close(handle)  # who gets the lock now sees that its file is gone


def _lock(handle: int) -> None:
    if IS_UNIX:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return
    try:
        msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
    except PermissionError as error:
        raise BlockingIOError from error


def _is_named(handle: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), file.stat())
    except FileNotFoundError:
        return False

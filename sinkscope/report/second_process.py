"""Work shared out with a second process, where there is a core for it."""

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NoReturn

FEWEST = 4  # pieces of work for which a process is started
PATIENCE = 20.0  # seconds more, beside four times what half of the work took here, until the process is given up


def shared_out(work: Callable[[str], object], names: Sequence[str]) -> None:
    """work(name) for every name, every other one in a second process, which has a copy of all that there is here.

    Work there leaves nothing behind but files, and computes nothing with torch, whose threads it lacks. Where it fails,
    all of it is done again here, so that its errors are raised here.
    """
    if len(names) < FEWEST or not _has_second_core():
        for name in names:
            work(name)
        return
    mine, others = names[::2], names[1::2]
    parent = os.getpid()
    child = os.fork()
    if not child:
        _work_and_exit(work, others, parent)
    try:
        began = time.monotonic()
        for name in mine:
            work(name)
        status = _status(child, patience=PATIENCE + 4 * (time.monotonic() - began))
    except BaseException:
        with suppress(ProcessLookupError, ChildProcessError):  # it may have ended
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        raise
    if status:
        for name in others:
            work(name)


def _status(child: int, patience: float) -> int:
    """How the process ended; it is ended, as one that fails, where it takes too long: a library's lock that another
    thread held at the fork is held there for ever.
    """
    end = time.monotonic() + patience
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def _has_second_core() -> bool:
    """Only on Linux: elsewhere there is no fork, or libraries do not stand it."""
    return sys.platform == "linux" and len(os.sched_getaffinity(0)) > 1


def _work_and_exit(work: Callable[[str], object], names: Sequence[str], parent: int) -> NoReturn:
    """Without a word, and no longer than the process lives that waits for it."""
    try:
        for name in names:
            if os.getppid() != parent:
                break
            work(name)
        os._exit(0)
    except BaseException:
        os._exit(1)

"""Work shared out with a second process, where there is a core for it."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import current_process, get_context
from typing import NoReturn

FEWEST = 4  # pieces of work for which a process is started
PATIENCE = 20.0  # seconds more, beside four times what half of the work took here, until the process is given up


def shared_out(work: Callable[[str], object], names: Sequence[str]) -> None:
    """work(name) for every name, every other one in a second process, which has a copy of all that there is here.

    Work there leaves nothing behind but files, and computes nothing with torch, whose threads it lacks. Where it fails,
    or takes too long (a library's lock that another thread held at the fork is held there for ever), all of it is done
    again here, so that its errors are raised here.
    """
    if len(names) < FEWEST or not _has_second_core():
        for name in names:
            work(name)
        return
    mine, others = names[::2], names[1::2]
    second = get_context("fork").Process(target=_work_and_exit, args=(work, others, os.getpid()), daemon=True)
    second.start()
    try:
        began = time.monotonic()
        for name in mine:
            work(name)
        second.join(PATIENCE + 4 * (time.monotonic() - began))
    finally:
        second.kill()
        second.join()
    if second.exitcode:
        for name in others:
            work(name)


def _has_second_core() -> bool:
    """Only on Linux: elsewhere there is no fork, or libraries do not stand it. A daemon may start no process."""
    return sys.platform == "linux" and (os.cpu_count() or 1) > 1 and not current_process().daemon


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

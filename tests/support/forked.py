"""A separate process that need not import everything again, to be interrupted or killed."""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Process:
    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None  # -signal if a signal ended it

    def poll(self) -> int | None:
        """Return the exit status of the process, or None if it still runs."""
        return self._collect(os.WNOHANG)

    def wait(self) -> int:
        self._collect(0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def _collect(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


@contextmanager
def forked(work: Callable[[], Any]) -> Iterator[Process]:
    """Do `work` in a copy of this process, which prints to the terminal and is killed at the end if it still runs."""
    pid = os.fork()
    if not pid:
        work_and_exit(work)
    process = Process(pid)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()


def work_and_exit(work: Callable[[], Any]) -> None:
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
        torch.set_num_threads(torch.get_num_threads())  # repairs the thread pool; two threads must not do this at once
        work()
        status = 0
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)

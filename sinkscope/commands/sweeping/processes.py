"""Workers as processes of this machine: each has its own memory, which is free again when it ends or is killed."""

import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from sinkscope.commands.sweeping.engine import Ended
from sinkscope.commands.sweeping.worker import Event, Group, measured, settle

# A server that has imported what workers need starts each of them in milliseconds; Windows has none.
METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
SILENCE = "sinkscope.commands.sweeping.silence"
GRACE = 15.0  # seconds that a worker has to clear up when it is told to end
CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current"))


@dataclass
class _Worker:
    process: Any
    receiver: Connection
    memory: int
    slot: int


class Processes:
    """A pool of processes, as many as `workers`, as far as their memory fits.

    Several workers share out the accelerators, if there are any: each sees one. A single one sees all of them.
    """

    def __init__(self, workers: int, commands: Iterable[str] = ("analyze",)) -> None:
        """`commands`: that they run."""
        self._context: Any = multiprocessing.get_context(METHOD)
        if METHOD == "forkserver":
            modules = (SILENCE, *(f"sinkscope.commands.{name}" for name in commands))
            self._context.set_forkserver_preload(list(modules))
        self.workers, self._devices = workers, accelerators() if workers > 1 else 0
        self._threads = max(1, (os.cpu_count() or 1) // workers)
        self._budget = available_memory()
        self.share = self._budget / workers if workers > 1 else math.inf
        self._workers: dict[int, _Worker] = {}
        self._started = 0

    def has_room(self, group: Group) -> bool:
        used = sum(worker.memory for worker in self._workers.values())
        return len(self._workers) < self.workers and used + group.memory <= self._budget

    def start(self, group: Group) -> int:
        receiver, sender = self._context.Pipe(duplex=False)
        slot = min(set(range(self.workers)) - {worker.slot for worker in self._workers.values()})
        device = slot % self._devices if self._devices else None
        process = self._context.Process(target=_main, args=(group, sender, self._threads, device))
        process.start()
        sender.close()  # so that the worker's end of it is the only one
        self._started += 1
        self._workers[self._started] = _Worker(process, receiver, group.memory, slot)
        return self._started

    def heard(self) -> Iterator[tuple[int, Event | Ended]]:
        ready = wait([worker.receiver for worker in self._workers.values()])
        for number, worker in list(self._workers.items()):
            if worker.receiver in ready:
                try:
                    yield number, worker.receiver.recv()
                except (EOFError, OSError):
                    yield number, self._ended(number)

    def _ended(self, number: int) -> Ended:
        worker = self._workers.pop(number)
        worker.process.join()
        worker.receiver.close()
        code = worker.process.exitcode
        if code == 0:
            return Ended()
        if code is not None and code < 0:
            hint = ": memory may have run out" if -code == getattr(signal, "SIGKILL", None) else ""
            return Ended(f"its process was ended by signal {-code}{hint}")
        return Ended(f"its process ended with status {code}")

    def close(self) -> None:
        workers = list(self._workers.values())
        for worker in workers:
            worker.process.terminate()
        until = time.monotonic() + GRACE
        for worker in workers:
            worker.process.join(max(0.0, until - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.receiver.close()
        self._workers.clear()


def accelerators() -> int:
    import torch

    return torch.cuda.device_count()


def default_workers() -> int:
    """One for each accelerator, or for each core; what they need of memory is seen when they start."""
    return accelerators() or os.cpu_count() or 1


def available_memory() -> int:
    """Bytes that are free on this machine, or in this container if it has fewer."""
    import psutil

    free = int(psutil.virtual_memory().available)
    try:
        most, used = (int(path.read_text(encoding="utf-8")) for path in CGROUP)
    except (OSError, ValueError):  # no container, or one without a limit («max»)
        return free
    return min(free, max(0, most - used))


# --- in the worker's process


def _main(group: Group, sender: Connection, threads: int, device: int | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes: the sweep's own tells the workers
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that nothing is left half written
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if device is not None:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["CUDA_VISIBLE_DEVICES"] = shown.split(",")[device] if shown else str(device)
    settle()
    import torch

    # Set in any case: torch mends a forked process's pool of threads here, and two threads that need it at once fail.
    torch.set_num_threads(torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else threads)
    try:
        for event in measured(group):
            sender.send(event)
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(1)


def _end_with_parent() -> None:
    """A sweep that is killed leaves no workers behind, which would go on writing."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)

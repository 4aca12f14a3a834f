"""Pools of workers that run the groups of a sweep; the loss of a worker does not end the sweep.

`open_pool` chooses one: `Processes` starts processes on this machine, `RayTasks` tasks on a Ray cluster, and `Launched`
uses the processes of `accelerate launch`. When a worker is lost, the cell that it was measuring has failed, and another
worker takes the rest of its group.
"""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

import torch

from sinkscope.commands.sweep.options import SweepOptions
from sinkscope.commands.sweep.worker import Event, Group, State, measured, prepare_worker
from sinkscope.errors import InputError, SinkscopeError, described
from sinkscope.measuring.processes import Team
from sinkscope.models.memory import available_memory


class Pool(Protocol):
    """Workers, each of which measures one group."""

    workers: int  # how many there can be at once

    def has_room(self, group: Group) -> bool: ...

    def start(self, group: Group) -> Hashable:
        """Start a worker, and return what identifies it."""

    def reports(self) -> Iterable[tuple[Hashable, Event | str]]:
        """Wait for reports, and yield each worker with its event, or at its end with how it was lost ("": finished)."""

    def close(self) -> None:
        """End all workers that still run."""


def run_groups(groups: Iterable[Group], pool: Pool) -> Iterator[Event]:
    """Run all groups, and yield the events of their cells as they occur."""
    waiting = deque(groups)
    running: dict[Hashable, Group] = {}  # the unfinished cells of each worker
    current: dict[Hashable, str] = {}  # the cell that each worker is measuring
    try:
        while waiting or running:
            while waiting and (not running or pool.has_room(waiting[0])):
                group = waiting.popleft()
                running[pool.start(group)] = group
            for worker, report in pool.reports():
                group, is_lost = running.pop(worker), not isinstance(report, Event)
                if isinstance(report, Event):
                    current[worker] = report.name
                    ended = [report.name] if report.state in (State.DONE, State.FAILED) else []
                    yield report
                else:
                    # a worker that is lost before its first cell could not start, and the next one could not either
                    ended = [task.name for task in group.tasks if current.get(worker) in (None, task.name)]
                    for name in ended:
                        yield Event(name, State.FAILED, report or "its worker ended too early")
                if ended:
                    current.pop(worker, None)
                left = replace(group, tasks=tuple(task for task in group.tasks if task.name not in ended))
                if not is_lost:
                    running[worker] = left
                elif left.tasks:
                    waiting.appendleft(left)
    finally:
        pool.close()


def split(groups: list[Group], workers: int) -> list[Group]:
    """Halve the largest groups until every worker has one: an extra load costs less than an idle worker."""
    groups = list(groups)
    while 0 < len(groups) < workers:
        largest = max(range(len(groups)), key=lambda place: len(groups[place].tasks))
        tasks = groups[largest].tasks
        if len(tasks) == 1:
            break
        half = (len(tasks) + 1) // 2
        groups[largest : largest + 1] = [replace(groups[largest], tasks=part) for part in (tasks[:half], tasks[half:])]
    return groups


# ---------------------------------------------------------------------------------------- processes of this machine

# A server that has imported what workers need starts each of them in milliseconds; Windows has none. Where there are
# accelerators, workers are spawned: what the server imports may initialize CUDA, which a fork cannot use.
METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
GRACE = 15.0  # seconds for a worker to clean up before it is killed


@dataclass(eq=False)
class _Worker:
    process: Any
    receiver: Connection
    memory: int
    devices: list[int]


class Processes:
    """A pool of at most `workers` processes on this machine, as many as fit into its memory.

    The memory of a process is free again when it ends or is killed. Each of several workers sees the accelerators that
    its group uses, if there are any; a single worker sees all of them. Workers share an accelerator only if there are
    more workers than accelerators. `commands` are imported before the first process is forked.
    """

    def __init__(self, workers: int, commands: Iterable[str] = ("analyze",)) -> None:
        accelerators = torch.cuda.device_count()
        method = "spawn" if accelerators or torch.xpu.device_count() else METHOD
        self._context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            modules = ("sinkscope.commands.sweep.silence", *(f"sinkscope.commands.{name}" for name in commands))
            self._context.set_forkserver_preload(list(modules))
        self.workers, self._devices = workers, accelerators if workers > 1 else 0
        self._threads = max(1, (os.cpu_count() or 1) // workers)
        self._budget = available_memory()
        self._running: list[_Worker] = []

    def _users(self, device: int) -> int:
        return sum(device in worker.devices for worker in self._running)

    def _devices_for(self, group: Group) -> list[int]:
        """Return the accelerators with the fewest workers, as many as the group uses."""
        return sorted(range(self._devices), key=self._users)[: group.devices]

    def has_room(self, group: Group) -> bool:
        used = sum(worker.memory for worker in self._running)
        has_devices = all(self._users(device) * self._devices < self.workers for device in self._devices_for(group))
        return len(self._running) < self.workers and used + group.memory <= self._budget and has_devices

    def start(self, group: Group) -> Hashable:
        receiver, sender = self._context.Pipe(duplex=False)
        devices = self._devices_for(group)
        process = self._context.Process(
            target=_main, args=(group, sender, self._threads, devices if self._devices else None)
        )
        process.start()
        sender.close()  # so that only the worker has an open end for sending
        self._running.append(_Worker(process, receiver, group.memory, devices))
        return self._running[-1]

    def reports(self) -> Iterator[tuple[Hashable, Event | str]]:
        ready = wait([worker.receiver for worker in self._running])
        for worker in [worker for worker in self._running if worker.receiver in ready]:
            try:
                yield worker, worker.receiver.recv()
            except (EOFError, OSError):
                self._running.remove(worker)
                worker.process.join()
                worker.receiver.close()
                status = worker.process.exitcode
                how = f"its process ended with status {status}" if status else ""
                if status is not None and status < 0:
                    hint = ": memory may have run out" if -status == getattr(signal, "SIGKILL", None) else ""
                    how = f"its process was ended by signal {-status}{hint}"
                yield worker, how

    def close(self) -> None:
        for worker in self._running:
            worker.process.terminate()
        until = time.monotonic() + GRACE
        for worker in self._running:
            worker.process.join(max(0.0, until - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.receiver.close()
        self._running.clear()


def _main(group: Group, sender: Connection, threads: int, devices: list[int] | None) -> None:
    """Do the work of a worker, in its process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the main process ends the workers
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that nothing is left half written
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if devices is not None:  # before this process initializes CUDA
        shown = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [shown.split(",")[device] if shown else str(device) for device in devices]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)
    prepare_worker()
    # Also when nothing changes: torch repairs the thread pool of a forked process here, and two threads that need it at
    # once would fail.
    torch.set_num_threads(torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else threads)
    try:
        for event in measured(group):
            sender.send(event)
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(1)


def _end_with_parent() -> None:
    """End this worker when the sweep is killed; otherwise it would continue to write."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


# ----------------------------------------------------------------------------------------------------- tasks of Ray


class RayTasks:
    """A pool of Ray tasks, one for each group, on any machine with enough processors and memory.

    The machines of the cluster share the folder of the sweep. Each task is a generator that yields its events:
    https://docs.ray.io/en/latest/ray-core/ray-generators.html

    `address` names a running cluster; None: start one here with `cpus` cores (None: all), and end it with the pool.
    """

    def __init__(self, address: str | None, cpus: int | None = None) -> None:
        try:
            import ray
        except ModuleNotFoundError:
            raise InputError("--engine ray needs Ray: pip install 'sinkscope[ray]'") from None
        self._ray: Any = ray
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            new = {} if address else {"num_cpus": cpus, "include_dashboard": False}
            try:
                ray.init(address=address, log_to_driver=False, logging_level="ERROR", **new)
            except Exception as error:
                raise SinkscopeError(f"the Ray cluster cannot be used: {described(error)}") from error
        gpus = int(ray.cluster_resources().get("GPU", 0))
        self._gpus = max((int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]), default=0)
        self.workers = gpus or int(ray.cluster_resources().get("CPU", 1))
        self._running: list[Any] = []  # the generators of the tasks

    def has_room(self, group: Group) -> bool:
        return True  # tasks wait in Ray, which finds a machine that has room

    def start(self, group: Group) -> Hashable:
        options = {
            "num_cpus": 1,
            "num_gpus": min(group.devices, self._gpus),  # on one machine
            "memory": min(group.memory, int(self._ray.cluster_resources().get("memory", 0))) or None,
            "max_retries": 0,  # run_groups marks the cell of a lost worker as failed, and starts the others again
        }
        task = self._ray.remote(_measured).options(num_returns="streaming", **options)
        self._running.append(task.remote(group, os.getcwd()))
        return self._running[-1]

    def reports(self) -> Iterator[tuple[Hashable, Event | str]]:
        ready, _ = self._ray.wait(self._running, num_returns=1)
        for generator in ready:
            try:
                yield generator, self._ray.get(next(generator))
            except Exception as error:  # its end, or Ray lost the worker or its machine
                self._running.remove(generator)
                lost = not isinstance(error, StopIteration)
                yield generator, f"its Ray worker was lost: {described(error)}" if lost else ""

    def close(self) -> None:
        for generator in self._running:
            self._ray.cancel(generator, force=True)
        self._running.clear()
        if self._is_ours:
            self._ray.shutdown()


def _measured(group: Group, folder: str) -> Iterator[Event]:
    """Measure a group inside a Ray worker, which may have started in another folder."""
    os.chdir(folder)
    prepare_worker()
    yield from measured(group)


# --------------------------------------------------------------------------------- processes of `accelerate launch`


class Launched:
    """A pool of one worker: all processes of `accelerate launch` together.

    The first process plans, hands each group to the others (`follow`), and is the only one that writes.
    """

    workers = 1

    def __init__(self, members: Team) -> None:
        self._members = members

    def has_room(self, group: Group) -> bool:
        return False  # one group at a time

    def start(self, group: Group) -> Any:
        self._members.of_the_first(lambda: group)
        self._events: Any = measured(group)
        return self._events

    def reports(self) -> Iterator[tuple[Hashable, Event | str]]:
        for event in self._events:
            yield self._events, event
        yield self._events, ""

    def close(self) -> None:
        """Do nothing: the other processes end when the first one sends its last object or fails."""


def follow(members: Team) -> Any:
    """Measure the groups that the first process hands to the others; return its last object, which is not a group."""
    while isinstance(group := members.of_the_first(lambda: None), Group):
        for _ in measured(group):
            pass
    return group


# ------------------------------------------------------------------------------------------------------- the choice


def open_pool(asked: SweepOptions, commands: Iterable[str], members: Team) -> Pool:
    """Return the pool that the options of a sweep name."""
    workers = None if asked.workers == "auto" else asked.workers
    if members.count > 1:
        if asked.engine != "local" or workers not in (None, 1):
            what = "--engine ray" if asked.engine != "local" else f"--workers {workers}"
            raise InputError(f"{what}: under `accelerate launch` the launched processes measure each cell together")
        return Launched(members)
    if asked.engine == "ray":
        return RayTasks(asked.address, workers)
    # as many as there are accelerators, or cores; memory is checked when workers start
    return Processes(workers or torch.cuda.device_count() or os.cpu_count() or 1, commands)

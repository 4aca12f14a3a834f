"""Workers as tasks of Ray, on this machine or on a cluster whose machines share the folder.

https://docs.ray.io/en/latest/ray-core/ray-generators.html: a task that yields what it has to tell while it runs.
"""

import os
from collections.abc import Iterator
from typing import Any

from sinkscope.commands.sweeping.engine import Ended
from sinkscope.commands.sweeping.worker import Event, Group, measured, settle
from sinkscope.errors import InputError, SinkscopeError, described


class RayTasks:
    """A pool of Ray tasks, one for each group, wherever there are the processors and the memory for it.

    Args:
        address: of a cluster that runs; None: one is started here, and ended with the pool.
        cpus: of the one that is started; None: all there are.

    Raises:
        InputError: Ray is not installed.
        SinkscopeError: the cluster cannot be reached.
    """

    share = 0.0  # Ray finds the machine that has room for a group

    def __init__(self, address: str | None, cpus: int | None = None) -> None:
        try:
            import ray
        except ModuleNotFoundError:
            raise InputError("--engine ray needs Ray: pip install 'sinkscope[ray]'") from None
        self._ray: Any = ray
        self._is_ours = not ray.is_initialized()
        if self._is_ours:
            own = {} if address else {"num_cpus": cpus, "include_dashboard": False}
            try:
                ray.init(address=address, log_to_driver=False, logging_level="ERROR", **own)
            except Exception as error:
                raise SinkscopeError(f"the Ray cluster cannot be used: {described(error)}") from error
        self._gpus = int(ray.cluster_resources().get("GPU", 0))
        self.workers = self._gpus or int(ray.cluster_resources().get("CPU", 1))
        self._running: dict[Any, int] = {}  # the generator of a task → its number
        self._started = 0

    def has_room(self, group: Group) -> bool:
        return True  # tasks wait in Ray

    def start(self, group: Group) -> int:
        options = {
            "num_cpus": 1,
            "num_gpus": 1 if self._gpus else 0,
            "memory": min(group.memory, int(self._ray.cluster_resources().get("memory", 0))) or None,
            "max_retries": 0,  # the cell that a lost worker was at is reported, and the others are started anew
        }
        task = self._ray.remote(_measured).options(num_returns="streaming", **options)
        self._started += 1
        self._running[task.remote(group, os.getcwd())] = self._started
        return self._started

    def heard(self) -> Iterator[tuple[int, Event | Ended]]:
        ready, _ = self._ray.wait(list(self._running), num_returns=1)
        for generator in ready:
            number = self._running[generator]
            try:
                yield number, self._ray.get(next(generator))
            except StopIteration:
                del self._running[generator]
                yield number, Ended()
            except Exception as error:  # of Ray: the worker or its machine is gone
                del self._running[generator]
                yield number, Ended(f"its Ray worker was lost: {described(error)}")

    def close(self) -> None:
        for generator in self._running:
            self._ray.cancel(generator, force=True)
        self._running.clear()
        if self._is_ours:
            self._ray.shutdown()


def _measured(group: Group, folder: str) -> Iterator[Event]:
    """In the worker, which may have begun elsewhere."""
    os.chdir(folder)
    settle()
    yield from measured(group)

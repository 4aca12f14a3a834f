"""How the groups of a sweep are run: by a pool of workers, whichever there are, so that no worker's end ends the sweep.

A pool is of processes here (processes.py) or of Ray tasks (ray_tasks.py). A worker that is lost fails the cell that it
was at; the rest of its group is given to another one.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple, Protocol

from sinkscope.commands.sweeping.worker import Event, Group, State, Task


class Ended(NamedTuple):
    """A worker that is gone.

    Attributes:
        message: how it was lost, on one line; "" where it came to its end.
    """

    message: str = ""


class Pool(Protocol):
    """Workers, each of which measures one group.

    Attributes:
        workers: how many there can be at once.
        share: bytes that each can have when all run; 0 where every group must say what it needs.
    """

    workers: int
    share: float

    def has_room(self, group: Group) -> bool: ...

    def start(self, group: Group) -> int:
        """Start a worker, and return its number."""

    def heard(self) -> Iterable[tuple[int, Event | Ended]]:
        """Wait until any worker has something to tell: its number, and what."""

    def close(self) -> None:
        """End all workers that still run."""


def run_groups(groups: Iterable[Group], pool: Pool) -> Iterator[Event]:
    """Run all groups, and tell what becomes of each cell as it happens."""
    waiting = deque(groups)
    running: dict[int, list[Task]] = {}  # the cells that each worker has not finished
    memory: dict[int, int] = {}
    current: dict[int, str] = {}  # the cell that it is at
    try:
        while waiting or running:
            while waiting and (not running or pool.has_room(waiting[0])):
                group = waiting.popleft()
                number = pool.start(group)
                running[number], memory[number] = list(group.tasks), group.memory
            for number, heard in pool.heard():
                if isinstance(heard, Event):
                    current[number] = heard.name
                    if heard.state in (State.DONE, State.FAILED):
                        running[number] = [task for task in running[number] if task.name != heard.name]
                        del current[number]
                    yield heard
                    continue
                left, at = running.pop(number), current.pop(number, None)
                # without a cell it could not even begin, and nor would the next one
                lost = [task for task in left if at in (None, task.name)]
                for task in lost:
                    yield Event(task.name, State.FAILED, heard.message or "its worker ended too early")
                rest = tuple(task for task in left if task not in lost)
                if rest:
                    waiting.appendleft(Group(rest, memory[number]))
    finally:
        pool.close()


def split(groups: list[Group], workers: int) -> list[Group]:
    """Cut the largest groups, until every worker has one: an extra load costs less than an idle worker."""
    groups = list(groups)
    while 0 < len(groups) < workers:
        largest = max(range(len(groups)), key=lambda at: len(groups[at].tasks))
        tasks = groups[largest].tasks
        if len(tasks) == 1:
            break
        half = (len(tasks) + 1) // 2
        groups[largest : largest + 1] = [replace(groups[largest], tasks=part) for part in (tasks[:half], tasks[half:])]
    return groups

"""A sweep whose cells are measured by all processes together that `accelerate launch` has started (processes.py).

The first one plans, and hands each group to the others; it alone writes.
"""

import math
from collections.abc import Iterator
from typing import Any

from sinkscope.commands.sweeping.engine import Ended
from sinkscope.commands.sweeping.worker import Event, Group, measured
from sinkscope.errors import InputError
from sinkscope.measuring.processes import Team
from sinkscope.options.sweep import SweepOptions


class Launched:
    """A pool of one worker: all processes together."""

    workers = 1
    share = math.inf

    def __init__(self, members: Team) -> None:
        self._members = members
        self._events: Iterator[Event] = iter(())
        self._started = 0

    def has_room(self, group: Group) -> bool:
        return False  # one at a time

    def start(self, group: Group) -> int:
        self._members.of_the_first(lambda: group)
        self._events = measured(group)
        self._started += 1
        return self._started

    def heard(self) -> Iterator[tuple[int, Event | Ended]]:
        for event in self._events:
            yield self._started, event
        yield self._started, Ended()

    def close(self) -> None:
        """The others end with what the first one hands them last, or with its error."""


def check_launched(asked: SweepOptions) -> None:
    """Raise InputError for options of other engines."""
    if asked.engine != "local" or asked.workers not in ("auto", 1):
        what = "--engine ray" if asked.engine != "local" else f"--workers {asked.workers}"
        raise InputError(f"{what}: under `accelerate launch` the launched processes measure each cell together")


def follow(members: Team) -> Any:
    """What the other processes do: measure what the first one hands them, up to what it hands them last."""
    while isinstance(group := members.of_the_first(lambda: None), Group):
        for _ in measured(group):
            pass
    return group

"""Several processes that measure one model together, started by `accelerate launch`.

    accelerate launch --num_processes 2 -m sinkscope.cli analyze MODEL

Each process runs the whole command with the whole model and all inputs; only the batches of a pass are distributed
(passes.py). After each pass, the processes share their sums, which are added in one order, and continue with the same
numbers. Only the first process prints and writes.

`sharing_errors` raises an error of one process in all of them, so that none waits for a process that has failed.
"""

import atexit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState

from sinkscope.errors import InputError, SinkscopeError, described
from sinkscope.measuring.console import Messages
from sinkscope.models.loading import stays_on_cpu, was_launched
from sinkscope.options.measuring import DEVICE_POLICIES

TIMEOUT = timedelta(days=1)  # for waiting on the others: the first process may write or measure without them
Gathered = TypeVar("Gathered")


def joined(cpu: bool = False) -> PartialState:
    """Return the state of the launched processes, or of this single process; with `cpu`, without GPUs."""
    # the first call into accelerate, which otherwise does not find the other processes on a machine without GPU
    state = PartialState(cpu=cpu or not torch.cuda.is_available(), timeout=TIMEOUT)
    atexit.register(state.destroy_process_group)  # gloo can abort if the interpreter does this at exit
    return state


class _OuterBlockFailed(BaseException):
    """An outer block of another process failed. Ends all blocks within that one."""

    def __init__(self, level: int, error: Exception) -> None:
        self.level, self.error = level, error


@dataclass
class Team:
    """The processes that share the batches of a pass."""

    place: int = 0  # rank of this process
    count: int = 1  # number of processes
    _level: int = field(default=0, init=False)  # number of open `sharing_errors` blocks

    @property
    def is_first(self) -> bool:
        return self.place == 0

    def only_first(self, out: Any) -> Any:
        """Return `out` in the first process, None in the others."""
        return out if self.is_first else None

    def console(self, quiet: bool) -> Messages:
        """Return a console on stderr, which is quiet except in the first process."""
        return Messages(quiet or not self.is_first)

    def each(self, mine: Gathered) -> list[Gathered]:
        """Gather an object from every process, in order of rank. All processes must call this."""
        objects: list[Any] = [None] * self.count
        dist.all_gather_object(objects, mine)
        return objects

    def one_by_one(self, mine: bytes) -> Iterator[bytes]:
        """Yield the bytes of each process in order of rank, with one process's bytes in memory at a time."""
        for place in range(self.count):
            sent: list[Any] = [mine if place == self.place else None]
            dist.broadcast_object_list(sent, src=place)
            yield sent[0]

    def of_the_first(self, compute: Callable[[], Gathered]) -> Gathered:
        """Call `compute` in the first process and return its result in all of them."""
        if self.count == 1:
            return compute()
        result: list[Any] = [None]
        with self.sharing_errors():
            if self.is_first:
                result = [compute()]
        dist.broadcast_object_list(result, src=0)
        return result[0]

    @contextmanager
    def sharing_errors(self) -> Iterator[None]:
        """Run a block that succeeds in all processes or raises in all: their own error, or that of another process."""
        if self.count == 1:
            yield
            return
        self._level += 1
        level = self._level
        error: Exception | None = None
        try:
            try:
                yield
            except Exception as raised:
                error = raised
            mine = None
            if error is not None:  # level, and the type and text with which other processes raise this error
                kind = next((name for name, kind in RAISED.items() if isinstance(error, kind)), None)
                text = str(error) if kind else f"unexpected {described(error)}"
                mine = (level, kind or "SinkscopeError", text)
            ends = [end for end in self.each(mine) if end is not None]
            if ends:
                outermost = min(end[0] for end in ends)  # the block that ends
                error = error or RAISED[ends[0][1]](ends[0][2])
                raise error if outermost == level else _OuterBlockFailed(outermost, error)
        except _OuterBlockFailed as broken:
            if broken.level < level:
                raise
            raise broken.error from None
        finally:
            self._level = level - 1


SINGLE_PROCESS = Team()
_TEAM: ContextVar[Team] = ContextVar("team", default=SINGLE_PROCESS)
RAISED = {kind.__name__: kind for kind in (InputError, SinkscopeError, RuntimeError, MemoryError)}


def team() -> Team:
    """Return the processes that share the current passes: this process only, except in a block of `together`."""
    return _TEAM.get()


@contextmanager
def alone() -> Iterator[None]:
    """Let every process read all batches in this block, because a pass shares only its losses and observables."""
    token = _TEAM.set(SINGLE_PROCESS)
    try:
        yield
    finally:
        _TEAM.reset(token)


@contextmanager
def together(device_map: str | None = None, in_memory: bool = False) -> Iterator[Team]:
    """Share the passes of this block among the launched processes, if there are any.

    A model that the user has loaded (`in_memory`), possibly in only one process of a training run, is measured by this
    process without the others. Raises InputError if the device map gives every process all devices.
    """
    members, token = _TEAM.get(), None
    shares = was_launched() and (members.count > 1 or not in_memory)
    if shares and device_map in DEVICE_POLICIES and not stays_on_cpu(device_map):
        raise InputError(
            f"--device-map {device_map} would give every process all devices: leave it out, and each process gets one"
        )
    if members.count == 1 and shares:
        state = joined(stays_on_cpu(device_map))
        members = Team(state.process_index, state.num_processes)
        token = _TEAM.set(members)
    try:
        with members.sharing_errors():
            yield members
    finally:
        if token is not None:
            _TEAM.reset(token)

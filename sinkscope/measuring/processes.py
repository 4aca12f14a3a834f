"""Several processes that measure one model together, as `accelerate launch` starts them.

    accelerate launch --num_processes 2 -m sinkscope.cli analyze MODEL

Each does all that its command does, with the whole model and all inputs; only the batches of a pass are shared out
(passes.py). Behind each pass all have the sums of all, added up in one order, and go on with the same numbers. The
first one prints and writes.

What fails in one of them is raised in all, by `agreeing`: none waits for another that has given up.
"""

import atexit
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from rich.console import Console

from sinkscope.errors import InputError, SinkscopeError, described
from sinkscope.models.devices import stays_on_cpu
from sinkscope.options.measuring import POLICIES

TIMEOUT = timedelta(days=1)  # that a process waits for the others: the first one may write, or measure, by itself
Found = TypeVar("Found")


def was_launched() -> bool:
    """Whether `accelerate launch` or torchrun has started this process beside others."""
    return "LOCAL_RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def joined(cpu: bool = False) -> PartialState:
    """The processes that were launched, or this one alone.

    To be called before anything else of accelerate: by itself it does not find the others on a machine without a GPU.

    Args:
        cpu: compute on the CPU even if there is a GPU.
    """
    state = PartialState(cpu=cpu or not torch.cuda.is_available(), timeout=TIMEOUT)
    atexit.register(state.destroy_process_group)  # gloo can abort if this is left to the interpreter's end
    return state


class _Broken(BaseException):
    """Something failed in a block further out, of another process: it ends all blocks within that one."""

    def __init__(self, level: int, error: Exception) -> None:
        self.level, self.error = level, error


@dataclass
class Team:
    """The processes that share passes out.

    Attributes:
        place: of this one, from 0 on.
        count: how many there are.
    """

    place: int = 0
    count: int = 1
    _level: int = field(default=0, init=False)  # how many blocks of `agreeing` are open

    @property
    def is_first(self) -> bool:
        return self.place == 0

    def only_first(self, out: Any) -> Any:
        """Where the first one writes; None in the others."""
        return out if self.is_first else None

    def console(self, quiet: bool) -> Console:
        """Where the first one says what it does."""
        return Console(stderr=True, quiet=quiet or not self.is_first)

    def each(self, mine: Found) -> list[Found]:
        """What each process has, in their order; a meeting of all."""
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, mine)
        return found

    def one_by_one(self, mine: bytes) -> Iterator[bytes]:
        """What each process has, in their order, of which this one keeps one at a time."""
        for place in range(self.count):
            sent: list[Any] = [mine if place == self.place else None]
            dist.broadcast_object_list(sent, src=place)
            yield sent[0]

    def of_the_first(self, find: Callable[[], Found]) -> Found:
        """What the first process finds, in all of them."""
        if self.count == 1:
            return find()
        found: list[Any] = [None]
        with self.agreeing():
            if self.is_first:
                found = [find()]
        dist.broadcast_object_list(found, src=0)
        return found[0]

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """A block that ends well in all processes, or badly in all: with their own errors, or that of another."""
        if self.count == 1:
            yield
            return
        self._level += 1
        level = self._level
        try:
            yield
        except _Broken as broken:
            if broken.level < level:
                raise
            raise broken.error from None
        except Exception as error:
            self._meet(level, error)
            raise
        else:
            self._meet(level, None)
        finally:
            self._level = level - 1

    def _meet(self, level: int, error: Exception | None) -> None:
        """Where any has failed, end the outermost block in which one has."""
        ends = [end for end in self.each(None if error is None else (level, *_told(error))) if end is not None]
        if not ends:
            return
        target = min(end[0] for end in ends)
        if target < level:
            raise _Broken(target, error or _error(*ends[0][1:]))
        if error is None:
            _raise(*ends[0][1:])


ALONE = Team()
_TEAM: ContextVar[Team] = ContextVar("team", default=ALONE)
KINDS = {kind.__name__: kind for kind in (InputError, SinkscopeError, RuntimeError, MemoryError)}


def _told(error: Exception) -> tuple[str, str]:
    """The kind of an error and its text, as other processes raise it."""
    kind = next((name for name, kind in KINDS.items() if isinstance(error, kind)), None)
    return (kind, str(error)) if kind else (SinkscopeError.__name__, f"unexpected {described(error)}")


def _error(kind: str, text: str) -> Exception:
    return KINDS[kind](text)


def _raise(kind: str, text: str) -> NoReturn:
    raise _error(kind, text)


def team() -> Team:
    """The processes that share the passes of this block out: this one alone, unless `together` says otherwise."""
    return _TEAM.get()


@contextmanager
def together(device_map: str | None = None, in_memory: bool = False) -> Iterator[Team]:
    """Share the passes of this block out among the processes that were launched, if there are any.

    Args:
        device_map: where their models compute.
        in_memory: the model is one that the user has loaded, maybe in one process alone of a training of his own: this
            process measures by itself.

    Raises:
        InputError: on all devices at once.
    """
    members, token = _TEAM.get(), None
    shares = was_launched() and (members.count > 1 or not in_memory)
    if shares and device_map in POLICIES and not stays_on_cpu(device_map):
        raise InputError(
            f"--device-map {device_map} would give every process all devices: leave it out, and each has one"
        )
    if members.count == 1 and shares:
        state = joined(stays_on_cpu(device_map))
        members = Team(state.process_index, state.num_processes)
        token = _TEAM.set(members)
    try:
        with members.agreeing():
            yield members
    finally:
        if token is not None:
            _TEAM.reset(token)

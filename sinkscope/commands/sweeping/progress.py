"""The progress display of `sweep`: a table of the cells that are being measured, and how many are done."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sinkscope.commands.sweeping.worker import Event, State
from sinkscope.measuring.console import print_line


@dataclass
class Progress:
    """Progress of the cells that are to be measured.

    Attributes:
        total: their number.
        running: name → start time.
        ended: state → number of cells that ended in it.
    """

    total: int
    running: dict[str, float] = field(default_factory=dict)
    ended: Counter[State] = field(default_factory=Counter)
    start: float = field(default_factory=time.monotonic)

    def hear(self, event: Event) -> None:
        if event.state == State.RUNNING:
            self.running[event.name] = time.monotonic()
        else:
            self.running.pop(event.name, None)
            self.ended[event.state] += 1

    @property
    def seconds_left(self) -> float | None:
        """Remaining seconds at the speed so far; None before the first cell has ended."""
        count = self.ended.total()
        return (time.monotonic() - self.start) / count * (self.total - count) if count else None

    @property
    def summary(self) -> str:
        """«12 of 40 done, 1 failed · 3.1 cells a minute · 9 min left»."""
        count, minutes = self.ended.total(), (time.monotonic() - self.start) / 60
        text = f"{self.ended[State.DONE]} of {self.total} done"
        text += f", {self.ended[State.FAILED]} failed" if self.ended[State.FAILED] else ""
        if self.seconds_left is None:
            return text
        return f"{text} · {count / max(minutes, 1e-9):.3g} cells a minute · {lasting(self.seconds_left)} left"

    def __rich__(self) -> RenderableType:
        table = Table("cell", "state", "time")
        for name, began in self.running.items():
            table.add_row(Text(name), str(State.RUNNING), lasting(time.monotonic() - began))
        return Group(table, Text(self.summary))


def lasting(seconds: float) -> str:
    """«45 s», «12 min», «3.5 h»."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextmanager
def shown(progress: Progress, console: Console) -> Iterator[None]:
    """Show a live table if the console is a terminal."""
    if console.quiet or not console.is_terminal:
        yield
        return
    with Live(progress, console=console, refresh_per_second=2, transient=True):
        yield


def say(progress: Progress, event: Event, console: Console) -> None:
    """Print a line for a cell that has ended. With a live table, only failures are printed."""
    if event.state == State.FAILED:
        print_line(console, f"{event.name}: failed: {event.message}")
    elif event.state == State.DONE and not console.is_terminal:
        print_line(console, f"{event.name}: done in {lasting(event.seconds)} ({progress.summary})")

"""The consoles of the commands: results on stdout, and messages on stderr while they run.

Names and texts come from files that anyone may have written, so a console prints their control sequences as text.
"""

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from sinkscope.errors import printable

UP = "\x1b[A"  # moves a terminal's cursor up a line


class Terminal(Console):
    """A console that prints text literally, without markup and emoji codes, and escapes control sequences."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)

    def on_broken_pipe(self) -> None:
        raise  # the BrokenPipeError, with which rich would end the process


class Messages(Terminal):
    """A console on stderr that raises no error if stderr is closed."""

    def __init__(self, quiet: bool = False) -> None:
        super().__init__(file=ErrorIgnoringStream(sys.stderr), quiet=quiet)


class ErrorIgnoringStream:
    """A text stream whose errors are ignored: its reader has ended, its disk is full, its terminal was closed, …"""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream: Any = stream  # None: it was closed before Python started

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError, AttributeError):  # ValueError: the stream is closed
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        with suppress(OSError, ValueError, AttributeError):
            self._stream.flush()


class PrintableStream(ErrorIgnoringStream):
    """The stderr of a command, where libraries write warnings, errors and bars: what they quote is made printable."""

    @property
    def rich_proxied_file(self) -> ErrorIgnoringStream:
        """The stream to which rich's consoles write, with their own colors."""
        return ErrorIgnoringStream(self._stream)

    def write(self, text: str) -> int:
        if not text.replace(UP, ""):  # rich moves from one bar to the one above
            return super().write(text)
        return super().write("\r".join(map(printable, text.split("\r"))))  # a bar begins with \r


def print_line(console: Console, text: str) -> None:
    """Print a line without line breaks of rich."""
    console.print(text, soft_wrap=True)


def print_notices(console: Console, notices: Iterable[str]) -> None:
    for notice in notices:
        print_line(console, f"note: {notice}")


def print_part(console: Console, label: str, number: int, count: int) -> None:
    """Print the label and the number of a part of the run."""
    print_line(console, f"{label} ({number} of {count})")


def spinner(console: Console, text: str) -> AbstractContextManager:
    """Show a spinner with this text until the end of the block, if stderr is a terminal."""
    return console.status(text) if console.is_terminal else nullcontext()


def lasting(seconds: float) -> str:
    """Return a duration as text, for example «45 s», «12 min» or «3.5 h»."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

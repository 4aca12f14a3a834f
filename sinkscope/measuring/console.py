"""Messages that commands print on stderr while they run."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

from rich.console import Console


def print_line(console: Console, text: str) -> None:
    """Print a line verbatim, without rich's markup, colors and line breaks."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


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

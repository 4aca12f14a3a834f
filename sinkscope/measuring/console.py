"""TODO"""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

from rich.console import Console


def tell(console: Console, notices: Iterable[str]) -> None:
    for notice in notices:
        say(console, f"note: {notice}")


def tell_place(console: Console, label: str, place: int, count: int) -> None:
    """Of a run in several parts, which one begins."""
    say(console, f"{label} ({place} of {count})")


def say(console: Console, words: str) -> None:
    console.print(words, markup=False, highlight=False, soft_wrap=True)


def status(console: Console, words: str) -> AbstractContextManager:
    """A spinner; nothing where stderr is no terminal."""
    return console.status(words) if console.is_terminal else nullcontext()

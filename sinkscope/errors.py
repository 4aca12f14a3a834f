"""The two exceptions of sinkscope, and helpers for their messages of one or two lines, shown without a traceback."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NoReturn, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

LONGEST_LINE = 2000  # characters of a message's line
# Characters that a terminal interprets instead of showing: controls except tab and line feed, line separators, the
# controls of bidirectional text (Unicode's Bidi_Control), and halves of surrogate pairs, which are not characters
UNPRINTABLE = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class SinkscopeError(Exception):
    """A run that failed (exit status 1): the message says what was wrong and what to do."""

    def __init__(self, message: object = "") -> None:
        """Shorten the message: a name from the user in it may hold line breaks, or a million characters."""
        lines = str(message).splitlines()
        super().__init__("\n".join(one_line(line, LONGEST_LINE) for line in (lines if len(lines) <= 2 else [message])))


class InputError(SinkscopeError):
    """Wrong arguments or input (exit status 2): nothing was computed and nothing was written."""


class UnknownKey(InputError, KeyError):
    """A missing key of a mapping; also a KeyError, which mappings raise."""

    __str__ = InputError.__str__


class Known(dict[Key, Value]):
    """A dict whose error for an unknown key names the closest known key, and all of them.

    The message begins with `what`, the kind of thing that a key names, such as "table".
    """

    def __init__(self, what: str, entries: Mapping[Key, Value]) -> None:
        super().__init__(entries)
        self.what = what

    def __missing__(self, key: object) -> NoReturn:
        raise UnknownKey(f"{self.what} {unknown(key, self)}")


def unknown(name: object, known: Iterable[object]) -> str:
    """Return "'x' is unknown; did you mean 'y'? known: …" with the closest known name and the complete list."""
    names = [str(one) for one in known]
    close = closest(str(name), names)
    hint = f"did you mean '{close}'? " if close is not None else ""
    return f"'{name}' is unknown; {hint}known: {', '.join(names)}"


def closest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the most similar known name; None if none is similar enough (difflib's `cutoff`)."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def printable(text: str) -> str:
    """Return a text with its control characters escaped for a terminal: `\\u001b` in place of an escape character."""
    return UNPRINTABLE.sub(lambda character: f"\\u{ord(character[0]):04x}", text)


def one_line(error: object, longest: int = 200) -> str:
    """Return an error's text (its type's name if it has none) on one printable line of at most `longest` characters."""
    text = printable(" ".join(str(error).split())) or type(error).__name__
    return text if len(text) <= longest else text[: longest - 1] + "…"


def counted(number: object, noun: str, nouns: str = "") -> str:
    """Return for example "1 document" or "2 documents"; `nouns` is the plural if it is not the noun with an s."""
    return f"{number} {noun if str(number) == '1' else nouns or f'{noun}s'}"


def described(error: BaseException) -> str:
    """Return the type and text of another library's error on one line, for the end of one of our messages."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".removesuffix(": ")


@contextmanager
def explained(message: str, kinds: type[Exception] | tuple[type[Exception], ...] = Exception) -> Iterator[None]:
    """Raise InputError with the message, and the library's own in brackets, for errors (of some kinds) in the block."""
    try:
        yield
    except kinds as error:
        raise InputError(f"{message} [{described(error)}]") from error


def was_interrupted(error: BaseException | None) -> bool:
    """Return whether an interrupt caused an error: an interrupted library may raise an error of its own."""
    seen: list[BaseException] = []  # a chain of errors may be circular
    while error is not None and error not in seen:
        if isinstance(error, KeyboardInterrupt):
            return True
        seen.append(error)
        error = None if isinstance(error, SinkscopeError) else error.__cause__ or error.__context__
    return False


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out; PyTorch's CPU allocator raises a bare RuntimeError."""
    signs = ("out of memory", "not enough memory", "allocate memory")
    return isinstance(error, MemoryError) or any(sign in str(error).lower() for sign in signs)

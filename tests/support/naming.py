"""Loops over many similar cases in one test: the name of a failed case is added to the error."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def naming(*case: Any) -> Iterator[None]:
    """Add the name of a case to an error that its check raises; pytest prints it below the traceback."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {', '.join(map(str, case))}")
        raise

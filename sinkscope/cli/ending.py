"""How commands end: with an exit status, and with one or two lines on stderr if they fail."""

import contextlib
import errno
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextvars import copy_context
from pathlib import Path
from typing import Any, TextIO

from typer.core import TyperGroup

from sinkscope.errors import InputError, SinkscopeError, one_line, was_interrupted
from sinkscope.measuring.console import PrintableStream
from sinkscope.options.option import Options
from sinkscope.options.signatures import is_typed
from sinkscope.plugins import failure_of

DONE, FAILED, WRONG_INPUT = 0, 1, 2  # exit status


class PrintedFailure(SinkscopeError):
    """The failure of a command whose result, with this failure, is on standard output as JSON."""


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Keep a command from failing because a standard stream is closed, at its start (`2>&-`) or while it runs."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:  # a file of the command would get this number, and libraries would write into it
            os.open(os.devnull, os.O_RDONLY)  # as before, nothing can be written
    output, messages = sys.stdout or open(1, "w", encoding="utf-8", closefd=False), sys.stderr  # noqa: SIM115
    for stream in (output, messages):
        if stream is not None:
            with contextlib.suppress(OSError):  # it is flushed
                stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # an ASCII terminal shows ε as ?
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(PrintableStream(messages)):
        try:
            yield
        finally:
            try:
                if messages is not None:
                    messages.flush()
            except (OSError, ValueError):
                _discard(messages)


class Commands(TyperGroup):
    """The group of all commands, which turns every error into a message and an exit status."""

    @standard_streams()
    def main(self, args: Any = None, *rest: Any, **extra: Any) -> Any:
        args = list(sys.argv[1:] if args is None else args)
        debug = "--debug" in args  # before arguments are parsed, since wrong ones end the command
        try:
            with contextlib.nullcontext() if debug else _silent_libraries():
                (context := copy_context()).run(is_typed.set, True)
                status = context.run(super().main, args, *rest, **extra | {"standalone_mode": False})
                with printing():  # flush the buffer, also after the text of --help
                    pass
        except Exception as raised:
            error = raised
            if isinstance(raised, OSError):  # it may be of standard output, whose buffer then cannot be flushed either
                try:
                    with printing():
                        pass
                except SinkscopeError as of_printing:
                    error = of_printing
            if debug:
                traceback.print_exception(error)
            print("sinkscope:", _message(error), file=sys.stderr)
            status = WRONG_INPUT if isinstance(error, InputError) or _is_usage_error(error) else FAILED
            if "--json" in args and not isinstance(error, PrintedFailure):
                try:
                    print(json.dumps({"command": args[0], "error": _message(error), "status": status}), flush=True)
                except OSError:
                    _discard(sys.stdout)
            sys.exit(status)
        sys.exit(status if isinstance(status, int) else DONE)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise SinkscopeError("interrupted") from None


@contextlib.contextmanager
def interruption(kind: type[Options]) -> Iterator[None]:
    """Turn an interruption into a message about the files that are left."""
    try:
        yield
    except BaseException as error:
        if not was_interrupted(error):
            raise
        if kind.resumable:
            left = ": what was reached is kept, and the same command resumes from there"
        else:
            # a message of its own: while figures are drawn, after the tables
            message = str(error) if isinstance(error, KeyboardInterrupt) else ""
            left = f": {message or 'nothing was written'}" if kind.writes else ""
        raise SinkscopeError(f"interrupted{left}") from None


@contextlib.contextmanager
def printing(folder: Path | None = None, is_needed: bool = True) -> Iterator[None]:
    """Raise SinkscopeError if output cannot be printed, as on a full disk; the result is already in `folder`.

    A reader that needs no more (`sinkscope list | head`) ends the command silently. An error is also ignored if the
    output is not needed, or if the stream was closed from the start (`>&-`) or with its terminal.
    """
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        _discard(sys.stdout)
        if not is_needed and error.errno in (errno.EPIPE, errno.EBADF, errno.EIO):
            return
        if isinstance(error, BrokenPipeError):
            sys.exit(FAILED)
        left = f", but the result is complete in {folder}" if folder is not None else ""
        raise SinkscopeError(f"standard output cannot be written ({error.strerror}){left}") from error


def _discard(stream: TextIO) -> None:
    """Discard the buffer of a stream, since Python would report an error when it flushes the buffer at exit."""
    with contextlib.suppress(OSError, ValueError):  # it has no file, or is closed
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _is_usage_error(error: Exception) -> bool:
    """Return whether typer raised the error for wrong options: its class is not public."""
    return hasattr(error, "format_message")


def _message(error: Any) -> str:
    if _is_usage_error(error):
        command = error.ctx.command_path if getattr(error, "ctx", None) else "sinkscope"
        return f"{one_line(error.format_message(), 300)}\ntry `{command} --help`"
    return "\n".join(filter(None, failure_of(error)))


@contextlib.contextmanager
def _silent_libraries() -> Iterator[None]:
    """Keep stderr for our own messages: warnings of libraries are for developers, who have --debug."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)

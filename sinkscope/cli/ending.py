"""How commands end: with an exit status, and with one or two lines on stderr where they end badly."""

import contextlib
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

from typer.core import TyperGroup

from sinkscope.errors import InputError, SinkscopeError, is_out_of_memory, one_line, was_interrupted
from sinkscope.options.option import Options

DONE, FAILED, WRONG_INPUT = 0, 1, 2  # exit status


class Commands(TyperGroup):
    """The group of all commands, which turns every error into a message and an exit status."""

    def main(self, args: Any = None, *rest: Any, **extra: Any) -> Any:
        args = list(sys.argv[1:] if args is None else args)
        debug = "--debug" in args  # looked for here, since wrong arguments end before any is parsed
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # an ASCII terminal shows ε as ?
        try:
            with contextlib.nullcontext() if debug else _silent_libraries():
                status = super().main(args, *rest, **extra | {"standalone_mode": False})
                sys.stdout.flush()  # here, where a closed pipe can still be caught
        except BrokenPipeError:  # `sinkscope list | head`: the reader has what it wanted
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())  # or Python complains when it flushes for the last time
            sys.exit(FAILED)
        except Exception as error:
            if debug:
                traceback.print_exception(error)
            print("sinkscope:", _message(error), file=sys.stderr)
            sys.exit(_exit_status(error))
        sys.exit(status if isinstance(status, int) else DONE)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise SinkscopeError("interrupted") from None


@contextlib.contextmanager
def interruption(kind: type[Options]) -> Iterator[None]:
    """Say what an interrupted command has left behind."""
    try:
        yield
    except BaseException as error:
        if not was_interrupted(error):
            raise
        if kind.resumable:
            left = ": what was reached is kept, and the same command goes on from there"
        else:
            left = ": nothing was written" if kind.writes else ""
        raise SinkscopeError(f"interrupted{left}") from None


def _exit_status(error: Exception) -> int:
    return WRONG_INPUT if isinstance(error, InputError) or _is_usage_error(error) else FAILED


def _is_usage_error(error: Exception) -> bool:
    """Whether it is typer's own, of wrong options: its class is not public."""
    return hasattr(error, "format_message")


def _message(error: Any) -> str:
    if isinstance(error, SinkscopeError):
        return str(error)
    if _is_usage_error(error):
        command = error.ctx.command_path if getattr(error, "ctx", None) else "sinkscope"
        return f"{one_line(error.format_message(), 300)}\ntry `{command} --help`"
    if is_out_of_memory(error):
        return "memory ran out: take a shorter --seq-len, --dtype bfloat16 or --device-map auto"
    gist = one_line(error, 300)
    if isinstance(error, OSError):
        return f"{gist}\n--debug shows where"
    return f"unexpected {type(error).__name__}: {gist}\n--debug shows where; please report it"


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

"""The signature, the help and the errors of a Python function whose `**options` are those of a command.

Type checkers read the same options from keywords.py, which tests/keywords.py writes.
"""

import inspect
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import reduce
from operator import or_
from pathlib import Path
from textwrap import fill
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator

from sinkscope.errors import SinkscopeError
from sinkscope.options.option import Options
from sinkscope.options.output import OutputOptions

is_typed = ContextVar("is_typed", default=False)  # whether a command line is running, and prints the messages
_REST = "a|and|are|as|does|has|is|names|needs|of|or|through|with"  # words after an option that are no value
_FLAG = re.compile(rf"`[^`]*`|(?<![\w-])--([a-z][a-z-]*)(?: (?!(?:{_REST}) ))?")

Function = TypeVar("Function", bound=Callable[..., Any])


def accepted(annotation: Any) -> Any:
    """Return the type of the values that a field with this annotation accepts in Python, without pydantic's checks."""
    parts = get_args(annotation)
    if get_origin(annotation) is Annotated:
        # a validator that converts another type names it
        converts = [part.json_schema_input_type for part in parts[1:] if isinstance(part, BeforeValidator)]
        return reduce(or_, [*converts, accepted(parts[0])])
    if get_origin(annotation) in (Union, UnionType):
        return reduce(or_, map(accepted, parts))
    if get_origin(annotation) is tuple:
        return Sequence[accepted(parts[0])]  # type: ignore[misc]  # a type that is computed
    return str | os.PathLike[str] if annotation is Path else annotation


def types_of(kind: type[Options]) -> dict[str, Any]:
    """Return the type of the values that each option accepts, by name."""
    hints = get_type_hints(kind, include_extras=True)
    return {name: accepted(hints[name]) for name in kind.model_fields}


def as_keywords(message: str, kind: type[Options]) -> str:
    """Return a message with options spelled as in Python: `--seq-len 64` → `seq_len=64`, `--force` → `force=True`.

    Command lines in backticks, and flags that are no options of this kind, stay as they are.
    """
    fields = kind.model_fields | OutputOptions.model_fields

    def spelled(match: re.Match[str]) -> str:
        name = (match[1] or "").replace("-", "_")
        if name not in fields:
            return match[0]
        if fields[name].annotation is bool:
            return match[0].replace(f"--{match[1]}", f"{name}=True")
        return f"{name}=" if match[0].endswith(" ") else f"{name}=…"

    return _FLAG.sub(spelled, message)


@contextmanager
def spelled_for_python(kind: type[Options]) -> Iterator[None]:
    """Spell the options that an error of the block names as keywords, unless a command line prints it."""
    try:
        yield
    except SinkscopeError as error:
        if not is_typed.get():
            error.args = (as_keywords(str(error), kind),)
        raise


def with_options(kind: type[Options]) -> Callable[[Function], Function]:
    """Let a function show the options that it takes as `**options` in its signature, its help and its errors."""

    def describe(function: Function) -> Function:
        signature, types, about = inspect.signature(function), types_of(kind), inspect.getdoc(function) or ""
        parameters = [one for one in signature.parameters.values() if one.kind != one.VAR_KEYWORD]
        about += "\n\nOptions:"
        for name, field in kind.offered().items():
            if name in signature.parameters:
                continue
            parameters.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=types[name])
            )
            about += "\n" + fill(f"{name}: {field.description}", 100, initial_indent="    ", subsequent_indent=" " * 8)
        function = spelled_for_python(kind)(function)
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        function.__doc__ = about
        return function

    return describe

"""The signature and help of a Python function whose `**options` are those of a command.

Type checkers read the same options from keywords.py, which tests/keywords.py writes.
"""

import inspect
import os
from collections.abc import Callable, Sequence
from functools import reduce
from operator import or_
from pathlib import Path
from textwrap import fill
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator

from sinkscope.options.option import Options

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


def with_options(kind: type[Options]) -> Callable[[Function], Function]:
    """Let a function show the options of a command, which it takes as `**options`, in its signature and its help."""

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
        function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        function.__doc__ = about
        return function

    return describe

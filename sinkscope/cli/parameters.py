"""typer's parameters, made from the fields of a command's options."""

import inspect
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from sinkscope.options.option import Options, flag
from sinkscope.options.output import OutputOptions

# what --debug does is decided before any argument is parsed (ending.py); here it is for --help
_DEBUG = typer.Option(
    "--debug", metavar="", help="Show tracebacks, and the warnings of libraries.", rich_help_panel="Output"
)


def parameters_of(kind: type[Options]) -> list[inspect.Parameter]:
    """The parameters of a command: its arguments, its own options, those that it shares, and where it writes."""
    first = [name for name in kind.arguments if name in kind.model_fields]
    own = [name for name in kind.model_fields if name in kind.__annotations__ and name not in first]
    rest = [name for name in kind.model_fields if name not in (*first, *own)]
    shown = [name for name in (*first, *own, *rest) if name not in (*kind.refused, *kind.hidden)]
    parameters = [_keyword("ctx", typer.Context)]
    parameters += [_parameter(kind, name, kind.model_fields[name]) for name in shown]
    parameters += [_parameter(kind, name, OutputOptions.model_fields[name]) for name in _of_output(kind)]
    return [*parameters, _keyword("debug", Annotated[bool, _DEBUG], False)]


def _of_output(kind: type[Options]) -> Iterator[str]:
    if kind.writes:
        yield from ("out", "overwrite", "no_page")
    if kind.repeatable:
        yield "from_"
    yield "quiet"


def _parameter(kind: type[Options], name: str, field: FieldInfo) -> inspect.Parameter:
    extra: Any = field.json_schema_extra
    shown = kind.writes if name == "out" else kind.shown.get(name, extra["shown"])
    required = field.default is PydanticUndefined or field.default is ...
    default = None if required else field.default
    listed = ",".join(default) if isinstance(default, tuple) else ""
    kind_of_value, value = _typed(field.annotation, default)
    words: dict[str, Any] = {
        "metavar": extra["metavar"],
        "help": field.description,
        "show_default": shown or listed or value is not None,
        "rich_help_panel": extra["panel"],
    }
    if name in kind.arguments:
        info: Any = typer.Argument(**words | {"rich_help_panel": None})
    else:
        info = typer.Option(flag(name), **words)
    return _keyword(name, Annotated[kind_of_value, info], inspect.Parameter.empty if required else value)


def _typed(annotation: Any, default: Any) -> tuple[Any, Any]:
    """How typer reads a value, and its default. pydantic checks more: choices, ranges, "a number or a word"."""
    choices = [choice for choice in _alternatives(annotation) if choice is not NoneType]
    if choices[0] is bool:
        return bool, default
    if get_origin(choices[0]) is tuple:
        return list[str] | None, None
    if len(choices) == 1 and choices[0] in (int, float):
        return choices[0], default
    return (str, default) if isinstance(default, str) else (str | None, default)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _keyword(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

"""The typer application: one command for each record of `options/register.py` with options.

A command's module is imported when it runs, so that `--help` and errors in options do not wait for torch.
"""

import contextlib
import gc
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from importlib.metadata import version
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic_core import PydanticUndefined
from rich.markup import escape

from sinkscope.cli.as_json import as_json
from sinkscope.cli.ending import WRONG_INPUT, Commands, PrintedFailure, interruption, printing
from sinkscope.cli.printing import print_messages, print_result
from sinkscope.errors import InputError, SinkscopeError
from sinkscope.options.measuring import PERMISSIONS
from sinkscope.options.option import Options, checked, flag
from sinkscope.options.output import OutputOptions
from sinkscope.options.register import Command, records
from sinkscope.plugins import load_plugins

# for --help: ending.py looks for --debug before any argument is parsed
_DEBUG = typer.Option(
    "--debug", metavar="", help="Show tracebacks, and the warnings of libraries.", rich_help_panel="Output"
)


def parameters_of(kind: type[Options]) -> list[inspect.Parameter]:
    """Return a command's parameters: its arguments, its own options, shared options, and options of output."""
    offered = kind.offered()
    fields = {name: offered[name] for name in kind.arguments if name in offered} | offered
    of_output = [*(("out", "overwrite", "no_page") if kind.writes else ()), *(("from_",) if kind.repeatable else ())]
    fields |= {name: OutputOptions.model_fields[name] for name in (*of_output, "quiet", "json_")}
    parameters: dict[str, tuple[Any, Any]] = {"ctx": (typer.Context, inspect.Parameter.empty)}
    for name, field in fields.items():
        extra: Any = field.json_schema_extra
        shown = kind.writes if name == "out" else kind.shown.get(name, extra["shown"])
        is_required = field.default is PydanticUndefined or field.default is ...
        default = None if is_required else field.default
        listed = ",".join(map(str, default)) if isinstance(default, tuple) else ""
        kind_of_value, value = _typed(field.annotation, default)
        words: dict[str, Any] = {
            "metavar": extra["metavar"],
            "help": field.description,
            "show_default": shown or listed or value is not None,
            "autocompletion": _completion(field.annotation, extra["names"]),
        }
        info: Any = typer.Option(flag(name), **words, rich_help_panel=extra["panel"])
        if name in kind.arguments:
            info = typer.Argument(**words)
        parameters[name] = (Annotated[kind_of_value, info], inspect.Parameter.empty if is_required else value)
    parameters["debug"] = (Annotated[bool, _DEBUG], False)
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in parameters.items()
    ]


def _typed(annotation: Any, default: Any) -> tuple[Any, Any]:
    """Return the type with which typer reads a value, and its default. pydantic checks choices and ranges."""
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    choices = [part for part in parts if part is not NoneType]
    if choices[0] is bool:
        return bool, default
    if get_origin(choices[0]) is tuple:
        return list[str] | None, None
    if len(choices) == 1 and choices[0] in (int, float):
        return choices[0], default
    return (str, default) if isinstance(default, str) else (str | None, default)


def _completion(annotation: Any, names: str) -> Callable[[str], list[str]]:
    """Return the function with which a shell completes a value: a choice or a name, or the last one after a comma."""
    parts = [annotation, *get_args(annotation)]
    choices = [choice for part in parts if get_origin(part) is Literal for choice in get_args(part)]

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        known: Iterable[str] = choices
        if names:
            module, _, name = names.partition(":")
            register = getattr(import_module(module), name)  # its import may take seconds
            known = register() if callable(register) else register
        return [f"{before}{comma}{one}" for one in known if one.startswith(last)]

    return complete


app = typer.Typer(
    name="sinkscope",
    cls=Commands,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"sinkscope {version('sinkscope')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def start(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Attention sinks and massive activations of any pretrained HuggingFace language model or encoder.

    Begin with `sinkscope analyze MODEL`; each command has its own --help.
    """
    if ctx.invoked_subcommand is None:
        ctx.get_help()  # prints it
        raise typer.Exit(WRONG_INPUT)


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import without collecting garbage, which takes a third of the time of importing torch and transformers.

    What is there afterwards stays, so that later collections, such as accelerate's before each pass, pass it over.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _command(record: Command, kind: type[Options]) -> Callable[..., None]:
    """Return the function that typer calls for a command."""

    def command(ctx: typer.Context, **values: Any) -> None:
        # the pydantic model has the defaults of options that were not typed
        sources = {option: ctx.get_parameter_source(option) for option in values}
        typed = {
            option: values[option] for option, source in sources.items() if source and source.name == "COMMANDLINE"
        }
        written = OutputOptions.model_fields.keys() - kind.model_fields.keys()
        output = checked(OutputOptions, {key: typed[key] for key in typed.keys() & written})
        options = {key: value for key, value in typed.items() if key in kind.model_fields}
        with interruption(kind), contextlib.redirect_stdout(sys.stderr):  # stdout is only for results
            asked = _repeated(record.name, kind, output, options) if output.from_ else checked(kind, options)
            folder = output.out or asked.folder()
            if folder is not None and output.from_ and output.out is None:
                folder = folder.with_name(f"{folder.name}-repeated")
            with importing():
                load_plugins()  # so that every register is complete
                module = record.imported()
            result = module.command(asked, output.model_copy(update={"out": folder}))
        # only the first of the processes of `accelerate launch` prints
        is_first = "LOCAL_RANK" not in os.environ or os.environ.get("RANK", "0") == "0"
        with printing(result.folder, is_needed=result.folder is None or output.json_):
            if output.json_ and is_first:
                print(as_json(record.name, result))
            elif not output.quiet and is_first:
                print_result(result)
        if is_first and not output.json_ and not output.quiet:
            print_messages(result)
        if result.failure:
            raise (PrintedFailure if output.json_ else SinkscopeError)(result.failure)

    command.__doc__ = escape(inspect.cleandoc(kind.__doc__ or ""))  # brackets are text, not rich markup
    command.__signature__ = inspect.Signature(parameters_of(kind))  # type: ignore[attr-defined]
    return command


def _repeated(name: str, kind: type[Options], output: OutputOptions, typed: dict[str, Any]) -> Options:
    """Return the options of the run that --from names, except its permissions, which must be typed."""
    others = [option for option in typed if option not in PERMISSIONS]
    if others:
        what = f"{others[0].upper()} {typed[others[0]]}" if others[0] in kind.arguments else flag(others[0])
        raise InputError(
            f"--from repeats a run with all its options, so {what} cannot be given with it: "
            f"leave one of the two out (--out, --overwrite, --quiet, {', '.join(map(flag, PERMISSIONS))} may stay)"
        )
    from sinkscope.commands.measured import options_of_run  # imports torch

    assert output.from_ is not None
    return options_of_run(output.from_, name, kind, [name for name in PERMISSIONS if typed.get(name)])


for _record in records().values():
    if _record.options is not None:
        app.command(name=_record.name)(_command(_record, _record.options))


def main() -> None:
    # a cluster's way to end a job: handled as Ctrl-C, so that nothing is left half written
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    app(prog_name="sinkscope")

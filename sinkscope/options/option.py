"""The declaration of an option: once, as a field of a pydantic model.

The command line, a recipe and run.json are three spellings of the same model: the field's name, type, default and
constraints check the value; `--help` shows its description, panel and metavar.
"""

import os
import re
from collections.abc import Mapping
from copy import copy
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from sinkscope.errors import InputError, one_line, unknown
from sinkscope.options.files import is_utf8

AnyModel = TypeVar("AnyModel", bound=BaseModel)

MAX_INT = 10**9  # the largest whole number: a larger one would overflow later


class Options(BaseModel):
    """The options of one command, whose --help begins with the docstring, or a group of them that several share."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    panel: ClassVar[str] = "Input"  # the group in which --help lists the options that the class declares
    arguments: ClassVar[tuple[str, ...]] = ()  # positional options
    writes: ClassVar[str] = ""  # the folder that the command writes by default, for --help; "" if it writes none
    repeatable: ClassVar[bool] = False  # --from repeats a run with all its options
    resumable: ClassVar[bool] = False  # an interrupted run is kept, and the same command resumes it
    trains: ClassVar[bool] = False  # the command trains a model, and loads or makes it itself
    in_memory: ClassVar[bool] = False  # the result is a Run, which need not be written
    defaults: ClassVar[Mapping[str, Any]] = {}  # other defaults of inherited options
    refused: ClassVar[Mapping[str, str]] = {}  # inherited options that do not apply, and why
    hidden: ClassVar[tuple[str, ...]] = ()  # options that --help leaves out
    shown: ClassVar[Mapping[str, str]] = {}  # the default of inherited options that --help shows

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        defaults = vars(cls).get("defaults", {})
        for name, default in defaults.items():
            cls.model_fields[name] = copy(cls.model_fields[name])
            cls.model_fields[name].default = default
        if defaults:
            cls.model_rebuild(force=True)
        for name in cls.model_fields.keys() & cls.__annotations__.keys():
            extra: Any = cls.model_fields[name].json_schema_extra
            extra["panel"] = extra["panel"] or cls.panel

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, options: Any) -> Any:
        for name, reason in cls.refused.items():
            default = cls.model_fields[name].default
            if isinstance(options, dict) and options.get(name, default) != default:
                raise ValueError(f"{flag(name)} does not apply: {reason}")
        return options

    @model_validator(mode="after")
    def _check_text(self) -> Self:
        """Refuse what run.json cannot hold: bytes of a command line that are not UTF-8."""
        for name, value in self:
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, str | os.PathLike) and not is_utf8(os.fspath(part)):
                    raise ValueError(f"{flag(name)} {one_line(part)} is not UTF-8: rename the file or folder")
        return self

    def is_changed(self, name: str) -> bool:
        """Return whether an option has another value than its default."""
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    @classmethod
    def offered(cls) -> dict[str, FieldInfo]:
        """Return the options to show, by name: the command's own, then the shared ones that apply to it."""
        names = sorted(cls.model_fields, key=lambda name: name not in cls.__annotations__)
        return {name: cls.model_fields[name] for name in names if name not in (*cls.refused, *cls.hidden)}

    def check_of_a_file(self) -> None:
        """Raise InputError for what a recipe or a sweep, which may come from anywhere, must not name."""

    def folder(self) -> Path | None:
        """Return the default folder of the command; None if it need not write."""
        return None


def option(
    default: Any,
    about: str,
    *,
    metavar: str = "",
    shown: str | None = None,
    names: str = "",
    panel: str = "",
    **constraints: Any,
) -> Any:
    """Declare an option.

    Args:
        default: its default. Whole numbers are at most MAX_INT, and other numbers are finite.
        about: one line for `--help`.
        metavar: the name of its value in `--help`.
        shown: the default that `--help` shows in place of the value.
        names: MODULE:NAME of the names that a shell completes: a register, or a function that returns them.
        panel: the group in which `--help` lists it, if not the one of its class.
        **constraints: constraints of pydantic's Field (ge, le, …).
    """
    extra: dict[str, Any] = {"panel": panel, "metavar": metavar, "shown": shown, "names": names}
    if type(default) is int:
        constraints = {"le": MAX_INT} | constraints
    if type(default) is float:
        constraints = {"allow_inf_nan": False} | constraints
    return Field(default=default, description=about, json_schema_extra=extra, **constraints)


def flag(name: str) -> str:
    """Return an option's name as it is typed: `seq_len` → `--seq-len`."""
    return f"--{name.strip('_').replace('_', '-')}"


def split_names(text: str) -> list[str]:
    """Split names at commas, as in `a,b,c`."""
    return [name.strip() for name in text.split(",") if name.strip()]


def split_all_names(names: Any) -> Any:
    """Split the names in one text or in several; leave anything else to pydantic's validation."""
    listed = [names] if isinstance(names, str) else names
    return [name for part in listed for name in split_names(str(part))] if isinstance(listed, list | tuple) else names


# parts of the types of options, as in Annotated[str, path_as_text]: each converts or checks a value, and names another
# accepted type
path_as_text = BeforeValidator(
    lambda path: os.fspath(path) if isinstance(path, os.PathLike) else path, json_schema_input_type=os.PathLike[str]
)
text_as_tuple = BeforeValidator(lambda text: (text,) if isinstance(text, str) else text, json_schema_input_type=str)
one_as_tuple = BeforeValidator(
    lambda number: (number,) if isinstance(number, int | float) else number, json_schema_input_type=float
)
split_at_commas = BeforeValidator(split_all_names, json_schema_input_type=str)


def distinct(complaint: str) -> AfterValidator:
    """Return a validator that removes repetitions from a list of names; `complaint` is its error for an empty list."""

    def check(names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if names is not None and not names:
            raise ValueError(complaint)
        return names and tuple(dict.fromkeys(names))

    return AfterValidator(check)


def from_one(complaint: str) -> AfterValidator:
    """Return a validator of a number from 1 on, or of the word auto; `complaint` is its error for a smaller number."""

    def check(number: int | str) -> int | str:
        if isinstance(number, int) and not 1 <= number <= MAX_INT:
            raise ValueError(complaint if number < 1 else f"at most {MAX_INT}")
        return number

    return AfterValidator(check)


def as_folder_name(*parts: str | None) -> str:
    """Join the given parts by hyphens, replacing characters that do not belong in a folder name."""
    return re.sub(r"[^\w.+=@-]+", "-", "-".join(part for part in parts if part)).lstrip(".-")


def distinct_folder_name(*parts: str | None) -> str:
    """Return a folder name that differs for different parts: if characters were replaced, a checksum follows."""
    joined = "-".join(part for part in parts if part)
    name = as_folder_name(joined)
    return name if name == joined else as_folder_name(name, sha256(os.fsencode(joined)).hexdigest()[:6])


# pydantic's kind of error → the message about the value; other kinds keep pydantic's message
_NEEDED = {
    "greater_than_equal": "it must be at least {ge}",
    "greater_than": "it must be more than {gt}",
    "less_than": "it must be less than {lt}",
    "less_than_equal": "it must be at most {le}",
    "finite_number": "it must be a number",
    "float_parsing": "it must be a number",
    "int_parsing": "it must be a whole number",
    "int_type": "it must be a whole number",
    "int_from_float": "it must be a whole number",
    "int_parsing_size": "it must be a whole number of fewer digits",
    "string_type": "it must be text",
    "string_unicode": "it holds half of a character",
}


def checked(kind: type[AnyModel], options: Mapping[str, Any]) -> AnyModel:
    """Make a model of options. Raises InputError with one line on the first option that is unknown or not allowed."""
    try:
        return kind(**options)
    except ValidationError as error:
        worst = error.errors()[0]
    value, context, message = worst["input"], worst.get("ctx", {}), worst["msg"].removeprefix("Value error, ")
    if not worst["loc"]:
        raise InputError(message)
    name = str(worst["loc"][0])
    if worst["type"] == "extra_forbidden":
        raise InputError(f"option {unknown(name, kind.model_fields)}")
    if len(worst["loc"]) > 1 and name == "batch_size":  # a number or a word
        raise InputError(f"{flag(name)} {value}: it must be a whole number or auto")
    if worst["type"] == "literal_error":
        choices = re.findall(r"'([^']+)'", context["expected"])
        raise InputError(f"{flag(name)} {unknown(str(value), choices)}")
    if worst["type"] in _NEEDED:
        bounds = {key: f"{bound:g}" if isinstance(bound, float) else bound for key, bound in context.items()}
        raise InputError(f"{flag(name)} {one_line(value)}: {_NEEDED[worst['type']].format(**bounds)}")
    if isinstance(value, tuple | list):  # the message names the element that is wrong
        raise InputError(f"{flag(name)}: {message}")
    raise InputError(f"{flag(name)} {one_line(value)}: {message[0].lower() + message[1:]}")


def from_parameters(kind: type[AnyModel], parameters: Mapping[str, Any], what: str, whole: str = "") -> AnyModel:
    """Make an intervention or a retrofit from its parameters, as numbers or as text; InputError if one is wrong.

    The message begins with `what`; `whole` replaces the parameter's name in a message about all parameters together.
    """
    for key in parameters:
        if key not in kind.model_fields:
            known = f"parameter {unknown(key, kind.model_fields)}" if kind.model_fields else "it has no parameters"
            raise InputError(f"{what}: {known}")
    try:
        return kind(**parameters)
    except ValidationError as error:
        worst = error.errors()[0]
        where = str(worst["loc"][0]) if worst["loc"] else whole
        message = worst["msg"].removeprefix("Value error, ")
        raise InputError(f"{what}: {where and where + ': '}{message[0].lower() + message[1:]}") from None

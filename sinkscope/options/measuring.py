"""The options of a run, checked once, and written into run.json so that the run can be repeated."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sinkscope.errors import InputError, unknown

POSITIONS, WINDOW = 16, 64  # where the sequences are long enough; GS fig. 1 and WSE
DRAWS = 5  # random controls of an arm
BITS, CALIBRATION = 8, 16  # of `quantize`: bits of weights and activations, sequences that ranges come from

Named = TypeVar("Named", bound=BaseModel)


class RunConfig(BaseModel):
    """Every option that decides a run's numbers. Defaults are WSE's: 100 sequences of 64 tokens, ε = 0.3."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str | None = None
    revision: str | None = None
    gguf_file: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    device_map: Literal["auto", "cpu", "cuda"] | None = None
    attn: Literal["sdpa", "eager"] = "sdpa"
    trust_remote_code: bool = False
    allow_pickle: bool = False

    input: str = "natural"
    dataset: str | None = None
    num_seqs: int = Field(default=100, ge=1)
    seq_len: int = Field(default=64, ge=2)
    bos: Literal["auto", "always", "never"] = "auto"
    seed: int = Field(default=0, ge=0)

    observables: tuple[str, ...] | None = None  # None: all that apply
    positions: int = Field(default=POSITIONS, ge=1)
    window: int = Field(default=WINDOW, ge=1)
    epsilon: float = Field(default=0.3, ge=0.0, le=1.0, allow_inf_nan=False)
    batch_size: int | Literal["auto"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _fit_defaults(cls, options: Any) -> Any:
        """A default shrinks with the sequence; what the user asked for does not."""
        if not isinstance(options, dict):
            return options
        defaults = {"positions": POSITIONS, "window": WINDOW}
        try:
            length = int(options.get("seq_len", 64))
        except (TypeError, ValueError):
            return options  # the field itself complains, and better
        if length < 2:
            return options
        return {name: min(default, length) for name, default in defaults.items()} | options

    @field_validator("batch_size")
    @classmethod
    def _check_batch_size(cls, size: int | str) -> int | str:
        if isinstance(size, int) and size < 1:
            raise ValueError("at least 1 sequence is needed in a batch")
        return size

    @field_validator("input", mode="before")
    @classmethod
    def _as_text(cls, source: Any) -> Any:
        """A path given from Python; run.json holds text."""
        return os.fspath(source) if isinstance(source, os.PathLike) else source

    @field_validator("observables", mode="before")
    @classmethod
    def _split(cls, names: Any) -> Any:
        """As the command line has them: `a,b,c`."""
        return [name.strip() for name in names.split(",") if name.strip()] if isinstance(names, str) else names

    @field_validator("observables")
    @classmethod
    def _check_observables(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if names is not None and not names:
            raise ValueError("none was named; `sinkscope list observables` shows the names")
        return names and tuple(dict.fromkeys(names))  # named twice is measured once

    @model_validator(mode="after")
    def _check_lengths(self) -> "RunConfig":
        for name in ("positions", "window"):
            if getattr(self, name) > self.seq_len:
                raise ValueError(
                    f"--{name} {getattr(self, name)} is beyond the sequence of {self.seq_len} tokens: "
                    f"take at most {self.seq_len}, or a larger --seq-len"
                )
        return self

    @property
    def folder_name(self) -> str:
        """Of the model and its revision, fit for a folder."""
        source = Path(self.gguf_file or self.model or "SmolLM2-135M")
        if source.exists():
            source = source.resolve()  # "." has no name
        return as_folder_name(source.stem if source.suffix == ".gguf" else source.name, self.revision)


def as_folder_name(*parts: str | None) -> str:
    return re.sub(r"[^\w.+=@-]+", "-", "-".join(part for part in parts if part)).lstrip(".-")


def make_config(**options: Any) -> RunConfig:
    """RunConfig with its first complaint as one clear line. Errors: InputError."""
    return checked(RunConfig, options)


def checked(kind: type[Named], options: Mapping[str, Any]) -> Named:
    """A configuration, or its first complaint as one clear line. Errors: InputError."""
    try:
        return kind(**options)
    except ValidationError as error:
        raise InputError(complaint(error.errors()[0], kind.model_fields)) from None


# pydantic's kind of error → what to say of the value; the rest is left in pydantic's words
_NEEDED = {
    "greater_than_equal": "it must be at least {ge:g}",
    "greater_than": "it must be more than {gt:g}",
    "less_than": "it must be less than {lt:g}",
    "less_than_equal": "it must be at most {le:g}",
    "finite_number": "it must be a number",
    "float_parsing": "it must be a number",
    "int_parsing": "it must be a whole number",
    "int_type": "it must be a whole number",
    "int_from_float": "it must be a whole number",
    "string_type": "it must be text",
}


def complaint(error: Any, fields: Any) -> str:
    """One of pydantic's errors, for someone who typed the option on the command line."""
    message, value, context = str(error["msg"]), error["input"], error.get("ctx", {})
    own_words = message.removeprefix("Value error, ")
    if not error["loc"]:
        return own_words
    name = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        return f"option {unknown(name, fields)}"
    option = f"--{name.replace('_', '-')}"
    if len(error["loc"]) > 1 and name == "batch_size":  # a number or a word
        return f"{option} {value}: it must be a whole number or auto"
    if error["type"] == "literal_error":
        choices = re.findall(r"'([^']+)'", context["expected"])
        return f"{option} {unknown(str(value), choices)}"
    if error["type"] in _NEEDED:
        return f"{option} {value}: {_NEEDED[error['type']].format(**context)}"
    if isinstance(value, tuple | list):  # the message names the one that is wrong
        return f"{option}: {own_words}"
    return f"{option} {value}: {own_words[0].lower() + own_words[1:]}"


def filled_in(kind: type[Named], parameters: Mapping[str, Any], what: str, whole: str = "") -> Named:
    """One of a registry's models with its parameters, as numbers or as the command line has them.

    `what` begins every complaint; `whole` stands for the parameter where one is about all of them. Errors: InputError.
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

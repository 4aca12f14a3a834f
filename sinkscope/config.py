"""The options of a run, checked once, and written into run.json so that the run can be repeated."""

import difflib
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sinkscope.errors import InputError

POSITIONS, WINDOW = 16, 64  # where the sequences are long enough; GS fig. 1 and WSE


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
    num_seqs: int = Field(100, ge=1)
    seq_len: int = Field(64, ge=2)
    bos: Literal["auto", "always", "never"] = "auto"
    seed: int = Field(0, ge=0)

    observables: tuple[str, ...] | None = None  # None: all that apply
    positions: int = Field(POSITIONS, ge=1)
    window: int = Field(WINDOW, ge=1)
    epsilon: float = Field(0.3, ge=0.0, le=1.0)
    batch_size: int | Literal["auto"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _fit_defaults(cls, options: Any) -> Any:
        """A default shrinks with the sequence; what the user asked for does not."""
        if not isinstance(options, dict):
            return options
        length = options.get("seq_len", 64)
        defaults = {"positions": POSITIONS, "window": WINDOW}
        if not isinstance(length, int) or length < 2:
            return options
        return {name: min(default, length) for name, default in defaults.items()} | options

    @field_validator("batch_size")
    @classmethod
    def _check_batch_size(cls, size: int | str) -> int | str:
        if isinstance(size, int) and size < 1:
            raise ValueError("at least 1 sequence is needed in a batch")
        return size

    @field_validator("observables")
    @classmethod
    def _check_observables(cls, names: tuple[str, ...] | None) -> tuple[str, ...] | None:
        from sinkscope.observables import OBSERVABLES

        for name in names or ():
            if name not in OBSERVABLES:
                raise ValueError(unknown(name, OBSERVABLES))
        if names is not None and not names:
            raise ValueError(f"none was named; choose from {', '.join(OBSERVABLES)}")
        return names

    @model_validator(mode="after")
    def _check_lengths(self) -> "RunConfig":
        for name in ("positions", "window"):
            if getattr(self, name) > self.seq_len:
                raise ValueError(f"--{name} {getattr(self, name)} is beyond the sequence of {self.seq_len} tokens")
        return self


def make_config(**options: Any) -> RunConfig:
    """RunConfig with its first complaint as one clear line. Errors: InputError."""
    try:
        return RunConfig(**options)
    except ValidationError as error:
        first = error.errors()[0]
        message = str(first["msg"]).removeprefix("Value error, ")
        if not first["loc"]:
            raise InputError(message) from None
        name = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            raise InputError(f"option {unknown(name, RunConfig.model_fields)}") from None
        message = message[0].lower() + message[1:]
        raise InputError(f"--{name.replace('_', '-')} {first['input']}: {message}") from None


def unknown(name: str, known: Any) -> str:
    """«'x' is unknown; did you mean 'y'? Known: …»"""
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f"did you mean '{close[0]}'? " if close else ""
    return f"'{name}' is unknown; {hint}known: {', '.join(known)}"

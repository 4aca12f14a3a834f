"""The few entries of a model's config.json on which loading and measuring rest, checked before transformers reads it.

transformers checks most entries itself when it builds the model; not those that would keep it building for hours, that
pick a class, or that only the text is read with.
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sinkscope.errors import InputError, one_line
from sinkscope.options.files import read_json

Layers = Annotated[int, Field(ge=1, le=1000)]
TokenId = Annotated[int, Field(ge=-1, lt=2**31)]  # -1: some checkpoints' padding


class _Settings(BaseModel):
    """Other entries are transformers' to check."""

    model_config = ConfigDict(strict=True, protected_namespaces=())

    model_type: str | None = None
    auto_map: dict[str, Any] | None = None
    num_hidden_layers: Layers | None = None
    num_layers: Layers | None = None  # what some families call them
    n_layers: Layers | None = None
    n_layer: Layers | None = None
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | list[TokenId] | None = None
    pad_token_id: TokenId | None = None
    text_config: "_Settings | None" = None


def read_settings(path: Path) -> dict[str, Any]:
    """The content of a config.json or generation_config.json, its checked entries right.

    Raises:
        InputError: the file cannot be read, or an entry has no use.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise InputError(f"{path} is JSON, but not an object")
    check_settings(content, path)
    return content


def check_settings(content: dict[str, Any], where: object) -> None:
    """Raise InputError for the first entry that is wrong; `where` begins the message."""
    try:
        _Settings.model_validate(content)
    except ValidationError as error:
        worst = error.errors()[0]
        entry, wrong = str(worst["loc"][0]), one_line(repr(worst["input"]), 50)
        what = worst["msg"].replace("Input should", "it should")
        raise InputError(f"{where}: `{entry}` cannot be used: {what}, not {wrong}") from None

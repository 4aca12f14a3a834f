"""What every command returns to the command line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Printout:
    """What a command prints, with the object that its Python function returns."""

    value: Any = None  # the Run, Series, Comparison, … that the Python function of the command returns
    markdown: str = ""  # findings in words
    text: str = ""  # plain lines
    numbers: "pd.DataFrame | None" = None  # a table of numbers, whose index is the first column
    tables: "Mapping[str, pd.DataFrame]" = field(default_factory=dict)  # tables of text by title
    data: Mapping[str, Any] = field(default_factory=dict)  # further entries for --json
    notes: Sequence[str] = ()  # one line each, for stderr
    folder: Path | None = None  # the folder that was written
    failure: str = ""  # the message with which the command ends, with exit status 1

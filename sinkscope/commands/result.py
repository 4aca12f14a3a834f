"""The result that every command returns to the command line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd


@dataclass(frozen=True)
class Result:
    """The output of a command for the terminal, with the Python object that it returns.

    Attributes:
        value: the Run, Series, Comparison, … that the Python function of the command returns.
        markdown: findings in words.
        text: plain lines.
        numbers: a table of numbers, its index the first column.
        tables: tables of text by title.
        notes: one line each, for stderr.
        folder: where it was written.
        failure: a message with which the command ends, its exit status then being 1.
    """

    value: Any = None
    markdown: str = ""
    text: str = ""
    numbers: pd.DataFrame | None = None
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    notes: Sequence[str] = ()
    folder: Path | None = None
    failure: str = ""

"""Comparison of all tables of runs or folders at once."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd


def assert_same_tables(
    ours: Mapping[str, pd.DataFrame], expected: Mapping[str, pd.DataFrame], drop: Sequence[str] = (), **how: Any
) -> None:
    assert ours.keys() == expected.keys()
    for name, table in expected.items():
        pd.testing.assert_frame_equal(ours[name].drop(columns=[*drop]), table.drop(columns=[*drop]), obj=name, **how)


def tables_in(folder: Path) -> dict[str, pd.DataFrame]:
    """Return the tables of a folder, at any depth, by their paths."""
    return {path.relative_to(folder).as_posix(): pd.read_parquet(path) for path in folder.rglob("*.parquet")}

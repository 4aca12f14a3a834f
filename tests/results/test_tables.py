"""Tables are read by their declared columns."""

import json
from pathlib import Path

import pandas as pd
import pytest

from sinkscope.errors import InputError
from sinkscope.results.manifest import MANIFEST, format_of
from sinkscope.results.tables import LEADING, LEADING_COLUMNS, METRIC, VALUE, Column, read_table
from sinkscope.verdict.register import written_tables

REPORTS = sorted((Path(__file__).parents[2] / "reports").glob("*/tables/*.parquet"))
COLUMNS = (*LEADING_COLUMNS, METRIC, VALUE)
ROWS = pd.DataFrame([("m", "natural", -1, "loss", 1.5)], columns=[*LEADING, "metric", "value"])


def test_declared_columns_are_those_that_were_written() -> None:
    for path in REPORTS:
        form = format_of(json.loads((path.parents[1] / MANIFEST).read_text(encoding="utf-8")))
        table = read_table(path, (*LEADING_COLUMNS, *written_tables()[path.stem]), form)
        assert list(table)[:3] == list(LEADING), path


def test_tables_are_read_by_their_columns(tmp_path: Path) -> None:
    path = tmp_path / "summary.parquet"
    for rows in (
        ROWS,
        ROWS.assign(value=2),  # a whole number is a number
        ROWS.assign(more=1),
        ROWS.assign(metric=None),  # text may be missing
        ROWS[:0].astype(object),  # without rows, values have no kind
    ):
        rows.to_parquet(path, index=False)
        assert len(read_table(path, COLUMNS)) == len(rows)
    for rows in (
        ROWS.drop(columns="metric"),
        ROWS.assign(value="1.5"),
        ROWS.assign(value=True),
        ROWS.assign(metric=3),
        ROWS.assign(layer=0.5),
        ROWS.assign(layer=None),
    ):
        rows.to_parquet(path, index=False)
        with pytest.raises(InputError, match="is not the table 'summary': it has no column"):
            read_table(path, COLUMNS)
    for share in (0.0, 0.3, 0.9):
        ROWS.to_parquet(path, index=False)
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
        with pytest.raises(InputError, match=r"summary.parquet is damaged"):
            read_table(path, (Column("layer", "", kind="whole"),))

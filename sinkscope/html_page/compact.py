"""Tables as JSON: by column, with the digits that matter, and as many rows as a page can hold."""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import ne
from typing import Any, NamedTuple

import pandas as pd

from sinkscope.results.tables import LEADING_COLUMNS, Column, Columns, Kind

DIGITS = 6  # significant ones of a number: tables hold float32, which has seven
LARGEST = 4_000_000  # bytes of all tables together
# columns of tables that have rows for each sequence: such a table is cut by them, and the first ones are kept whole
BY_SEQUENCE = ("sequence", "group")
# others are cut by these, so that all layers, heads and arms stay
BY_PLACE = ("position", "query")


class Limit(NamedTuple):
    """How many rows of a table are kept."""

    rows: int
    by_sequence: int  # of a table with several sequences


# from the most rows on, until all tables fit into LARGEST
LIMITS = (Limit(250_000, 10_000), Limit(60_000, 10_000), Limit(60_000, 4_000), Limit(60_000, 1_000),
          Limit(40_000, 1_000), Limit(30_000, 1_000), Limit(20_000, 1_000), Limit(15_000, 1_000), Limit(10_000, 1_000),
          Limit(4_000, 500), Limit(1_000, 200))  # fmt: skip


def as_json(value: Any) -> str:
    """JSON for a <script> element: ASCII, and without a character that could end it.

    Token texts may hold `</script>`, and halves of surrogate pairs, which UTF-8 cannot write.
    """
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def compact_tables(tables: Mapping[str, pd.DataFrame], columns: Mapping[str, Columns]) -> str:
    """All tables as a JSON list, of as many rows each as fit into LARGEST.

    Args:
        tables: name → table.
        columns: name → what its columns hold, behind the leading ones.
    """
    written: dict[tuple[str, int], str] = {}  # what one limit leaves as the one before is written once
    for limit in LIMITS:
        texts = []
        for name, table in tables.items():
            kept, left_out = cut(table, limit)
            key = (name, len(kept))
            if key not in written:
                written[key] = compact_table(name, kept, columns.get(name, ()), len(table), left_out)
            texts.append(written[key])
        if sum(map(len, texts)) <= LARGEST:
            break
    return f"[{','.join(texts)}]"


def compact_table(name: str, kept: pd.DataFrame, columns: Columns, rows: int, left_out: str) -> str:
    """One table as a JSON object.

    Args:
        name: of the table.
        kept: the rows that are shown.
        columns: what they hold, behind the leading ones; a column that is not among them is described by its type.
        rows: how many the whole table has.
        left_out: which of them are not in `kept`, in words.

    Returns:
        name, rows, left_out and columns, each with its name, meaning, unit, kind and values.
    """
    described = {column.name: column for column in (*LEADING_COLUMNS, *columns)}
    parts = []
    for label in kept.columns:
        column = described.get(str(label)) or _described(str(label), kept[label])
        head = as_json({name: entry for name, entry in column._asdict().items() if name != "since"})
        parts.append(f'{head[:-1]},"values":{compact_column(kept[label], column.kind)}}}')
    head = as_json({"name": name, "rows": rows, "left_out": left_out})
    return f'{head[:-1]},"columns":[{",".join(parts)}]}}'


def compact_column(values: pd.Series, kind: Kind) -> str:
    """The values of a column as JSON.

    Returns:
        A list; or {"runs": [value, how many times, …]} where that is shorter; of text {"of": the distinct texts, "at":
        the place of each row's among them, in one of these forms}. Missing values are null, infinite ones "inf" and
        "-inf".
    """
    if kind == "text":
        codes, distinct = pd.factorize(values)  # of a missing one: -1
        return f'{{"of":{as_json([str(text) for text in distinct])},"at":{_shorter(list(map(str, codes)))}}}'
    missing = values.isna()
    if kind == "number":
        texts = [f"{value:.{DIGITS}g}" for value in values.astype(float).tolist()]
        texts = [f'"{text}"' if text.endswith("inf") else text for text in texts]
    else:
        texts = [str(int(value)) for value in values.mask(missing, 0).tolist()]
    return _shorter(["null" if is_missing else text for text, is_missing in zip(texts, missing, strict=True)])


def _shorter(texts: list[str]) -> str:
    """A list, or runs of equal values counted, if that has fewer entries."""
    changes = sum(map(ne, texts, texts[1:]))
    if 2 * (changes + 1) >= len(texts):
        return f"[{','.join(texts)}]"
    runs = (part for text, same in groupby(texts) for part in (text, str(len(list(same)))))
    return f'{{"runs":[{",".join(runs)}]}}'


def cut(table: pd.DataFrame, limit: Limit) -> tuple[pd.DataFrame, str]:
    """The rows that are kept, and in words which were left out.

    Those of later sequences are, or of later positions, or all behind the first ones.
    """
    ways = ((BY_SEQUENCE, limit.by_sequence), (BY_PLACE, limit.rows))
    for name, most in ((name, most) for names, most in ways for name in names):
        if name in table and len(table) > most and table[name].nunique() > 1:
            counts = table[name].value_counts().sort_index().cumsum()
            kept = counts.index[: max(1, int((counts <= most).sum()))]
            rows = table[table[name].isin(kept)]
            if name in BY_SEQUENCE or len(rows) <= most:
                return rows, f"only those of {name} {kept[0]} to {kept[-1]} are here, {len(kept)} of {len(counts)}"
    if len(table) > limit.rows:
        return table.head(limit.rows), f"only the first {limit.rows:,} rows are here"
    return table, ""


def _described(name: str, values: pd.Series) -> Column:
    """A column that nobody declared, as of a comparison, which has one for each run."""
    kinds: Sequence[tuple[Any, Kind]] = (
        (pd.api.types.is_bool_dtype, "truth"),
        (pd.api.types.is_integer_dtype, "whole"),
        (pd.api.types.is_numeric_dtype, "number"),
    )
    return Column(name, "", kind=next((kind for is_of, kind in kinds if is_of(values)), "text"))

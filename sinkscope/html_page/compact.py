"""Tables as JSON: by column, with six significant digits, and with as many rows as fit into a page."""

import base64
import json
import zlib
from collections.abc import Mapping
from itertools import groupby
from operator import ne
from typing import Any

import numpy as np
import pandas as pd

from sinkscope.errors import InputError
from sinkscope.results.activations import ATTENTION, Activations
from sinkscope.results.tables import LEADING_COLUMNS, Column, Columns, Kind

DIGITS = 6  # significant digits: tables hold float32, which has seven
LARGEST = 4_000_000  # bytes of all tables together
# columns of tables with rows for each sequence: such a table keeps all rows of the first sequences
BY_SEQUENCE = ("sequence", "group")

# Attention weights of all heads are bytes, in equal steps of the logarithm from FAINTEST (1) to 1 (255); 0 is less.
FAINTEST = 1e-4
STEPS = 254
MAPS = 3_000_000  # characters of all maps together

# the number of rows of a table that are kept, and of a table with several sequences; tried in this order until all
# tables fit into LARGEST
LIMITS = (
    (250_000, 10_000), (60_000, 10_000), (60_000, 4_000), (60_000, 1_000), (40_000, 1_000), (30_000, 1_000),
    (20_000, 1_000), (15_000, 1_000), (10_000, 1_000), (4_000, 500), (1_000, 200),
)  # fmt: skip


def as_json(value: Any) -> str:
    """Return JSON for a <script> element: ASCII, and without a character that could end the element.

    Token texts may hold `</script>`, and halves of surrogate pairs, which UTF-8 cannot encode.
    """
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def compact_tables(tables: Mapping[str, pd.DataFrame], columns: Mapping[str, Columns]) -> str:
    """Return all tables as a JSON list, with as many rows each as fit into LARGEST."""
    written: dict[tuple[str, int], str] = {}  # a table that the next limit does not cut is not converted again
    for limit in LIMITS:
        texts = []
        for name, table in tables.items():
            rows, left_out = cut(table, *limit)
            key = (name, len(rows))
            if key not in written:
                written[key] = compact_table(name, rows, columns.get(name, ()), len(table), left_out)
            texts.append(written[key])
        if sum(map(len, texts)) <= LARGEST:
            break
    return f"[{','.join(texts)}]"


def compact_table(name: str, rows: pd.DataFrame, columns: Columns, count: int, left_out: str) -> str:
    """Return one table as a JSON object: name, rows, left_out and columns.

    Each column has its name, meaning, unit, kind and values. A column that is not declared (a comparison has one for
    each run) is described by its type. `count` is the number of rows of the complete table, and `left_out` describes
    those that are not in `rows`.
    """
    described = {column.name: column for column in (*LEADING_COLUMNS, *columns)}
    kinds: dict[str, Kind] = {"b": "truth", "i": "whole", "u": "whole", "f": "number"}  # of numpy's and pandas' dtypes
    parts = []
    for label in rows.columns:
        kind = kinds.get(getattr(rows[label].dtype, "kind", ""), "text")
        column = described.get(str(label)) or Column(str(label), "", kind=kind)
        head = as_json(column._asdict())
        parts.append(f'{head[:-1]},"values":{compact_column(rows[label], column.kind)}}}')
    head = as_json({"name": name, "rows": count, "left_out": left_out})
    return f'{head[:-1]},"columns":[{",".join(parts)}]}}'


def compact_column(values: pd.Series, kind: Kind) -> str:
    """Return the values of a column as JSON.

    This is a list, or {"runs": [value, how many times, …]} where that is shorter. For text it is {"of": the distinct
    texts, "at": the index of each row's text among them, in one of these forms}. Missing values are null, infinite ones
    "inf" and "-inf".
    """
    if kind == "text":
        codes, distinct = pd.factorize(values)  # -1 for missing values
        return f'{{"of":{as_json([str(text) for text in distinct])},"at":{_shorter(list(map(str, codes)))}}}'
    missing = values.isna()
    if kind == "number":
        texts = [f"{value:.{DIGITS}g}" for value in values.astype(float).tolist()]
        texts = [f'"{text}"' if text.endswith("inf") else text for text in texts]
    else:
        texts = [str(int(value)) for value in values.mask(missing, 0).tolist()]
    return _shorter(["null" if is_missing else text for text, is_missing in zip(texts, missing, strict=True)])


def _shorter(texts: list[str]) -> str:
    """Return a list, or counted runs of equal values if these have fewer entries."""
    changes = sum(map(ne, texts, texts[1:]))
    if 2 * (changes + 1) >= len(texts):
        return f"[{','.join(texts)}]"
    runs = (part for text, same in groupby(texts) for part in (text, str(len(list(same)))))
    return f'{{"runs":[{",".join(runs)}]}}'


def cut(table: pd.DataFrame, most_rows: int, by_sequence: int) -> tuple[pd.DataFrame, str]:
    """Return the rows that are kept, and a description of those that are left out.

    Rows of later sequences are left out, or of later positions, or all rows after the first ones.
    """
    # other tables keep the first positions, so that all layers, heads and arms stay
    limits = dict.fromkeys(BY_SEQUENCE, by_sequence) | dict.fromkeys(("position", "query"), most_rows)
    for name, most in limits.items():
        if name in table and len(table) > most and table[name].nunique() > 1:
            counts = table[name].value_counts().sort_index().cumsum()
            first = counts.index[: max(1, int((counts <= most).sum()))]
            rows = table[table[name].isin(first)]
            if name in BY_SEQUENCE or len(rows) <= most:
                some = f"{name} {first[0]} to {first[-1]} are here, {len(first)} of {len(counts)}"
                return rows, f"only the rows of {some}"
    if len(table) > most_rows:
        return table.head(most_rows), f"only the first {most_rows:,} rows are here"
    return table, ""


def compact_maps(activations: Activations) -> dict[str, Any] | None:
    """Return the weights of all heads on the first sequence for the page's scripts; None if there are none.

    `codes` are deflated bytes in base64: head by head and query by query, up to the query itself if `causal`.
    """
    tensors = activations.get(ATTENTION)
    if not tensors:
        return None
    mask = activations.tensors.get("attention_mask")
    length = None if mask is None else int(mask[0].sum())  # --keep pads weights to the longest sequence
    weights = {layer: tensor[0, :, :length, :length].float().numpy() for layer, tensor in tensors.items()}
    lengths = {length for maps in weights.values() for length in maps.shape[1:]}
    if len(lengths) > 1:
        raise InputError(f"activations: the tensors {ATTENTION} are not square")
    causal = not any(np.triu(maps, 1).any() for maps in weights.values())
    # numbers of tokens that the maps may show: the first that fits is taken
    for tokens in sorted({min(most, *lengths) for most in (64, 48, 32, 24, 16)}, reverse=True):
        shown = np.tril_indices(tokens) if causal else np.indices((tokens, tokens)).reshape(2, -1)
        parts = []
        for maps in weights.values():
            within = np.clip(np.nan_to_num(maps[:, *shown]), FAINTEST / 2, 1)
            steps = STEPS + 1 - np.rint(STEPS * np.log(within) / np.log(FAINTEST))
            parts.append(steps.clip(0).astype(np.uint8).tobytes())
        codes = base64.b64encode(zlib.compress(b"".join(parts))).decode()
        if len(codes) <= MAPS:
            break
    heads = [[layer, len(maps)] for layer, maps in weights.items()]
    return {"heads": heads, "tokens": tokens, "causal": causal, "faintest": FAINTEST, "steps": STEPS, "codes": codes}

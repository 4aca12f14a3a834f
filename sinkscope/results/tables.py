"""The parquet tables: what a column is, the columns that many tables have, and reading and writing a table."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from sinkscope.results.swap import new_file


class Column(NamedTuple):
    """One column of a table."""

    name: str
    about: str  # one line for `sinkscope list tables`
    unit: str = ""


Columns = tuple[Column, ...]


def names_of(columns: Columns) -> tuple[str, ...]:
    return tuple(column.name for column in columns)


# Every table begins with these, then has its own, in their order: a contract with users.
LEADING_COLUMNS = (
    Column("model", "the model's name"),
    Column("condition", "the kind of input, or the arm: an intervention or retrofit, or what it is compared with"),
    Column("layer", "from 0 on; -1: the whole model"),
)
LEADING = names_of(LEADING_COLUMNS)

HEAD = Column("head", "query head, from 0 on")
KV_HEAD = Column("kv_head", "key/value head that the query head reads")
POSITION = Column("position", "place in the sequence, from 0 on")
SEQUENCE = Column("sequence", "which of the run's sequences, from 0 on")
TOKEN_ID = Column("token_id", "id of the token at this position")
TOKEN = Column("token", "its text")
COORDINATE = Column("coordinate", "of the residual stream, from 0 on")
SITE = Column("site", "where in the layer: layer_in, attn_out, mid, mlp_out or layer_out")
QUERY = Column("query", "position of the query")
KEY = Column("key", "position of the key")
SEED = Column("seed", "of the training")
METRIC = Column("metric", "what was measured (`sinkscope list metrics`)")
VALUE = Column("value", "its value")

# Tables that are made above measuring/; all tables: measuring/tables.py
TRAINING_TABLES: dict[str, Columns] = {
    "training": (SEED, Column("step", "of the optimizer, 0 is before the first"), METRIC, VALUE),
    "gates": (
        SEED,
        Column("head", "of values or queries, as the parameter counts; registers in order"),
        Column("parameter", "of the retrofit"),
        Column("displacement", "distance of the head's parameters from where they started"),
    ),
    "retrofit": (SEED, METRIC, VALUE),
    "value_norms": (
        SEQUENCE, POSITION, TOKEN_ID, TOKEN,
        Column("is_trigger", "whether the token is a trigger of the task"),
        Column("norm", "L2 norm of all heads' values as they are projected"),
        Column("attended_norm", "the same as they are attended to, behind a gate on values"),
    ),
}  # fmt: skip


def write_table(table: pd.DataFrame, path: Path) -> None:
    """Write under a temporary name and rename: a killed run leaves no half table."""
    with new_file(path) as fresh:
        table.to_parquet(fresh, index=False)


def write_tables(tables: Mapping[str, pd.DataFrame], folder: Path) -> None:
    """Write each as FOLDER/tables/NAME.parquet."""
    (folder / "tables").mkdir(exist_ok=True)
    for name, table in tables.items():
        write_table(table, folder / "tables" / f"{name}.parquet")


def read_table(path: Path) -> pd.DataFrame:
    return pd.read_parquet(path)

"""The parquet tables: declared columns, the columns that many tables share, and reading and writing of tables."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd

from sinkscope.errors import InputError, one_line
from sinkscope.results.manifest import FORMAT, of_an_older_format, read_manifest
from sinkscope.results.swap import new_file

Kind = Literal["text", "whole", "number", "truth"]
EMPTY: dict[Kind, Any] = {"text": "", "whole": float("nan"), "number": float("nan"), "truth": False}


class Column(NamedTuple):
    """One column of a table."""

    name: str
    about: str  # one line for `sinkscope list tables`
    unit: str = ""
    kind: Kind = "number"  # kind of the values; "number" includes whole numbers
    since: int = 1  # first format (results/manifest.py) with the column; empty in older folders: "", NaN or False


Columns = tuple[Column, ...]


def names_of(columns: Columns) -> tuple[str, ...]:
    return tuple(column.name for column in columns)


# Every table begins with these columns, and then has its own, in this order: users rely on it.
LEADING_COLUMNS = (
    Column("model", "the model's name", kind="text"),
    Column("condition", "the input, or the arm: an intervention, a retrofit, or their comparison", kind="text"),
    Column("layer", "from 0 on; -1 for the whole model", kind="whole"),
)
LEADING = names_of(LEADING_COLUMNS)

HEAD = Column("head", "query head, from 0 on", kind="whole")
KV_HEAD = Column("kv_head", "key/value head that the query head reads", kind="whole")
POSITION = Column("position", "index in the sequence, from 0 on", kind="whole")
SEQUENCE = Column("sequence", "index of the sequence in the run, from 0 on", kind="whole")
TOKEN_ID = Column("token_id", "id of the token at this position", kind="whole")
TOKEN = Column("token", "its text", kind="text")
COORDINATE = Column("coordinate", "coordinate of the residual stream, from 0 on", kind="whole")
SITE = Column(
    "site",
    "site in the layer: layer_in (its input), attn_out (the output of attention), mid (the stream between the "
    "branches), mlp_out (the output of the MLP) or layer_out (its output)",
    kind="text",
)
QUERY = Column("query", "position of the query", kind="whole")
KEY = Column("key", "position of the key", kind="whole")
SEED = Column("seed", "seed of the training")
STEP = Column("step", "step of the optimizer; 0 is before the first", kind="whole")
METRIC = Column("metric", "name of the metric (`sinkscope list metrics`)", kind="text")
VALUE = Column("value", "its value")
SUMMARY_COLUMNS = (METRIC, VALUE)
WHOLE_MODEL = -1  # in the column `layer`

# tables that trainings write; measuring/tables.py has all tables
TRAINING_TABLES: dict[str, Columns] = {
    "training": (SEED, STEP, METRIC, VALUE),
    "largest_activations": (
        STEP, SEQUENCE, POSITION, TOKEN_ID, TOKEN, COORDINATE,
        Column("value", "the largest entry of all layers' outputs at this step"),
    ),
    "largest_logits": (STEP, HEAD, KV_HEAD, Column("largest", "largest |logit| of the head at this step")),
    "gates": (
        SEED,
        Column("head", "head of values or queries, as the parameter counts; or the register", kind="whole"),
        Column("parameter", "parameter of the retrofit", kind="text"),
        Column("displacement", "distance of the head's parameters from where they started"),
    ),
    "retrofit": (SEED, METRIC, VALUE),
    "value_norms": (
        SEQUENCE, POSITION, TOKEN_ID, TOKEN,
        Column("is_trigger", "whether the token is a trigger of the task", kind="truth"),
        Column("norm", "L2 norm of all heads' values as they are projected"),
        Column("attended_norm", "the same as they are attended to, after a gate on values"),
    ),
}  # fmt: skip


def write_table(table: pd.DataFrame, path: Path) -> None:
    """Write a table under a temporary name and rename it, so that a killed run leaves no partial table."""
    with new_file(path) as fresh:
        table.to_parquet(fresh, index=False)


def write_tables(tables: Mapping[str, pd.DataFrame], folder: Path) -> None:
    """Write each table as FOLDER/tables/NAME.parquet."""
    (folder / "tables").mkdir(exist_ok=True)
    for name, table in tables.items():
        write_table(table, folder / "tables" / f"{name}.parquet")


def read_table(path: Path, columns: Columns = (), form: int = FORMAT) -> pd.DataFrame:
    """Read a table that has these columns, with values of their kinds.

    In a folder of an older format (`form`), newer columns are empty. Raises InputError if the file is damaged, contains
    another table, or has another format.
    """
    import pyarrow.parquet  # imported late, because declaring a column does not need it

    newer = newer_columns(columns, form)
    needed = [column for column in columns if column not in newer]
    try:
        metadata = pyarrow.parquet.read_metadata(path)
        lacking = [column.name for column in needed if not _has(metadata, column)]
        if not lacking:
            table = pd.read_parquet(path)
            return table.assign(**{column.name: EMPTY[column.kind] for column in newer if column.name not in table})
    except Exception as error:  # a damaged file can raise almost any error
        raise InputError(f"{path} is damaged: {one_line(error)}") from error
    if form < FORMAT:
        raise InputError(of_an_older_format(path, read_manifest(path.parents[1], None)))
    raise InputError(f"{path} is not the table '{path.stem}': it has no column {lacking[0]}, or one with other values")


def newer_columns(columns: Columns, form: int) -> list[Column]:
    return [column for column in columns if column.since > form]


def _has(metadata: Any, column: Column) -> bool:
    """Return whether a parquet file has a column of this name and kind."""
    from pyarrow import types

    is_of: dict[Kind, Callable[[Any], bool]] = {
        "text": lambda kind: types.is_string(kind) or types.is_large_string(kind),
        "whole": types.is_integer,
        "number": lambda kind: types.is_integer(kind) or types.is_floating(kind),
        "truth": types.is_boolean,
    }
    schema = metadata.schema.to_arrow_schema()
    if schema.names.count(column.name) != 1:
        return False
    kind = schema.field(column.name).type
    without_values = types.is_null(kind) and (column.kind == "text" or metadata.num_rows == 0)
    return is_of[column.kind](kind) or without_values

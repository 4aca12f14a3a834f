"""The parquet tables: declared columns, the columns that many tables share, and reading and writing of tables."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd

from sinkscope.errors import InputError, SinkscopeError, described, is_out_of_memory, one_line, was_interrupted
from sinkscope.results.swap import new_file

Kind = Literal["text", "whole", "number", "truth"]


class Column(NamedTuple):
    """One column of a table."""

    name: str
    about: str  # one line for `sinkscope list tables`
    unit: str = ""
    kind: Kind = "number"  # kind of the values; "number" includes whole numbers


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
TOKEN_PLACE = (SEQUENCE, POSITION, TOKEN_ID, TOKEN)
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
# Readers make arrays that are as long as the largest index, and as wide as that of heads or keys. No model, text or
# study reaches these numbers.
BELOW = dict.fromkeys(("layer", "head", "kv_head", "query", "key"), 1 << 12) | dict.fromkeys(
    ("position", "sequence", "coordinate", "draw", "group", "row", "column"), 1 << 24
)
MOST_ROWS = 100_000_000
TWICE = "it has rows twice"

# tables of SinkCallback; measuring/tables.py has all tables
TRAINING_TABLES: dict[str, Columns] = {
    "training": (SEED, STEP, METRIC, VALUE),
    "largest_activations": (
        STEP, *TOKEN_PLACE, COORDINATE,
        Column("value", "the largest entry of all layers' outputs at this step"),
    ),
    "largest_logits": (STEP, HEAD, KV_HEAD, Column("largest", "largest |logit| of the head at this step")),
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


# tables that are used in a block of `blaming_tables`, the last one last
_USED: ContextVar[dict[Path, pd.DataFrame] | None] = ContextVar("used", default=None)


def used(path: Path, table: pd.DataFrame) -> pd.DataFrame:
    """Return a table of a folder, and note for `blaming_tables` that it is used now."""
    if (tables := _USED.get()) is not None:
        tables.pop(path, None)
        tables[path] = table
    return table


@contextmanager
def blaming_tables() -> Iterator[None]:
    """Name a table in errors of code that evaluates tables of folders, which may have been edited.

    The named table is the last one that was read and has a fault, or else the last one. Other errors pass through.
    """
    tables: dict[Path, pd.DataFrame] = {}
    token = _USED.set(tables)
    try:
        yield
    except (SinkscopeError, OSError):
        raise
    except Exception as error:
        if not tables or is_out_of_memory(error) or was_interrupted(error):
            raise
        faults = ((path, fault) for path in reversed(tables) for fault, has in FAULTS.items() if has(tables[path]))
        path, fault = next(faults, (list(tables)[-1], "this or another table does not fit to the others"))
        raise InputError(f"{path} seems to be edited or damaged: {fault} [{described(error)}]") from error
    finally:
        _USED.reset(token)


# fault → whether a table has it, tested after an error
FAULTS: dict[str, Callable[[pd.DataFrame], bool]] = {
    TWICE: lambda table: bool(table.duplicated().any()),
    "two rows have the same labels": lambda table: bool(
        table.duplicated(list(table.select_dtypes(exclude="float"))).any()
    ),
    "it has no rows": lambda table: not len(table),
    "a column has no values": lambda table: bool(table.isna().all().any()),
}


def read_table(path: Path, columns: Columns = ()) -> pd.DataFrame:
    """Read a table that has these columns, with values of their kinds.

    Raises InputError if the file is damaged, contains another table, or would fill the memory.
    """
    import psutil  # imported late, because declaring a column does not need them
    import pyarrow.parquet

    try:
        metadata = pyarrow.parquet.read_metadata(path)
        if metadata.num_rows > min(MOST_ROWS, psutil.virtual_memory().available // (8 * max(1, metadata.num_columns))):
            raise InputError(f"{path} has {metadata.num_rows:,} rows, which would fill the memory: it is damaged")
        schema = metadata.schema.to_arrow_schema()
        lacking = [column.name for column in columns if not _has_column(schema, metadata.num_rows, column)]
        if not lacking:
            table = pd.read_parquet(path)
            if fault := fault_of(table, columns):
                raise InputError(f"{path} was edited, or is damaged: {fault}")
            return used(path, table)
    except InputError:
        raise
    except Exception as error:  # a damaged file can raise almost any error
        raise InputError(f"{path} is damaged: {one_line(error)}") from error
    raise InputError(f"{path} is not the table '{path.stem}': it has no column {lacking[0]}, or one with other values")


def fault_of(table: pd.DataFrame, columns: Columns) -> str:
    """Return a fault of a table with these columns, such as an impossible layer or a duplicate row; "" if none."""
    for name in (column.name for column in columns if column.name in BELOW and column.kind == "whole"):
        for index in (table[name].min(), table[name].max()) if name in table and len(table) else ():
            if not -1 <= index < BELOW[name]:
                return f"there is no {name} {index}"
    has_keys = any(column.name in BELOW and column.name != "layer" for column in columns) or METRIC in columns
    return TWICE if has_keys and table.duplicated().any() else ""


def check_made(tables: Mapping[str, pd.DataFrame], columns: Mapping[str, Columns]) -> None:
    """Raise ValueError if tables of an observable differ from its `columns`, because they could not be read again."""
    import pyarrow

    for name, table in tables.items():
        if name not in columns:
            raise ValueError(f"its `columns` do not declare the table '{name}'")
        if not isinstance(table, pd.DataFrame):
            raise ValueError(f"the table '{name}' is a {type(table).__name__}, not a DataFrame")
        schema, needed = pyarrow.Schema.from_pandas(table), (LEADING_COLUMNS[-1], *columns[name])
        for column in needed:
            if column != TOKEN and not _has_column(schema, len(table), column):  # it is added for each token_id
                raise ValueError(f"the table '{name}' has no column {column.name}, or one with other values")
        if fault := fault_of(table, needed):
            raise ValueError(f"the table '{name}': {fault}")


def models_or_cells(table: pd.DataFrame) -> pd.Series:
    """Return the name of each row's model in a table of a sweep, or of its cell if a model has several."""
    return table["model" if table["cell"].nunique() == table["model"].nunique() else "cell"]


def of_whole_model(summary: pd.DataFrame) -> dict[str, float]:
    """Return metric → value of the rows of a table like `summary` that are of the whole model."""
    return summary[summary["layer"] == WHOLE_MODEL].set_index("metric")["value"].to_dict()


def _has_column(schema: Any, rows: int, column: Column) -> bool:
    """Return whether a schema of pyarrow, for this number of rows, has a column of this name and kind."""
    from pyarrow import types

    is_of: dict[Kind, Callable[[Any], bool]] = {
        "text": lambda kind: types.is_string(kind) or types.is_large_string(kind),
        "whole": types.is_integer,
        "number": lambda kind: types.is_integer(kind) or types.is_floating(kind),
        "truth": types.is_boolean,
    }
    if schema.names.count(column.name) != 1:
        return False
    kind = schema.field(column.name).type
    without_values = types.is_null(kind) and (column.kind == "text" or rows == 0)
    return is_of[column.kind](kind) or without_values

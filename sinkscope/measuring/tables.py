"""All tables that a run can have, and the form in which they are published."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from sinkscope.measuring.decoding import Decoding
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.observable import Observable
from sinkscope.measuring.passes import LOSS_TABLES
from sinkscope.measuring.pictures import PICTURE_TABLES
from sinkscope.models.loading import LoadedModel
from sinkscope.options.register import records
from sinkscope.results.findings import FINDING_TABLES
from sinkscope.results.tables import LEADING, SUMMARY_COLUMNS, TRAINING_TABLES, Columns, names_of
from sinkscope.text.tokens import token_texts


def all_tables() -> Mapping[str, Columns]:
    """Return the columns of every table, without the leading columns that all tables have."""
    kinds: tuple[type[Observable], ...] = (*OBSERVABLES.values(), Decoding)
    of_observables = {name: columns for kind in kinds for name, columns in kind.columns.items()}
    shared = of_observables | LOSS_TABLES | {"summary": SUMMARY_COLUMNS} | PICTURE_TABLES | TRAINING_TABLES
    of_commands = [record.imported(place) for record in records().values() for place in record.tables]
    return {**shared, **FINDING_TABLES, **{name: columns for tables in of_commands for name, columns in tables.items()}}


def column_names(table: str) -> tuple[str, ...]:
    """Return the names of a table's columns, without the leading columns that all tables have."""
    return names_of(all_tables()[table])


def publish(raw: Mapping[str, pd.DataFrame], loaded: LoadedModel, condition: str) -> dict[str, pd.DataFrame]:
    """Bring the raw tables of one model under one condition into published form, with a text for each token id."""
    ids = {int(token) for table in raw.values() if "token_id" in table for token in table["token_id"].unique()}
    tokens = token_texts(loaded.tokenizer, ids)
    return {name: shape_table(name, table, loaded.name, condition, tokens) for name, table in raw.items()}


def shape_table(name: str, table: pd.DataFrame, model: str, condition: str, tokens: Mapping[int, str]) -> pd.DataFrame:
    """Return a table with the leading columns, followed by its declared columns in their order."""
    added: dict[str, Any] = {"model": model, "condition": condition}
    if "token_id" in table:
        added["token"] = table["token_id"].map(tokens)
    columns = (*LEADING, *column_names(name))
    # in one step, which takes less than half as long as columns that are assigned and then put in order
    return pd.DataFrame(
        {column: added[column] if column in added else table[column] for column in columns}, table.index
    )

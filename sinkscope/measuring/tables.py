"""Every table that a run can have, and how a table comes to its published form."""

from collections.abc import Mapping

import pandas as pd

from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.passes import LOSS_TABLES
from sinkscope.measuring.quantization_study import QUANTIZATION_TABLES
from sinkscope.measuring.streaming import STREAMING_TABLES
from sinkscope.measuring.summary import EFFECT_COLUMNS
from sinkscope.models.loading import LoadedModel
from sinkscope.results.tables import LEADING, METRIC, TRAINING_TABLES, VALUE, Columns, names_of
from sinkscope.text.tokens import token_texts


def all_tables() -> dict[str, Columns]:
    """Table → its columns behind the leading ones: of every observable, and those that other code makes."""
    of_observables = {name: columns for kind in OBSERVABLES.values() for name, columns in kind.columns.items()}
    return {
        **of_observables,
        **LOSS_TABLES,
        "summary": (METRIC, VALUE),
        "effect": EFFECT_COLUMNS,
        **STREAMING_TABLES,
        **QUANTIZATION_TABLES,
        **TRAINING_TABLES,
    }


def column_names(table: str) -> tuple[str, ...]:
    """The columns of a table behind the leading ones."""
    return names_of(all_tables()[table])


def publish(raw: Mapping[str, pd.DataFrame], loaded: LoadedModel, condition: str) -> dict[str, pd.DataFrame]:
    """The tables of one model under one condition as a run holds them, with token texts beside token ids."""
    ids = {int(token) for table in raw.values() if "token_id" in table for token in table["token_id"].unique()}
    tokens = token_texts(loaded.tokenizer, ids)
    return {name: shape_table(name, table, loaded.name, condition, tokens) for name, table in raw.items()}


def shape_table(name: str, table: pd.DataFrame, model: str, condition: str, tokens: Mapping[int, str]) -> pd.DataFrame:
    """A table as it is published: its declared columns in their order, behind the leading ones."""
    table = table.assign(model=model, condition=condition)
    if "token_id" in table:
        table["token"] = table["token_id"].map(tokens)
    return table[[*LEADING, *column_names(name)]]

"""What `sinkscope list` shows: all that can be named on the command line, each kind from its register.

Each kind is one function that returns a DataFrame, imported when it is asked for.
"""

from collections.abc import Callable

import pandas as pd

from sinkscope.commands.result import Result
from sinkscope.errors import InputError, unknown
from sinkscope.options.output import ListOptions, OutputOptions


def command(options: ListOptions, output: OutputOptions) -> Result:
    return Result(tables=listing(options.kind))


def observables() -> pd.DataFrame:
    from sinkscope.measuring.observables import OBSERVABLES

    rows = [(name, observable.about) for name, observable in OBSERVABLES.items()]
    return pd.DataFrame(rows, columns=["observable", "what it measures"])


def interventions() -> pd.DataFrame:
    from sinkscope.interventions import INTERVENTIONS

    rows = [
        (name, item.about, item.control_about, item.paper, ", ".join(item.model_fields))
        for name, item in INTERVENTIONS.items()
    ]
    return pd.DataFrame(rows, columns=["intervention", "what it does", "random control", "whose", "parameters"])


def retrofits() -> pd.DataFrame:
    from sinkscope.retrofits import RETROFITS

    rows = [(name, item.about, item.paper, ", ".join(item.model_fields)) for name, item in RETROFITS.items()]
    return pd.DataFrame(rows, columns=["retrofit", "what is added", "whose", "parameters"])


def architectures() -> pd.DataFrame:
    """What `train` knows by name."""
    from sinkscope.training.architectures import ARCHITECTURES

    rows = [(name, model_type, _told(fields)) for name, (model_type, fields) in ARCHITECTURES.items()]
    return pd.DataFrame(rows, columns=["architecture", "model type", "configuration"])


def tasks() -> pd.DataFrame:
    """What `train --text` knows by name."""
    from sinkscope.training.tasks import TASKS

    return pd.DataFrame([(name, task.about) for name, task in TASKS.items()], columns=["task", "what is learned"])


def _told(fields: dict) -> str:
    return ", ".join(f"{name}={value}" for name, value in fields.items() if not name.endswith("_token_id"))


def figures() -> pd.DataFrame:
    """The figures of one run, and those of several."""
    from sinkscope.figures import KINDS

    rows = [(name, kind, spec.about) for kind, specs in KINDS.items() for name, spec in specs.items()]
    return pd.DataFrame(rows, columns=["figure", "of", "what it shows"])


def families() -> pd.DataFrame:
    """A model type has several rows where its configuration decides its wiring: `where` says which."""
    from sinkscope.models.families import FAMILIES

    rows = [
        (
            model_type,
            ", ".join(f"{option}={value}" for option, value in row.when.items()),
            row.wiring,
            row.positions,
            row.door,
            ", ".join(row.absent_sites()),
        )
        for model_type, rows in FAMILIES.items()
        for row in rows
    ]
    columns = ["model type", "where", "wiring", "positions", "door", "sites absent"]
    return pd.DataFrame(rows, columns=columns)


def recipes() -> pd.DataFrame:
    """Those in recipes/ here, and of the checkout that sinkscope runs from. Of other YAML there, why it is none."""
    from sinkscope.options.recipe import known_recipes, read_recipe

    rows = []
    for name, path in known_recipes().items():
        try:
            content = read_recipe(path).content
            rows.append((name, content.title, content.reproduces or ""))
        except InputError as error:
            rows.append((name, f"not a recipe: {error}", ""))
    return pd.DataFrame(rows, columns=["recipe", "title", "reproduces"])


def sweeps() -> pd.DataFrame:
    """Those in recipes/sweeps/, here and of the checkout that sinkscope runs from."""
    from sinkscope.options.recipe import SWEEPS, known_recipes
    from sinkscope.options.sweep_file import read_sweep

    rows = []
    for name, path in known_recipes(SWEEPS).items():
        try:
            found = read_sweep(str(path), {})
            rows.append((name, found.content.title, found.content.reproduces or "", str(len(found.cells))))
        except InputError as error:
            rows.append((name, f"not a sweep: {error}", "", ""))
    return pd.DataFrame(rows, columns=["sweep", "title", "reproduces", "cells"])


def tables() -> pd.DataFrame:
    """Every column of every table; those that all tables begin with come first."""
    from sinkscope.results.tables import LEADING_COLUMNS
    from sinkscope.verdict.register import written_tables

    described = {"(every table)": LEADING_COLUMNS} | written_tables()
    rows = [(name, column.name, column.about, column.unit) for name, columns in described.items() for column in columns]
    return pd.DataFrame(rows, columns=["table", "column", "what it holds", "unit"])


def metrics() -> pd.DataFrame:
    from sinkscope.results.metrics import METRICS

    rows = [(item.name, item.label, item.unit, item.definition, item.source) for item in METRICS.values()]
    return pd.DataFrame(rows, columns=["metric", "label", "unit", "definition", "source"])


def claims() -> pd.DataFrame:
    """What `sinkscope claims` judges a model by."""
    from sinkscope.paper_claims.register import CLAIMS

    rows = [
        (
            claim.id,
            claim.paper,
            claim.reference,
            claim.statement,
            part.quantity,
            part.test.text(part.form) + "‡" * claim.is_ours,
        )
        for claim in CLAIMS.values()
        for part in claim.parts
    ]
    columns = ["claim", "paper", "where", "what it says", "what is measured", "holds if (‡ threshold of ours)"]
    return pd.DataFrame(rows, columns=columns)


KINDS: dict[str, Callable[[], pd.DataFrame]] = {
    "observables": observables,
    "interventions": interventions,
    "retrofits": retrofits,
    "architectures": architectures,
    "tasks": tasks,
    "figures": figures,
    "families": families,
    "recipes": recipes,
    "sweeps": sweeps,
    "tables": tables,
    "metrics": metrics,
    "claims": claims,
}


def listing(kind: str | None = None) -> dict[str, pd.DataFrame]:
    """Kind → its table, of one kind or of all. Errors: InputError for a kind that is unknown."""
    if kind is not None and kind not in KINDS:
        raise InputError(unknown(kind, KINDS))
    return {name: rows() for name, rows in KINDS.items() if kind in (None, name)}

"""The command `list`: prints all names for the command line. Each kind of names is a table, made from its register.

The registers are imported when they are shown.
"""

from typing import Any

import pandas as pd

from sinkscope.commands.result import Result
from sinkscope.errors import InputError, unknown
from sinkscope.options.output import ListOptions, OutputOptions

Rows = list[tuple[Any, ...]]


def command(options: ListOptions, output: OutputOptions) -> Result:
    return Result(tables=listing(options.kind))


def listing(kind: str | None = None) -> dict[str, pd.DataFrame]:
    """Return the table of a kind, or of every kind, by name. Raises InputError for an unknown kind."""
    if kind is not None and kind not in KINDS:
        raise InputError(unknown(kind, KINDS))
    return {
        name: pd.DataFrame(rows(), columns=list(columns))
        for name, (rows, *columns) in KINDS.items()
        if kind in (None, name)
    }


def _observables() -> Rows:
    from sinkscope.measuring.observables import OBSERVABLES

    return [(name, observable.about) for name, observable in OBSERVABLES.items()]


def _interventions() -> Rows:
    from sinkscope.interventions import INTERVENTIONS

    return [
        (name, item.about, item.control_about, item.paper, ", ".join(item.model_fields))
        for name, item in INTERVENTIONS.items()
    ]


def _retrofits() -> Rows:
    from sinkscope.retrofits import RETROFITS

    return [(name, item.about, item.paper, ", ".join(item.model_fields)) for name, item in RETROFITS.items()]


def _architectures() -> Rows:
    from sinkscope.training.architectures import ARCHITECTURES

    rows = []
    for name, (model_type, fields) in ARCHITECTURES.items():
        shape = [f"{field}={value}" for field, value in fields.items() if not field.endswith("_token_id")]
        rows.append((name, model_type, ", ".join(shape)))
    return rows


def _tasks() -> Rows:
    from sinkscope.training.tasks import TASKS

    return [(name, task.about) for name, task in TASKS.items()]


def _figures() -> Rows:
    from sinkscope.figures import KINDS as REGISTERS

    return [(name, kind, spec.about) for kind, specs in REGISTERS.items() for name, spec in specs.items()]


def _families() -> Rows:
    from sinkscope.models.families import FAMILIES

    rows = []
    for model_type, families in FAMILIES.items():
        for row in families:  # several if the wiring depends on the configuration
            where = ", ".join(f"{option}={value}" for option, value in row.when.items())
            rows.append((model_type, where, row.wiring, row.positions, row.door, ", ".join(row.absent_sites())))
    return rows


def _recipes() -> Rows:
    """List the recipes of the working directory and of sinkscope, with the errors of invalid YAML files."""
    from sinkscope.options.recipe import known_recipes, read_recipe

    rows = []
    for name, path in known_recipes().items():
        try:
            content = read_recipe(path).content
            rows.append((name, content.title, content.reproduces or ""))
        except InputError as error:
            rows.append((name, f"not a recipe: {error}", ""))
    return rows


def _sweeps() -> Rows:
    from sinkscope.options.recipe import SWEEPS, known_recipes
    from sinkscope.options.sweep_file import read_sweep

    rows = []
    for name, path in known_recipes(SWEEPS).items():
        try:
            found = read_sweep(str(path), {})
            rows.append((name, found.content.title, found.content.reproduces or "", str(len(found.cells))))
        except InputError as error:
            rows.append((name, f"not a sweep: {error}", "", ""))
    return rows


def _tables() -> Rows:
    from sinkscope.results.tables import LEADING_COLUMNS
    from sinkscope.verdict.register import written_tables

    described = {"(every table)": LEADING_COLUMNS} | written_tables()
    return [(name, column.name, column.about, column.unit) for name, columns in described.items() for column in columns]


def _metrics() -> Rows:
    from sinkscope.results.metrics import METRICS

    return [(item.name, item.label, item.unit, item.definition, item.source) for item in METRICS.values()]


def _claims() -> Rows:
    from sinkscope.paper_claims.register import CLAIMS

    rows = []
    for claim in CLAIMS.values():
        for part in claim.parts:
            test = part.test.text(part.form) + "‡" * claim.is_ours
            rows.append((claim.id, claim.paper, claim.reference, claim.statement, part.quantity, test))
    return rows


# kind → (its rows, column, …)
KINDS: dict[str, tuple[Any, ...]] = {
    "observables": (_observables, "observable", "what it measures"),
    "interventions": (_interventions, "intervention", "what it does", "random control", "whose", "parameters"),
    "retrofits": (_retrofits, "retrofit", "what is added", "whose", "parameters"),
    "architectures": (_architectures, "architecture", "model type", "configuration"),
    "tasks": (_tasks, "task", "what is learned"),
    "figures": (_figures, "figure", "of", "what it shows"),
    "families": (_families, "model type", "where", "wiring", "positions", "door", "sites absent"),
    "recipes": (_recipes, "recipe", "title", "reproduces"),
    "sweeps": (_sweeps, "sweep", "title", "reproduces", "cells"),
    "tables": (_tables, "table", "column", "what it holds", "unit"),
    "metrics": (_metrics, "metric", "label", "unit", "definition", "source"),
    "claims": (
        _claims, "claim", "paper", "where", "what it says", "what is measured", "holds if (‡ our threshold)",
    ),
}  # fmt: skip

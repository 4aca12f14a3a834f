"""The command `list`: prints all names for the command line. Each kind of names is a table, made from its register.

The registers are imported when they are shown.
"""

from functools import partial
from importlib import import_module
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


def _entries(place: str, *attributes: str) -> Rows:
    """List the entries of a register, given as MODULE:NAME, with these attributes, which are texts or names."""
    module, name = place.split(":")
    register = getattr(import_module(f"sinkscope.{module}"), name)
    values = {name: [getattr(item, attribute) for attribute in attributes] for name, item in register.items()}
    return [(name, *(part if isinstance(part, str) else ", ".join(part) for part in of)) for name, of in values.items()]


def _architectures() -> Rows:
    from sinkscope.training.architectures import ARCHITECTURES

    rows = []
    for name, (model_type, fields) in ARCHITECTURES.items():
        shape = [f"{field}={value}" for field, value in fields.items() if not field.endswith("_token_id")]
        rows.append((name, model_type, ", ".join(shape)))
    return rows


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


def _files(command: str, count: int) -> Rows:
    """List the YAML files for a command, of the working directory and of sinkscope, with the errors of invalid ones."""
    from sinkscope.options.recipe import KINDS as FILES
    from sinkscope.options.recipe import known_recipes, read_recipe
    from sinkscope.options.sweep_file import read_sweep

    what, folder = FILES[command]
    rows = []
    for name, path in known_recipes(folder).items():
        try:
            found: Any = read_recipe(path) if command == "run" else read_sweep(str(path), {})
            cells = [] if command == "run" else [str(len(found.cells))]
            rows.append((name, found.content.title, found.content.reproduces or "", *cells))
        except InputError as error:
            rows.append((name, f"not a {what}: {error}", *[""] * count))
    return rows


def _tables() -> Rows:
    from sinkscope.results.tables import LEADING_COLUMNS
    from sinkscope.verdict.register import written_tables

    described = {"(every table)": LEADING_COLUMNS} | written_tables()
    return [(name, column.name, column.about, column.unit) for name, columns in described.items() for column in columns]


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
    "observables": (
        partial(_entries, "measuring.observables:OBSERVABLES", "about"), "observable", "what it measures",
    ),
    "rankings": (partial(_entries, "measuring.kv_plan:RANKINGS", "about"), "ranking", "what it scores heads by"),
    "interventions": (
        partial(_entries, "interventions:INTERVENTIONS", "about", "control_about", "paper", "model_fields"),
        "intervention", "what it does", "random control", "whose", "parameters",
    ),
    "retrofits": (
        partial(_entries, "retrofits:RETROFITS", "about", "paper", "model_fields"),
        "retrofit", "what is added", "whose", "parameters",
    ),
    "architectures": (_architectures, "architecture", "model type", "configuration"),
    "tasks": (partial(_entries, "training.tasks:TASKS", "about"), "task", "what is learned"),
    "figures": (_figures, "figure", "of", "what it shows"),
    "families": (_families, "model type", "where", "wiring", "positions", "door", "sites absent"),
    "recipes": (partial(_files, "run", 1), "recipe", "title", "reproduces"),
    "sweeps": (partial(_files, "sweep", 2), "sweep", "title", "reproduces", "cells"),
    "tables": (_tables, "table", "column", "what it holds", "unit"),
    "metrics": (
        partial(_entries, "results.metrics:METRICS", "label", "unit", "definition", "source"),
        "metric", "label", "unit", "definition", "source",
    ),
    "claims": (
        _claims, "claim", "paper", "where", "what it says", "what is measured", "holds if (‡ our threshold)",
    ),
}  # fmt: skip

"""The command `list`: all names that the commands know. Each kind of names is a table, made from its register.

The registers are imported when they are shown.
"""

from functools import partial
from importlib import import_module
from typing import Any, overload

import pandas as pd

from sinkscope.commands.list.options import ListOptions
from sinkscope.commands.result import Result
from sinkscope.errors import InputError, unknown
from sinkscope.options.output import OutputOptions
from sinkscope.plugins import package_of

Rows = list[tuple[Any, ...]]
PACKAGE = "plugin"


def command(options: ListOptions, output: OutputOptions) -> Result:
    if options.kind is None:  # an overview, for which no register is imported
        kinds = [(kind, about, where) for kind, (about, where, *_) in KINDS.items()]
        return Result(tables={"kinds": pd.DataFrame(kinds, columns=["sinkscope list", "shows", "where they are used"])})
    return Result(tables=listing() if options.kind == "all" else {options.kind: listing(options.kind)})


@overload
def listing(kind: str) -> pd.DataFrame: ...


@overload
def listing(kind: None = None) -> dict[str, pd.DataFrame]: ...


def listing(kind: str | None = None) -> pd.DataFrame | dict[str, pd.DataFrame]:
    """Return all names that the commands know, with what they mean. In Python it is `sinkscope.list`.

    Args:
        kind: one of KINDS; None for all.

    Returns:
        The table of the kind, or of every kind by name.

    Raises:
        InputError: there is no such kind.
    """
    if kind is None:
        return {name: listing(name) for name in KINDS}
    if kind not in KINDS:
        raise InputError(unknown(kind, (*KINDS, "all")))
    _, _, rows, *columns = KINDS[kind]
    table = pd.DataFrame(rows(), columns=columns)
    has_plugin = PACKAGE in table and table[PACKAGE].any()
    return table if has_plugin else table.drop(columns=PACKAGE, errors="ignore")


def _entries(place: str, *attributes: str) -> Rows:
    """List the entries of a register, MODULE:NAME, with these attributes, texts or names, and the plugin's package."""
    module, name = place.split(":")
    register = getattr(import_module(f"sinkscope.{module}"), name)
    values = {name: [getattr(item, attribute) for attribute in attributes] for name, item in register.items()}
    return [
        (name, *(part if isinstance(part, str) else ", ".join(part) for part in of), package_of(register, name))
        for name, of in values.items()
    ]


def _architectures() -> Rows:
    from sinkscope.commands.train.architectures import ARCHITECTURES

    rows = []
    for name, (model_type, fields) in ARCHITECTURES.items():
        shape = [f"{field}={value}" for field, value in fields.items() if not field.endswith("_token_id")]
        rows.append((name, model_type, ", ".join(shape)))
    return rows


def _figures() -> Rows:
    from sinkscope.figures import KINDS as REGISTERS

    return [
        (name, kind, spec.about, package_of(specs, name))
        for kind, specs in REGISTERS.items()
        for name, spec in specs.items()
    ]


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
    from sinkscope.commands.sweep.file import read_sweep
    from sinkscope.options.recipe import KINDS as FILES
    from sinkscope.options.recipe import known_recipes, read_recipe

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
    from sinkscope.commands.claims.register import CLAIMS

    rows = []
    for claim in CLAIMS.values():
        for part in claim.parts:
            test = part.test.text(part.form) + "‡" * claim.is_ours
            words = (claim.reference, claim.statement, part.quantity, test)
            rows.append((claim.id, claim.paper, *words, package_of(CLAIMS, claim.id)))
    return rows


# kind → (what it is, where its names are used, its rows, column, …)
KINDS: dict[str, tuple[Any, ...]] = {
    "observables": (
        "what a run measures", "--observables A,B",
        partial(_entries, "measuring.observables:OBSERVABLES", "about"), "observable", "what it measures", PACKAGE,
    ),
    "rankings": (
        "scores of heads for a cache", "table kv_plan",
        partial(_entries, "measuring.kv_plan:RANKINGS", "about"), "ranking", "what it scores heads by", PACKAGE,
    ),
    "interventions": (
        "changes of a model during a run", "intervene --do NAME",
        partial(_entries, "interventions:INTERVENTIONS", "about", "control_about", "paper", "model_fields"),
        "intervention", "what it does", "random control", "whose", "parameters", PACKAGE,
    ),
    "retrofits": (
        "trainable changes of a model", "retrofit --method NAME",
        partial(_entries, "retrofits:RETROFITS", "about", "paper", "model_fields"),
        "retrofit", "what is added", "whose", "parameters", PACKAGE,
    ),
    "architectures": (
        "models to train from scratch", "train --config NAME",
        _architectures, "architecture", "model type", "configuration",
    ),
    "tasks": (
        "tasks to train on", "train --text NAME",
        partial(_entries, "training.tasks:TASKS", "about"), "task", "what is learned", PACKAGE,
    ),
    "figures": (
        "figures of runs and sweeps", "run.figure(NAME)",
        _figures, "figure", "of", "what it shows", PACKAGE,
    ),
    "families": (
        "model types with a known wiring", "MODEL",
        _families, "model type", "where", "wiring", "positions", "door", "sites absent",
    ),
    "recipes": (
        "experiments and figures of papers", "run NAME",
        partial(_files, "run", 1), "recipe", "title", "reproduces",
    ),
    "sweeps": (
        "grids of many models", "sweep NAME",
        partial(_files, "sweep", 2), "sweep", "title", "reproduces", "cells",
    ),
    "tables": (
        "tables and their columns", "run.tables[NAME]",
        _tables, "table", "column", "what it holds", "unit",
    ),
    "activations": (
        "raw tensors that a run can keep", "analyze --keep SITE",
        partial(_entries, "results.activations:ALL_SITES", "shape", "about"),
        "tensor", "shape", "what it holds", PACKAGE,
    ),
    "metrics": (
        "numbers of the table summary", "run.metric(NAME)",
        partial(_entries, "results.metrics:METRICS", "label", "unit", "definition", "source"),
        "metric", "label", "unit", "definition", "source", PACKAGE,
    ),
    "claims": (
        "claims of papers and their tests", "claims",
        _claims, "claim", "paper", "where", "what it says", "what is measured", "holds if (‡ our threshold)",
        PACKAGE,
    ),
}  # fmt: skip

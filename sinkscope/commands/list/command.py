"""The command `list`: all names that the commands know. Each kind of names is a table, made from its register.

The registers are imported when they are shown.
"""

from typing import Any, overload

import pandas as pd

from sinkscope.commands.list.options import ListOptions
from sinkscope.commands.printout import Printout
from sinkscope.errors import InputError, unknown
from sinkscope.options.output import OutputOptions
from sinkscope.options.recipe import known_recipes, read_recipe
from sinkscope.options.register import records
from sinkscope.plugins import package_of

Rows = list[tuple[Any, ...]]
PACKAGE = "plugin"


def command(options: ListOptions, output: OutputOptions) -> Printout:
    if options.kind is None:  # an overview, for which no register is imported
        rows = [(kind, about, where) for kind, (about, where, *_) in kinds().items()]
        kinds_table = pd.DataFrame(rows, columns=["sinkscope list", "shows", "where they are used"])
        return Printout(tables={"kinds": kinds_table})
    return Printout(tables=listing() if options.kind == "all" else {options.kind: listing(options.kind)})


@overload
def listing(kind: str) -> pd.DataFrame: ...


@overload
def listing(kind: None = None) -> dict[str, pd.DataFrame]: ...


def listing(kind: str | None = None) -> pd.DataFrame | dict[str, pd.DataFrame]:
    """Return all names that the commands know, with what they mean. In Python it is `sinkscope.list`.

    Args:
        kind: one of `kinds()`; None for all.

    Returns:
        The table of the kind, or of every kind by name.

    Raises:
        InputError: there is no such kind.
    """
    if kind is None:
        return {name: listing(name) for name in kinds()}
    if kind not in kinds():
        raise InputError(unknown(kind, (*kinds(), "all")))
    _, _, listed, *columns = kinds()[kind]
    place, *attributes = listed.split()
    owner = next((record for record in records().values() if kind in record.lists), records()["list"])
    register = owner.imported(place)
    rows: Rows = [] if attributes else register()
    for name in register if attributes else ():
        values = [getattr(register[name], attribute) for attribute in attributes]
        texts = [value if isinstance(value, str) else ", ".join(value) for value in values]
        rows.append((name, *texts, package_of(register, name)))
    table = pd.DataFrame(rows, columns=columns)
    has_plugin = PACKAGE in table and table[PACKAGE].any()
    return table if has_plugin else table.drop(columns=PACKAGE, errors="ignore")


def _figures() -> Rows:
    from sinkscope.figures import KINDS as REGISTERS

    every = [(kind, specs, name) for kind, specs in REGISTERS.items() for name in specs]
    return [(name, kind, specs[name].about, package_of(specs, name)) for kind, specs, name in every]


def _families() -> Rows:
    from sinkscope.models.families import FAMILIES

    rows = []
    for model_type, families in FAMILIES.items():
        for row in families:  # several if the wiring depends on the configuration
            where = ", ".join(f"{option}={value}" for option, value in row.when.items())
            rows.append((model_type, where, row.wiring, row.positions, row.door, ", ".join(row.absent_sites())))
    return rows


def _recipes() -> Rows:
    """List the recipes of the working directory and of sinkscope, with the errors of invalid ones."""
    rows = []
    for name, path in known_recipes().items():
        try:
            content = read_recipe(path).content
            rows.append((name, content.title, content.reproduces or ""))
        except InputError as error:
            rows.append((name, f"not a recipe: {error}", ""))
    return rows


def _tables() -> Rows:
    from sinkscope.measuring.tables import all_tables
    from sinkscope.results.tables import LEADING_COLUMNS

    described = {"(every table)": LEADING_COLUMNS, **all_tables()}
    return [(name, column.name, column.about, column.unit) for name, columns in described.items() for column in columns]


# of the core: kind → what it is, where its names are used, MODULE:NAME of its register with the listed attributes, or
# of a function that returns its rows, and the columns. Those of a command are in its record.
CORE: dict[str, tuple[str, ...]] = {
    "observables": (
        "what a run measures", "--observables A,B", "sinkscope.measuring.observables:OBSERVABLES about",
        "observable", "what it measures", PACKAGE,
    ),
    "interventions": (
        "changes of a model during a run", "intervene --do NAME",
        "sinkscope.interventions:INTERVENTIONS about control_about paper model_fields",
        "intervention", "what it does", "random control", "whose", "parameters", PACKAGE,
    ),
    "retrofits": (
        "trainable changes of a model", "retrofit --method NAME",
        "sinkscope.retrofits:RETROFITS about paper model_fields",
        "retrofit", "what is added", "whose", "parameters", PACKAGE,
    ),
    "figures": (
        "figures of runs and comparisons", "run.figure(NAME)", f"{__name__}:_figures",
        "figure", "of", "what it shows", PACKAGE,
    ),
    "families": (
        "model types with a known wiring", "MODEL", f"{__name__}:_families",
        "model type", "where", "wiring", "positions", "door", "sites absent",
    ),
    "recipes": (
        "experiments and figures of papers", "run NAME", f"{__name__}:_recipes",
        "recipe", "title", "reproduces",
    ),
    "tables": (
        "tables and their columns", "run.tables[NAME]", f"{__name__}:_tables",
        "table", "column", "what it holds", "unit",
    ),
    "activations": (
        "raw tensors that a run can keep", "analyze --keep SITE",
        "sinkscope.results.activations:ALL_SITES shape about",
        "tensor", "shape", "what it holds", PACKAGE,
    ),
    "metrics": (
        "numbers of the table summary", "run.metric(NAME)",
        "sinkscope.results.metrics:METRICS label unit definition source",
        "metric", "label", "unit", "definition", "source", PACKAGE,
    ),
}  # fmt: skip


def kinds() -> dict[str, tuple[str, ...]]:
    """Return all kinds of names, as in CORE."""
    return CORE | {kind: row for record in records().values() for kind, row in record.lists.items()}

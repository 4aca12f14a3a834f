"""What is drawn, one figure a file, from a run's tables alone.

A file here with a NAME is a figure: NAME and ABOUT for `sinkscope list`, the TABLES that it needs, and
`draw(run)`.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, cast

from sinkscope.config import unknown
from sinkscope.discovery import modules_of
from sinkscope.errors import InputError
from sinkscope.figures.style import Figure, in_style
from sinkscope.run import Run


class FigureModule(Protocol):
    """What a figure's file holds."""

    NAME: str
    ABOUT: str
    TABLES: tuple[str, ...]
    draw: Callable[[Run], Figure]


FIGURES: dict[str, FigureModule] = {
    module.NAME: cast(FigureModule, module) for module in modules_of(sys.modules[__name__]) if hasattr(module, "NAME")
}

# tables that bear another name than the observable that they come from
OBSERVABLE = {
    "sink_positions": "attention",
    "attention_heads": "attention",
    "attention_maps": "attention",
    "massive_map": "massive",
    "gradient_ratio": "gradient",
    "gradient_check": "gradient",
}


def draw(name: str, run: Run) -> Figure:
    """One figure of a run. Errors: InputError if it is unknown, or if the run lacks a table that it needs."""
    if name not in FIGURES:
        raise InputError(f"figure {unknown(name, FIGURES)}")
    missing = [table for table in FIGURES[name].TABLES if not _has(run, table)]
    if missing:
        observables = dict.fromkeys(OBSERVABLE.get(table, table) for table in missing)
        raise InputError(
            f"figure '{name}' needs the table '{missing[0]}', which this run lacks: "
            f"run the observable{'s' * (len(observables) > 1)} {', '.join(observables)}"
        )
    with in_style():
        return FIGURES[name].draw(run)


def applicable(run: Run) -> list[str]:
    """The figures that the run's tables allow."""
    return [name for name, module in FIGURES.items() if all(_has(run, table) for table in module.TABLES)]


def save_all(run: Run, folder: Path) -> None:
    """Every applicable figure as NAME.png and NAME.pdf."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in applicable(run):
        figure = draw(name, run)
        for kind in ("png", "pdf"):
            figure.savefig(folder / f"{name}.{kind}")


def _has(run: Run, table: str) -> bool:
    """An empty `sink_positions` is a finding; any other empty table has nothing to draw."""
    return table in run.tables and (table == "sink_positions" or len(run.tables[table]) > 0)

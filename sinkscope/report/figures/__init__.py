"""What is drawn, one figure a file, from a run's tables alone.

A new one is a file here, and a line in the register: NAME and ABOUT for `sinkscope list`, the TABLES that it needs, and
`draw(run)`. One that needs more than a table with rows also has `lacking(run)`: what is missing, or None.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from sinkscope.errors import InputError, unknown
from sinkscope.report.figures import (
    arm_maps,
    arm_maps_by_layer,
    attention_maps,
    effects,
    effects_by_layer,
    epe_coordinates,
    gamma,
    gradient_bounds,
    gradient_norms,
    gradient_reshaping,
    massive_activations,
    massive_map,
    quantization_cost,
    quantization_ranges,
    query_bias_alignment,
    query_bias_distribution,
    query_key_geometry,
    sink_map,
    sink_positions,
    sinks_by_layer,
    streaming_perplexity,
)
from sinkscope.report.figures.style import Figure, in_style
from sinkscope.results.run import RunData


class FigureModule(Protocol):
    """What a figure's file holds."""

    NAME: str
    ABOUT: str
    TABLES: tuple[str, ...]
    draw: Callable[[RunData], Figure]


_MODULES: tuple[Any, ...] = (
    arm_maps,
    arm_maps_by_layer,
    attention_maps,
    effects,
    effects_by_layer,
    epe_coordinates,
    gamma,
    gradient_bounds,
    gradient_norms,
    gradient_reshaping,
    massive_activations,
    massive_map,
    quantization_cost,
    quantization_ranges,
    query_bias_alignment,
    query_bias_distribution,
    query_key_geometry,
    sink_map,
    sink_positions,
    sinks_by_layer,
    streaming_perplexity,
)
FIGURES: dict[str, FigureModule] = {module.NAME: module for module in _MODULES}

# tables that bear another name than the observable that they come from
OBSERVABLE = {
    "sink_positions": "attention",
    "attention_heads": "attention",
    "attention_maps": "attention",
    "massive_map": "massive",
    "gradient_ratio": "gradient",
    "gradient_check": "gradient",
    "query_bias": "query-bias",
    "gamma": "query-bias",
    "delta_distribution": "query-bias",
}


# tables that other commands than `analyze` make; those of `intervene` hold all its arms, for one figure
COMMAND = {
    "effect": "intervene",
    "arm_maps": "intervene",
    "streaming": "intervene",
    "quantization": "quantize",
    "quantization_sites": "quantize",
}
ARM_TABLES = {table for table, command in COMMAND.items() if command == "intervene"}


def draw(name: str, run: RunData) -> Figure:
    """One figure of a run. Errors: InputError if it is unknown, or if the run lacks a table that it needs."""
    if name not in FIGURES:
        raise InputError(f"figure {unknown(name, FIGURES)}")
    if run.is_experiment and not ARM_TABLES & set(FIGURES[name].TABLES):
        raise InputError(f"figure '{name}' is of one arm: draw it of run.at('before'), or of another arm")
    missing = [table for table in FIGURES[name].TABLES if not _has(run, table)]
    if missing and missing[0] in COMMAND:
        runs = f"only some runs of `{COMMAND[missing[0]]}` have"
        raise InputError(f"figure '{name}' needs the table '{missing[0]}', which {runs}")
    if missing:
        observables = dict.fromkeys(OBSERVABLE.get(table, table) for table in missing)
        for observable, reason in (run.manifest.get("not_measured") or {}).items():
            if observable in observables:
                raise InputError(f"figure '{name}': {observable} does not apply to {run.model}: {reason}")
        raise InputError(
            f"figure '{name}' needs the table '{missing[0]}', which this run lacks: "
            f"run the observable{'s' * (len(observables) > 1)} {', '.join(observables)}"
        )
    lacking = _lacking(FIGURES[name], run)
    if lacking is not None:
        raise InputError(f"figure '{name}' has nothing to draw of {run.model}: {lacking}")
    with in_style():
        return FIGURES[name].draw(run)


def applicable(run: RunData) -> list[str]:
    """The figures that the run's tables allow; of an experiment, whose other tables hold several arms, its own."""
    complete = {name: module for name, module in FIGURES.items() if all(_has(run, table) for table in module.TABLES)}
    if run.is_experiment:
        complete = {name: module for name, module in complete.items() if ARM_TABLES & set(module.TABLES)}
    return [name for name, module in complete.items() if _lacking(module, run) is None]


def save_all(run: RunData, folder: Path) -> None:
    """Every applicable figure as NAME.png and NAME.pdf."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in applicable(run):
        figure = draw(name, run)
        for kind in ("png", "pdf"):
            figure.savefig(folder / f"{name}.{kind}")


def _lacking(module: FigureModule, run: RunData) -> str | None:
    return module.lacking(run) if hasattr(module, "lacking") else None


def _has(run: RunData, table: str) -> bool:
    """An empty `sink_positions` is a finding; any other empty table has nothing to draw."""
    if table in ARM_TABLES and "arms" not in run.manifest:  # maps of one condition alone
        return False
    return table in run.tables and (table == "sink_positions" or len(run.tables[table]) > 0)

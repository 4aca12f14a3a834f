"""The figures, one in each file, drawn from tables alone.

A new one is a file here that ends with its `FIGURE`, and an entry in the register of its kind.
"""

from collections.abc import Mapping, Sequence
from typing import Never

import pandas as pd

from sinkscope.errors import InputError, unknown
from sinkscope.figures import (
    arm_maps,
    arm_maps_by_layer,
    attention_maps,
    backcopy_maps,
    backcopy_training,
    comparison,
    effects,
    effects_by_layer,
    epe_coordinates,
    gamma,
    gates_by_layer,
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
    retrofit_bars,
    retrofit_layers,
    retrofit_training,
    retrofit_values,
    routes,
    scorecard,
    scorecard_by_model,
    sink_map,
    sink_positions,
    sinks_by_layer,
    streaming_perplexity,
    sweep_benchmarks,
    sweep_chat,
    sweep_domains,
    sweep_epsilon,
    sweep_factor,
    sweep_inputs,
    sweep_lengths,
    sweep_sizes,
    sweep_steps,
    sweep_training,
    training_by_step,
    training_gradient_norms,
)
from sinkscope.figures.arms import Arms
from sinkscope.figures.spec import FigureSpec
from sinkscope.figures.steps import Checkpoints
from sinkscope.figures.style import Figure
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.results.run import RunData
from sinkscope.verdict.scorecard import Scorecard
from sinkscope.verdict.sweep_tables import SweepTables

# fmt: off
FIGURES: dict[str, FigureSpec[RunData]] = {spec.name: spec for spec in (  # of one run
    arm_maps.draw, arm_maps_by_layer.draw, attention_maps.draw, effects.draw, effects_by_layer.draw,
    epe_coordinates.draw, gamma.draw, gates_by_layer.draw, gradient_bounds.draw, gradient_norms.draw,
    gradient_reshaping.draw,
    massive_activations.draw, massive_map.draw, quantization_cost.draw, quantization_ranges.draw,
    query_bias_alignment.draw, query_bias_distribution.draw, query_key_geometry.draw, sink_map.draw,
    sink_positions.draw, sinks_by_layer.draw, streaming_perplexity.draw,
)}
OF_RUNS: dict[str, FigureSpec[Sequence[RunData]]] = {spec.name: spec for spec in (comparison.draw,)}
OF_STEPS: dict[str, FigureSpec[Checkpoints]] = {spec.name: spec for spec in (
    training_by_step.draw, training_gradient_norms.draw,
)}
OF_ARMS: dict[str, FigureSpec[Arms]] = {spec.name: spec for spec in (
    retrofit_bars.draw, retrofit_training.draw, retrofit_layers.draw, retrofit_values.draw,
    backcopy_maps.draw, backcopy_training.draw,
)}
OF_CLAIMS: dict[str, FigureSpec[Scorecard]] = {spec.name: spec for spec in (
    scorecard.draw, scorecard_by_model.draw,
)}
OF_ROUTES: dict[str, FigureSpec[pd.DataFrame]] = {spec.name: spec for spec in (routes.draw,)}
OF_SWEEP: dict[str, FigureSpec[SweepTables]] = {spec.name: spec for spec in (
    sweep_inputs.draw, sweep_sizes.draw, sweep_steps.draw, sweep_chat.draw, sweep_epsilon.draw, sweep_lengths.draw,
    sweep_domains.draw, sweep_benchmarks.draw, sweep_factor.draw, sweep_training.draw, sweep_training.draw_loss,
)}
# fmt: on
# what a figure is drawn from → the register of such figures
KINDS: dict[str, Mapping[str, FigureSpec[Never]]] = {
    "one run": FIGURES,
    "several runs": OF_RUNS,
    "training steps": OF_STEPS,
    "arms of a training": OF_ARMS,
    "claims": OF_CLAIMS,
    "interventions on several models": OF_ROUTES,
    "cells of a sweep": OF_SWEEP,
}

# table → the observable that a user names to have it
OBSERVABLE = {table: (kind.after or (name,))[0] for name, kind in OBSERVABLES.items() for table in kind.columns}
# tables that commands other than `analyze` make
COMMAND = {
    "effect": "intervene",
    "arm_maps": "intervene",
    "streaming": "intervene",
    "quantization": "quantize",
    "quantization_sites": "quantize",
}
ALL_ARMS = ("effect", "arm_maps")  # of one arm by itself, they have no figure


def is_of(name: str, command: str) -> bool:
    """Whether runs of a command can have a figure of one run."""
    return command in {COMMAND.get(table, "analyze") for table in FIGURES[name].tables}


def draw(name: str, run: RunData) -> Figure:
    """Draw a figure of one run.

    Raises:
        InputError: the figure is unknown, or the run lacks what it needs.
    """
    if name not in FIGURES:
        raise InputError(f"figure {unknown(name, FIGURES)}")
    spec = FIGURES[name]
    if run.is_experiment and not _is_experiments(spec):
        raise InputError(f"figure '{name}' is of one arm: draw it of run.at('before'), or of another arm")
    missing = [table for table in spec.tables if not _has(run, table)]
    if missing:
        raise InputError(f"figure '{name}'{_why_missing(run, missing)}")
    return spec(run)


def applicable(run: RunData) -> list[str]:
    """The figures that the run's tables allow; of an experiment, those of all its arms together."""
    return [
        name
        for name, spec in FIGURES.items()
        if (_is_experiments(spec) or not run.is_experiment)
        and all(_has(run, table) for table in spec.tables)
        and spec.lacking(run) is None
    ]


def _is_experiments(spec: FigureSpec[RunData]) -> bool:
    return any(COMMAND.get(table) == "intervene" for table in spec.tables)


def _has(run: RunData, table: str) -> bool:
    """Whether there is something to draw: `sink_positions` may be empty, which is a finding; no other table may."""
    is_split = table in ALL_ARMS and not run.is_experiment  # one arm by itself
    return table in run.tables and not is_split and (table == "sink_positions" or len(run.tables[table]) > 0)


def _why_missing(run: RunData, missing: Sequence[str]) -> str:
    needs = f" needs the table '{missing[0]}', which"
    if missing[0] in COMMAND:
        return f"{needs} only some runs of `{COMMAND[missing[0]]}` have"
    observables = dict.fromkeys(OBSERVABLE[table] for table in missing)
    for observable, reason in (run.manifest.get("not_measured") or {}).items():
        if observable in observables:
            return f": {observable} does not apply to {run.model}: {reason}"
    plural = "s" * (len(observables) > 1)
    return f"{needs} this run lacks: run the observable{plural} {', '.join(observables)}"

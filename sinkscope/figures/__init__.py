"""The register of figures: the file of each figure, its description, and the tables that it needs.

The function `draw_NAME` in the file draws the figure NAME; the file is imported when one of its figures is first used.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sinkscope.errors import InputError, unknown
from sinkscope.figures.spec import FigureSpec
from sinkscope.figures.style import Figure
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.plugins import load_plugins
from sinkscope.results.run import RunData

if TYPE_CHECKING:
    import pandas as pd

    from sinkscope.commands.claims.scorecard import Scorecard
    from sinkscope.commands.sweep.tables import SweepTables
    from sinkscope.commands.train.figures import Arms
    from sinkscope.figures.labels import Checkpoints


def _register(*rows: tuple[str, ...]) -> dict[str, FigureSpec[Any]]:
    return {
        name: FigureSpec(name, f"sinkscope.figures.{file}", about, tuple(tables)) for name, file, about, *tables in rows
    }


# fmt: off
# name, file with its functions, description, tables
FIGURES: dict[str, FigureSpec[RunData]] = _register(
    ("arm-maps", "interventions",
        "attention maps of one layer under every arm and its control (NU fig. 3)", "arm_maps"),
    ("arm-maps-by-layer", "interventions",
        "attention maps of every layer under every arm (NU figs. 7–13 on one page)", "arm_maps"),
    ("attention-maps", "runs", "attention weights of selected heads on the first sequence", "attention_maps"),
    ("effects", "interventions",
        "effect of every arm on sink, perplexity and massive activations, with its control", "effect"),
    ("effects-by-layer", "interventions",
        "sink rate by layer before and after every arm, with its control's spread", "effect"),
    ("entropy-by-layer", "states",
        "entropy of each layer's states with and without position 0 (compression valleys)", "entropy"),
    ("epe-coordinates", "query_bias", "EPE₀ by coordinate, with names of massive coordinates (NU fig. 6)", "gamma"),
    ("gamma", "query_bias", "|γ| at the massive coordinates of EPE₀ and over all (NU tables 1 and 2)", "gamma"),
    ("gates-by-layer", "runs", "gates at position 0 and elsewhere, by layer and by position (VGA §3.2)", "gate"),
    ("gradient-bounds", "gradients", "theorems 1 and 2 of GS by layer: measured values and bounds", "gradient_check"),
    ("gradient-norms", "gradients", "gradient norms of query, key and value by token position (GS fig. 2)", "gradient"),
    ("gradient-reshaping", "gradients",
        "bloat, compress and change against the input's norm (GS fig. 3)", "gradient_ratio"),
    ("head-scores", "states", "heads by the norm of their output and by their attention to position 0", "head_scores"),
    ("kv-plan", "kv_plan", "perplexity and retrieval by the memory that plans for the KV cache keep", "kv_plan"),
    ("massive-activations", "runs",
        "the three largest activations and the median by layer (Sun et al. 2024)", "massive"),
    ("massive-map", "runs",
        "magnitudes by token and coordinate at the layer with the largest activation", "massive_map"),
    ("outlier-patches", "pictures",
        "norms of and attention to a vision transformer's patches (Darcet et al. 2024)", "encoder_patch", "picture"),
    ("overflow-headroom", "quantization",
        "largest magnitude of each site by layer, and the limit of the dtype (doctor --dtype)", "overflow"),
    ("over-mixing", "interventions",
        "change of later tokens by a changed token, by layer and distance, under every arm", "effect", "over_mixing",
        "over_mixing_by_sequence"),
    ("quantization-cost", "quantization",
        "perplexity with the model or single sites quantized", "quantization", "quantization_sites"),
    ("quantization-ranges", "quantization", "range and median of every linear layer by layer", "quantization_sites"),
    ("quantization-split", "quantization_split",
        "cost with tokens, coordinates, a prefix or a rotation, and random controls", "quantization_split"),
    ("query-bias-alignment", "query_bias", "cosine of keys and query bias, by layer (NU figs. 2 and 5)", "query_bias"),
    ("query-bias-distribution", "query_bias",
        "the query bias's shift Δ by layer (NU figs. 1 and 4)", "delta_distribution", "summary"),
    ("query-key-geometry", "runs", "norms and angles of queries, keys and values by layer (WSE fig. 2)", "geometry"),
    ("residual-sinks", "states", "coordinates that are large at most tokens, and spikes by layer", "spikes"),
    ("sink-map", "runs",
        "window mass at position 0 of every layer and head; dots: sinks in most sequences", "attention"),
    ("sink-positions", "runs",
        "heads with a sink by layer, and later sinks by position and token", "sink_positions", "attention"),
    ("sink-tokens", "states", "tokens that join the direction of the first sink (secondary sinks)", "parallel_tokens"),
    ("sinks-by-layer", "runs",
        "sinks and norms by layer: token 0 and other early tokens (GS fig. 1)", "attention", "activation"),
    ("streaming-perplexity", "runs",
        "perplexity with a short cache, with and without first tokens (StreamingLLM)", "streaming"),
    ("super-weights", "states",
        "the largest entry that each feed-forward network adds, and the weight that writes it", "super_weights"),
    ("visual-sinks", "pictures",
        "attention to the patches of pictures, and φ (Kang et al. 2025)", "visual_patch", "picture"),
)
OF_RUNS: dict[str, FigureSpec[Sequence[RunData]]] = _register(
    ("by-layer", "runs", "sink rate, value norm, residual norm and massive activations of all runs", "summary"),
)
OF_STEPS: "dict[str, FigureSpec[Checkpoints]]" = _register(
    ("training-by-step", "training", "loss, sinks, gradient sinks and norms by training step", "summary"),
    ("training-onsets", "training",
        "onsets of value gradient, norm and sink in training, and which of them leads",
        "attention_by_sequence", "activation_by_sequence", "gradient_by_group"),
    ("training-gradient-norms", "gradients", "gradient norms by token position and step (GS fig. 2)", "gradient"),
)
OF_ARMS: "dict[str, FigureSpec[Arms]]" = _register(
    ("retrofit-bars", "training", "perplexity, outliers and sinks of every arm, over seeds", "retrofit"),
    ("retrofit-training", "training", "loss and displacement of new parameters by training step", "training"),
    ("retrofit-equal-loss", "training", "sink rate by total weight against held-out loss, of every arm", "training"),
    ("retrofit-layers", "training", "sink rate and norms of every arm by layer (GS fig. 5)", "attention", "activation"),
    ("retrofit-values", "training", "value norms and gates of every arm (VGA figs. 1 and 4)", "geometry"),
    ("backcopy-maps", "training",
        "Bigram-Backcopy: attention and value norms on one sequence (VGA figs. 4 and 6)", "value_norms"),
    ("backcopy-training", "training", "Bigram-Backcopy by training step, of every arm (VGA figs. 5 and 6)", "training"),
)
OF_TRAININGS: "dict[str, FigureSpec[pd.DataFrame]]" = _register(
    ("training-curves", "training", "what SinkCallback measured of each training, by step", "training"),
)
OF_CLAIMS: "dict[str, FigureSpec[Scorecard]]" = _register(
    ("scorecard", "claims", "the number of every claim, its threshold and published values", "claim"),
    ("scorecard-by-model", "claims", "the outcome of every claim, claims × models", "claim"),
)
OF_ROUTES: "dict[str, FigureSpec[pd.DataFrame]]" = _register(
    ("routes", "claims", "routes that carry the sink in each model: sink rate before and after each is cut", "route"),
)
OF_SWEEP: "dict[str, FigureSpec[SweepTables]]" = _register(
    ("sweep-inputs", "sweeps", "sink rate by model and input, next to WSE table 1", "sweep"),
    ("sweep-sizes", "sweeps", "sink rate against the number of parameters, by family and input", "sweep"),
    ("sweep-steps", "sweeps", "sink rate against the training step, by model and input", "sweep"),
    ("sweep-chat", "sweeps", "sink rate of base models and of models tuned from them", "sweep"),
    ("sweep-epsilon", "sweeps", "sink rate against ε, by model and input", "sweep_epsilon"),
    ("sweep-lengths", "sweeps", "sink rate against sequence length T = window, by model and input", "sweep"),
    ("sweep-domains", "sweeps", "sink rate by model and domain of the text", "sweep"),
    ("sweep-benchmarks", "sweeps", "scores against the sink rate, by task and family", "sweep_benchmark"),
    ("sweep-factor", "sweeps", "sink rate at the end of each training, every seed, next to WSE's", "sweep_training"),
    ("sweep-training-sink", "sweeps",
        "sink rate of each training by step, mean and range over seeds", "sweep_training"),
    ("sweep-training-loss", "sweeps", "loss of each training by step, mean and range over seeds", "sweep_training"),
)
# fmt: on
# data of a figure → the register of figures with these data
KINDS: dict[str, dict[str, FigureSpec[Any]]] = {
    "one run": FIGURES,
    "several runs": OF_RUNS,
    "training steps": OF_STEPS,
    "arms of a training": OF_ARMS,
    "trainings of your own": OF_TRAININGS,
    "claims": OF_CLAIMS,
    "interventions on several models": OF_ROUTES,
    "cells of a sweep": OF_SWEEP,
}

# table → the command that makes it, if not `analyze`
COMMAND = {
    "effect": "intervene",
    "arm_maps": "intervene",
    "streaming": "intervene",
    "quantization": "quantize",
    "quantization_sites": "quantize",
    "kv_plan": "kv-plan",
    "kv_plan_by_sequence": "kv-plan",
    "kv_heads": "kv-plan",
    "kv_layers": "kv-plan",
    "overflow": "doctor",
    "overflow_runs": "doctor",
    "quantization_split": "quantize",
    **dict.fromkeys(("picture", "visual_patch", "visual_head", "encoder_patch"), "analyze --images"),
}
ALL_ARMS = ("effect", "arm_maps")  # one figure shows all arms of an experiment


def observable_of(table: str) -> str | None:
    """Return the observable that makes a table; None if a command makes it."""
    makers = (kind.after or (name,) for name, kind in OBSERVABLES.items() if table in kind.columns)
    return next(makers, (None,))[0]


def is_of(name: str, command: str) -> bool:
    """Return whether runs of a command can have a figure of one run."""
    return command in {COMMAND.get(table, "analyze") for table in FIGURES[name].tables}


def draw(name: str, run: RunData, **options: Any) -> Figure:
    """Draw a figure of one run. Raises InputError if figure or option is unknown, or the run lacks what it needs."""
    load_plugins()
    if name not in FIGURES:
        raise InputError(f"figure {unknown(name, FIGURES)}")
    spec = FIGURES[name]
    if run.is_experiment and not _is_experiments(spec):
        raise InputError(f"figure '{name}' shows a single arm: draw it for run.at('before'), or for another arm")
    missing = [table for table in spec.tables if not _has(run, table)]
    if missing:
        raise InputError(f"figure '{name}'{_why_missing(run, missing)}")
    return spec(run, **options)


def applicable(run: RunData) -> list[str]:
    """Return the figures that the tables of the run allow; for an experiment, the figures of all arms together."""
    return [
        name
        for name, spec in FIGURES.items()
        if (_is_experiments(spec) or not run.is_experiment)
        and all(_has(run, table) for table in spec.tables)
        and spec.applies(run)
    ]


def _is_experiments(spec: FigureSpec[RunData]) -> bool:
    return any(COMMAND.get(table) == "intervene" for table in spec.tables)


def _has(run: RunData, table: str) -> bool:
    """Return whether the table has data to draw. Only `sink_positions` may be empty, which is a finding."""
    is_split = table in ALL_ARMS and not run.is_experiment  # a single arm of an experiment
    return table in run.tables and not is_split and (table == "sink_positions" or len(run.tables[table]) > 0)


def _why_missing(run: RunData, missing: Sequence[str]) -> str:
    needs = f" needs the table '{missing[0]}', which"
    if missing[0] in COMMAND:
        return f"{needs} only some runs of `{COMMAND[missing[0]]}` have"
    observables = dict.fromkeys(str(observable_of(table)) for table in missing)
    for observable, reason in (run.manifest.get("not_measured") or {}).items():
        if observable in observables:
            return f": {observable} does not apply to {run.model}: {reason}"
    plural = "s" * (len(observables) > 1)
    return f"{needs} this run lacks: run the observable{plural} {', '.join(observables)}"

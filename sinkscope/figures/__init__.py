"""The register of figures: the file of each figure, its description, and the tables that it needs.

Those of a run of `analyze` are here, and those of a command in its record.

The function `draw_NAME` in the file draws the figure NAME; the file is imported when one of its figures is first used.
"""

from typing import Any

from sinkscope.errors import InputError, unknown
from sinkscope.figures.spec import FigureSpec
from sinkscope.figures.style import Figure
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.options.register import records
from sinkscope.plugins import load_plugins
from sinkscope.results.run import RunData

# fmt: off
# of one run of `analyze`: name, file with its function, description, tables
FIGURE_ROWS = (
    ("attention-maps", "runs", "attention weights of selected heads on the first sequence", "attention_maps"),
    ("decoding", "decoding", "attention to position 0, later sinks and activations of each decoded token", "decoding"),
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
    ("massive-activations", "runs",
        "the three largest activations and the median by layer (Sun et al. 2024)", "massive"),
    ("massive-map", "runs",
        "magnitudes by token and coordinate at the layer with the largest activation", "massive_map"),
    ("outlier-patches", "pictures",
        "norms of and attention to a vision transformer's patches (Darcet et al. 2024)", "encoder_patch", "picture"),
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
        "sinks and norms by layer: position 0 and other early tokens (GS fig. 1)", "attention", "activation"),
    ("super-weights", "states",
        "the largest entry that each feed-forward network adds, and the weight that writes it", "super_weights"),
    ("visual-sinks", "pictures",
        "attention to the patches of pictures, and φ (Kang et al. 2025)", "visual_patch", "picture"),
)
BY_LAYER = ("by-layer", "sink rate, value norm, residual norm and massive activations of all runs", "summary")
# fmt: on


def _spec(module: str, command: str, name: str, about: str, *tables: str) -> FigureSpec[Any]:
    return FigureSpec(name, module, about, tables, command)


def _registers() -> dict[str, dict[str, FigureSpec[Any]]]:
    """Return the registers of figures by the data that they show, from FIGURE_ROWS and the records of the commands."""
    of_run = [
        _spec(f"{__name__}.{file}", WITH_OPTION.get(file, "analyze"), name, *about)
        for name, file, *about in FIGURE_ROWS
    ]
    kinds = {"one run": of_run, "several runs": [_spec(f"{__name__}.runs", "compare", *BY_LAYER)]}
    for name, record in records().items():
        for data, rows in record.figures.items():
            kinds.setdefault(data, []).extend(_spec(f"{record.folder}.figures", name, *row) for row in rows)
    kinds["one run"].sort(key=lambda spec: spec.name)
    return {data: {spec.name: spec for spec in specs} for data, specs in kinds.items()}


WITH_OPTION = {"decoding": "analyze --generate", "pictures": "analyze --images"}
KINDS = _registers()
FIGURES: dict[str, FigureSpec[RunData]] = KINDS["one run"]


def observable_of(table: str) -> str | None:
    """Return the observable that makes a table; None if a command makes it."""
    makers = (kind.after or (name,) for name, kind in OBSERVABLES.items() if table in kind.columns)
    return next(makers, (None,))[0]


def figure_spec(name: str) -> FigureSpec[RunData]:
    """Return the entry of a figure of one run. Raises InputError if there is none."""
    if name not in FIGURES:
        raise InputError(f"figure {unknown(name, FIGURES)}")
    return FIGURES[name]


def draw(name: str, run: RunData, **options: Any) -> Figure:
    """Draw a figure of one run. Raises InputError if figure or option is unknown, or the run lacks what it needs."""
    load_plugins()
    spec = figure_spec(name)
    if run.is_experiment and spec.command != run.command:
        raise InputError(f"figure '{name}' shows a single arm: draw it for run.at('before'), or for another arm")
    if not (missing := _lacking(spec, run)):
        return spec(run, **options)
    observables = list(dict.fromkeys(map(observable_of, missing)))
    needs = f"figure '{name}' needs the table '{missing[0]}', which"
    if observables[0] is None:
        raise InputError(f"{needs} only some runs of `{spec.command}` have")
    for observable, reason in (run.manifest.get("not_measured") or {}).items():
        if observable in observables:
            raise InputError(f"figure '{name}': {observable} does not apply to {run.model}: {reason}")
    plural = "s" * (len(observables) > 1)
    raise InputError(f"{needs} this run lacks: run the observable{plural} {', '.join(map(str, observables))}")


def applicable(run: RunData) -> list[str]:
    """Return the figures that the tables of the run allow; for an experiment, the figures of all arms together."""
    specs = [spec for spec in FIGURES.values() if spec.command == run.command or not run.is_experiment]
    return [spec.name for spec in specs if not _lacking(spec, run) and spec.applies(run)]


def _lacking(spec: FigureSpec[RunData], run: RunData) -> list[str]:
    """Return the tables that the run lacks for a figure; an arm of an experiment lacks those of all arms together."""
    lacking = () if run.is_experiment else {table for record in records().values() for table in record.of_arms}

    def has(table: str) -> bool:  # only `sink_positions` may be empty, which is a finding
        return table in run.tables and (table == "sink_positions" or not run.tables[table].empty)

    return [table for table in spec.tables if table in lacking or not has(table)]

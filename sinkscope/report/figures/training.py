"""How sinks, gradient sinks and massive activations grow in training: checkpoints of one model side by side.

Not one run's figure, so `sinkscope list` does not show it.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from sinkscope.errors import InputError
from sinkscope.measuring.summary import WHOLE_MODEL
from sinkscope.report.figures.axes import MOST_MARKERS, has_values, say, value_axis
from sinkscope.report.figures.gradient_norms import (
    PATHWAYS,
    add_legend,
    draw_curve,
    finish,
    layer_norms,
    mark_off_scale,
)
from sinkscope.report.figures.gradient_reshaping import GUIDE
from sinkscope.report.figures.labels import escape, shorten
from sinkscope.report.figures.style import GRADUAL, OTHERS, SINK, WIDE, Figure, in_style, new_figure
from sinkscope.results.run import RunData

Checkpoints = Sequence[tuple[int, RunData]]  # (training step, its run)
MOST_TICKS = 5  # decades
MOST_NAMED = 8  # steps, beside the colour bar
UNEVEN = 5  # times the median step: where the last lies beyond, the early ones need a log scale
TITLE = 90  # characters


def draw_training(runs: Checkpoints) -> dict[str, Figure]:
    """By name: `by-step`, the model's numbers against the training step, and, where gradients were measured,
    `gradient-norms`, GS figure 2 with a line a step.

    `runs` are pairs of a step and the run of its checkpoint, in any order. Errors: InputError if there are none.
    """
    if not runs:
        raise InputError("there are no checkpoints to draw")
    runs = sorted(runs, key=lambda pair: pair[0])
    with_gradients = [(step, run) for step, run in runs if len(run.tables.get("gradient", ()))]
    with in_style():
        figures = {"by-step": _by_step(runs)}
        if with_gradients:
            figures["gradient-norms"] = _gradient_norms(with_gradients)
    return figures


# ------------------------------------------------------------------------------------- numbers against steps


def _by_step(runs: Checkpoints) -> Figure:
    figure = new_figure(WIDE, 3.7)
    axes = figure.subplots(2, 3, sharex=True)
    (loss, rate, gradient), (norm, ratio, fit) = axes

    def draw(ax: Axes, name: str, *metrics: str, **look: Any) -> None:
        _panel(ax, name, runs, {metric: [run.metric(metric) for _, run in runs] for metric in metrics}, **look)

    draw(loss, "loss", "loss")
    draw(rate, "sink rate", "sink_rate", share=True)
    pathways = ("value_gradient_ratio", "key_gradient_ratio")
    draw(gradient, "gradient norm, token 0 ÷ later", *pathways, log=True, neutral=1)
    norms = {name: [_largest_norm(run, name) for _, run in runs] for name in ("token 0", "others")}
    _panel(norm, "largest norm of a layer's output", runs, norms, log=True)
    ratios = {"norm_ratio": [_largest_ratio(run) for _, run in runs]}
    _panel(ratio, "largest norm ratio, token 0 ÷ others", runs, ratios, log=True, neutral=1)
    draw(fit, "compress on ‖h‖, log–log", "compress_slope", "compress_correlation", neutral=-1)
    for ax in axes[-1]:
        ax.set_xlabel("training step")
    step_axis(loss, [step for step, _ in runs])
    figure.suptitle(_title(runs))
    return figure


LABELS = {
    "value_gradient_ratio": "value",
    "key_gradient_ratio": "key",
    "compress_slope": "slope",
    "compress_correlation": "correlation",
}


def _panel(
    ax: Axes,
    name: str,
    runs: Checkpoints,
    curves: dict[str, list[float]],
    log: bool = False,
    share: bool = False,
    neutral: float | None = None,
) -> None:
    """One quantity, or two with their names; `neutral` is its value without an effect, or in theory."""
    ax.set_title(name)
    every = 1 + (len(runs) - 1) // MOST_MARKERS
    for (metric, values), look in zip(curves.items(), (SINK, OTHERS), strict=False):
        known = np.where(np.isfinite(values), values, np.nan)
        ax.plot([step for step, _ in runs], known, label=LABELS.get(metric, metric), markevery=every, **look)
    if not has_values(ax, log):
        say(ax, "not measured")
        return
    if neutral is not None:
        ax.axhline(neutral, **GUIDE)
        ax.autoscale(axis="y")  # with a margin below the line
    value_axis(ax, log, share)
    if len(curves) > 1:
        ax.legend(loc="best", handlelength=2.2, borderaxespad=0.2)


def _largest_norm(run: RunData, of: str) -> float:
    """Over layers: the norm of the layer's output at position 0, or its mean over the others."""
    activation = run.tables.get("activation", pd.DataFrame({"site": [], "position": [], "layer": [], "norm_mean": []}))
    rows = activation[(activation["site"] == "layer_out") & ((activation["position"] == 0) == (of == "token 0"))]
    return float(rows.groupby("layer")["norm_mean"].mean().max())


def _largest_ratio(run: RunData) -> float:
    summary = run.tables["summary"]
    return float(summary[(summary["metric"] == "norm_ratio") & (summary["layer"] != WHOLE_MODEL)]["value"].max())


def step_axis(ax: Axes, steps: list[int]) -> None:
    """Linear for steps that are evenly spread, else logarithmic, with room for step 0."""
    if min(steps) == max(steps):
        ax.set_xlim(steps[0] - 0.5, steps[0] + 0.5)
        ax.set_xticks([steps[0]])
    elif min(steps) < 0 or max(steps) <= UNEVEN * np.median(steps):
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    else:
        least = min(step for step in steps if step > 0)
        if least == min(steps):
            ax.set_xscale("log")
        else:
            ax.set_xscale("symlog", linthresh=least, linscale=0.5)
            ax.set_xlim(-0.3 * least, 2 * max(steps))
        decades = range(math.floor(math.log10(least)), math.ceil(math.log10(max(steps))) + 1)
        within = [10**decade for decade in decades if least <= 10**decade <= max(steps)]
        ticks = within[:: 1 + len(within) // MOST_TICKS] if len(within) > 1 else [least, max(steps)]
        ax.set_xticks([0, *ticks] if 0 in steps else ticks)
        ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda step, _: step_label(step)))


def step_label(step: float) -> str:
    for size, sign in ((10**6, "M"), (10**3, "k")):
        if abs(step) >= size:
            return f"{step / size:g}{sign}"
    return f"{step:g}"


# --------------------------------------------------------------------------------------- GS figure 2 by step


def _gradient_norms(runs: Checkpoints) -> Figure:
    figure = new_figure(WIDE, 2.3)
    axes = figure.subplots(1, 3, sharex=True, sharey=True)
    colours = GRADUAL(np.linspace(1, 0, len(runs))[::-1])  # the last one is dark, also if it is alone
    for ax, pathway in zip(axes, PATHWAYS, strict=True):
        curves = [layer_norms(run, pathway).mean() for _, run in runs]
        for curve, colour in zip(curves, colours, strict=True):
            draw_curve(ax, curve, color=colour, linewidth=0.9, marker="o", markersize=1.8)
        mark_off_scale(ax, curves)
    finish(axes)
    edges = BoundaryNorm(np.arange(len(runs) + 1) - 0.5, len(runs))
    bar = figure.colorbar(ScalarMappable(edges, ListedColormap(colours)), ax=axes, aspect=30, pad=0.01)
    bar.outline.set_linewidth(0.5)
    named = range(len(runs) - 1, -1, -(1 + (len(runs) - 1) // MOST_NAMED))  # the last step in any case
    bar.set_ticks(named, labels=[step_label(runs[place][0]) for place in named])
    bar.ax.tick_params(which="both", length=0)
    bar.set_label("training step")
    add_legend(figure, axes)
    figure.suptitle(_title(runs, "means over layers"))
    return figure


# ---------------------------------------------------------------------------------------------------- titles


def _title(runs: Checkpoints, *more: str) -> str:
    """«model · condition · steps 0–1000». Checkpoints of one folder go by its name."""
    names = {run.model.rstrip("/").split("/")[-1] for _, run in runs}
    if len(names) > 1:
        names = {Path(str(run.manifest["model"].get("source", ""))).parent.name for _, run in runs}
    name = names.pop() if len(names) == 1 else ""
    conditions = dict.fromkeys(run.condition for _, run in runs)
    first, last = runs[0][0], runs[-1][0]
    steps = f"step {first}" if first == last else f"steps {first}–{last}"
    parts = (name, ", ".join(conditions), steps, *more)
    return escape(shorten(" · ".join(part for part in parts if part), TITLE))

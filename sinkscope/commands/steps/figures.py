"""Figures of a training's steps."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap

from sinkscope.commands.steps.onsets import QUANTITIES, RunsByStep
from sinkscope.figures import plot, style
from sinkscope.figures.gradients import OFF_SCALE, PATHWAYS, finish_pathways, mark_off_scale
from sinkscope.figures.labels import Checkpoints, steps_title
from sinkscope.figures.plot import ACROSS
from sinkscope.figures.spec import needs
from sinkscope.figures.style import BAND, COLUMN, GRADUAL, OTHERS, SINK, VERMILION, WIDE, Figure, Look, new_figure
from sinkscope.measuring.summary import pathway_norms
from sinkscope.results.metrics import METRICS
from sinkscope.results.run import RunData
from sinkscope.results.tables import WHOLE_MODEL

# --- Growth of sinks, gradient sinks and massive activations in training: metrics of the model by training step

Curves = dict[str, Callable[[RunData], float]]  # name → its value in a run


def _largest_norm(run: RunData, of_first: bool) -> float:
    """Return the largest norm of the output of a layer, at position 0 or as the mean over the others."""
    activation = run.tables.get("activation")
    if activation is None:
        return float("nan")
    rows = activation[(activation["site"] == "layer_out") & ((activation["position"] == 0) == of_first)]
    return float(rows.groupby("layer")["norm_mean"].mean().max())


def _largest_ratio(run: RunData) -> float:
    summary = run.tables["summary"]
    return float(summary[(summary["metric"] == "norm_ratio") & (summary["layer"] != WHOLE_MODEL)]["value"].max())


def _metrics(*names: str, **labeled: str) -> Curves:
    of = {METRICS[name].short: name for name in names} | labeled
    return {label: partial(RunData.metric, name=name) for label, name in of.items()}


# title, unit, curves, scale of the y axis, value in theory or without an effect
BY_STEP: tuple[tuple[str, str, Curves, dict[str, bool], float | None], ...] = (
    (METRICS["loss"].short, "nats per token", _metrics("loss"), {}, None),
    (METRICS["sink_rate"].short, "share of heads", _metrics("sink_rate"), {"share": True}, None),
    ("gradient, position 0 ÷ later", "ratio of L2 norms",
        _metrics(value="value_gradient_ratio", key="key_gradient_ratio"), {"log": True}, 1),
    ("layer output, largest layer", "L2 norm",
        {"position 0": partial(_largest_norm, of_first=True), "others": partial(_largest_norm, of_first=False)},
        {"log": True}, None),
    ("position 0 ÷ others, largest layer", "ratio of L2 norms", {"": _largest_ratio}, {"log": True}, 1),
    ("compress on ‖h‖, log–log", "slope; correlation", _metrics("compress_slope", "compress_correlation"), {}, -1),
)  # fmt: skip


@needs(len, "there are no checkpoints")
def draw_training_by_step(runs: Checkpoints) -> Figure:
    runs = sorted(runs, key=lambda pair: pair[0])
    steps = [step for step, _ in runs]
    tables = [
        plot.finite(pd.DataFrame({label: [value(run) for _, run in runs] for label, value in curves.items()}, steps))
        for _, _, curves, _, _ in BY_STEP
    ]
    panels = [
        (panel, table)
        for panel, table in zip(BY_STEP, tables, strict=True)
        if (table[table > 0] if panel[3].get("log") else table).notna().any(axis=None)
    ] or [(BY_STEP[0], tables[0])]
    across = min(ACROSS, len(panels))
    figure = new_figure(WIDE * max(across, 2) / ACROSS, 0.5 + 1.6 * -(-len(panels) // across))
    axes = plot.panel_grid(figure, len(panels), across, "training step", sharey=False)
    for ax, ((name, unit, _, scale, neutral), table) in zip(axes, panels, strict=True):
        ax.set_title(name)
        for label, look in zip(table, (SINK, OTHERS), strict=False):
            plot.curve(ax, table[label], label=label, **look)
        if neutral is not None:
            ax.axhline(neutral, **style.GUIDE)
            ax.autoscale(axis="y")  # with a margin below the line
        plot.value_axis(ax, unit, **scale, lacking="not measured")
        if len(table.columns) > 1:
            ax.legend(loc="best", handlelength=2.2, borderaxespad=0.2)
    plot.step_axis(axes[0], steps)
    return figure.finish(steps_title(runs))


# --- The order in which value gradient, norm and sink appear (onsets.py): their courses with 95 % bands and
# onsets, and at the bottom the lead of one over the other from step to step, with its null

CHANCE: Look = {"facecolor": "0.82", "edgecolor": "none"}


@needs(
    lambda runs: len(runs.onsets),
    "two of sink rate, norm and value gradient are needed, on the same two or more sequences at two or more steps",
)
def draw_training_onsets(runs: RunsByStep) -> Figure:
    table = runs.onsets
    numbers = {(row.number, row.quantity): row for row in table.itertuples()}
    names, leads = [name for number, name in numbers if number == "onset"], table[table["number"] == "lead"]
    heights = [1.0] * len(names) + [0.1 + 0.36 * len(leads)] * (len(leads) > 0)
    figure = new_figure(COLUMN, 0.9 + 0.95 * sum(heights))
    axes = figure.subplots(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0]
    for ax, name in zip(axes, names, strict=False):
        course = table[(table["number"] == "course") & (table["quantity"] == name)].set_index("step")
        onset, quantity = numbers["onset", name], QUANTITIES[name]
        plot.curve(ax, course["value"], **SINK)
        ax.fill_between(course.index, course["low"], course["high"], color=SINK["color"], **BAND)
        ax.axhline(numbers["threshold", name].value, **style.GUIDE)
        if np.isfinite(onset.value):
            ax.axvspan(onset.low, min(onset.high, course.index[-1]), color=VERMILION, **BAND)
            ax.axvline(onset.value, color=VERMILION, linewidth=1)
        is_wide = quantity.is_ratio and course["high"].max() > 10 * course["low"].min()
        plot.value_axis(ax, quantity.unit, log=is_wide)
        ax.set_title(quantity.title, loc="left")
        label = "no onset"
        if np.isfinite(onset.value):
            high = plot.step_label(onset.high) if np.isfinite(onset.high) else "∞"
            label = f"{plot.step_label(onset.value)} [{plot.step_label(onset.low)}, {high}]"
        ax.set_title(label, loc="right", color=VERMILION)
        if ax is not axes[0]:
            ax.sharex(axes[0])
        ax.tick_params(labelbottom=name == names[-1])
    plot.step_axis(axes[0], [step for step, _ in runs])
    axes[len(names) - 1].set_xlabel("training step")
    if len(leads):  # a row for each pair: its lead with the interval, over the middle 95 % of its null
        ax, rows = axes[-1], range(len(leads))
        ax.barh(rows, leads["null_high"] - leads["null_low"], left=leads["null_low"], height=0.7, **CHANCE)
        ax.hlines(rows, leads["low"].clip(-2, 2), leads["high"].clip(-2, 2), color=SINK["color"], linewidth=1.1)
        ax.plot(leads["value"], rows, **SINK | {"linestyle": "none"})
        ax.axvline(0, **style.NEUTRAL)
        ax.use_sticky_edges = False  # otherwise the bars would have no margin
        ax.autoscale_view()
        first, second = ([QUANTITIES[name].name for name in leads[column]] for column in ("quantity", "other"))
        pairs = [f"{one}\nbefore {other}" for one, other in zip(first, second, strict=True)]
        plot.name_rows(ax, pairs, shaded=False)
        ax.set_xlabel("lag correlation, minus the reverse")
    signs: dict[str, Look] = {"onset": {"color": VERMILION, "linewidth": 1}, "threshold": style.GUIDE}
    signs |= {"95 % over sequences": {"facecolor": SINK["color"], "alpha": BAND["alpha"]}}
    signs |= {"steps in random order": CHANCE} if len(leads) else {}
    return figure.finish(steps_title(runs, width=COLUMN), signs, ncols=2)


# --- GS figure 2 by training step: gradient norms by token position, means over layers, a line for each step


def _with_gradients(runs: Checkpoints) -> Checkpoints:
    measured = [(step, run) for step, run in runs if len(run.tables.get("gradient", ()))]
    return sorted(measured, key=lambda pair: pair[0])


@needs(_with_gradients, "no checkpoint has gradients")
def draw_training_gradient_norms(runs: Checkpoints) -> Figure:
    runs = _with_gradients(runs)
    figure = new_figure(WIDE, 2.3)
    axes = figure.subplots(1, 3, sharex=True, sharey=True)
    colors = GRADUAL(np.linspace(1, 0, len(runs))[::-1])  # the last step is dark, even if it is the only step
    for ax, pathway in zip(axes, PATHWAYS, strict=True):
        curves = [plot.finite(pathway_norms(run.tables["gradient"], pathway)).mean() for _, run in runs]
        for course, color in zip(curves, colors, strict=True):
            on_scale = course.where(course > OFF_SCALE * course.max())
            plot.curve(ax, on_scale, color=color, linewidth=0.9, marker="o", markersize=1.8)
        mark_off_scale(ax, curves)
    edges = BoundaryNorm(np.arange(len(runs) + 1) - 0.5, len(runs))
    bar = figure.colorbar(ScalarMappable(edges, ListedColormap(colors)), ax=axes, aspect=30, pad=0.01)
    named = range(len(runs) - 1, -1, -(1 + (len(runs) - 1) // 8))  # at most eight; always the last step
    bar.set_ticks(named, labels=[plot.step_label(runs[place][0]) for place in named])
    bar.ax.tick_params(which="both", length=0)
    bar.set_label("training step")
    return finish_pathways(figure, axes, steps_title(runs, "means over layers"), {})

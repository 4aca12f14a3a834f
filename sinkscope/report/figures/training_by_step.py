"""How sinks, gradient sinks and massive activations grow in training: the model's numbers against the step."""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from sinkscope.measuring.summary import WHOLE_MODEL
from sinkscope.report.figures.axes import curve, has_values, say, value_axis
from sinkscope.report.figures.spec import declare
from sinkscope.report.figures.steps import Checkpoints, in_order, lacking, step_axis, steps_title
from sinkscope.report.figures.style import GUIDE, OTHERS, SINK, WIDE, Figure, new_figure
from sinkscope.results.metrics import METRICS
from sinkscope.results.run import RunData


@declare("training-by-step", "loss, sinks, gradient sinks and norms by training step", "summary", lacking=lacking)
def draw(runs: Checkpoints) -> Figure:
    runs = in_order(runs)
    figure = new_figure(WIDE, 3.7)
    axes = figure.subplots(2, 3, sharex=True)
    (loss, rate, gradient), (norm, ratio, fit) = axes
    steps = [step for step, _ in runs]

    def by_step(value: Callable[[RunData], float]) -> pd.Series:
        return pd.Series([value(run) for _, run in runs], steps)

    def curves(*metrics: str) -> dict[str, pd.Series]:
        return {METRICS[name].short: by_step(partial(RunData.metric, name=name)) for name in metrics}

    _panel(loss, METRICS["loss"].short, curves("loss"))
    _panel(rate, METRICS["sink_rate"].short, curves("sink_rate"), share=True)
    pathways = ("value", "key")
    gradients = {name: by_step(partial(RunData.metric, name=f"{name}_gradient_ratio")) for name in pathways}
    _panel(gradient, "gradient norm, token 0 ÷ later", gradients, log=True, neutral=1)
    norms = {name: by_step(partial(_largest_norm, of=name)) for name in ("token 0", "others")}
    _panel(norm, "largest norm of a layer's output", norms, log=True)
    _panel(ratio, "largest norm ratio, token 0 ÷ others", {"": by_step(_largest_ratio)}, log=True, neutral=1)
    _panel(fit, "compress on ‖h‖, log–log", curves("compress_slope", "compress_correlation"), neutral=-1)
    for ax in axes[-1]:
        ax.set_xlabel("training step")
    step_axis(loss, steps)
    figure.suptitle(steps_title(runs))
    return figure


def _panel(
    ax: Axes,
    name: str,
    curves: Mapping[str, pd.Series],
    log: bool = False,
    share: bool = False,
    neutral: float | None = None,
) -> None:
    """One quantity, or two with their names; `neutral` is the value without an effect, or of theory."""
    ax.set_title(name)
    for (label, values), look in zip(curves.items(), (SINK, OTHERS), strict=False):
        curve(ax, values.where(np.isfinite(values)), label=label, **look)
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
    activation = run.tables.get("activation")
    if activation is None:
        return float("nan")
    rows = activation[(activation["site"] == "layer_out") & ((activation["position"] == 0) == (of == "token 0"))]
    return float(rows.groupby("layer")["norm_mean"].mean().max())


def _largest_ratio(run: RunData) -> float:
    summary = run.tables["summary"]
    return float(summary[(summary["metric"] == "norm_ratio") & (summary["layer"] != WHOLE_MODEL)]["value"].max())

"""How sinks, gradient sinks and massive activations grow in training: the model's numbers against the step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from sinkscope.figures.axes import curve, panel_grid, say, value_axis
from sinkscope.figures.spec import declare
from sinkscope.figures.steps import Checkpoints, in_order, lacking, step_axis, steps_title
from sinkscope.figures.style import GUIDE, OTHERS, SINK, WIDE, Figure, new_figure
from sinkscope.measuring.summary import WHOLE_MODEL
from sinkscope.results.metrics import METRICS
from sinkscope.results.run import RunData

ACROSS = 3  # panels in a row


@dataclass(frozen=True)
class _Panel:
    """One quantity, or two with their names; `neutral` is the value without an effect, or of theory."""

    name: str
    unit: str
    curves: Mapping[str, pd.Series]
    log: bool = False
    share: bool = False
    neutral: float | None = None

    @property
    def has_values(self) -> bool:
        known = pd.concat(list(self.curves.values())).replace([np.inf, -np.inf], np.nan).dropna()
        return bool((known > 0).any() if self.log else len(known))


@declare("training-by-step", "loss, sinks, gradient sinks and norms by training step", "summary", lacking=lacking)
def draw(runs: Checkpoints) -> Figure:
    runs = in_order(runs)
    steps = [step for step, _ in runs]

    def by_step(value: Callable[[RunData], float]) -> pd.Series:
        return pd.Series([value(run) for _, run in runs], steps)

    def curves(*metrics: str) -> dict[str, pd.Series]:
        return {METRICS[name].short: by_step(partial(RunData.metric, name=name)) for name in metrics}

    pathways = ("value", "key")
    gradients = {name: by_step(partial(RunData.metric, name=f"{name}_gradient_ratio")) for name in pathways}
    norms = {name: by_step(partial(_largest_norm, of=name)) for name in ("token 0", "others")}
    ratios, slopes = {"": by_step(_largest_ratio)}, curves("compress_slope", "compress_correlation")
    panels = [
        _Panel(METRICS["loss"].short, "nats per token", curves("loss")),
        _Panel(METRICS["sink_rate"].short, "share of heads", curves("sink_rate"), share=True),
        _Panel("gradient, token 0 ÷ later", "ratio of L2 norms", gradients, log=True, neutral=1),
        _Panel("layer output, largest layer", "L2 norm", norms, log=True),
        _Panel("token 0 ÷ others, largest layer", "ratio of L2 norms", ratios, log=True, neutral=1),
        _Panel("compress on ‖h‖, log–log", "slope; correlation", slopes, neutral=-1),
    ]
    panels = [panel for panel in panels if panel.has_values] or panels[:1]
    across = min(ACROSS, len(panels))
    figure = new_figure(WIDE * max(across, 2) / ACROSS, 0.5 + 1.6 * -(-len(panels) // across))
    axes, lowest = panel_grid(figure, len(panels), across, sharey=False)
    for ax, panel in zip(axes, panels, strict=True):
        _draw(ax, panel)
        ax.set_xlabel("training step" if ax in lowest else "")
    step_axis(axes[0], steps)
    figure.suptitle(steps_title(runs))
    return figure


def _draw(ax: Axes, panel: _Panel) -> None:
    ax.set_title(panel.name)
    for (label, values), look in zip(panel.curves.items(), (SINK, OTHERS), strict=False):
        curve(ax, values.where(np.isfinite(values)), label=label, **look)
    if not panel.has_values:
        say(ax, "not measured")
        return
    if panel.neutral is not None:
        ax.axhline(panel.neutral, **GUIDE)
        ax.autoscale(axis="y")  # with a margin below the line
    value_axis(ax, panel.log, panel.share)
    ax.set_ylabel(panel.unit)
    if len(panel.curves) > 1:
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

"""Loss, and how far the new parameters have moved, by training step: the arms of a training side by side.

A line is the mean over seeds, its band reaches from the lowest to the highest.
"""

import pandas as pd
from matplotlib.axes import Axes

from sinkscope.figures.arms import Arms, arm_looks
from sinkscope.figures.axes import curve, value_axis
from sinkscope.figures.spec import declare
from sinkscope.figures.steps import step_axis
from sinkscope.figures.style import TEXT, WIDE, Figure, Look, new_figure
from sinkscope.measuring.summary import WHOLE_MODEL


def lacking(arms: Arms) -> str | None:
    return None if arms.rows("training") else "nothing was logged in training: take a smaller --log-every"


@declare("retrofit-training", "loss and displacement of new parameters by training step", "training", lacking=lacking)
def draw(arms: Arms) -> Figure:
    training = arms.tables["training"]
    loss = training[(training["layer"] == WHOLE_MODEL) & (training["metric"] == "loss")]
    gates = training[training["metric"] == "gate_displacement_mean"]
    panels = [("training loss", "nats per token", loss)]
    if len(gates):
        panels.append(("distance of new parameters from their start", "‖p − p₀‖,\nmean over heads", gates))
    figure = new_figure(WIDE if len(panels) > 1 else TEXT, 2.6)
    axes = figure.subplots(1, len(panels), sharex=True, squeeze=False)[0]
    for ax, (name, label, table) in zip(axes, panels, strict=True):
        ax.set_title(name)
        for arm, look in arm_looks(training["condition"].unique()).items():
            _arm(ax, table[table["condition"] == arm], look)
        value_axis(ax)
        ax.set_ylabel(label)
        ax.set_xlabel("training step")
    step_axis(axes[0], sorted(training["step"].unique().tolist()))
    lines = axes[0].lines
    figure.legend(lines, [str(line.get_label()) for line in lines], loc="outside lower center", ncols=4)
    band = "bands: lowest to highest" if arms.seeds > 1 else ""
    figure.suptitle(arms.title(arms.seeds_text(), band))
    return figure


def _arm(ax: Axes, rows: pd.DataFrame, look: Look) -> None:
    if rows.empty:
        return
    of_seeds = rows.groupby(["step", "seed"])["value"].mean()  # over layers
    by_step = of_seeds.groupby("step").agg(["mean", "min", "max"])
    curve(ax, by_step["mean"], **look)
    ax.fill_between(by_step.index, by_step["min"], by_step["max"], color=look["color"], alpha=0.25, linewidth=0)

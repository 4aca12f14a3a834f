"""Loss, and how far the gates have moved, by training step: the arms of a retrofit side by side.

Not one run's figure, so `sinkscope list` does not show it.
"""

import pandas as pd
from matplotlib.axes import Axes

from sinkscope.errors import InputError
from sinkscope.measuring.summary import WHOLE_MODEL
from sinkscope.report.figures.arms import NAME_LENGTH, arm_looks
from sinkscope.report.figures.axes import MOST_MARKERS, say, value_axis
from sinkscope.report.figures.labels import escape, shorten
from sinkscope.report.figures.style import WIDE, Figure, in_style, new_figure
from sinkscope.report.figures.training import step_axis


def draw_retrofit_training(training: pd.DataFrame) -> Figure:
    """`training`: the table of that name, of all arms (their `condition`). Errors: InputError where it is empty."""
    if training.empty:
        raise InputError("nothing was logged in training: take a smaller --log-every")
    loss = training[(training["layer"] == WHOLE_MODEL) & (training["metric"] == "loss")]
    gates = training[training["metric"] == "gate_displacement_mean"]
    with in_style():
        figure = new_figure(WIDE, 2.6)
        left, right = figure.subplots(1, 2, sharex=True)
        left.set_title("training loss")
        right.set_title("new parameters, ‖p − p₀‖ per head, mean")
        for arm, look in arm_looks(training["condition"].unique()).items():
            for ax, table in ((left, loss), (right, gates)):
                _line(ax, table[table["condition"] == arm], look)
        for ax in (left, right):
            if ax.lines:
                value_axis(ax)
            ax.set_xlabel("training step")
        if not right.lines:
            say(right, "no new parameters")
        step_axis(left, sorted(training["step"].unique().tolist()))
        figure.legend(left.lines, [str(line.get_label()) for line in left.lines], loc="outside lower center", ncols=4)
        figure.suptitle(escape(shorten(str(training["model"].iloc[0]).rstrip("/").split("/")[-1], 2 * NAME_LENGTH)))
    return figure


def _line(ax: Axes, table: pd.DataFrame, look: dict) -> None:
    """The mean over layers, by step."""
    if table.empty:
        return
    by_step = table.groupby("step")["value"].mean()
    ax.plot(by_step.index, by_step.to_numpy(float), markevery=1 + (len(by_step) - 1) // MOST_MARKERS, **look)

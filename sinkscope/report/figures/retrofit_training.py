"""Loss, and how far the new parameters have moved, by training step: the arms of a training side by side."""

from sinkscope.measuring.summary import WHOLE_MODEL
from sinkscope.report.figures.arms import Arms, arm_looks
from sinkscope.report.figures.axes import curve, say, value_axis
from sinkscope.report.figures.spec import declare
from sinkscope.report.figures.steps import step_axis
from sinkscope.report.figures.style import WIDE, Figure, new_figure
from sinkscope.results.metrics import METRICS


def lacking(arms: Arms) -> str | None:
    return None if arms.rows("training") else "nothing was logged in training: take a smaller --log-every"


@declare("retrofit-training", "loss and displacement of new parameters by training step", "training", lacking=lacking)
def draw(arms: Arms) -> Figure:
    training = arms.tables["training"]
    loss = training[(training["layer"] == WHOLE_MODEL) & (training["metric"] == "loss")]
    gates = training[training["metric"] == "gate_displacement_mean"]
    figure = new_figure(WIDE, 2.6)
    left, right = figure.subplots(1, 2, sharex=True)
    left.set_title(f"training {METRICS['loss'].short}")
    right.set_title(f"{METRICS['gate_displacement_mean'].short} (mean ‖p − p₀‖ of the heads)")
    for arm, look in arm_looks(training["condition"].unique()).items():
        for ax, table in ((left, loss), (right, gates)):
            rows = table[table["condition"] == arm]
            if len(rows):
                curve(ax, rows.groupby("step")["value"].mean(), **look)
    for ax in (left, right):
        if ax.lines:
            value_axis(ax)
        ax.set_xlabel("training step")
    if not right.lines:
        say(right, "no new parameters")
    step_axis(left, sorted(training["step"].unique().tolist()))
    figure.legend(left.lines, [str(line.get_label()) for line in left.lines], loc="outside lower center", ncols=4)
    figure.suptitle(arms.title())
    return figure

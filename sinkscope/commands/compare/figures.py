"""The figure of several runs, side by side."""

import pandas as pd

from sinkscope.figures import plot
from sinkscope.figures.labels import heading
from sinkscope.figures.plot import ACROSS, arm_looks, signs_of
from sinkscope.figures.spec import needs
from sinkscope.figures.style import WIDE, Figure, new_figure
from sinkscope.results.metrics import METRICS
from sinkscope.results.side_by_side import model_name
from sinkscope.results.tables import WHOLE_MODEL

CURVES = ("sink_rate", "largest_activation", "largest_logit", "value_drain", "kurtosis", "float16_headroom")


@needs(lambda table: table["metric"].isin(CURVES).any(), "nothing was measured")
def draw_training_curves(table: pd.DataFrame) -> Figure:
    whole = table[table["layer"] == WHOLE_MODEL]
    metrics = [METRICS[name] for name in CURVES if (whole["metric"] == name).any()]
    across = min(ACROSS, len(metrics))
    figure = new_figure(WIDE * max(across, 2) / ACROSS, 0.5 + 1.8 * -(-len(metrics) // across))
    axes = plot.panel_grid(figure, len(metrics), across, "training step", sharey=False)
    looks = arm_looks(whole["condition"].unique())
    for ax, metric in zip(axes, metrics, strict=True):
        for name, look in looks.items():
            rows = whole[(whole["metric"] == metric.name) & (whole["condition"] == name)]
            plot.curve(ax, rows.set_index("step")["value"], **look)
        is_share = metric.unit == "share"
        unit = "share of heads" if is_share else metric.unit or "value"
        plot.panel(ax, metric.short, unit, None, share=is_share)
    plot.step_axis(axes[0], sorted(whole["step"].unique().tolist()))
    return figure.finish(heading(*dict.fromkeys(map(model_name, whole["model"]))), signs_of(looks), ncols=4)

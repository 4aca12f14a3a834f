"""GS figure 2 by training step: gradient norms by token position, means over layers, a line for each step."""

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import BoundaryNorm, ListedColormap

from sinkscope.figures.gradient_norms import PATHWAYS, add_legend, draw_curve, finish, layer_norms, mark_off_scale
from sinkscope.figures.spec import declare
from sinkscope.figures.steps import Checkpoints, in_order, step_label, steps_title
from sinkscope.figures.style import GRADUAL, WIDE, Figure, new_figure

MOST_NAMED = 8  # steps, beside the color bar


def lacking(runs: Checkpoints) -> str | None:
    return None if _with_gradients(runs) else "no checkpoint has gradients"


@declare(
    "training-gradient-norms", "gradient norms by token position and step (GS fig. 2)", "gradient", lacking=lacking
)
def draw(runs: Checkpoints) -> Figure:
    runs = _with_gradients(runs)
    figure = new_figure(WIDE, 2.3)
    axes = figure.subplots(1, 3, sharex=True, sharey=True)
    colors = GRADUAL(np.linspace(1, 0, len(runs))[::-1])  # the last one is dark, also if it is alone
    for ax, pathway in zip(axes, PATHWAYS, strict=True):
        curves = [layer_norms(run, pathway).mean() for _, run in runs]
        for curve, color in zip(curves, colors, strict=True):
            draw_curve(ax, curve, color=color, linewidth=0.9, marker="o", markersize=1.8)
        mark_off_scale(ax, curves)
    finish(axes)
    edges = BoundaryNorm(np.arange(len(runs) + 1) - 0.5, len(runs))
    bar = figure.colorbar(ScalarMappable(edges, ListedColormap(colors)), ax=axes, aspect=30, pad=0.01)
    named = range(len(runs) - 1, -1, -(1 + (len(runs) - 1) // MOST_NAMED))  # the last step in any case
    bar.set_ticks(named, labels=[step_label(runs[place][0]) for place in named])
    bar.ax.tick_params(which="both", length=0)
    bar.set_label("training step")
    add_legend(figure, axes)
    figure.suptitle(steps_title(runs, "means over layers"))
    return figure


def _with_gradients(runs: Checkpoints) -> Checkpoints:
    return [(step, run) for step, run in in_order(runs) if len(run.tables.get("gradient", ()))]

"""What gates leave at position 0 and elsewhere: a retrofit's, or the model's own (VGA §3.2; GS §5.1).

Left by layer, means over heads with bands from their 10 % to their 90 % quantiles, position 0 against the mean over the
other positions; right by position, a thin line for each layer. A gate of 1 changes nothing.
"""

from matplotlib.axes import Axes

from sinkscope.figures.axes import band_by_layer, finite, layer_axis, line_by_layer, value_axis, whole_numbers
from sinkscope.figures.gradient_norms import MEAN
from sinkscope.figures.labels import title
from sinkscope.figures.query_key_geometry import BAND
from sinkscope.figures.spec import declare
from sinkscope.figures.style import GRAY, OTHERS, SINK, SKY, WIDE, Figure, new_figure
from sinkscope.results.run import RunData


@declare("gates-by-layer", "gates at position 0 and elsewhere, by layer and by position (VGA §3.2)", "gate")
def draw(run: RunData) -> Figure:
    figure = new_figure(WIDE, 2.3)
    by_layer, by_position = figure.subplots(1, 2, sharey=True)
    _by_layer(by_layer, run)
    _by_position(by_position, run)
    figure.legend(loc="outside lower center", ncols=5, columnspacing=1.2)
    figure.suptitle(title(run, WIDE))
    return figure


def _by_layer(ax: Axes, run: RunData) -> None:
    gate = finite(run.tables["gate"])
    at_first = gate["position"] == 0
    for rows, label, look in (
        (gate[at_first], "position 0", SINK),
        (gate[~at_first], "mean over the other positions", OTHERS),
    ):
        if rows.empty:  # --positions 1
            continue
        heads = rows.groupby(["layer", "head"])["gate"].mean().groupby("layer")
        band_by_layer(ax, heads.quantile(BAND[0]), heads.quantile(BAND[1]), color=look["color"], alpha=0.2, linewidth=0)
        line_by_layer(ax, heads.mean(), label=label, **look)
    ax.fill_between([], [], color=GRAY, alpha=0.35, linewidth=0, label="10–90 % of heads")
    ax.set_ylabel("gate, a factor")
    layer_axis(ax)
    ax.set_xlim(*_room(run))
    value_axis(ax)


def _room(run: RunData) -> tuple[float, float]:
    """From the first to the last layer, those without attention too where they were measured."""
    last = max(int(run.tables[name]["layer"].max()) for name in ("gate", "activation") if name in run.tables)
    return -0.3, last + 0.3


def _by_position(ax: Axes, run: RunData) -> None:
    means = finite(run.tables["gate"]).groupby(["layer", "position"])["gate"].mean().unstack("layer")
    for place, layer in enumerate(means):
        ax.plot(means.index, means[layer], color=SKY, linewidth=0.7, label="" if place else "one layer")
    ax.plot(means.index, means.mean(axis=1), label="mean over layers", **MEAN)
    ax.set_xlabel("position")
    whole_numbers(ax, "x")
    value_axis(ax)

"""In which layers an arm acts: the sink rate before and after it, beside its control's spread.

The change has its 95 % interval over sequences, where the run keeps tables by sequence.
"""

from collections.abc import Iterable

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes

from sinkscope.figures.axes import band_by_layer, layer_axis, line_by_layer, panel_grid, value_axis
from sinkscope.figures.labels import title, wrapped
from sinkscope.figures.spec import declare
from sinkscope.figures.style import COLUMN, OTHERS, REFERENCE, SINK, WIDE, Figure, Look, new_figure
from sinkscope.results.metrics import METRICS
from sinkscope.results.run import RunData
from sinkscope.verdict.effect_intervals import interval_by_layer
from sinkscope.verdict.effects import SPREAD, arms

ACROSS = 4
PAGE = 9.0  # inches, at most
LETTERS = 24  # of a line of an arm's name

BEFORE = REFERENCE | {"zorder": 3}
BAND: Look = {"color": "0.75", "linewidth": 1.5, "zorder": 1}  # its edge is seen where there is no spread
INTERVAL: Look = {"alpha": 0.3, "linewidth": 0, "zorder": 1.5}


@declare("effects-by-layer", "sink rate by layer before and after every arm, beside its control's spread", "effect")
def draw(run: RunData) -> Figure:
    table = run.tables["effect"]
    rates = table[(table["metric"] == "sink_rate") & (table["layer"] >= 0)]
    watched = {label: arm["watched"] for label, arm in arms(run).items() if arm["watched"]}
    sinks = {positions[0] for positions in watched.values()}
    targets = {position for positions in watched.values() for position in positions[1:]}
    across = min(ACROSS, len(watched))
    width = max(WIDE * across / ACROSS, COLUMN)
    down = -(-len(watched) // across)
    figure = new_figure(width, min(1.3 * down + 0.75, PAGE))
    axes, _ = panel_grid(figure, len(watched), across)
    for place, (ax, (label, positions)) in enumerate(zip(axes, watched.items(), strict=True)):
        ax.set_title(wrapped(label, LETTERS, 2) + (f"\nposition {positions[0]}" if len(sinks) > 1 else ""))
        _draw_arm(ax, rates[rates["condition"] == label], positions, targets)
        _draw_intervals(ax, run, label, positions)
        layer_axis(ax, "layer" if place >= across * (down - 1) else "")
        value_axis(ax, share=True)
    where = f" at position {sinks.pop()}" if len(sinks) == 1 else ""
    figure.supylabel(METRICS["sink_rate"].short + where)
    figure.legend(handles=_legend(axes), loc="outside lower center", ncols=3 if width == WIDE else 2)
    figure.suptitle(title(run, width))
    return figure


def _draw_arm(ax: Axes, rates: pd.DataFrame, positions: list[int], all_targets: set[int]) -> None:
    sink, *targets = positions
    at_sink = rates[rates["position"] == sink]
    line_by_layer(ax, _by_layer(at_sink, "before"), label="before", **BEFORE)
    line_by_layer(ax, _by_layer(at_sink, "after"), label="after", **SINK)
    for target in targets:
        where = f"position {target}" if len(all_targets) == 1 else "the target"
        after = _by_layer(rates[rates["position"] == target], "after")
        line_by_layer(ax, after, label=f"after, at {where}", **OTHERS)
    _draw_controls(ax, at_sink[at_sink["arm"] == "control"])


def _draw_intervals(ax: Axes, run: RunData, label: str, positions: list[int]) -> None:
    for place, position in enumerate(positions):
        ends = interval_by_layer(run, label, "sink_rate", position)
        if len(ends):
            color = (OTHERS if place else SINK)["color"]
            name = None if place else "change, 95 % over sequences"
            band_by_layer(ax, ends["low"], ends["high"], color=color, label=name, **INTERVAL)


def _by_layer(rates: pd.DataFrame, arm: str) -> pd.Series:
    return rates[rates["arm"] == arm].set_index("layer")["value"]


def _draw_controls(ax: Axes, controls: pd.DataFrame) -> None:
    """Mean ± 2 standard deviations of the draws; layers that have none leave a gap."""
    if controls.empty:
        return
    layers = range(int(controls["layer"].min()), int(controls["layer"].max()) + 1)
    by_layer = controls.groupby("layer")["value"]
    mean, deviation = (values.reindex(layers) for values in (by_layer.mean(), SPREAD * by_layer.std().fillna(0)))
    draws = controls["draw"].nunique()
    name = f"random control: mean ± {SPREAD:g} std of {draws} draws" if draws > 1 else "random control, 1 draw"
    ax.fill_between(layers, mean - deviation, mean + deviation, label=name, **BAND)


def _legend(axes: Iterable[Axes]) -> list[Artist]:
    """What any of the panels has, once."""
    entries = [entry for ax in axes for entry in zip(*ax.get_legend_handles_labels(), strict=True)]
    once = {label: handle for handle, label in entries}
    return [once[label] for label in sorted(once, key=lambda label: label.startswith("random"))]

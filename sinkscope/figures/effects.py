"""What every arm does, and what random changes of the same kind do: a row for each arm, a panel for each metric.

The change has its 95 % interval over sequences, where the run keeps tables by sequence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from sinkscope.figures.axes import drawn, name_rows, shade_rows, wide_x_axis
from sinkscope.figures.labels import title, wrapped
from sinkscope.figures.spec import declare
from sinkscope.figures.style import NAVY, REFERENCE, WIDE, Figure, Look, new_figure
from sinkscope.results.metrics import METRICS
from sinkscope.results.run import RunData
from sinkscope.verdict.effect_intervals import interval
from sinkscope.verdict.effects import NO_POSITION, SPREAD, Effect, arms, effect_of

ROW, PAGE = 0.3, 9.0  # inches: an arm, and at most all of them with what is around
LETTERS = 24  # of a line of an arm's name
ABOVE, UNDER = -0.17, 0.17  # where the arm and its controls stand in a row of height 1

AFTER: Look = {"color": NAVY, "linewidth": 0.8, "marker": "o", "markersize": 4, "markevery": [-1]}
INTERVAL: Look = {"color": NAVY, "linewidth": 2.2, "solid_capstyle": "butt"}
DRAWS: Look = {"color": "black", "linestyle": "none", "marker": "|", "markersize": 4.5, "markeredgewidth": 0.6}
SPREAD_BAR: Look = {"color": "0.72", "linewidth": 3.5, "solid_capstyle": "butt"}


@dataclass(frozen=True)
class _Panel:
    metric: str
    positions: Callable[[list[int]], list[int]]  # of those that an arm watches, its sink first
    log: bool = False
    width: float = 1.0


PANELS = (
    _Panel("sink_rate", lambda watched: watched[:1]),
    _Panel("window_mass", lambda watched: watched[1:], width=0.75),
    _Panel("perplexity", lambda watched: [NO_POSITION], log=True),
    _Panel("massive_magnitude", lambda watched: [NO_POSITION], log=True),
)


@declare("effects", "what every arm does to sink, perplexity and massive activations, beside its control", "effect")
def draw(run: RunData) -> Figure:
    watched = {label: arm["watched"] for label, arm in arms(run).items() if arm["watched"]}
    panels = [panel for panel in PANELS if any(panel.positions(positions) for positions in watched.values())]
    figure = new_figure(WIDE, min(ROW * len(watched) + 1.15, PAGE))
    widths = [panel.width for panel in panels]
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False, width_ratios=widths)[0]
    name_rows(axes[0], [wrapped(label, LETTERS, 2) for label in watched], shaded=False)
    for ax, panel in zip(axes, panels, strict=True):
        shade_rows(ax, len(watched))
        ax.tick_params(axis="y", length=0)
        chosen = {label: panel.positions(positions) for label, positions in watched.items()}
        log = panel.log and _spans_a_decade(run, panel.metric, chosen)
        _draw_panel(ax, run, panel, chosen, log)
        _value_axis(ax, log, from_zero=not panel.log)
    figure.legend(handles=_legend(run), loc="outside lower center", ncols=3)
    figure.suptitle(title(run, WIDE))
    return figure


def _spans_a_decade(run: RunData, metric: str, positions: dict[str, list[int]]) -> bool:
    """A log axis without two powers of ten could not be read."""
    effects = [effect_of(run, label, metric, position) for label, some in positions.items() for position in some]
    values = _drawable([value for one in effects for value in (one.before, one.after, *one.controls)], log=True)
    return bool(len(values) and values.max() >= 10 * values.min())


def _draw_panel(ax: Axes, run: RunData, panel: _Panel, positions: dict[str, list[int]], log: bool) -> None:
    """One metric of all arms, a row for each; the positions of an arm that has several stand below one another."""
    different = {position for some in positions.values() for position in some}
    ax.set_xlabel(METRICS[panel.metric].axis.replace(" (", "\n(") + _where(different))  # panels are narrow
    for row, (label, some) in enumerate(positions.items()):
        if not some:
            ax.text(0.5, row, "–", transform=ax.get_yaxis_transform(), ha="center", va="center", color="0.5")
        for place, position in enumerate(some):
            height = 1 / len(some)
            middle = row - 0.5 + height * (place + 0.5)
            ends = _drawable(interval(run, label, panel.metric, position) or (), log)
            if len(ends) == 2:
                ax.plot(ends, [middle + ABOVE * height] * 2, **INTERVAL)
            _draw_effect(ax, effect_of(run, label, panel.metric, position), middle, height, log)
            if len(different) > 1:
                ax.text(1.02, middle, f"@{position}", transform=ax.get_yaxis_transform(), va="center", fontsize=6)


def _where(positions: set[int]) -> str:
    if positions == {NO_POSITION}:
        return ""
    return f"\nat position {next(iter(positions))}" if len(positions) == 1 else "\nat @position"


def _draw_effect(ax: Axes, effect: Effect, middle: float, height: float, log: bool) -> None:
    """Before, after and controls around `middle`. In neighboring rows, the lines of before join."""
    above, under = middle + ABOVE * height, middle + UNDER * height
    before, after = _drawable([effect.before], log), _drawable([effect.after], log)
    controls = _drawable(effect.controls, log)
    if len(controls) > 1:
        ax.plot(_spread(controls, log), [under, under], **SPREAD_BAR)
    ax.plot(controls, np.full(len(controls), under), **DRAWS)
    for value in before:
        ax.plot([value, value], [middle - height / 2, middle + height / 2], **REFERENCE)
    if len(after):
        ends = np.concatenate([before, after])
        ax.plot(ends, np.full(len(ends), above), **AFTER)
    else:
        transform = ax.get_yaxis_transform()
        ax.text(0.98, above, f"after: {effect.after:g}", transform=transform, ha="right", va="center", fontsize=6)


def _drawable(values: Sequence[float], log: bool) -> np.ndarray:
    array = np.array(values, float)
    return array[np.isfinite(array) & (array > 0 if log else True)]


def _spread(controls: np.ndarray, log: bool) -> np.ndarray:
    """Mean ± 2 standard deviations; on a log axis those of the logarithms."""
    values = np.log(controls) if log else controls
    ends = values.mean() + SPREAD * values.std(ddof=1) * np.array([-1, 1])
    return np.exp(ends) if log else ends


def _value_axis(ax: Axes, log: bool, from_zero: bool) -> None:
    """Set the scale once all is drawn: logarithmic, from 0 on, or as narrow as the values."""
    values = drawn(ax, "x")
    if not len(values):
        ax.set_xticks([])
        ax.text(0.5, 0.5, "no values", transform=ax.transAxes, ha="center", va="center", color="0.4", fontsize=7)
        return
    low, high = values.min(), values.max()
    if log:
        wide_x_axis(ax, low, high, room=1.04)
        return
    if from_zero:
        ax.set_xlim(min(low, 0) - 0.05 * max(high, 0.01), 1.1 * max(high, 0.01))
    else:
        room = 0.08 * ((high - low) or abs(high) or 1.0)
        ax.set_xlim(low - room, high + room)
    ax.xaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))  # numbers may be long


def _legend(run: RunData) -> list[Line2D]:
    handles: list[Line2D] = [
        Line2D([], [], label="before", **REFERENCE),
        Line2D([], [], label="after", **AFTER | {"markevery": None}),
    ]
    if "attention_by_sequence" in run.tables:
        handles.append(Line2D([], [], label="change, 95 % over sequences", **INTERVAL))
    draws = run.tables["effect"]["draw"].max() + 1
    if draws > 0:
        handles.append(Line2D([], [], label=f"random control, {draws} draws", **DRAWS))
    if draws > 1:
        handles.append(Line2D([], [], label=f"their mean ± {SPREAD:g} standard deviations", **SPREAD_BAR))
    return handles

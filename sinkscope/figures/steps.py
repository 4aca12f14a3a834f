"""Helpers of figures by training step: their data, the axis of steps, and their titles."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from sinkscope.figures.labels import heading, model_name
from sinkscope.results.run import RunData

Checkpoints = Sequence[tuple[int, RunData]]  # (training step, its run)
MOST_TICKS = 5  # decades
UNEVEN = 5  # if the last step is this many times the median, the early ones need a log scale


def lacking(runs: Checkpoints) -> str | None:
    return None if runs else "there are no checkpoints"


def in_order(runs: Checkpoints) -> Checkpoints:
    return sorted(runs, key=lambda pair: pair[0])


def step_axis(ax: Axes, steps: Sequence[int]) -> None:
    """Make the axis linear for evenly spread steps, else logarithmic, with room for step 0."""
    if min(steps) == max(steps):
        ax.set_xlim(steps[0] - 0.5, steps[0] + 0.5)
        ax.set_xticks([steps[0]])
    elif min(steps) < 0 or max(steps) <= UNEVEN * np.median(steps):
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    else:
        least = min(step for step in steps if step > 0)
        if least == min(steps):
            ax.set_xscale("log")
        else:
            ax.set_xscale("symlog", linthresh=least, linscale=0.5)
            ax.set_xlim(-0.3 * least, 2 * max(steps))
        decades = range(math.floor(math.log10(least)), math.ceil(math.log10(max(steps))) + 1)
        within = [10**decade for decade in decades if least <= 10**decade <= max(steps)]
        ticks = within[:: 1 + len(within) // MOST_TICKS] if len(within) > 1 else [least, max(steps)]
        ax.set_xticks([0, *ticks] if 0 in steps else ticks)
        ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda step, _: step_label(step)))


def step_label(step: float) -> str:
    """Return a short form of a step, such as «143k»."""
    for size, sign in ((10**6, "M"), (10**3, "k")):
        if abs(step) >= size:
            return f"{step / size:g}{sign}"
    return f"{step:g}"


def seeds_words(count: int, least: int | None = None) -> str:
    """Describe the seeds of means and bands: `count`, or from `least` to `count` where some curves have fewer."""
    if count == 1:
        return "1 seed"
    return f"mean and range of {count if least in (None, count) else f'{least} to {count}'} seeds"


def steps_title(runs: Checkpoints, *more: str) -> str:
    """Return «model · condition · steps 0–1000». Checkpoints in one folder are named by the folder."""
    names = {model_name(run.model) for _, run in runs}
    if len(names) > 1:
        names = {Path(str(run.manifest["model"].get("source", ""))).parent.name for _, run in runs}
    conditions = dict.fromkeys(run.condition for _, run in runs)
    first, last = runs[0][0], runs[-1][0]
    steps = f"step {first}" if first == last else f"steps {first}–{last}"
    return heading(names.pop() if len(names) == 1 else "", ", ".join(conditions), steps, *more)

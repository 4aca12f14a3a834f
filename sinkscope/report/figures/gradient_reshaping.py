"""Massive activations compress the gradients that sinks concentrate (GS figure 3).

Bloat, compress and change of the attention branch (GS eq. 3) against the norm of the branch's input: a point for each
layer and position, means over sequences. Both axes are logarithmic, where the paper's show log₁₀. The line is the fit
of the table `summary`; it leaves out the first layer, which reads the bare embeddings and has hollow points.
"""

from itertools import zip_longest

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from sinkscope.measuring.summary import compress_fits, fit_points
from sinkscope.report.figures.axes import finite, has_values, log_ticks, say, value_axis, widen, with_decades
from sinkscope.report.figures.labels import title
from sinkscope.report.figures.spec import declare
from sinkscope.report.figures.style import GREEN, GUIDE, NAVY, SKY, WIDE, Figure, Look, new_figure
from sinkscope.results.metrics import TOKEN_GROUPS
from sinkscope.results.run import RunData

PANELS = {  # ratio: its definition
    "bloat": r"$\|\nabla\tilde{h}\|\,/\,\|\nabla r\|$",
    "compress": r"$\|\nabla h-\nabla h_{\mathrm{mid}}\|\,/\,\|\nabla\tilde{h}\|$",
    "change": r"$\|\nabla h\|\,/\,\|\nabla h_{\mathrm{mid}}\|$",
}
# From dark to light, each with a marker of its own. The last is for positions beyond the paper's groups.
LOOKS = ((NAVY, "o"), ("#b33c12", "s"), (GREEN, "^"), (SKY, "D"), ("#d1bf9a", "v"), ("#e0e0e0", "P"))
POINT: Look = {"linestyle": "none", "markersize": 3}
HOLLOW: Look = {"mfc": "none", "mew": 0.7}
FIT: Look = {"color": "black", "linewidth": 1, "zorder": 4}

UNDEFINED = {  # (wiring, ratio) → why such models do not have it
    ("parallel", "bloat"): "attention and MLP read one norm:\nits gradient is the sum of both",
    ("parallel", "compress"): "attention and MLP read\nthe same input: there is\nno h+½ between them",
    ("parallel", "change"): "attention and MLP read\nthe same input: there is\nno h+½ between them",
    ("post-norm", "bloat"): "no norm stands in front\nof the attention branch",
    ("post-norm", "compress"): "no norm stands in front\nof the attention branch",
}


@declare("gradient-reshaping", "bloat, compress and change against the input's norm (GS fig. 3)", "gradient_ratio")
def draw(run: RunData) -> Figure:
    table = finite(run.tables["gradient_ratio"])
    ratios = table[table["branch"] == "attn"]
    groups = token_groups(ratios)
    figure = new_figure(WIDE, 2.55)
    axes = dict(zip(PANELS, figure.subplots(1, 3, sharex=True), strict=True))
    for name, ax in axes.items():
        for (_, first, last), look in reversed(list(zip(groups, LOOKS, strict=False))):
            _points(ax, ratios[ratios["position"].between(first, last)], name, *look)
        ax.set_title(f"{name}  {PANELS[name]}")
        ax.set_xlabel("norm of the branch's input, ‖h‖")
    drawn = {name: ax for name, ax in axes.items() if has_values(ax, log=True)}
    for name, ax in axes.items():
        if name not in drawn:
            say(ax, why_undefined(run, name))
            continue
        value_axis(ax, log=True)
        ax.set_ylabel("ratio of gradient norms")
        ax.set_xscale("log", nonpositive="mask")
        ax.set_xlim(*with_decades(*ax.get_xlim()))
        log_ticks(ax.xaxis, *ax.get_xlim())
    fitted = "compress" in drawn and _compression(axes["compress"], ratios)
    if "change" in drawn:
        _no_change(axes["change"])
    _legend(figure, [label for label, *_ in groups], fitted, "change" in drawn)
    figure.suptitle(title(run, WIDE))
    return figure


def token_groups(ratios: pd.DataFrame) -> list[tuple[str, int, int]]:
    """The paper's groups as far as this run's positions reach, and one for those beyond: (label, first, last)."""
    last = int(ratios["position"].max())
    spans = [(start, min(end, last)) for _, start, end in TOKEN_GROUPS if start <= last]
    if spans[-1][1] < last:
        spans.append((spans[-1][1] + 1, last))
    return [(f"token {start}" if start == end else f"tokens {start}–{end}", start, end) for start, end in spans]


def why_undefined(run: RunData, ratio: str) -> str:
    wiring = (run.manifest.get("family") or {}).get("wiring")
    return UNDEFINED.get((str(wiring), ratio), "no values")


def _points(ax: Axes, rows: pd.DataFrame, name: str, color: str, marker: str) -> None:
    for in_first, look in ((False, {"mfc": color, "mec": "white", "mew": 0.3}), (True, HOLLOW | {"mec": color})):
        chosen = rows[((rows["layer"] == 0) == in_first) & (rows["input_norm"] > 0) & (rows[name] > 0)]
        ax.plot(chosen["input_norm"], chosen[name], marker=marker, **POINT, **look)


def _compression(ax: Axes, ratios: pd.DataFrame) -> bool:
    """Draw the fitted line, and one of slope −1 through the points' center, if there are enough points."""
    fits = compress_fits(ratios)
    if "compress_slope" not in fits:
        return False
    points = fit_points(ratios)
    x, y = np.log10(points["input_norm"]), np.log10(points["compress"])
    ends = np.array([x.min(), x.max()])
    for slope, look in ((-1.0, GUIDE), (fits["compress_slope"], FIT)):
        ax.plot(10**ends, 10 ** (y.mean() + slope * (ends - x.mean())), **look)
    text = f"slope {fits['compress_slope']:.2f}\nr = {fits['compress_correlation']:.2f}".replace("-", "−")
    ax.text(0.04, 0.05, text, transform=ax.transAxes, fontsize=7, linespacing=1.4)
    return True


def _no_change(ax: Axes) -> None:
    """A line at 1, on a scale of at least a decade, so that values near 1 look near."""
    ax.axhline(1, **GUIDE)
    widen(ax, 10**-1, 10**1)


def _legend(figure: Figure, groups: list[str], fitted: bool, no_change: bool) -> None:
    """Two rows: the token groups, and the other signs. A legend is filled column by column."""
    points = [
        Line2D([], [], color=color, marker=marker, label=label, **POINT)
        for label, (color, marker) in zip(groups, LOOKS, strict=False)
    ]
    signs = [Line2D([], [], color="0.3", marker="o", label="first layer", **POINT, **HOLLOW)]
    if fitted:
        signs.append(Line2D([], [], label="fit, later layers", **FIT))
    if fitted or no_change:
        guides = "; ".join(["slope −1"] * fitted + ["no change"] * no_change)
        signs.append(Line2D([], [], label=guides, **GUIDE))
    columns = max(len(points), len(signs))
    handles = [handle for pair in zip_longest(points, signs) for handle in pair if handle is not None]
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, columnspacing=1.2)

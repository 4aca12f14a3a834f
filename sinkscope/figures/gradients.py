"""Figures of gradients: norms, reshaping and bounds, for one run or by training step (GS)."""

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.ticker import MaxNLocator

from sinkscope.figures import plot, style
from sinkscope.figures.labels import places, title
from sinkscope.figures.style import GRADUAL, GUIDE, MEAN_LINE, NAVY, OTHERS, SINK, SKY, WIDE, Figure, Look, new_figure
from sinkscope.measuring.summary import compress_fits, fit_points, pathway_norms
from sinkscope.results.metrics import METRICS, TOKEN_GROUPS
from sinkscope.results.run import RunData

# --- The sink of the forward pass is also a sink of gradients (GS figure 2).
# Gradient norms of query, key and value by token position, over all heads: a line for each layer, and their mean, as in
# the paper. If the mean is above most layers, the first few layers have most of the gradient.

PATHWAYS = ("query", "key", "value")
# Share of the largest value of a curve. Smaller values, such as the gradient of the first query, are round-off.
OFF_SCALE = 1e-5
FLOOR = "below the scale"  # label of the marks at the bottom of a panel


def draw_gradient_norms(run: RunData, positions: int | None = None) -> Figure:
    figure = new_figure(WIDE, 2.3)
    axes = figure.subplots(1, 3, sharex=True, sharey=True)
    norms = [  # layers × the first positions
        plot.finite(pathway_norms(run.tables["gradient"], pathway)).iloc[:, :positions] for pathway in PATHWAYS
    ]
    depth = Normalize(0, max(table.index.max() for table in norms))
    for ax, table in zip(axes, norms, strict=True):
        mean = table.mean()
        for layer, norm in table.iterrows():
            plot.curve(ax, norm.where(norm > OFF_SCALE * mean.max()), color=GRADUAL(depth(layer)), linewidth=0.5)
        on_scale = mean.where(mean > OFF_SCALE * mean.max())
        plot.curve(ax, on_scale, color="white", linewidth=3, zorder=3)  # an outline
        plot.curve(ax, on_scale, **MEAN_LINE)
        mark_off_scale(ax, [mean])
    if depth.vmax:
        bar = figure.colorbar(ScalarMappable(depth, GRADUAL), ax=axes, label="layer", aspect=30, pad=0.01)
        bar.ax.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    return finish_pathways(figure, axes, title(run, WIDE), {"mean over layers": MEAN_LINE})


def mark_off_scale(ax: Axes, curves: Iterable[pd.Series]) -> None:
    """Mark the bottom of the panel where a curve is off the scale; the first of neighboring marks has its value."""
    hidden = pd.concat([curve[(curve <= OFF_SCALE * curve.max()) & (curve.max() > 0)] for curve in curves])
    values = hidden.groupby(level=0).max()
    if len(values):  # no line, because the lines decide the scale
        floor = np.full(len(values), 0.012)
        look: Look = {"s": 20, "marker": "v", "facecolors": "white", "edgecolors": "black", "linewidths": 0.8}
        place: Look = {"transform": ax.get_xaxis_transform(), "clip_on": False, "zorder": 5}
        ax.scatter(values.index, floor, gid=FLOOR, **look, **place)
    for position, value in values.items():
        if position - 1 not in values.index:
            digits, exponent = f"{value:.0e}".split("e")
            text = "0" if value == 0 else rf"≈ 0 (${digits}\cdot 10^{{{int(exponent)}}}$)"
            align = "center" if value == 0 else "left" if position <= max(ax.get_xlim()) / 2 else "right"
            place = {"xycoords": ax.get_xaxis_transform(), "textcoords": "offset points", "fontsize": 6}
            ax.annotate(text, (position, 0), (0, 5), ha=align, **place)


def finish_pathways(figure: Figure, axes: np.ndarray, text: str, signs: dict[str, Look]) -> Figure:
    """Set titles and common scales of the three panels after drawing, and add the legend."""
    last = max(max(line.get_xdata()) for ax in axes for line in ax.lines)
    margin = max(0.5, 0.04 * last)
    axes[0].set_xlim(-margin, last + margin)  # also for a panel with only a mark at the bottom
    named = zip(axes, PATHWAYS, strict=True)
    if drawn := [ax for ax, name in named if plot.panel(ax, name, "", "token position", log=True)]:
        drawn[0].set_ylabel("gradient, L2 norm")
        drawn[0].tick_params(labelleft=True)
        low, high = drawn[0].get_ylim()
        drawn[0].set_ylim(low / (high / low) ** 0.09, high)  # room for the marks
    if any(marks.get_gid() == FLOOR for ax in axes for marks in ax.collections):
        mark: Look = {"color": "black", "linestyle": "none", "marker": "v", "ms": 4.5, "mfc": "white", "mew": 0.8}
        signs |= {"off the scale": mark}
    return figure.finish(text, signs, ncols=2)


# --- Massive activations compress the gradients that sinks concentrate (GS figure 3).
# Bloat, compress and change of the attention branch (GS eq. 3) against the norm of the branch's input: a point for each
# layer and position, the mean over sequences. Both axes are logarithmic; the paper's show log₁₀. The line is the fit of
# the table `summary`; it leaves out the first layer, which reads the bare embeddings and has hollow points.

RATIOS = {  # ratio → its definition
    "bloat": r"$\|\nabla\tilde{h}\|\,/\,\|\nabla r\|$",
    "compress": r"$\|\nabla h-\nabla h_{\mathrm{mid}}\|\,/\,\|\nabla\tilde{h}\|$",
    "change": r"$\|\nabla h\|\,/\,\|\nabla h_{\mathrm{mid}}\|$",
}
# From dark to light, each with its own marker. The last look is for positions beyond the paper's groups.
GROUP_LOOKS = ((NAVY, "o"), ("#b33c12", "s"), (style.GREEN, "^"), (SKY, "D"), ("#d1bf9a", "v"), ("#e0e0e0", "P"))
POINT: Look = style.DOT | {"markersize": 3}
HOLLOW: Look = {"mfc": "none", "mew": 0.7}
FIT: Look = {"color": "black", "linewidth": 1, "zorder": 4}

NO_BETWEEN = "attention and MLP read\nthe same input: there is\nno h+½ between them"
NO_NORM = "there is no norm before\nthe attention branch"
UNDEFINED: dict[tuple[Any, str], str] = {  # (wiring, ratio) → why the ratio is undefined in such models
    ("parallel", "bloat"): "attention and MLP read one norm:\nits gradient is the sum of both",
    ("parallel", "compress"): NO_BETWEEN,
    ("parallel", "change"): NO_BETWEEN,
    ("post-norm", "bloat"): NO_NORM,
    ("post-norm", "compress"): NO_NORM,
}


def draw_gradient_reshaping(run: RunData) -> Figure:
    table = plot.finite(run.tables["gradient_ratio"])
    ratios = table[table["branch"] == "attn"]
    # the paper's groups of tokens up to the last position, and one group after them
    last = int(ratios["position"].max())
    spans = [(start, min(end, last)) for _, start, end in TOKEN_GROUPS if start <= last]
    if spans[-1][1] < last:
        spans.append((spans[-1][1] + 1, last))
    figure = new_figure(WIDE, 2.55)
    axes = dict(zip(RATIOS, figure.subplots(1, 3, sharex=True), strict=True))
    for name, ax in axes.items():
        for (start, end), (color, marker) in reversed(list(zip(spans, GROUP_LOOKS, strict=False))):
            rows = ratios[ratios["position"].between(start, end)]
            looks = {False: {"mfc": color, "mec": "white", "mew": 0.3}, True: HOLLOW | {"mec": color}}
            for in_first, look in looks.items():
                chosen = rows[((rows["layer"] == 0) == in_first) & (rows["input_norm"] > 0) & (rows[name] > 0)]
                ax.plot(chosen["input_norm"], chosen[name], marker=marker, **POINT, **look)
        ax.set(title=f"{name}  {RATIOS[name]}", xlabel="norm of the branch's input, ‖h‖")
    label = "ratio of gradient norms"
    drawn = [name for name, ax in axes.items() if plot.value_axis(ax, label, log=True, lacking=_undefined(run, name))]
    for name in drawn:
        plot.log_axis(axes[name], "x")
    fits = compress_fits(ratios)
    fitted = "compress" in drawn and "compress_slope" in fits
    if fitted:  # the fit, and a line of slope −1 through the center of the points
        points = fit_points(ratios)
        x, y = np.log10(points["input_norm"]), np.log10(points["compress"])
        ends = np.array([x.min(), x.max()])
        for slope, look in ((-1.0, GUIDE), (fits["compress_slope"], FIT)):
            axes["compress"].plot(10**ends, 10 ** (y.mean() + slope * (ends - x.mean())), **look)
        text = f"slope {fits['compress_slope']:.2f}\nr = {fits['compress_correlation']:.2f}".replace("-", "−")
        plot.note(axes["compress"], text)
    if "change" in drawn:  # a line at 1, and at least a decade on both sides, so that values near 1 look near
        axes["change"].axhline(1, **GUIDE)
        plot.log_axis(axes["change"], "y", 10**-1, 10**1)
    by_group = [
        (
            f"position {start}" if start == end else f"positions {start}–{end}",
            {"color": color, "marker": marker} | POINT,
        )
        for (start, end), (color, marker) in zip(spans, GROUP_LOOKS, strict=False)
    ]
    signs = [("first layer", {"color": "0.3", "marker": "o"} | POINT | HOLLOW), *[("fit", FIT)] * fitted]
    if guides := ["slope −1"] * fitted + ["no change"] * ("change" in drawn):
        signs.append(("; ".join(guides), GUIDE))
    # a legend of two rows, which is filled column by column
    by_column = dict(sign for column in zip_longest(by_group, signs) for sign in column if sign)
    columns = max(len(by_group), len(signs))
    return figure.finish(title(run, WIDE), by_column, ncols=columns, columnspacing=1.2)


def _undefined(run: RunData, ratio: str) -> str:
    wiring = (run.manifest.get("family") or {}).get("wiring")
    return UNDEFINED.get((str(wiring), ratio), "no values")


# --- The two theorems of GS by layer, with the measured values.
# Left: theorem 1 at position 0, means over heads, for the loss summed over the run: attention bounds the square of the
# value gradient from both sides. The bounds assume that attention is independent of the gradients that it passes on, so
# they can fail. Middle: the share of heads and positions for which they hold, and the largest error of the identity
# from which they follow, ∇v = Σ_t a[t,s] g_t. Right: theorem 2, ‖∇x‖ ÷ ‖∇y‖ of the norm before each branch ÷ its bound.

BOUNDS: Look = style.AREA | {"color": NAVY, "alpha": 0.18}
CHECK: Look = {"color": "0.25", "marker": "D", "markersize": 2.4}
ROUND_OFF = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
UNMEASURED = "not measured: all batches\nhad padding"


def draw_gradient_bounds(run: RunData) -> Figure:
    check = plot.finite(run.tables["gradient_check"])
    figure = new_figure(WIDE, 3.4)
    panels: list[Any] = [["theorem 1", "holds", "attn"], ["theorem 1", "identity", "mlp"]]
    axes = figure.subplot_mosaic(panels, width_ratios=[1.2, 1, 1])
    first = axes["theorem 1"]
    means = check[check["position"] == 0].groupby("layer")[["lower_bound", "measured", "upper_bound"]].mean()
    alone: Look = {"marker": "_", "markersize": 8} if len(means) == 1 else {}  # a line needs two layers
    for bound in ("lower_bound", "upper_bound"):
        plot.line_by_layer(first, means[bound], color=NAVY, alpha=0.5, linewidth=0.5, **alone)
    plot.line_by_layer(first, means["measured"], **SINK)
    label, lacking = "‖∇v₀‖² of values, mean over heads", UNMEASURED * bool(means["measured"].isna().all())
    if plot.panel(first, "theorem 1 at position 0", label, log=True, lacking=lacking):
        floor = first.get_ylim()[0]  # replaces lower bounds of 0
        plot.band_by_layer(first, means["lower_bound"].clip(lower=floor), means["upper_bound"], **BOUNDS)
    holds, measured = axes["holds"], check[check["measured"].notna()]
    plot.line_by_layer(holds, measured.groupby("layer")["holds"].mean(), **CHECK)
    if plot.panel(holds, METRICS["theorem1_holds"].short, "share of places", share=True, lacking=UNMEASURED):
        failed = measured[~measured["holds"]]
        above = (failed["measured"] > failed["upper_bound"]).sum()
        text = f"{len(measured) - len(failed)} of {len(measured)} hold\n{above} above, {len(failed) - above} below"
        plot.note(holds, text)
    identity, dtype = axes["identity"], str(run.manifest.get("dtype"))
    plot.line_by_layer(identity, check.groupby("layer")["identity_residual"].max(), **CHECK)
    if plot.panel(identity, "identity", "largest relative error", log=True) and dtype in ROUND_OFF:
        least = ROUND_OFF[dtype]
        plot.log_axis(identity, "y", least / 10, least * 100)
        _guide(identity, least, f"round-off of {dtype}", below=True)
    # the table is empty or missing if no branch has its own norm
    bounds = run.tables.get("norm_bound", pd.DataFrame(columns=["branch", "position", "layer", "tightness"]))
    for branch, name in (("attn", "attention"), ("mlp", "MLP")):
        rows = plot.finite(bounds[bounds["branch"] == branch])
        for some, look in ((rows[rows["position"] == 0], SINK), (rows[rows["position"] > 0], OTHERS)):
            plot.line_by_layer(axes[branch], some.groupby("layer")["tightness"].mean(), **look)
        lacking = _undefined(run, "compress")
        if plot.panel(axes[branch], f"theorem 2: {name} branch", "measured ÷ bound", lacking=lacking):
            axes[branch].set_ylim(0, max(1.15, axes[branch].get_ylim()[1]))
            _guide(axes[branch], 1, "bound")
    last = int(check["position"].max())
    signs = {"position 0, measured": SINK, "theorem 1's bounds": BOUNDS}
    signs |= {f"mean over {places(1, last)}": OTHERS} if last else {}
    return figure.finish(title(run, WIDE), signs, ncols=3)


def _guide(ax: Axes, value: float, text: str, below: bool = False) -> None:
    """Draw a named horizontal line."""
    ax.axhline(value, **GUIDE)
    place: Look = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right"}
    look: Look = {"va": "top" if below else "bottom", "fontsize": 6, "color": "0.35"}
    ax.annotate(text, (1, value), (0, -2 if below else 1), **place, **look)

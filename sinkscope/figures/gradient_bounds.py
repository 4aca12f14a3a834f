"""The two theorems of GS by layer, beside what is measured.

Left: theorem 1 at position 0, means over heads, for the loss summed over the run: attention bounds the square of the
value gradient from both sides. The bounds assume that attention is independent of the gradients that it passes on, so
they can fail. Middle: how often they hold at all heads and positions, and the largest error of the identity on which
they rest, ∇v = Σ_t a[t,s] g_t. Right: theorem 2, ‖∇x‖ ÷ ‖∇y‖ of the norm in front of each branch, over its bound.
"""

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sinkscope.figures.axes import band_by_layer, finite, has_values, layer_axis, line_by_layer, say, value_axis, widen
from sinkscope.figures.gradient_reshaping import why_undefined
from sinkscope.figures.labels import places, title
from sinkscope.figures.spec import declare
from sinkscope.figures.style import GUIDE, NAVY, OTHERS, SINK, WIDE, Figure, Look, new_figure
from sinkscope.results.metrics import METRICS
from sinkscope.results.run import RunData

BAND: Look = {"color": NAVY, "alpha": 0.18, "linewidth": 0}
EDGE: Look = {"color": NAVY, "alpha": 0.5, "linewidth": 0.5}
CHECK: Look = {"color": "0.25", "marker": "D", "markersize": 2.4}
ROUND_OFF = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
BRANCHES = {"attn": "attention", "mlp": "MLP"}
UNMEASURED = "not measured: all batches\nhad padding"


@declare("gradient-bounds", "theorems 1 and 2 of GS by layer: measured values and bounds", "gradient_check")
def draw(run: RunData) -> Figure:
    check = finite(run.tables["gradient_check"])
    figure = new_figure(WIDE, 3.4)
    axes = figure.subplot_mosaic(
        [["theorem 1", "holds", "attn"], ["theorem 1", "identity", "mlp"]], width_ratios=[1.2, 1, 1]
    )
    _theorem_one(axes["theorem 1"], check[check["position"] == 0])
    _holds(axes["holds"], check)
    _identity(axes["identity"], check, str(run.manifest.get("dtype")))
    for branch, name in BRANCHES.items():
        axes[branch].set_title(f"theorem 2: {name} branch")
        _tightness(axes[branch], run, branch)
    handles: list[Artist] = [
        Line2D([], [], label="position 0, measured", **SINK),
        Patch(label="theorem 1's bounds", **BAND),
    ]
    last = int(check["position"].max())
    if last:
        handles.append(Line2D([], [], label=f"mean over {places(1, last)}", **OTHERS))
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    figure.suptitle(title(run, WIDE))
    return figure


def _theorem_one(ax: Axes, first: pd.DataFrame) -> None:
    ax.set_title("theorem 1 at position 0")
    means = first.groupby("layer")[["lower_bound", "measured", "upper_bound"]].mean()
    if not means["measured"].notna().any():
        say(ax, UNMEASURED)
        return
    alone: Look = {"marker": "_", "markersize": 8} if len(means) == 1 else {}  # a line needs two layers
    for bound in ("lower_bound", "upper_bound"):
        line_by_layer(ax, means[bound], **EDGE, **alone)
    line_by_layer(ax, means["measured"], **SINK)
    layer_axis(ax)
    ax.set_ylabel("‖∇v₀‖² of values, mean over heads")
    if value_axis(ax, log=True):
        floor = ax.get_ylim()[0]  # where a lower bound is 0
        band_by_layer(ax, means["lower_bound"].clip(lower=floor), means["upper_bound"], **BAND)


def _holds(ax: Axes, check: pd.DataFrame) -> None:
    ax.set_title(METRICS["theorem1_holds"].short)
    measured = check[check["measured"].notna()]
    if measured.empty:
        say(ax, UNMEASURED)
        return
    line_by_layer(ax, measured.groupby("layer")["holds"].mean(), **CHECK)
    layer_axis(ax)
    if not value_axis(ax, share=True):
        return
    ax.set_ylabel("share of places")
    above, below = measured["measured"] > measured["upper_bound"], measured["measured"] < measured["lower_bound"]
    text = f"{measured['holds'].sum()} of {len(measured)} hold\n{above.sum()} above, {below.sum()} below"
    ax.text(0.04, 0.06, text, transform=ax.transAxes, fontsize=7, linespacing=1.4)


def _identity(ax: Axes, check: pd.DataFrame, dtype: str) -> None:
    ax.set_title("identity")
    ax.set_ylabel("largest relative error")
    line_by_layer(ax, check.groupby("layer")["identity_residual"].max(), **CHECK)
    layer_axis(ax)
    if value_axis(ax, log=True) and dtype in ROUND_OFF:
        least = ROUND_OFF[dtype]
        widen(ax, least / 10, least * 100)
        _guide(ax, least, f"round-off of {dtype}", below=True)


def _tightness(ax: Axes, run: RunData, branch: str) -> None:
    """The table `norm_bound` has no rows, or is missing, where no branch has a norm of its own."""
    bounds = run.tables.get("norm_bound", pd.DataFrame(columns=["branch", "position", "layer", "tightness"]))
    rows = finite(bounds[bounds["branch"] == branch])
    for chosen, look in ((rows[rows["position"] == 0], SINK), (rows[rows["position"] > 0], OTHERS)):
        line_by_layer(ax, chosen.groupby("layer")["tightness"].mean(), **look)
    layer_axis(ax)
    ax.set_ylabel("measured ÷ bound")
    if not has_values(ax):
        say(ax, why_undefined(run, "compress"))
        return
    value_axis(ax)
    ax.set_ylim(0, max(1.15, ax.get_ylim()[1]))
    _guide(ax, 1, "bound")


def _guide(ax: Axes, value: float, text: str, below: bool = False) -> None:
    """A named horizontal line."""
    ax.axhline(value, **GUIDE)
    place: Look = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right"}
    look: Look = {"va": "top" if below else "bottom", "fontsize": 6, "color": "0.35"}
    ax.annotate(text, (1, value), (0, -2 if below else 1), **place, **look)

"""What the arms of the Bigram-Backcopy lab have become, on one sequence: VGA figures 4 and 6.

Above, attention weights, a map an arm; below, the norm of each token's value: the bar as the projection makes it, the
line where it stands behind a gate on the values. Not one run's figure, so `sinkscope list` does not show it.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.image import AxesImage

from sinkscope.errors import InputError
from sinkscope.report.figures.labels import escape, shorten, token_labels
from sinkscope.report.figures.style import NAVY, SEQUENTIAL, SKY, VERMILION, WIDE, Figure, in_style, new_figure

NAME_LENGTH = 20  # characters of an arm's name
SMALL = 5.5  # points: the tokens


def draw_backcopy_maps(attention_maps: pd.DataFrame, value_norms: pd.DataFrame) -> Figure:
    """The tables of those names, of all arms (their `condition`): one sequence, of one seed.

    Of several heads, each arm's that gives <s> most. Errors: InputError for tables without rows.
    """
    if attention_maps.empty or value_norms.empty:
        raise InputError("there is no attention map to draw")
    arms = list(attention_maps["condition"].unique())
    with in_style():
        figure = new_figure(WIDE, 0.75 + 1.75 * WIDE / (len(arms) + 0.4))
        axes = figure.subplots(
            2, len(arms), sharex="col", sharey="row", squeeze=False, gridspec_kw={"height_ratios": [3, 2]}
        )
        for (above, below), arm in zip(axes.T, arms, strict=True):
            maps = attention_maps[attention_maps["condition"] == arm]
            layer, head = sinking_head(maps)
            norms = value_norms[(value_norms["condition"] == arm) & (value_norms["layer"] == layer)]
            norms = norms.sort_values("position")
            image = _map(above, maps[(maps["layer"] == layer) & (maps["head"] == head)], len(norms))
            _bars(below, norms)
            if above is axes[0, 0]:
                _name(above.yaxis, norms)
            _name(below.xaxis, norms)
            above.tick_params(length=0)
            heads = maps.groupby(["layer", "head"]).ngroups
            which = f"\nlayer {layer}, head {head}" if heads > 1 else ""
            above.set_title(escape(shorten(arm, NAME_LENGTH)) + which)
        axes[0, 0].set_ylabel("query")
        axes[1, 0].set_ylabel("norm of value")
        bar = figure.colorbar(image, ax=axes[0], label="attention weight", aspect=20, pad=0.01)
        bar.outline.set_linewidth(0.5)
        figure.supxlabel("token, triggers in red (bars: values as projected; lines: as attended to, behind a gate)")
        figure.suptitle(escape(shorten(str(attention_maps["model"].iloc[0]).rstrip("/").split("/")[-1], 60)))
    return figure


def sinking_head(maps: pd.DataFrame) -> tuple[int, int]:
    """Layer and head whose later queries give <s> most."""
    first = maps[(maps["key"] == 0) & (maps["query"] > 0)]
    layer, head = first.groupby(["layer", "head"])["weight"].mean().idxmax()
    return int(layer), int(head)


def _map(ax: Axes, table: pd.DataFrame, size: int) -> AxesImage:
    """Queries downwards. What the causal mask forbids stays white."""
    weights = np.full((size, size), np.nan)
    weights[table["query"], table["key"]] = table["weight"]
    return ax.imshow(weights, cmap=SEQUENTIAL.with_extremes(bad="white"), vmin=0, vmax=1, aspect="auto")


def _bars(ax: Axes, norms: pd.DataFrame) -> None:
    places = norms["position"].to_numpy()
    ax.bar(places, norms["norm"], width=0.8, color=[NAVY if place == 0 else SKY for place in places])
    if not np.allclose(norms["norm"], norms["attended_norm"], rtol=1e-3):
        ax.hlines(norms["attended_norm"], places - 0.4, places + 0.4, color=VERMILION, linewidth=1.1)
    ax.grid(True, axis="y", color="0.9", linewidth=0.4)


def _name(axis: Axis, norms: pd.DataFrame) -> None:
    """The tokens along an axis, triggers in colour."""
    axis.set_ticks(norms["position"], token_labels(norms["token"], norms["token_id"]), fontsize=SMALL)
    axis.set_tick_params(length=0)
    for label, is_trigger in zip(axis.get_ticklabels(), norms["is_trigger"], strict=True):
        label.set_color(VERMILION if is_trigger else "black")
    axis.get_ticklabels()[0].set_horizontalalignment("right")  # <s> is wider than the others

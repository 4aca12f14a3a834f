"""What the arms of the Bigram-Backcopy task attend to on one sequence (VGA figures 4 and 6).

Above, attention weights, a map for each arm; of several heads, the one that gives <s> most. Below, the norm of each
token's value: bars as projected, lines as attended to where there is a gate on the values.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis

from sinkscope.figures.arms import Arms
from sinkscope.figures.heatmaps import square
from sinkscope.figures.labels import escape, shorten, token_labels
from sinkscope.figures.spec import declare
from sinkscope.figures.style import NAVY, SEQUENTIAL, SKY, VERMILION, WIDE, Figure, new_figure

NAME_LENGTH = 20  # characters of an arm's name
SMALL = 5.5  # points: the tokens


def lacking(arms: Arms) -> str | None:
    return None if arms.rows("attention_maps") and arms.rows("value_norms") else "there is no attention map"


@declare(
    "backcopy-maps",
    "Bigram-Backcopy: attention and value norms on one sequence (VGA figs. 4 and 6)",
    "value_norms",
    lacking=lacking,
)
def draw(arms: Arms) -> Figure:
    attention_maps, value_norms = arms.tables["attention_maps"], arms.tables["value_norms"]
    names = list(attention_maps["condition"].unique())
    figure = new_figure(WIDE, 0.75 + 2.5 * WIDE / (len(names) + 0.4))
    axes = figure.subplots(2, len(names), sharex="col", sharey="row", squeeze=False, height_ratios=[3, 2])
    for (above, below), name in zip(axes.T, names, strict=True):
        maps = attention_maps[attention_maps["condition"] == name]
        layer, head = sinking_head(maps)
        norms = value_norms[(value_norms["condition"] == name) & (value_norms["layer"] == layer)]
        norms = norms.sort_values("position")
        weights = square(maps[(maps["layer"] == layer) & (maps["head"] == head)], len(norms))
        image = above.imshow(weights, cmap=SEQUENTIAL.with_extremes(bad="white"), vmin=0, vmax=1, aspect="auto")
        _bars(below, norms)
        if above is axes[0, 0]:
            _name_tokens(above.yaxis, norms)
        _name_tokens(below.xaxis, norms)
        above.tick_params(length=0)
        which = f"\nlayer {layer}, head {head}" if maps.groupby(["layer", "head"]).ngroups > 1 else ""
        above.set_title(escape(shorten(name, NAME_LENGTH)) + which)
    axes[0, 0].set_ylabel("query")
    axes[1, 0].set_ylabel("value, L2 norm")
    figure.colorbar(image, ax=axes[0], label="attention weight", aspect=20, pad=0.01)
    figure.supxlabel("token, triggers bold and red (bars: values as projected; lines: as attended to, behind a gate)")
    figure.suptitle(arms.title("one sequence", arms.seeds_text(of_runs=True)))
    return figure


def sinking_head(maps: pd.DataFrame) -> tuple[int, int]:
    """Layer and head whose later queries give <s> most."""
    first = maps[(maps["key"] == 0) & (maps["query"] > 0)]
    layer, head = first.groupby(["layer", "head"])["weight"].mean().idxmax()
    return int(layer), int(head)


def _bars(ax: Axes, norms: pd.DataFrame) -> None:
    places = norms["position"].to_numpy()
    ax.bar(places, norms["norm"], width=0.8, color=[NAVY if place == 0 else SKY for place in places])
    if not np.allclose(norms["norm"], norms["attended_norm"], rtol=1e-3):
        ax.hlines(norms["attended_norm"], places - 0.4, places + 0.4, color=VERMILION, linewidth=1.1)
    ax.grid(True, axis="y", color="0.9", linewidth=0.4)


def _name_tokens(axis: Axis, norms: pd.DataFrame) -> None:
    """The tokens along an axis; triggers stand out, in print without color too."""
    axis.set_ticks(norms["position"], token_labels(norms["token"], norms["token_id"]), fontsize=SMALL)
    axis.set_tick_params(length=0)
    for label, is_trigger in zip(axis.get_ticklabels(), norms["is_trigger"], strict=True):
        if is_trigger:
            label.set(color=VERMILION, fontweight="bold")
    axis.get_ticklabels()[0].set_horizontalalignment("right")  # <s> is wider than the others

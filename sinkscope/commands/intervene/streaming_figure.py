"""The figure of perplexity with a short cache (StreamingLLM)."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from sinkscope.figures import plot, style
from sinkscope.figures.labels import title
from sinkscope.figures.style import GRAY, HIGHEST, OTHERS, SINK, WIDE, Figure, Look, new_figure
from sinkscope.results.run import RunData

# --- Perplexity of a long text read through a short cache (StreamingLLM, Xiao et al. 2024, figure 3 and table 1).
# Left, by token, for the shortest window: dense attention, only the last tokens, and the last tokens with the largest
# number of first tokens. Right, over all tokens, by the number of first tokens kept, for every window.

DENSE = SINK | {"marker": "", "label": "dense"}
DASHES = ("--", ":", "-.", "-")


def draw_streaming_perplexity(run: RunData) -> Figure:
    table = run.tables["streaming"]
    figure = new_figure(WIDE, 2.4)
    by_token, by_kept = figure.subplots(1, 2, width_ratios=(3, 2))
    _by_token(by_token, table[table["bucket"] >= 0])
    _by_kept(by_kept, table[table["bucket"] < 0])
    return figure.finish(title(run, WIDE))


def _by_token(ax: Axes, buckets: pd.DataFrame) -> None:
    window, most = int(buckets.loc[buckets["window"] > 0, "window"].min()), int(buckets["keep"].max())
    ways = [("dense", -1, 0, DENSE), ("window", window, 0, OTHERS | {"label": f"last {window}"})]
    if most:
        ways.append(("sinks kept", window, most, HIGHEST | {"label": f"first {most} and last {window}"}))
    for method, last, keep, look in ways:
        of_method = (buckets["method"] == method) & (buckets["window"] == last) & (buckets["keep"] == keep)
        by_bucket = buckets[of_method].set_index("bucket")["perplexity"].sort_index()
        starts = by_bucket.index.to_numpy(float)
        width = np.diff(starts).min() if len(starts) > 1 else 1.0  # the last bucket may be shorter
        plot.curve(ax, by_bucket.set_axis(starts + (width - 1) / 2), **look)
    ax.set_title(f"by token; the window of {window} slides from the dotted line on")
    ax.set_xlabel("token index")
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if plot.value_axis(ax, "perplexity", log=True):
        ax.axvline(window, color=GRAY, linewidth=0.7, linestyle=(0, (1, 2)), zorder=1)
        _legend_above(ax, columns=3)


def _by_kept(ax: Axes, totals: pd.DataFrame) -> None:
    streams = totals[totals["window"] > 0]
    kept = sorted(streams["keep"].unique())  # such as 0, 1, 2, 4, 8, drawn at equal distances
    windows = sorted(streams["window"].unique())
    dense = float(totals.loc[totals["method"] == "dense", "perplexity"].iloc[0])
    ax.plot([-0.3, len(kept) - 0.7], [dense, dense], **DENSE)
    for nth, window in enumerate(windows):
        by_kept = streams[streams["window"] == window].set_index("keep")["perplexity"].reindex(kept)
        look: Look = {
            "color": style.GRADUAL(1 - 0.65 * nth / max(len(windows) - 1, 1)),
            "marker": style.MARKERS[nth % len(style.MARKERS)],
            "linestyle": DASHES[nth % len(DASHES)],
        }
        ax.plot(range(len(kept)), by_kept.to_numpy(float), zorder=3, label=f"last {window}", **look)
    ax.set_title("over all tokens")
    ax.set_xticks(range(len(kept)), [str(n) for n in kept])
    ax.set_xlabel("first tokens kept")
    values = plot.drawn(ax, "y")
    values = values[np.isfinite(values)]
    if plot.value_axis(ax, "perplexity", log=bool(len(values) and values.max() > 10 * values.min())):
        _legend_above(ax, columns=2)


def _legend_above(ax: Axes, columns: int) -> None:
    """Extend the y axis upwards and put the legend there, above the lines."""
    low, high = ax.get_ylim()
    rows = -(-len(ax.get_legend_handles_labels()[1]) // columns)
    room = 0.1 + 0.12 * rows
    ax.set_ylim(low, high * (high / low) ** room if ax.get_yscale() == "log" else high + room * (high - low))
    ax.legend(loc="upper center", ncols=columns, columnspacing=1.2, borderaxespad=0.1)

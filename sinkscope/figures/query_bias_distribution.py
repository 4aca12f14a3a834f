"""What the query bias adds to a key's logits, Δ_j, over tokens (NU figures 1 and 4).

A panel for each layer, all heads together. Position 0 is one token of each sequence: each histogram is scaled to its
own highest bin. Δ is before the logits' scaling by 1/√d. Titles say by how many standard deviations (σ) of the later
tokens' Δ position 0 lies above their mean.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from sinkscope.figures.labels import title
from sinkscope.figures.spec import declare
from sinkscope.figures.style import NAVY, VERMILION, WIDE, Figure, Look, new_figure
from sinkscope.measuring.observables.query_bias import ALL_HEADS
from sinkscope.measuring.summary import delta_gap
from sinkscope.results.run import RunData

LOOKS: dict[str, Look] = {  # the later tokens beneath
    "later": {"facecolor": VERMILION, "alpha": 0.45, "linewidth": 0},
    "position 0": {"facecolor": NAVY, "alpha": 0.85, "linewidth": 0},
}
LABELS = {"position 0": "position 0", "later": "later positions"}
MOST_COLUMNS = 8
TALLEST = 7.6  # inches


@declare("query-bias-distribution", "the query bias's shift Δ (NU figs. 1 and 4)", "query_bias", "delta_distribution")
def draw(run: RunData) -> Figure:
    table, by_position = run.tables["delta_distribution"], run.tables["query_bias"]
    gaps = delta_gap(by_position[by_position["head"] == ALL_HEADS])
    layers = sorted(table["layer"].unique())
    columns = min(len(layers), 4 if len(layers) <= 16 else 6 if len(layers) <= 36 else MOST_COLUMNS)
    rows = -(-len(layers) // columns)
    figure = new_figure(WIDE, min(TALLEST, 0.8 + rows * (1.15 if columns == 4 else 0.85)))
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for ax, layer in zip(axes, layers, strict=False):
        _panel(ax, table[table["layer"] == layer])
        ax.set_title(_heading(layer, gaps.get(layer, np.nan)), fontsize=7 if columns == 4 else 6, pad=2)
    for ax in axes[len(layers) :]:
        ax.set_axis_off()
    for ax in axes[: len(layers)][-columns:]:  # the lowest of its column
        ax.set_xlabel("Δ, unscaled", fontsize=7)
    figure.supylabel("tokens (highest bin = 1)")
    handles = [Patch(label=LABELS[group], **LOOKS[group]) for group in ("position 0", "later")]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    figure.suptitle(title(run, WIDE))
    return figure


def _heading(layer: int, gap: float) -> str:
    return f"layer {layer}" + (f": {gap:+.1f}σ".replace("-", "−") if np.isfinite(gap) else "")


def _panel(ax: Axes, rows: pd.DataFrame) -> None:
    for group, look in LOOKS.items():
        bins = rows[rows["group"] == group].sort_values("delta")
        centers, counts = bins["delta"].to_numpy(float), bins["count"].to_numpy(float)
        if np.isfinite(centers).all() and counts.sum() > 0:
            width = (centers[-1] - centers[0]) / max(1, len(centers) - 1) or 1.0
            ax.bar(centers, counts / counts.max(), width=width, **look)
    ax.set_ylim(0, 1.08)
    ax.set_yticks([])
    ax.spines["left"].set_visible(False)
    ax.xaxis.set_major_locator(MaxNLocator(3))
    ax.tick_params(axis="x", labelsize=6)

"""Where in one hidden state the massive activations are: tokens × coordinates (Sun et al. 2024, fig. 1).

The layer with the largest activation, first sequence. Above, the coordinates with the largest magnitudes; below, evenly
spaced ones for comparison.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm

from sinkscope.figures.axes import say
from sinkscope.figures.labels import title, token_labels
from sinkscope.figures.spec import declare
from sinkscope.figures.style import SEQUENTIAL, WIDE, Figure, new_figure
from sinkscope.results.run import RunData

FAINTEST = 0.25  # this share of the magnitudes lies below the color scale, so that usual ones stay pale


@declare("massive-map", "magnitudes by token and coordinate at the layer with the largest activation", "massive_map")
def draw(run: RunData) -> Figure:
    table = run.tables["massive_map"]
    layer = table["layer"].iloc[0]
    is_top = table["is_top"].astype(bool)
    named = {
        "largest\ncoordinates": _grid(table[is_top], by_size=True),
        "evenly spaced\ncoordinates": _grid(table[~is_top]),
    }
    parts = [(part, name) for name, part in named.items() if part.size]
    rows = [max(6, len(part)) for part, _ in parts]  # at least as high as the panel's name is long
    figure = new_figure(WIDE, 0.12 * sum(rows) + 1.5)
    axes = figure.subplots(len(parts), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    sequence = f"one sequence ({table['sequence'].iloc[0]})"
    figure.suptitle(title(run, WIDE, sequence, f"output of layer {layer}"))
    scale = _scale(table["magnitude"])
    for ax, (part, name) in zip(axes, parts, strict=True):
        if scale is None:
            say(ax, "no positive values")
            continue
        ax.spines[:].set_visible(False)
        ax.set_ylabel(name)
        image = ax.imshow(part.clip(lower=scale.vmin), cmap=SEQUENTIAL, norm=scale, aspect="auto")
        ax.set_yticks(range(len(part)), [str(coordinate) for coordinate in part.index])
        ax.tick_params(length=0, labelsize=6)
    if scale is not None:
        figure.colorbar(image, ax=list(axes), label="|activation|", aspect=25, pad=0.015, extend="min")
        _name_tokens(axes[-1], table)
    return figure


def _grid(table: pd.DataFrame, by_size: bool = False) -> pd.DataFrame:
    """Coordinates × positions, in order or with the largest magnitude first."""
    grid = table.pivot(index="coordinate", columns="position", values="magnitude")
    return grid.loc[grid.max(axis=1).sort_values(ascending=False, kind="stable").index] if by_size else grid


def _scale(magnitude: pd.Series) -> LogNorm | None:
    positive = magnitude[np.isfinite(magnitude) & (magnitude > 0)]
    if positive.empty:
        return None
    high = float(positive.max())
    return LogNorm(min(float(positive.quantile(FAINTEST)), high / 10), high)


def _name_tokens(ax: Axes, table: pd.DataFrame) -> None:
    """Every token by its text, along the sequence."""
    tokens = table.drop_duplicates("position").sort_values("position")
    labels = token_labels(tokens["token"], tokens["token_id"])
    ax.set_xticks(range(len(tokens)), labels, rotation=90, fontsize=5.5)
    ax.tick_params(axis="x", pad=1)
    ax.set_xlabel("token, from position 0")

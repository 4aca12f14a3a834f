"""Maps over pictures: attention to their patches and φ, or the norms of an encoder's patches."""

import base64
import io

import numpy as np
import pandas as pd

from sinkscope.figures import style
from sinkscope.figures.labels import escape, title
from sinkscope.figures.style import WIDE, Figure, new_figure
from sinkscope.measuring.estimates import outlier_patches
from sinkscope.results.findings import AFTER_LAYER, HIGH_NORM, PHI
from sinkscope.results.run import RunData


def draw_visual_sinks(run: RunData) -> Figure:
    table = run.tables["visual_patch"].query(f"layer >= {AFTER_LAYER}")
    sinks = (table["phi"] > PHI).groupby(table["layer"]).mean()
    layer = int(sinks.idxmax() if sinks.max() > 0 else table.groupby("layer")["mass"].sum().idxmax())
    return _maps(run, table[table["layer"] == layer], {"mass": "attention", "phi": "φ"}, layer, ("phi", PHI))


def draw_outlier_patches(run: RunData) -> Figure:
    table = outlier_patches(run)
    layer = int(table["layer"].max())
    columns = {"ratio": "norm ÷ median", "mass": "attention"}
    return _maps(run, table[table["layer"] == layer].assign(tile=0), columns, layer, ("ratio", HIGH_NORM))


def _maps(run: RunData, table: pd.DataFrame, columns: dict[str, str], layer: int, mark: tuple[str, float]) -> Figure:
    """Draw the first pictures and below each its maps; squares are around patches with the number `mark` above it."""
    from PIL import Image  # comes with matplotlib

    pictures = run.tables["picture"].head(3)
    rows = 1 + len(columns)
    figure = new_figure(WIDE, 1.55 * rows + 0.5).finish(title(run, WIDE, f"layer {layer}"))
    axes = figure.subplots(rows, len(pictures), squeeze=False)
    for ax in axes.flat:
        ax.set(xticks=[], yticks=[])
        ax.spines[:].set_visible(False)
    ends = {name: (float(table[name].min()), float(table[name].max())) for name in columns}
    for (_, picture), (thumbnail, *maps) in zip(pictures.iterrows(), axes.T, strict=True):
        data = base64.b64decode(picture["thumbnail"].partition(",")[2])
        thumbnail.imshow(np.asarray(Image.open(io.BytesIO(data))))
        thumbnail.set_title(escape(picture["name"]), fontsize=6)
        patches = table[table["sequence"] == picture["sequence"]]
        patches = patches[patches["tile"] == patches["tile"].max()]
        marked = patches[patches[mark[0]] > mark[1]]
        for ax, name in zip(maps, columns, strict=True):
            values = patches.pivot(index="row", columns="column", values=name).to_numpy(float)
            ax.imshow(values, cmap=style.SEQUENTIAL, vmin=ends[name][0], vmax=ends[name][1])
            ax.plot(marked["column"], marked["row"], "s", mfc="none", mec="black", ms=3, mew=0.6)
    for place, label in enumerate(columns.values(), 1):
        image = axes[place, -1].images[0]
        figure.colorbar(image, ax=list(axes[place]), label=label, aspect=14, pad=0.015)
    return figure

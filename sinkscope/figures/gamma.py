"""Does the query bias read the coordinates where EPE₀ is massive? |γ| there beside all of γ (NU tables 1 and 2)."""

from matplotlib.artist import Artist
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sinkscope.figures.axes import finite, layer_axis, line_by_layer, value_axis
from sinkscope.figures.labels import title
from sinkscope.figures.spec import declare
from sinkscope.figures.style import COLUMN, GRAY, GREEN, HIGHEST, OTHERS, SINK, Figure, Look, new_figure
from sinkscope.results.run import RunData

BAND: Look = {"color": GRAY, "alpha": 0.3, "linewidth": 0}
MEAN: Look = {"color": "0.35", "linewidth": 0.9}
LOOKS = (SINK, OTHERS, HIGHEST, {"color": GREEN, "linestyle": "-.", "marker": "D", "markersize": 2.4, "zorder": 5})


def lacking(run: RunData) -> str | None:
    gamma = run.tables["gamma"]
    if gamma["is_massive_epe"].any():
        return None
    if gamma["epe_0"].notna().any():
        return "its EPE_0 has no massive coordinate"
    return "its positions are not learned vectors, so that there is no EPE_0"


@declare("gamma", "|γ| at the massive coordinates of EPE₀ and over all (NU tables 1 and 2)", "gamma", lacking=lacking)
def draw(run: RunData) -> Figure:
    gamma = finite(run.tables["gamma"])
    gamma = gamma.assign(magnitude=gamma["gamma"].abs())
    by_layer = gamma.groupby("layer")["magnitude"]
    mean, spread = by_layer.mean(), 2 * by_layer.std(ddof=0)
    massive = gamma[gamma["is_massive_epe"]]
    largest = massive.groupby("coordinate")["epe_0"].first().abs().sort_values(ascending=False).index
    width = COLUMN * 1.25
    figure = new_figure(width, 2.5)
    ax = figure.subplots()
    low = (mean - spread).clip(lower=0)
    ax.bar(mean.index, mean + spread - low, bottom=low, width=0.6, **BAND)
    line_by_layer(ax, mean, **MEAN)
    handles: list[Artist] = []
    for coordinate, look in zip(largest, LOOKS, strict=False):
        at = massive[massive["coordinate"] == coordinate].set_index("layer")["magnitude"]
        handles.append(line_by_layer(ax, at, label=f"d = {coordinate}", **look))
    layer_axis(ax)
    ax.set_ylabel("|γ|")
    if value_axis(ax):
        ax.set_ylim(bottom=0)
    beyond = len(largest) - len(handles)
    label = "mean of all" + (f" ({beyond} massive not drawn)" if beyond > 0 else "")
    handles += [Line2D([], [], label=label, **MEAN), Patch(label="mean ± 2 std", **BAND)]
    columns = len(handles) if len(handles) <= 4 else 3
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, columnspacing=1.0, handlelength=2)
    figure.suptitle(title(run, width))
    return figure

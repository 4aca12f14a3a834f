"""The figure of what neurons can write, by layer."""

from sinkscope.commands.scan.command import Scan
from sinkscope.figures import plot, style
from sinkscope.figures.labels import heading
from sinkscope.figures.style import DOT, Figure, Look, new_figure
from sinkscope.results.side_by_side import model_name

NAMED = 3  # coordinates with a color of their own


def draw_scan(scanned: Scan) -> Figure:
    """Draw the listed neurons' gains by layer, in the colors of the coordinates that most of the first ones write."""
    table = scanned.tables["scan"]
    figure = new_figure(style.TEXT, 2.6)
    ax = figure.subplots()
    named = table[table["rank"] == 1]["coordinate"].value_counts().index[:NAMED]
    looks: dict[str, Look] = {"other coordinates": DOT | {"color": style.GRAY, "marker": ".", "markersize": 4}}
    ax.plot(*table.loc[~table["coordinate"].isin(named), ["layer", "gain"]].to_numpy().T, **looks["other coordinates"])
    for coordinate, look in zip(named, style.line_looks(), strict=False):
        looks[f"coordinate {coordinate}"] = look | {"linestyle": "none", "markersize": 4}
        rows = table[table["coordinate"] == coordinate]
        ax.plot(rows["layer"], rows["gain"], **looks[f"coordinate {coordinate}"])
    plot.panel(ax, "", "gain", log=True)
    name = model_name(scanned.manifest["model"]["name"])
    return figure.finish(heading(name, "from weights", width=style.TEXT), looks, ncols=4)

"""The figure of the headroom of a dtype."""

from sinkscope.figures import plot, style
from sinkscope.figures.labels import escape, title
from sinkscope.figures.style import Figure, Look, new_figure
from sinkscope.models.projections import NO_LAYER
from sinkscope.results.run import RunData
from sinkscope.results.side_by_side import shorten

# --- Overflow in a dtype: the largest magnitude of each site by layer, and the limit.

LONGEST_NAME = 30  # characters in the name of a site
BY_NAME = ("mid", "layer_out", "attn_out", "mlp_out", "attn_mix")  # and of the others the OTHERS_SHOWN largest
OTHERS_SHOWN = 2
LIMIT: Look = {"color": "black", "linewidth": 1.4}


def draw_overflow_headroom(run: RunData) -> Figure:
    table = run.tables["overflow"]
    table = table[(table["layer"] != NO_LAYER) & ~table["is_inside"]]
    largest = table.groupby("site")["largest"].max().sort_values(ascending=False)
    named = [site for site in BY_NAME if site in largest]
    chosen = [*named, *largest.drop(named).index[:OTHERS_SHOWN]]
    figure = new_figure(style.TEXT, 2.9)
    ax, looks = figure.subplots(), dict(zip(chosen, style.line_looks(), strict=False))
    for site, look in looks.items():
        rows = table[table["site"] == site].groupby("layer")["largest"].max()
        ax.plot(rows.index, rows, **look | {"markersize": 3, "linewidth": 1})
    ends = table["layer"].min(), table["layer"].max()
    limit, dtype = run.manifest["overflow"]["limit"], run.manifest["overflow"]["dtype"]
    ax.plot(ends, [limit, limit], **LIMIT)
    plot.panel(ax, "", "largest |entry|", log=True)
    signs = {escape(shorten(site, LONGEST_NAME)): look for site, look in looks.items()}
    return figure.finish(title(run, style.TEXT), signs | {f"limit of {dtype}": LIMIT}, ncols=4)

"""The effective positional vector of a learned position 0 (EPE₀) by coordinate, massive ones named (NU figure 6)."""

import numpy as np

from sinkscope.errors import counted
from sinkscope.figures.axes import say, write_beside
from sinkscope.figures.labels import title
from sinkscope.figures.spec import declare
from sinkscope.figures.style import GRAY, NAVY, VERMILION, WIDE, Figure, new_figure
from sinkscope.results.run import RunData

MOST_NAMED = 12


def lacking(run: RunData) -> str | None:
    return None if run.tables["gamma"]["epe_0"].notna().any() else "its positions are not learned vectors"


@declare("epe-coordinates", "EPE₀ by coordinate, massive ones named (NU fig. 6)", "gamma", lacking=lacking)
def draw(run: RunData) -> Figure:
    table = run.tables["gamma"]
    vector = table[table["layer"] == table["layer"].min()]  # the same in the rows of every layer
    figure = new_figure(WIDE, 2.2)
    ax = figure.subplots()
    entries = vector[np.isfinite(vector["epe_0"])]
    massive = entries[entries["is_massive_epe"]]
    usual = entries[~entries["is_massive_epe"]]
    ax.axhline(0, color=GRAY, linewidth=0.5, zorder=1)
    ax.vlines(usual["coordinate"], 0, usual["epe_0"], color=NAVY, linewidth=0.8)
    ax.vlines(massive["coordinate"], 0, massive["epe_0"], color=VERMILION, linewidth=1.4)
    ax.plot(massive["coordinate"], massive["epe_0"], color=VERMILION, linestyle="none", marker="s", markersize=3)
    named = massive.reindex(massive["epe_0"].abs().sort_values(ascending=False).index[:MOST_NAMED])
    for coordinate, entry in zip(named["coordinate"], named["epe_0"], strict=True):
        write_beside(ax, f"{coordinate}", coordinate, entry, space=5, size=7)
    ax.set_xlabel("coordinate")
    ax.set_ylabel(r"$\mathrm{EPE}_0$")
    ax.set_xlim(-0.01 * len(vector), 1.03 * len(vector))
    ax.margins(y=0.08)
    if entries.empty:
        say(ax, "no values")
    count = len(massive)
    figure.suptitle(title(run, WIDE, counted(count or "no", "massive coordinate")))
    return figure

"""What a learned position 0 becomes in the first layer: EPE_0 by coordinate, the massive ones named (NU figure 6)."""

import numpy as np

from sinkscope.report.figures.axes import say
from sinkscope.report.figures.labels import title
from sinkscope.report.figures.style import GREY, NAVY, VERMILION, WIDE, Figure, new_figure
from sinkscope.results.run import RunData

NAME = "epe-coordinates"
ABOUT = "effective positional vector of position 0 by coordinate, massive ones named (NU fig. 6)"
TABLES = ("gamma",)
MOST_NAMED = 12


def lacking(run: RunData) -> str | None:
    if run.tables["gamma"]["epe_0"].notna().any():
        return None
    return "its positions are not learned vectors"


def draw(run: RunData) -> Figure:
    table = run.tables["gamma"]
    vector = table[table["layer"] == table["layer"].min()]  # the same in every layer's rows
    figure = new_figure(WIDE, 2.2)
    ax = figure.subplots()
    entries = vector[np.isfinite(vector["epe_0"])]
    massive = entries[entries["is_massive_epe"]]
    usual = entries[~entries["is_massive_epe"]]
    ax.axhline(0, color=GREY, linewidth=0.5, zorder=1)
    ax.vlines(usual["coordinate"], 0, usual["epe_0"], color=NAVY, linewidth=0.8)
    ax.vlines(massive["coordinate"], 0, massive["epe_0"], color=VERMILION, linewidth=1.4)
    ax.plot(massive["coordinate"], massive["epe_0"], color=VERMILION, linestyle="none", marker="s", markersize=3)
    named = massive.reindex(massive["epe_0"].abs().sort_values(ascending=False).index[:MOST_NAMED])
    for coordinate, entry in zip(named["coordinate"], named["epe_0"], strict=True):
        ax.annotate(f"{coordinate}", (coordinate, entry), (5, 0), textcoords="offset points", fontsize=7, va="center")
    ax.set_xlabel("coordinate")
    ax.set_ylabel(r"$\mathrm{EPE}_0$")
    ax.set_xlim(-0.01 * len(vector), 1.03 * len(vector))
    ax.margins(y=0.08)
    if entries.empty:
        say(ax, "no values")
    figure.suptitle(title(run, WIDE, _found(len(massive))))
    return figure


def _found(massive: int) -> str:
    return f"{massive or 'no'} massive coordinate{'s' * (massive != 1)}"

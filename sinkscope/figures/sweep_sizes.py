"""The sink rate against the size of the model, a line for each family."""

import pandas as pd

from sinkscope.figures.axes import log_ticks, with_decades
from sinkscope.figures.spec import declare
from sinkscope.figures.style import Figure
from sinkscope.figures.sweep_parts import lines_by_input
from sinkscope.verdict.sweep_tables import SweepTables, several


def _rows(tables: SweepTables) -> pd.DataFrame:
    rows = tables.main
    return several(rows[rows["family"] != ""], ("family", "input"), "parameters")


def lacking(tables: SweepTables) -> str | None:
    return "no family has models of two sizes" if _rows(tables).empty else None


@declare("sweep-sizes", "sink rate against the number of parameters, by family and input", "sweep", lacking=lacking)
def draw(tables: SweepTables) -> Figure:
    figure, axes, lowest = lines_by_input(_rows(tables), "parameters", ("family",))
    axes[0].set_xscale("log")  # of all panels
    axes[0].set_xlim(*with_decades(*axes[0].get_xlim()))
    log_ticks(axes[0].xaxis, *axes[0].get_xlim())
    for ax in lowest:
        ax.set_xlabel("parameters")
    return figure

"""The sink rate against its threshold ε, from the stored window masses (WSE figure 3)."""

import pandas as pd

from sinkscope.figures.spec import declare
from sinkscope.figures.style import GUIDE, Figure
from sinkscope.figures.sweep_parts import lines_by_input
from sinkscope.verdict.sweep_tables import EPSILON, SweepTables


def _rows(tables: SweepTables) -> pd.DataFrame:
    """Of the cells that are compared by input."""
    table = tables.tables.get(EPSILON)
    return pd.DataFrame() if table is None else table[table["cell"].isin(tables.main["cell"])]


def lacking(tables: SweepTables) -> str | None:
    return "no cell has measured attention" if _rows(tables).empty else None


@declare("sweep-epsilon", "sink rate against ε, by model and input", EPSILON, lacking=lacking)
def draw(tables: SweepTables) -> Figure:
    figure, axes, lowest = lines_by_input(_rows(tables), "epsilon")
    for ax in axes:
        for epsilon in tables.main["epsilon"].unique():
            ax.axvline(epsilon, **GUIDE)
    for ax in lowest:
        ax.set_xlabel("ε (dashed: of the cells)")
    return figure

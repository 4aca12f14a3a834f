"""The sink rate by the domain of the text (WSE figure 9)."""

import pandas as pd

from sinkscope.figures.spec import declare
from sinkscope.figures.style import Figure
from sinkscope.figures.sweep_parts import dots_by_model
from sinkscope.text.sources import DRAWN
from sinkscope.verdict.sweep_tables import SweepTables, several


def _rows(tables: SweepTables) -> pd.DataFrame:
    """Of texts: what is drawn at random has no domain."""
    rows = tables.main
    return several(rows[~rows["condition"].isin(list(DRAWN))], ("model",), "input")


def lacking(tables: SweepTables) -> str | None:
    return "no model read texts of two domains" if _rows(tables).empty else None


@declare("sweep-domains", "sink rate by model and domain of the text", "sweep", lacking=lacking)
def draw(tables: SweepTables) -> Figure:
    return dots_by_model(_rows(tables), "input")[0]

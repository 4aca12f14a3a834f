"""The sink rate against the length of the sequences, with the window as long (WSE figure 3)."""

import pandas as pd
from matplotlib.ticker import FuncFormatter, NullLocator

from sinkscope.figures.spec import declare
from sinkscope.figures.style import Figure
from sinkscope.figures.sweep_parts import lines_by_input
from sinkscope.verdict.sweep_tables import SweepTables, several


def _rows(tables: SweepTables) -> pd.DataFrame:
    rows = tables.rates
    return several(rows[rows["window"] == rows["seq_len"]], ("model", "revision", "input"), "seq_len")


def lacking(tables: SweepTables) -> str | None:
    return "no model was measured at two lengths, with windows as long" if _rows(tables).empty else None


@declare("sweep-lengths", "sink rate against sequence length T = window, by model and input", "sweep", lacking=lacking)
def draw(tables: SweepTables) -> Figure:
    rows = _rows(tables)
    figure, axes, lowest = lines_by_input(rows, "seq_len", ("model", "revision", "epsilon"))
    for ax in axes:
        ax.set_xscale("log", base=2)
        ax.set_xticks(sorted(rows["seq_len"].unique()))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda length, _: f"{length:g}"))
        ax.xaxis.set_minor_locator(NullLocator())
    for ax in lowest:
        ax.set_xlabel("length = window (tokens)")
    return figure

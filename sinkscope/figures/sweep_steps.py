"""The sink rate against the step of the training, by model and input (WSE figure 4, GS figure 2)."""

import pandas as pd

from sinkscope.figures.spec import declare
from sinkscope.figures.steps import step_axis
from sinkscope.figures.style import Figure
from sinkscope.figures.sweep_parts import lines_by_input
from sinkscope.verdict.sweep_tables import NO_STEP, SweepTables, several


def _rows(tables: SweepTables) -> pd.DataFrame:
    rows = tables.rates
    return several(rows[rows["step"] != NO_STEP], ("model", "input", "settings"), "step")


def lacking(tables: SweepTables) -> str | None:
    return "no model has two steps" if _rows(tables).empty else None


@declare("sweep-steps", "sink rate against the training step, by model and input", "sweep", lacking=lacking)
def draw(tables: SweepTables) -> Figure:
    rows = _rows(tables)
    figure, axes, lowest = lines_by_input(rows, "step", ("model", "settings"))
    for ax in axes:
        step_axis(ax, sorted(int(step) for step in rows["step"].unique()))
    for ax in lowest:
        ax.set_xlabel("training step")
    return figure

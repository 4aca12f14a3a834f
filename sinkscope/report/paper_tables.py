"""Tables as the papers print them, from a run's own."""

from collections.abc import Callable

import pandas as pd

from sinkscope.results.run import RunData

DIGITS = 3  # behind the decimal point, as NU prints


def paper_tables(run: RunData) -> dict[str, pd.DataFrame]:
    """The tables that this run's tables allow, by name."""
    tables = {name: table(run) for name, table in _TABLES.items()}
    return {name: table for name, table in tables.items() if table is not None}


def gamma_table(run: RunData) -> pd.DataFrame | None:
    """NU tables 1 and 2: |γ| at the massive coordinates of EPE_0 beside all of its entries, mean ± 2 standard
    deviations (population), a layer a row. The paper counts layers from 1. None where there is no such coordinate.
    """
    gamma = run.tables.get("gamma")
    if gamma is None or not gamma["is_massive_epe"].any():
        return None
    gamma = gamma.assign(magnitude=gamma["gamma"].abs())
    return pd.DataFrame([_gamma_row(int(layer), rows) for layer, rows in gamma.groupby("layer")])


def _gamma_row(layer: int, rows: pd.DataFrame) -> dict[str, str | float]:
    mean, spread = rows["magnitude"].mean(), 2 * rows["magnitude"].std(ddof=0)
    massive = rows[rows["is_massive_epe"]].sort_values("coordinate")
    row: dict[str, str | float] = {
        "layer": f"layer {layer + 1}",
        "baseline": f"{round(mean, DIGITS)} ± {round(spread, DIGITS)}",
    }
    entries = zip(massive["coordinate"], massive["magnitude"], strict=True)
    return row | {f"d={coordinate}": round(float(magnitude), DIGITS) for coordinate, magnitude in entries}


_TABLES: dict[str, Callable[[RunData], pd.DataFrame | None]] = {"gamma": gamma_table}

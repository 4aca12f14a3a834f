"""Tables as the papers print them, from a run's own, and what the papers print beside them."""

from collections.abc import Callable

import pandas as pd

from sinkscope.results.run import RunData

DIGITS = 3  # behind the decimal point, as NU prints

# NU tables 1 and 2, of GPT-2: layer from 1 on → mean ± 2 standard deviations of |γ|, and |γ| at the coordinates at
# which EPE_0 is massive.
GPT2_LAYERS, GPT2_WIDTH, GPT2_MASSIVE = 12, 768, (138, 447)
PRINTED: dict[int, tuple[str, float, float]] = {
    1: ("4.47 ± 22.226", 12.116, 11.064),
    2: ("2.8 ± 6.62", 8.065, 24.468),
    3: ("1.717 ± 5.826", 10.178, 23.047),
    4: ("1.657 ± 5.02", 18.198, 17.149),
    5: ("1.561 ± 4.618", 3.072, 23.854),
    6: ("0.86 ± 1.59", 5.644, 6.142),
    7: ("1.12 ± 2.701", 12.453, 18.17),
    8: ("1.404 ± 3.546", 19.806, 28.01),
    9: ("1.23 ± 3.224", 17.846, 28.01),
    10: ("1.313 ± 3.616", 23.131, 28.42),
    11: ("1.403 ± 4.0", 27.547, 27.691),
    12: ("1.145 ± 2.65", 4.5, 13.59),
}
MISPRINT = (9, 447, 26.014)  # layer and coordinate where NU prints another layer's entry, and what the weights give
HEADINGS = ("baseline", *(f"d={coordinate}" for coordinate in GPT2_MASSIVE))
NEEDS_GPT2 = "GPT-2's weights are needed to compute them: `sinkscope claims gpt2`"


def paper_tables(run: RunData) -> dict[str, pd.DataFrame]:
    """The tables that this run's tables allow, by name."""
    tables = {name: table(run) for name, table in _TABLES.items()}
    return {name: table for name, table in tables.items() if table is not None}


def gamma_table(run: RunData) -> pd.DataFrame | None:
    """NU tables 1 and 2: |γ| at the massive coordinates of EPE_0 beside all of its entries, mean ± 2 standard
    deviations (population), a layer a row. The paper counts layers from 1. Of GPT-2 with what the paper prints beside.
    None where there is no such coordinate.
    """
    gamma = run.tables.get("gamma")
    if gamma is None or not gamma["is_massive_epe"].any():
        return None
    gamma = gamma.assign(magnitude=gamma["gamma"].abs())
    table = pd.DataFrame([_gamma_row(int(layer), rows) for layer, rows in gamma.groupby("layer")])
    return table.merge(printed_gamma(), on="layer") if _is_gpt2(gamma) else table


def printed_gamma() -> pd.DataFrame:
    """What NU prints of GPT-2; its misprint has the entry that the weights give behind it."""
    rows = []
    for layer, (baseline, *entries) in PRINTED.items():
        printed = [f"{entry:g}" for entry in entries]
        if layer == MISPRINT[0]:
            printed[GPT2_MASSIVE.index(MISPRINT[1])] += f" (misprint of {MISPRINT[2]:g})"
        rows.append((f"layer {layer}", baseline, *printed))
    return pd.DataFrame(rows, columns=["layer", *(f"{heading}, NU prints" for heading in HEADINGS)])


def _is_gpt2(gamma: pd.DataFrame) -> bool:
    """By shape and massive coordinates: copies of GPT-2 have other names."""
    massive = tuple(sorted(gamma[gamma["is_massive_epe"]]["coordinate"].unique()))
    shape = (gamma["layer"].nunique(), gamma["coordinate"].nunique())
    return massive == GPT2_MASSIVE and shape == (GPT2_LAYERS, GPT2_WIDTH)


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

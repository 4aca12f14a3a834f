"""Base models beside those that were tuned from them (WSE table 1, right)."""

import pandas as pd

from sinkscope.figures.spec import declare
from sinkscope.figures.style import NAVY, NEUTRAL, VERMILION, Figure
from sinkscope.figures.sweep_parts import dots_by_model, places_in_row
from sinkscope.verdict.sweep_tables import ENDS, SweepTables

BASE, TUNED = "base", "tuned"
LOOKS = {BASE: {"color": NAVY, "marker": "o"}, TUNED: {"color": VERMILION, "marker": "s"}}


def _rows(tables: SweepTables) -> pd.DataFrame:
    """A base and a tuned row for each pair and input; `model` says which pair."""
    main = tables.main
    tuned = main[(main["base"] != "") & (main["base"] != main["model"])]
    pairs = tuned.merge(main, left_on=["base", "input"], right_on=["model", "input"], suffixes=("", "_of_base"))
    names = pairs["model"] + " · " + pairs["input"]
    parts = [
        pd.DataFrame({"model": names, "kind": kind} | {name: pairs[name + suffix] for name in ("sink_rate", *ENDS)})
        for kind, suffix in ((BASE, "_of_base"), (TUNED, ""))
    ]
    return pd.concat(parts, ignore_index=True)


def lacking(tables: SweepTables) -> str | None:
    return "no model names the one that it was tuned from" if _rows(tables).empty else None


@declare("sweep-chat", "sink rate of base models and of those tuned from them", "sweep", lacking=lacking)
def draw(tables: SweepTables) -> Figure:
    rows = _rows(tables)
    figure, ax = dots_by_model(rows, "kind", LOOKS)
    places = places_in_row(rows["kind"])
    for at, (_, pair) in enumerate(rows.groupby("model", sort=False)):
        ax.plot(100 * pair["sink_rate"], at + pair["kind"].map(places), **NEUTRAL)
    return figure

"""The figure of plans for the KV cache: a row for each kind of plan and budget, with its controls."""

import numpy as np
from matplotlib.ticker import PercentFormatter

from sinkscope.commands.kv_plan.plan import COMBINED, FIRST_AND_LAST, NO_SINKS, PREDICTED, RANDOM, SERVED
from sinkscope.figures import plot
from sinkscope.figures.labels import title
from sinkscope.figures.style import GREEN, NAVY, REFERENCE, VERMILION, WIDE, Figure, Look, new_figure
from sinkscope.results.run import RunData

PLAN_DOT: Look = {"linestyle": "none", "markersize": 4.5}
PLAN_LOOKS: dict[str, Look] = {  # shapes differ, so that colors are not needed
    "plan": PLAN_DOT | {"marker": "o", "color": NAVY},
    "plan that combines heads, tokens and bits": PLAN_DOT | {"marker": "*", "color": VERMILION, "markersize": 8},
    "format that vLLM serves": PLAN_DOT | {"marker": "s", "color": GREEN},
    "control": PLAN_DOT | {"marker": "D", "color": "0.45", "mfc": "white", "markersize": 3.5},
}
LARGEST_RATIO = 1.2  # ratios of perplexity above this are beyond the axis, which says them
DENSE_LINE = REFERENCE | {"zorder": 1}


def draw_kv_plan(run: RunData) -> Figure:
    table = run.tables["kv_plan"]
    is_bits = table["plan"].str.fullmatch(r"\d+ bits") & (table["sinks"] == PREDICTED)
    is_served = table["plan"].isin(SERVED) & (table["sinks"] == NO_SINKS)
    table = table[is_bits | is_served | (table["budget"] < 1)]
    kind = table["plan"].str.replace(r" \d+$", "", regex=True).where(table["budget"] < 1, table["plan"])
    table = table.assign(row=kind + table["budget"].map(lambda budget: f", {budget:.0%}" if budget < 1 else ""))
    memory = table.groupby("row")["memory"].mean()
    rows = list(table.sort_values(["budget", "kept"], ascending=False)["row"].drop_duplicates())
    names = [f"{row.split(', ')[0]} ({memory[row]:.0%} of the memory)" for row in rows]
    figure = new_figure(WIDE, 0.2 * len(rows) + 1.1)
    left, right = figure.subplots(1, 2, sharey=True)
    for ax, column in ((left, "ratio"), (right, "kept")):
        plot.name_rows(ax, names)
        for place, row in enumerate(rows):
            some = table[table["row"] == row]
            # draws of a control are one below the other
            offsets = np.linspace(-0.25, 0.25, len(some)) if len(some) > 1 else [0.0]
            for offset, plan in zip(offsets, some.to_dict("records"), strict=True):
                value, low, high = plan[column], plan[f"{column}_low"], plan[f"{column}_high"]
                if column == "ratio" and value > LARGEST_RATIO:
                    beyond = {"transform": ax.get_yaxis_transform(), "ha": "right", "va": "center"}
                    ax.text(0.98, place, f"{value:.1f} →", **beyond)
                elif np.isfinite(value):
                    reach = [[value - low], [high - value]] if np.isfinite([low, high]).all() else None
                    look = PLAN_LOOKS[_kind_of_plan(str(plan["plan"]))]
                    ax.errorbar([value], [place + offset], xerr=reach, elinewidth=1.0, **look)
        ax.axvline(1, **DENSE_LINE)
    left.set_xlim(right=min(LARGEST_RATIO, 1.02 * table["ratio_high"].max()))
    left.set_xlabel("perplexity ÷ dense cache")
    right.set_xlabel("retrieval ÷ dense cache")
    right.set_xlim(left=0)
    right.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    shown = {_kind_of_plan(plan) for plan in table["plan"]}
    return figure.finish(
        title(run, WIDE), {k: v for k, v in PLAN_LOOKS.items() if k in shown} | {"dense": DENSE_LINE}, ncols=3
    )


def _kind_of_plan(plan: str) -> str:
    plain, combined, served, control = PLAN_LOOKS
    if plan.startswith((RANDOM, FIRST_AND_LAST)):
        return control
    return served if plan in SERVED else combined if plan == COMBINED else plain

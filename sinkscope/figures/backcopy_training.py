"""The Bigram-Backcopy task by training step, a column for each arm (VGA figure 5, and figure 6 on the right).

"Others" are tokens that are neither <s> nor triggers. Rows share their scale. A line is the mean over seeds, its band
reaches from the lowest to the highest. Of several layers, the one whose attention the first arm sinks most is drawn.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from sinkscope.figures.arms import Arms
from sinkscope.figures.axes import curve, value_axis
from sinkscope.figures.labels import escape, shorten
from sinkscope.figures.spec import declare
from sinkscope.figures.steps import seeds_words, step_label
from sinkscope.figures.style import HIGHEST, OTHERS, SINK, WIDE, Figure, Look, new_figure
from sinkscope.measuring.summary import WHOLE_MODEL
from sinkscope.training.tables import sinking_layer
from sinkscope.verdict.trained import without_start

NAME_LENGTH = 20  # characters of an arm's name
FEW_MARKERS = 5  # of one line, in a narrow panel
TICKS = 15  # of all panels in a row
ROWS: dict[str, dict[str, tuple[str, Look]]] = {  # name of a row → metric → its name and look
    "loss above\noptimum (nats)": {"backcopy_risk": ("backcopy", SINK), "bigram_risk": ("bigram", OTHERS)},
    "attention of\nothers (share)": {
        "attention_to_start": ("on <s>", SINK),
        "attention_to_triggers": ("on triggers", OTHERS),
        "early_attention_to_start": ("on <s>, before\nany trigger", HIGHEST),
    },
    "value\n(L2 norm)": {
        "start_value_norm": ("<s>", SINK),
        "other_value_norm": ("others", OTHERS),
        "start_attended_norm": ("<s>, gated", HIGHEST),
    },
    "Δlogit\nof <s>": {"delta_logit": ("", SINK)},
}


def lacking(arms: Arms) -> str | None:
    known = arms.rows("training") and not _measures(arms.tables["training"]).empty
    return None if known else "the training table has nothing of the Bigram-Backcopy task"


@declare(
    "backcopy-training",
    "Bigram-Backcopy by training step, of every arm (VGA figs. 5 and 6)",
    "training",
    lacking=lacking,
)
def draw(arms: Arms) -> Figure:
    table = _measures(arms.tables["training"])
    names = list(table["condition"].unique())
    layer = sinking_layer(table)
    figure = new_figure(WIDE, 4.1)
    axes = figure.subplots(len(ROWS), len(names), sharex=True, sharey="row", squeeze=False)
    for column, name in enumerate(names):
        rows = table[(table["condition"] == name) & table["layer"].isin((WHOLE_MODEL, layer))]
        for ax, curves in zip(axes[:, column], ROWS.values(), strict=True):
            _panel(ax, rows, curves)
        axes[0, column].set_title(escape(shorten(name, NAME_LENGTH)))
    _finish(axes)
    figure.supxlabel("training step")
    layers, seeds = table.loc[table["layer"] != WHOLE_MODEL, "layer"].nunique(), table["seed"].nunique()
    where = f"layer {layer}" if layers > 1 else ""
    figure.suptitle(arms.title(where, seeds_words(seeds), without_start(arms.runs.values())))
    return figure


def _measures(training: pd.DataFrame) -> pd.DataFrame:
    """What this figure shows of the table `training`."""
    return training[training["metric"].isin(metric for row in ROWS.values() for metric in row)]


def _panel(ax: Axes, rows: pd.DataFrame, curves: dict[str, tuple[str, Look]]) -> None:
    for metric, (name, look) in curves.items():
        by_step = rows[rows["metric"] == metric].groupby("step")["value"].agg(["mean", "min", "max"])
        curve(ax, by_step["mean"], FEW_MARKERS, label=name, **look)
        ax.fill_between(by_step.index, by_step["min"], by_step["max"], color=look["color"], alpha=0.25, linewidth=0)


def _finish(axes: np.ndarray) -> None:
    for row, (name, curves) in zip(axes, ROWS.items(), strict=True):
        for ax in row:
            value_axis(ax, log="backcopy_risk" in curves, share="attention_to_start" in curves)
        row[0].set_ylabel(name)
        if len(curves) > 1:
            row[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), handlelength=1.8, borderaxespad=0.2)
    ticks = max(2, min(5, TICKS // axes.shape[1]))  # of a panel: steps are logged evenly
    axes[-1, 0].xaxis.set_major_locator(MaxNLocator(ticks, integer=True))
    axes[-1, 0].xaxis.set_major_formatter(FuncFormatter(lambda step, _: step_label(step)))

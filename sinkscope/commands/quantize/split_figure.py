"""The cost of quantization with tokens, coordinates or a prefix spared, or the residual stream rotated.

One row for each setting: a bar with its 95 % interval over sequences, and an open mark for each random control.
"""

from sinkscope.commands.quantize.split_findings import controls, measured
from sinkscope.errors import counted
from sinkscope.figures import plot
from sinkscope.figures.labels import title
from sinkscope.figures.style import GUIDE, NAVY, TEXT, VERMILION, Figure, Look, new_figure
from sinkscope.quantization import settings
from sinkscope.results.metrics import METRICS
from sinkscope.results.run import RunData

BAR: Look = {"facecolor": NAVY, "alpha": 0.75, "linewidth": 0}
INTERVAL: Look = {"color": "black", "linewidth": 1.0}
RANDOM: Look = {"linestyle": "none", "marker": "o", "markersize": 3.4, "mfc": "none", "color": VERMILION}


def draw_quantization_split(run: RunData) -> Figure:
    table, draws = measured(run).drop(settings.FULL), run.tables["quantization_split"]["draw"].max() + 1
    figure = new_figure(TEXT, 0.3 * len(table) + 1.0)
    ax = figure.subplots()
    prefix = run.manifest["quantization"]["prefix"]
    labels = {
        settings.ALL: "everything quantized",
        settings.WEIGHTS: "weights only",
        settings.TOKENS: f"outlier tokens spared ({table['tokens'][settings.TOKENS]:.3g} of a sequence)",
        settings.COORDINATES: f"{table['coordinates'][settings.COORDINATES]} coordinates spared",
        settings.BOTH: "both spared",
        settings.PREFIX: f"a prefix of {counted(len(prefix), 'token')}",
        settings.ROTATION: "rotated",
    }
    plot.name_rows(ax, [labels[str(setting)] for setting in table.index])
    for row, (setting, found) in enumerate(table.iterrows()):
        ax.barh([row], [found["cost"]], height=0.55, **BAR)
        ax.plot([found["cost_low"], found["cost_high"]], [row, row], **INTERVAL)
        random = controls(run, str(setting))["cost"].to_numpy()
        ax.plot(random, [row + 0.36] * len(random), **RANDOM)
    ax.axvline(0.0, **GUIDE)
    ax.set_xlabel(METRICS["cost"].label)
    signs = {"cost": BAR, "95 % interval": INTERVAL, f"random control (up to {counted(draws, 'draw')})": RANDOM}
    return figure.finish(title(run, TEXT), signs, ncols=3)

"""Figures of simulated quantization."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from sinkscope.commands.quantize.findings import probed_settings, setting_label, split_controls, split_settings, whole
from sinkscope.errors import counted
from sinkscope.figures import plot, style
from sinkscope.figures.labels import escape, title, wrapped
from sinkscope.figures.spec import needs
from sinkscope.figures.style import DOT, HIGHEST, NAVY, OTHERS, SINK, SKY, VERMILION, WIDE, Figure, Look, new_figure
from sinkscope.models.projections import NO_LAYER
from sinkscope.quantization import settings as levels
from sinkscope.quantization.settings import ALL_LAYERS, ALONE, FULL
from sinkscope.quantization.sites import INPUT, KEYS, OUTPUT, SCORES, SOFTMAX, SUM, VALUES, WEIGHT
from sinkscope.results.metrics import METRICS
from sinkscope.results.run import RunData
from sinkscope.results.side_by_side import shorten

# --- The cost of quantization: perplexity with the model quantized, by setting, and with single sites quantized.
# Settings are on all sequences, kinds of site and layers of the costliest kinds on the few sequences of the search for
# costly sites. The broken line is full precision on the same sequences.

LONGEST_SITE = 30  # characters in a site, and in a title
COST_INTERVAL: Look = {"color": "0.35", "linewidth": 0.8, "zorder": 1.5}
MASSIVE_MARK = "†"  # after the name of a site
MOST_DRAWN = 10  # number of the costliest modules, and of the costliest single sites, that are drawn
# offsets within a row, so that marks with equal values are all visible
NUDGE = {INPUT: -0.24, WEIGHT: 0.0, OUTPUT: 0.24, SCORES: -0.12, SOFTMAX: 0.12, SUM: 0.0, KEYS: -0.12, VALUES: 0.12}

SETTING_MARK: Look = DOT | {"color": "black", "marker": "X", "markersize": 4.6, "mew": 0}
MARKS: dict[str, Look] = {  # shapes differ, so that colors are not needed
    INPUT: DOT | {"marker": "o", "color": NAVY, "markersize": 4.2},
    WEIGHT: DOT | {"marker": "D", "color": SKY, "markersize": 3.4},
    OUTPUT: DOT | {"marker": "s", "color": VERMILION, "markersize": 3.8, "mfc": "white", "mew": 1.0},
    SCORES: DOT | {"marker": "^", "color": NAVY, "markersize": 4.2},
    SOFTMAX: DOT | {"marker": "v", "color": SKY, "markersize": 4.2},
    SUM: DOT | {"marker": "P", "color": VERMILION, "markersize": 4.2},
    KEYS: DOT | {"marker": "<", "color": NAVY, "markersize": 4.2},
    VALUES: DOT | {"marker": ">", "color": SKY, "markersize": 4.2},
}
FULL_PRECISION = style.REFERENCE | {"zorder": 1}


def draw_quantization_cost(run: RunData) -> Figure:
    alone = probed_settings(run, ALONE)
    kinds, sites = alone[alone["layer"] == ALL_LAYERS], alone[alone["layer"] != ALL_LAYERS].head(MOST_DRAWN)
    modules = list(kinds["site"].unique()[:MOST_DRAWN])
    quantized, probes = whole(run).drop(FULL), float(probed_settings(run, FULL)["perplexity"].iloc[0])
    heights = [1.9 * len(quantized), 1.4 * len(modules), *[len(sites)] * (len(sites) > 0)]
    figure = new_figure(style.COLUMN, 0.14 * sum(heights) + 0.5 * len(heights) + 0.6)
    axes = figure.subplots(len(heights), 1, height_ratios=heights)
    settings = [wrapped(setting_label(run, str(setting)), 26, 2) for setting in quantized.index]
    _row_names(axes[0], "whole model quantized", settings, float(whole(run)["perplexity"][FULL]))
    for place, row in enumerate(quantized.itertuples()):
        _mark(axes[0], row, place, whole(run)["perplexity"][FULL], SETTING_MARK)
    kinds = kinds[kinds["site"].isin(modules)]
    modules = list(kinds.sort_index()["site"].unique())  # in the order of the model
    _row_names(
        axes[1], "one kind of site quantized", [escape(shorten(module, LONGEST_SITE)) for module in modules], probes
    )
    for row in kinds.itertuples():
        part = str(row.part)
        _mark(axes[1], row, modules.index(row.site) + NUDGE[part], probes, MARKS[part])
    names, known = [], run.tables["quantization_sites"]
    massive = known[known["is_massive"]].set_index(["layer", "site", "part"]).index
    for place, row in enumerate(sites.itertuples()):
        where = "" if row.layer == NO_LAYER else f"{row.layer} "
        mark = f" {MASSIVE_MARK}" if (row.layer, row.site, row.part) in massive else ""
        names.append(escape(where + shorten(str(row.site), LONGEST_SITE)) + mark)
        _mark(axes[2], row, place, probes, MARKS[str(row.part)])
    if len(sites):
        _row_names(axes[2], "one site quantized (layer, site)", names, probes)
    for ax in axes:
        table = run.tables["quantization"] if ax is axes[0] else alone
        values = plot.drawn(ax, "x")
        values = values[np.isfinite(values)]  # infinite values are beyond the axis
        plot.wide_x_axis(ax, values.min(), values.max(), room=1.02)
        ax.set_xlabel(f"{METRICS['perplexity'].short}, {counted(table['sequences'].max(), 'sequence')}")
    shown = {str(part) for part in alone["part"]}
    marks = {part: look for part, look in MARKS.items() if part in shown} | {"full precision": FULL_PRECISION}
    if np.isfinite(run.tables["quantization"][["cost_low", "cost_high"]]).any(axis=None):
        marks["95 % over sequences"] = COST_INTERVAL
    if any(name.endswith(MASSIVE_MARK) for name in names):
        marks[f"{MASSIVE_MARK} massive activations"] = DOT
    return figure.finish(title(run, style.COLUMN), marks, ncols=3, columnspacing=1.0, handlelength=1.8)


def _mark(ax: Axes, row: Any, place: float, full: float, look: Look) -> None:
    """Draw a perplexity, with the interval of its cost; that of full precision is taken as fixed."""
    ends = full * np.exp([row.cost_low, row.cost_high])
    if np.isfinite(ends).all():
        ax.plot(ends, [place, place], **COST_INTERVAL)
    ax.plot([row.perplexity], [place], **look)


def _row_names(ax: Axes, title: str, names: list[str], reference: float) -> None:
    """Name the rows, and draw the line of full precision through all of them."""
    ax.set_title(title)
    plot.name_rows(ax, names)
    ax.plot([reference, reference], [-0.5, len(names) - 0.5], **FULL_PRECISION)


# --- The range that 8 bits must cover: largest and median entry of every site by layer, and half a step of its grid.
# Entries below half a step round to zero: where the median is below half a step, most of the tensor is lost.

COLUMNS, RANGES_MOST = 4, 24  # panels in a row, and in the figure

RING: Look = DOT | {"marker": "o", "markersize": 7, "mfc": "none", "mec": VERMILION, "zorder": 5}


@needs(lambda run: len(_sites_in_layers(run)), "the layers of the model contain no linear layer")
def draw_quantization_ranges(run: RunData) -> Figure:
    sites = _sites_in_layers(run)
    # linear layers that read the same tensor, such as query, key and value, share a panel
    alike: dict[tuple, tuple[list[str], str, pd.DataFrame]] = {}
    for (site, part), table in sites.groupby(["site", "part"], sort=False):
        same = (part, *table["layer"], *table["low"], *table["high"], *table["median_abs"])
        names, *_ = alike.setdefault(same, ([], str(part), table))
        names.append(str(site))
    kinds = {}
    for names, part, table in list(alike.values())[:RANGES_MOST]:
        joined = names[0] if len(names) == 1 else ", ".join(name.split(".")[-1] for name in names)
        kinds[f"{shorten(joined, LONGEST_SITE)}\n{part}"] = table
    across = min(COLUMNS, len(kinds))
    figure = new_figure(WIDE, 1.3 * -(-len(kinds) // across) + 0.7)
    axes = plot.panel_grid(figure, len(kinds), across, "layer")
    for ax, table in zip(axes, kinds.values(), strict=True):
        table = table.set_index("layer").sort_index()
        for values, look in ((table["max_abs"], SINK), (table["median_abs"], OTHERS), (table["step"] / 2, HIGHEST)):
            plot.line_by_layer(ax, values, **look)
        massive = table[table["is_massive"]]
        ax.plot(massive.index, massive["max_abs"].to_numpy(float), **RING)
        ax.margins(y=0.12)  # room for the rings
    for place, (ax, name) in enumerate(zip(axes, kinds, strict=True)):  # all are drawn, because they share their axes
        plot.panel(ax, escape(name), "" if place % across else "|entry|", None, log=True)
        ax.title.set_fontsize(7)
    signs = {"largest entry": SINK, "median entry": OTHERS, "half a step: less rounds to zero": HIGHEST}
    signs |= {"massive activations": RING} if sites["is_massive"].any() else {}
    calibration = run.manifest["quantization"]["calibration"]
    return figure.finish(title(run, WIDE, f"{counted(calibration, 'sequence')} of calibration"), signs, ncols=4)


def _sites_in_layers(run: RunData) -> pd.DataFrame:
    """Return the input and output sites of the layers; of a layer's experts, only the site with the widest range."""
    table = run.tables["quantization_sites"]
    table = table[(table["layer"] != NO_LAYER) & (table["part"] != WEIGHT)]
    widest = table.sort_values("max_abs", ascending=False).drop_duplicates(["layer", "site", "part"])
    return widest.sort_index()


# --- The cost with tokens, coordinates or a prefix spared, or the residual stream rotated: a row for each setting, with
# a bar, its 95 % interval over sequences, and an open mark for each random control.

COST_BAR: Look = {"facecolor": NAVY, "alpha": 0.75, "linewidth": 0}
BLACK_INTERVAL: Look = {"color": "black", "linewidth": 1.0}
RANDOM_MARK: Look = DOT | {"marker": "o", "markersize": 3.4, "mfc": "none", "color": VERMILION}


def draw_quantization_split(run: RunData) -> Figure:
    table, draws = split_settings(run).drop(FULL), run.tables["quantization_split"]["draw"].max() + 1
    figure = new_figure(style.TEXT, 0.3 * len(table) + 1.0)
    ax = figure.subplots()
    labels = {
        levels.ALL: "everything quantized",
        levels.WEIGHTS: "weights only",
        levels.TOKENS: f"outlier tokens spared ({table['tokens'][levels.TOKENS]:.3g} of a sequence)",
        levels.COORDINATES: f"{table['coordinates'][levels.COORDINATES]} coordinates spared",
        levels.BOTH: "both spared",
        levels.PREFIX: f"a prefix of {counted(len(run.manifest['quantization']['prefix']), 'token')}",
        levels.ROTATION: "rotated",
    }
    plot.name_rows(ax, [labels[str(setting)] for setting in table.index])
    for place, (setting, row) in enumerate(table.iterrows()):
        ax.barh([place], [row["cost"]], height=0.55, **COST_BAR)
        ax.plot([row["cost_low"], row["cost_high"]], [place, place], **BLACK_INTERVAL)
        random = split_controls(run, str(setting))["cost"].to_numpy()
        ax.plot(random, [place + 0.36] * len(random), **RANDOM_MARK)
    ax.axvline(0.0, **style.GUIDE)
    ax.set_xlabel(METRICS["cost"].label)
    random = f"random control (up to {counted(draws, 'draw')})"
    signs = {"cost": COST_BAR, "95 % interval": BLACK_INTERVAL, random: RANDOM_MARK}
    return figure.finish(title(run, style.TEXT), signs, ncols=3)


# --- What the formats that are served cost: a row for each scheme, with everything in its format, weights or inputs
# alone, and with the inputs of sink tokens or of as many random tokens in full precision.

FORMAT_MARKS: dict[str, Look] = {
    "all": SETTING_MARK,
    "weights alone": MARKS[WEIGHT],
    "inputs alone": MARKS[INPUT],
    "sink tokens spared": DOT | {"marker": "s", "color": VERMILION, "markersize": 4.2, "mfc": "white", "mew": 1.0},
    "random tokens spared": RANDOM_MARK,
}
FORMAT_ROW = 0.2  # distance of the rows of marks of a scheme


def draw_formats_cost(run: RunData) -> Figure:
    table = run.tables["formats"]
    schemes = list(dict.fromkeys(table["scheme"]))
    figure = new_figure(style.TEXT, 0.5 * len(schemes) + 1.1)
    ax = figure.subplots()
    plot.name_rows(ax, schemes)
    rows = {"all": -1.5, "weights": 0.5, "inputs": 1.5}  # of marks within a scheme's
    for row in table.itertuples():
        place = schemes.index(row.scheme) + FORMAT_ROW * rows[row.part]
        look = FORMAT_MARKS["all" if row.part == "all" else f"{row.part} alone"]
        if np.isfinite([row.cost_low, row.cost_high]).all():
            ax.plot([row.cost_low, row.cost_high], [place, place], **COST_INTERVAL)
        ax.plot([row.cost], [place], **look)
        if np.isfinite(row.sink_share):
            below = place + FORMAT_ROW
            ax.plot([row.cost - row.random_share_high, row.cost - row.random_share_low], [below] * 2, **RANDOM_MARK)
            ax.plot([row.cost - row.sink_share], [below], **FORMAT_MARKS["sink tokens spared"])
    ax.axvline(0.0, **style.GUIDE)
    ax.set_xlabel(METRICS["cost"].label)
    signs = FORMAT_MARKS | {"95 % over sequences": COST_INTERVAL}
    return figure.finish(title(run, style.TEXT), signs, ncols=3)

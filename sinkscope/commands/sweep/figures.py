"""Figures of the cells of a sweep."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullLocator

from sinkscope.commands.sweep import factor_study
from sinkscope.commands.sweep.factor_study import LEVEL, STUDY, with_levels
from sinkscope.commands.sweep.tables import ENDS, EPSILON, FORMATS, NO_STEP, SweepTables, several
from sinkscope.figures import plot, style
from sinkscope.figures.labels import escape, heading, seeds_words
from sinkscope.figures.spec import needs
from sinkscope.figures.style import BAND, SINK, TEXT, WIDE, Figure, Look, line_looks, new_figure
from sinkscope.results.findings import SINK as SINK_RATE
from sinkscope.results.metrics import METRICS
from sinkscope.results.papers import LENGTH, TRANSCRIBED, WSE_SETTING, WSE_TABLE_1
from sinkscope.results.side_by_side import shorten
from sinkscope.results.tables import models_or_cells
from sinkscope.text.sources import DRAWN

# --- Shared by the figures of sweeps: sink rates as rows of dots and as lines, with their intervals

ROW_SPREAD = 0.28  # share of the height of a row, on both sides of its middle
PANEL, ACROSS = 1.5, 3  # inches, and panels in a row
LONGEST_LABEL = 36
INTERVAL_WIDTH = 1.1  # points: a bar through a dot
INTERVAL = "95 % over sequences"
RATE, LIMITS = "sink rate at position 0 in %", (-3, 103)


def rows_by_policy(tables: SweepTables) -> pd.DataFrame:
    """Return the rows of `tables.by_policy`; `model` includes the BOS policy if a model has both."""
    rows = tables.by_policy
    rows = rows.assign(name=rows["model"])
    if rows.empty or rows.groupby("model")["bos"].nunique().max() == 1:
        return rows
    short = rows["model"].map(lambda name: shorten(name, LONGEST_LABEL - len(", without BOS")))
    return rows.assign(model=short + ", " + rows["bos"] + " BOS")


def dots_by_model(rows: pd.DataFrame, by: str, looks: dict[str, Look] | None = None) -> tuple[Figure, Axes]:
    """Draw a row for each model, with a dot for each value of `by` at its sink rate, and its 95 % interval."""
    models = list(rows["model"].unique())
    figure = new_figure(TEXT, 0.34 * len(models) + 0.95)
    ax = figure.subplots()
    for (value, offset), plain in zip(places_in_row(rows[by]).items(), line_looks(), strict=False):
        dots = rows[rows[by] == value]
        where = [models.index(model) + offset for model in dots["model"]]
        look = (looks or {}).get(value, plain) | {"linestyle": "none"}
        ax.plot(100 * dots["sink_rate"], where, label=escape(str(value)), **look)
        low, high = (100 * dots.get(end, pd.Series(np.nan, dots.index)) for end in ENDS)
        ax.hlines(where, low, high, color=look["color"], linewidth=INTERVAL_WIDTH)
    plot.name_rows(ax, [escape(shorten(model, LONGEST_LABEL)) for model in models])
    ax.set(xlabel=RATE, xlim=LIMITS)
    plot.grid(ax, "x")
    interval = [Line2D([], [], color="0.3", linewidth=INTERVAL_WIDTH, label=INTERVAL)] if has_ends(rows) else []
    return figure.finish("", [*ax.lines, *interval], ncols=4), ax


def has_ends(rows: pd.DataFrame) -> bool:
    """Return whether any rate has an interval."""
    return bool(np.isfinite(rows.reindex(columns=ENDS).to_numpy(float)).any())


def places_in_row(values: pd.Series) -> dict[str, float]:
    """Return value → offset of its dots from the middle of a row."""
    different = list(values.unique())
    places = np.linspace(-ROW_SPREAD, ROW_SPREAD, len(different)) if len(different) > 1 else np.zeros(len(different))
    return dict(zip(different, map(float, places), strict=True))


def lines_by_input(rows: pd.DataFrame, x: str, label: str, by: Sequence[str] = ("model",)) -> tuple[Figure, list[Axes]]:
    """Draw the sink rate by the column `x`: a panel for each input, with a line for each combination of `by`."""
    # A line is the mean over cells with equal visible settings, with a band from their lowest to their highest rate, or
    # with the 95 % interval over sequences if there is a single cell.
    inputs = list(rows["input"].unique())
    across = min(len(inputs), ACROSS)
    differing = [name for name in by if rows[name].nunique() > 1] or list(by[:1])
    names = rows[differing].astype(str).agg(" · ".join, axis=1)
    rows = rows.assign(line=names.map(lambda text: shorten(text, LONGEST_LABEL)))
    looks = dict(zip(rows["line"].unique(), line_looks(), strict=False))
    legend_across = max(1, min(4, 84 // (max(map(len, looks)) + 8)))  # 84 characters in a row
    height = PANEL * -(-len(inputs) // across) + 0.55 + 0.16 * -(-len(looks) // legend_across)
    figure = new_figure(TEXT, height)
    axes = plot.panel_grid(figure, len(inputs), across, label)
    for ax, reads in zip(axes, inputs, strict=True):
        for name, of_line in rows[rows["input"] == reads].groupby("line", sort=False):
            means = of_line.groupby(x)["sink_rate"].mean()
            plot.curve(ax, 100 * means, label=escape(str(name)), markersize=2.4, **looks[name])
            cells = of_line.reindex(columns=[x, "sink_rate", *ENDS]).groupby(x)
            several, alone = cells.size() > 1, cells[ENDS].mean()
            low = cells["sink_rate"].min().where(several, alone["low"])
            high = cells["sink_rate"].max().where(several, alone["high"])
            ax.fill_between(means.index, 100 * low, 100 * high, color=looks[name]["color"], **BAND)
        ax.set(title=escape(str(reads)), ylim=LIMITS)
        plot.grid(ax, "y")
    figure.supylabel(RATE, fontsize=7)
    handles: dict[str, Line2D | Patch] = {str(line.get_label()): line for ax in axes for line in ax.lines}
    if rows.duplicated(["line", "input", x]).any():
        handles["lowest to highest"] = Patch(color="0.3", **BAND)
    elif has_ends(rows):
        handles[INTERVAL] = Patch(color="0.3", **BAND)
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=legend_across)
    return figure, axes


# --- WSE table 1 as a chart: the sink rate of every model on every input, with the published rate


@needs(lambda tables: len(tables.main), "no cell of `analyze` is done")
def draw_sweep_inputs(tables: SweepTables) -> Figure:
    rows = rows_by_policy(tables)
    figure, ax = dots_by_model(rows, "input")
    if all((rows[name] == value).all() for name, value in {**WSE_SETTING, "seq_len": LENGTH}.items()):
        colors = {line.get_label(): line.get_color() for line in ax.lines}
        places = places_in_row(rows["input"])
        for row, model in enumerate(rows.drop_duplicates("model")["name"]):
            for reads, rate in WSE_TABLE_1.get(tables.papers.get(model, ""), {}).items():
                ax.plot(
                    [rate.value], [row + places.get(reads, 0.0)], marker="o", markersize=8, fillstyle="none",
                    linestyle="none", color=colors.get(reads, style.GRAY), zorder=1,
                )  # fmt: skip
        if tables.papers:
            ax.set_title("rings: as published (WSE)", fontsize=7)
    return figure


# --- The sink rate against the size of the model, a line for each family


def _rows_by_size(tables: SweepTables) -> pd.DataFrame:
    rows = tables.main
    return several(rows[rows["family"] != ""], ("family", "input"), "parameters")


@needs(lambda tables: len(_rows_by_size(tables)), "no family has models of two sizes")
def draw_sweep_sizes(tables: SweepTables) -> Figure:
    figure, axes = lines_by_input(_rows_by_size(tables), "parameters", "parameters", ("family",))
    plot.log_axis(axes[0], "x")  # the panels share the axis
    return figure


# --- The sink rate against the step of the training, by model and input (WSE figure 4, GS figure 2)


def _rows_by_step(tables: SweepTables) -> pd.DataFrame:
    rows = tables.rates
    return several(rows[rows["step"] != NO_STEP], ("model", "input", "settings"), "step")


@needs(lambda tables: len(_rows_by_step(tables)), "no model has two steps")
def draw_sweep_steps(tables: SweepTables) -> Figure:
    rows = _rows_by_step(tables)
    figure, axes = lines_by_input(rows, "step", "training step", ("model", "settings"))
    for ax in axes:
        plot.step_axis(ax, sorted(map(int, rows["step"].unique())))
    return figure


# --- The sink rate against its threshold ε, from the stored window masses (WSE figure 3)


def _rows_by_epsilon(tables: SweepTables) -> pd.DataFrame:
    table = tables.tables.get(EPSILON)
    if table is None:
        return pd.DataFrame()
    models = rows_by_policy(tables).set_index("cell")["model"]
    rows = table[table["cell"].isin(models.index)]
    return rows.assign(model=rows["cell"].map(models))


@needs(lambda tables: len(_rows_by_epsilon(tables)), "no cell has measured attention")
def draw_sweep_epsilon(tables: SweepTables) -> Figure:
    figure, axes = lines_by_input(_rows_by_epsilon(tables), "epsilon", "ε (dashed: of the cells)")
    for ax in axes:
        for epsilon in tables.main["epsilon"].unique():
            ax.axvline(epsilon, **style.GUIDE)
    return figure


# --- The sink rate against the length of the sequences, with a window of this length (WSE figure 3)


def _rows_by_length(tables: SweepTables) -> pd.DataFrame:
    rows = tables.rates
    return several(rows[rows["window"] == rows["seq_len"]], ("model", "revision", "input"), "seq_len")


@needs(lambda tables: len(_rows_by_length(tables)), "no model was measured at two lengths with windows of that length")
def draw_sweep_lengths(tables: SweepTables) -> Figure:
    rows = _rows_by_length(tables)
    figure, axes = lines_by_input(rows, "seq_len", "length = window (tokens)", ("model", "revision", "epsilon"))
    for ax in axes:
        ax.set_xscale("log", base=2)
        ax.set_xticks(sorted(rows["seq_len"].unique()))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda length, _: f"{length:g}"))
        ax.xaxis.set_minor_locator(NullLocator())
    return figure


# --- The sink rate by the domain of the text (WSE figure 9)


def _rows_by_domain(tables: SweepTables) -> pd.DataFrame:
    rows = rows_by_policy(tables)
    texts = rows[~rows["condition"].isin(list(DRAWN))]  # a randomly drawn input has no domain
    return several(texts, ("model",), "input")


@needs(lambda tables: len(_rows_by_domain(tables)), "no model read texts of two domains")
def draw_sweep_domains(tables: SweepTables) -> Figure:
    return dots_by_model(_rows_by_domain(tables), "input")[0]


# --- Base models and the models that were tuned from them (WSE table 1, right)


def _chat_rows(tables: SweepTables) -> pd.DataFrame:
    """Return a base and a tuned row for each pair and input; `model` names the pair and the input."""
    main = tables.main
    tuned = main[(main["base"] != "") & (main["base"] != main["model"])]
    pairs = tuned.merge(main, left_on=["base", "input"], right_on=["model", "input"], suffixes=("", "_of_base"))
    names = pairs["model"] + " · " + pairs["input"]
    parts = [
        pd.DataFrame({"model": names, "kind": kind} | {name: pairs[name + suffix] for name in ("sink_rate", *ENDS)})
        for kind, suffix in (("base", "_of_base"), ("tuned", ""))
    ]
    return pd.concat(parts, ignore_index=True)


@needs(lambda tables: len(_chat_rows(tables)), "no model names its base model")
def draw_sweep_chat(tables: SweepTables) -> Figure:
    rows = _chat_rows(tables)
    looks: dict[str, Look] = {
        "base": {"color": style.NAVY, "marker": "o"},
        "tuned": {"color": style.VERMILION, "marker": "s"},
    }
    figure, ax = dots_by_model(rows, "kind", looks)
    places = places_in_row(rows["kind"])
    for row, (_, pair) in enumerate(rows.groupby("model", sort=False)):
        ax.plot(100 * pair["sink_rate"], row + pair["kind"].map(places), **style.NEUTRAL)
    return figure


# --- Scores on benchmarks against the sink rate, a panel for each task (WSE figure 10)


def _benchmarks_rows(tables: SweepTables) -> pd.DataFrame:
    """Return the scores of models with a known sink rate (first input, same revision) if there are two models."""
    scores, rates = tables.scores, tables.rates
    if scores.empty or rates.empty:
        return pd.DataFrame()
    first = rates[(rates["input"] == rates["input"].iloc[0]) & (rates["settings"] == rates["settings"].iloc[0])]
    rows = scores.merge(first[["model", "revision", "input", "sink_rate"]], on=["model", "revision"])
    return rows if len(rows.drop_duplicates(["model", "revision"])) > 1 else rows[:0]


@needs(lambda tables: len(_benchmarks_rows(tables)), "no two models have a score and a sink rate")
def draw_sweep_benchmarks(tables: SweepTables) -> Figure:
    rows = _benchmarks_rows(tables)
    alone = rows["family"] == ""
    rows = rows.assign(line=rows["family"].where(~alone, rows["model"]))
    tasks = list(rows["task"].unique())
    looks = dict(zip(rows["line"].unique(), line_looks(), strict=False))
    across = min(len(tasks), ACROSS)
    figure = new_figure(TEXT if across > 1 else TEXT * 0.6, PANEL * -(-len(tasks) // across) + 0.9)
    axes = plot.panel_grid(figure, len(tasks), across, RATE)
    for ax, task in zip(axes, tasks, strict=True):
        for name, points in rows[rows["task"] == task].groupby("line", sort=False):
            points = points.sort_values("parameters")
            look = looks[name] | ({} if len(points) > 1 else {"linestyle": "none"})
            look |= {"label": escape(shorten(str(name), LONGEST_LABEL)), "capsize": 1.5}
            ax.errorbar(100 * points["sink_rate"], points["score"], yerr=points["error"], **look)
        ax.set(title=escape(str(task)), xlim=LIMITS)
        plot.grid(ax, "x")
    axes[0].set_ylabel("score (± standard error)")
    return figure.finish("", axes[0].get_legend_handles_labels()[0], ncols=3)


# --- The sink rate at the end of each training of a sweep, a row for each level of the factor, with WSE's rate

SUMS_TO_ONE = 0.1  # tolerance, which is larger than the share of a learned bias
PUBLISHED_SHAPES = {"": ("D", "WSE, 60M"), TRANSCRIBED: ("s", "WSE, 60M, transcribed")}  # mark of a rate → shape, label


def _factor_ends(tables: SweepTables) -> pd.DataFrame:
    table = tables.tables.get(STUDY)
    end = pd.DataFrame() if table is None else factor_study.at_the_end(with_levels(table))
    return end if "sink_rate" in end else pd.DataFrame()


@needs(lambda tables: len(_factor_ends(tables)), "no cell is a training with sink rates by step")
def draw_sweep_factor(tables: SweepTables) -> Figure:
    end = _factor_ends(tables)
    levels = list(dict.fromkeys(end.index.get_level_values(LEVEL)))
    figure = new_figure(WIDE, 0.9 + 0.17 * len(levels))
    ax = figure.subplots()
    place = {level: row for row, level in enumerate(levels)}
    rows = np.array([place[level] for level in end.index.get_level_values(LEVEL)])
    by_level = end.groupby(level=LEVEL, sort=False)["sink_rate"]
    size = by_level.transform("size")
    offsets = 0.8 * (by_level.cumcount() - (size - 1) / 2) / size  # vertical offsets, so that equal rates are visible
    ax.plot(end["sink_rate"], rows + offsets.to_numpy(), "o", color=SINK["color"], markersize=2, label="each seed")
    means = by_level.mean()
    look = {"color": SINK["color"], "markersize": 8, "markeredgewidth": 1.8}
    ax.plot(means, [place[level] for level in means.index], "|", label="mean", **look)
    known = [(rate, row) for row, level in enumerate(levels) if (rate := factor_study.published(level))]
    for mark, (shape, name) in PUBLISHED_SHAPES.items():
        points = [(rate.value, row) for rate, row in known if rate.mark == mark]
        if points:
            look = {"color": style.HIGHEST["color"], "markersize": 4, "fillstyle": "none"}
            ax.plot(*zip(*points, strict=True), shape, label=name, **look)
    key, names = factor_study.without_key(levels)
    plot.name_rows(ax, [escape(shorten(name, 40)) for name in names])
    ax.set_ylabel(escape(key))
    ax.set_xlim(LIMITS)
    totals = end.get("total_weight", pd.Series(dtype=float)).dropna()
    proxy = "; |sim| ÷ Σ|sim| where attention is not softmax" * bool(((totals - 1).abs() > SUMS_TO_ONE).any())
    ax.set_xlabel(f"sink rate at {factor_study.measured_at(tables.tables[STUDY])} in %{proxy}")
    ax.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=4)
    return figure


# --- Trainings of a sweep by step, a panel for each level of the factor: sink rate and loss (WSE figures 4 to 8)


def _training_rows(tables: SweepTables, metric: str) -> pd.DataFrame:
    table = tables.tables.get(STUDY)
    return pd.DataFrame() if table is None else with_levels(table)[lambda rows: rows["metric"] == metric]


@needs(lambda tables: len(_training_rows(tables, "sink_rate")), "no cell is a training with sink rates by step")
def draw_sweep_training_sink(tables: SweepTables) -> Figure:
    rows = _training_rows(tables, "sink_rate")
    name = f"sink rate at\n{factor_study.measured_at(rows)} in %"
    figure, axes, of_all = _panels(rows.assign(value=100 * rows["value"]), name, SINK)
    for ax in axes:
        ax.axhline(SINK_RATE, color="0.55", linestyle="--", linewidth=0.8)
    top = max(1.5 * SINK_RATE, 100 * rows["value"].max())
    axes[0].set_ylim(-0.03 * top, 1.03 * top)  # the panels share the axis
    return figure.finish(heading(*of_all, f"dashed: {SINK_RATE:g} %, the limit for a sink"))


@needs(lambda tables: len(_training_rows(tables, "loss")), "no cell is a training")
def draw_sweep_training_loss(tables: SweepTables) -> Figure:
    rows = _training_rows(tables, "loss")
    figure, _, of_all = _panels(rows, METRICS["loss"].label, style.OTHERS)
    return figure.finish(heading(*of_all))


def _panels(rows: pd.DataFrame, name: str, look: Look) -> tuple[Figure, list[Axes], list[str]]:
    """Return figure, panels, and what all panels share: the setting whose values are their titles, and the seeds."""
    levels = list(dict.fromkeys(rows[LEVEL]))
    across = min(4, len(levels))
    key, names = factor_study.without_key(levels)
    titles = ["\n".join(escape(shorten(part, 24)) for part in name.split()) for name in names]
    panel = 0.92 + 0.13 * max(title.count("\n") + 1 for title in titles)  # inches, with its title
    figure = new_figure(WIDE, 0.9 + panel * -(-len(levels) // across))
    axes = plot.panel_grid(figure, len(levels), across)
    for ax, level, title in zip(axes, levels, titles, strict=True):
        plot.curve_with_range(ax, rows[rows[LEVEL] == level], 5, **look)
        ax.set_title(title)
        plot.value_axis(ax, "")
    plot.step_axis(axes[0], sorted(rows["step"].unique()))
    figure.supxlabel("training step")
    figure.supylabel(name)
    counts = rows.groupby(LEVEL)["seed"].nunique()
    seeds = seeds_words(counts.max(), counts.min())
    return figure, axes, [f"by {key}", seeds] if key else [seeds]


# --- What each format costs each model: a cell for each, with the rise of perplexity in percent and its interval. Gray
# cells are formats that do not apply. Models are those of a sweep.

LEAST_RISE, MOST_RISE = 0.01, 1.0  # of perplexity: the palest and the darkest cell
LONGEST_MODEL = 16  # characters


@needs(lambda tables: FORMATS in tables.tables, "no cell measured number formats")
def draw_formats_models(tables: SweepTables) -> Figure:
    table = tables.tables[FORMATS]
    table = table[table["part"] == "all"]
    table = table.assign(model=models_or_cells(table))
    schemes, models = list(dict.fromkeys(table["scheme"])), list(dict.fromkeys(table["model"]))
    figure = new_figure(1.0 + 0.95 * len(models), 0.33 * len(schemes) + 0.75)
    ax = figure.subplots()
    rows = table.set_index(["scheme", "model"])
    rises = np.expm1(rows["cost"].unstack().reindex(index=schemes, columns=models))
    scale = LogNorm(LEAST_RISE, MOST_RISE, clip=True)
    colors = style.SEQUENTIAL.with_extremes(bad="0.9")
    ax.imshow(rises.clip(lower=LEAST_RISE / 2), cmap=colors, norm=scale, aspect="auto")
    for (scheme, model), row in rows.iterrows():
        value, *ends = (100 * math.expm1(row[name]) for name in ("cost", "cost_low", "cost_high"))
        text = f"{value:+.{1 if abs(value) < 100 else 0}f} %"
        if np.isfinite(ends).all():
            text += "\n" + " to ".join(f"{end:.{1 if abs(value) < 100 else 0}f}" for end in ends)
        color = "white" if scale(max(value / 100, LEAST_RISE)) > 0.45 else "black"
        place = models.index(model), schemes.index(scheme)
        ax.text(*place, text, ha="center", va="center", size=6, color=color, linespacing=1.1)
    ax.set_xticks(np.arange(len(models))[1:] - 0.5, minor=True)
    ax.set_yticks(np.arange(len(schemes))[1:] - 0.5, minor=True)
    ax.grid(which="minor", color="white", linewidth=1.5)
    ax.tick_params(which="minor", length=0)
    ax.set_xticks(range(len(models)), [escape(shorten(model, LONGEST_MODEL)) for model in models])
    ax.set_yticks(range(len(schemes)), schemes)
    ax.tick_params(length=0, top=False, labeltop=True, bottom=False, labelbottom=False)
    ax.spines[:].set_visible(False)
    ax.set_xlabel("rise of perplexity, with its 95 % interval over texts")
    return figure.finish("")

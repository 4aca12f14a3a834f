"""Figures of trainings: by step, and of the arms of a retrofit, a training or the Bigram-Backcopy task."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, PercentFormatter

from sinkscope.commands.train.findings import without_start
from sinkscope.figures import plot, style
from sinkscope.figures.labels import escape, heading, places, seeds_words, token_labels, wrapped
from sinkscope.figures.plot import ACROSS, arm_looks, signs_of
from sinkscope.figures.spec import needs
from sinkscope.figures.style import COLUMN, OTHERS, SINK, VERMILION, WIDE, Figure, Look, new_figure
from sinkscope.results.findings import SINK as SINK_RATE
from sinkscope.results.metrics import METRICS, PERPLEXITY_IN_W8A8
from sinkscope.results.run import RunData
from sinkscope.results.side_by_side import model_name, shorten
from sinkscope.results.tables import WHOLE_MODEL
from sinkscope.results.trainings import HELD_OUT, UNTOUCHED, courses, sinking_layer

# --- The arms of a training and their looks: an arm looks the same in every figure

FAINT: Look = {"marker": "", "linewidth": 0.6, "alpha": 0.8}  # later positions


@dataclass(frozen=True)
class TrainedArms:
    """The arms of one training."""

    tables: Mapping[str, pd.DataFrame]  # the tables of the training, each with all arms (column `condition`) and seeds
    runs: Mapping[str, RunData]  # arm → its run on held-out text, with the first seed

    def has(self, *tables: str) -> bool:
        """Return whether these tables exist and have rows."""
        return all(len(self.tables.get(table, ())) for table in tables)

    def all_have(self, *tables: str) -> bool:
        """Return whether every arm's run has these tables."""
        return all(set(tables) <= set(run.tables) for run in self.runs.values())

    @cached_property
    def courses(self) -> dict[tuple[str, int], pd.DataFrame]:
        return courses(self.tables["training"], HELD_OUT)

    @property
    def seeds(self) -> int:
        """The number of seeds in the tables."""
        return len({seed for table in self.tables.values() if "seed" in table for seed in table["seed"]})

    def seeds_text(self, of_runs: bool = False) -> str:
        """Return «3 seeds», or «first of 3 seeds» for a figure of runs, which have the first seed."""
        if self.seeds < 2:
            return "1 seed"
        return f"first of {self.seeds} seeds" if of_runs else f"{self.seeds} seeds"

    def title(self, *more: str, width: float = WIDE) -> str:
        """Return a title with the model from which all arms were made, for a figure `width` inches wide."""
        return heading(model_name(next(iter(self.runs.values())).model), *more, width=width)


# --- Perplexity, outliers and sinks as bars: a bar for each arm, a panel for each metric.
# A bar is the mean over seeds, a dot one seed, the whisker one standard deviation (n − 1). The broken line is the first
# arm: the unchanged model, or the plain training. A metric that is 0 in every arm, or was not measured, has no panel.

# metrics of the table `retrofit`
BAR_METRICS = (
    "perplexity", PERPLEXITY_IN_W8A8, "layer_inf_norm", "kurtosis_with_norms", "sink_rate", "massive_count",
)  # fmt: skip
NAME_LETTERS = 18  # characters in a line of an arm's name
ONE_SEED: Look = {"color": "black", "linestyle": "none", "marker": "o", "markersize": 2.4, "mfc": "white", "mew": 0.6}
WHISKER: Look = {"color": "black", "linestyle": "none", "elinewidth": 0.8, "capsize": 2, "capthick": 0.8}


@needs(lambda arms: arms.has("retrofit"), "no arm of this retrofit has been measured")
def draw_retrofit_bars(arms: TrainedArms) -> Figure:
    table = arms.tables["retrofit"]
    looks = arm_looks(table["condition"].unique(), UNTOUCHED)
    values = {name: table[table["metric"] == name] for name in BAR_METRICS}
    shown = [name for name, rows in values.items() if (rows["value"] != 0).any()]
    across = min(ACROSS, max(len(shown), 1))
    down = -(-max(len(shown), 1) // across)
    figure = new_figure(WIDE * max(across, 2) / ACROSS, down * (0.24 * len(looks) + 0.42) + 0.5)
    axes = figure.subplots(down, across, sharey=True, squeeze=False)
    for ax, name in zip(axes.flat, shown, strict=False):
        metric, rows = METRICS[name], values[name]
        by_arm = rows.groupby("condition")["value"]
        means, spreads = by_arm.mean().reindex(list(looks)), by_arm.std().reindex(list(looks))
        lengths = np.where(np.isfinite(means), means, 0.0)  # an infinite value has its sign and no bar
        has_spread = bool(spreads.notna().any())
        ax.set_xlabel(metric.axis)
        ax.tick_params(axis="y", length=0)
        ax.barh(range(len(looks)), lengths, height=0.66, color=[look["color"] for look in looks.values()])
        ax.axvline(float(lengths[0]), **style.REFERENCE | {"zorder": 3})
        if has_spread:
            ax.errorbar(lengths, range(len(looks)), xerr=spreads.fillna(0), zorder=4, **WHISKER)
        ends = []
        for row, (arm, length) in enumerate(zip(looks, lengths, strict=True)):  # from the top
            single = rows.loc[(rows["condition"] == arm) & np.isfinite(rows["value"]), "value"]
            if len(single) > 1:
                ax.plot(single, np.full(len(single), row), zorder=5, **ONE_SEED)
            text = "∞" if np.isinf(means[arm]) else metric.text_with_spread(means[arm], spreads[arm])
            ends.append(float(max([length + np.nan_to_num(spreads[arm]), *single])))
            number = plot.write_beside(ax, text, ends[-1], row, space=4, size=6.5)
            number.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.4})  # hides the line of the first arm
        limit = (1.8 if has_spread else 1.45) * (max(ends) or 1.0)  # with room for the numbers
        is_share = metric.unit == "share"
        ax.set_xlim(0, limit)
        ax.xaxis.set_major_locator(FixedLocator([0, 0.5, 1]) if is_share and limit > 1 else MaxNLocator(3))
        if is_share:
            ax.xaxis.set_major_formatter(PercentFormatter(1))
        plot.grid(ax, "x")
    for ax in list(axes.flat)[len(shown) :]:
        ax.set_visible(False)
    plot.name_rows(axes[0, 0], [wrapped(arm, NAME_LETTERS, 2) for arm in looks], shaded=False)
    signs = {escape(shorten(next(iter(looks)), NAME_LETTERS)): style.REFERENCE}
    if arms.seeds > 1:
        signs["one seed"] = ONE_SEED
        signs["± standard deviation of seeds"] = {"color": "black", "linewidth": 0.8, "marker": "|"}
    nothing = [METRICS[name].short for name, rows in values.items() if len(rows) and name not in shown]
    return figure.finish(arms.title(arms.seeds_text(), f"{', '.join(nothing)}: 0" if nothing else ""), signs, ncols=3)


# --- Sinks and norms by layer, the arms of a training side by side (GS figure 5).
# Sink rate, and the norms of the outputs of layer, MLP and attention: position 0 (with markers) and the mean over the
# other early tokens (thin). With register tokens, position 0 is the first register. Layers count from 0. A site
# that a family lacks has no panel.

SITES_WITH_NORMS = {"layer_out": "layer output", "mlp_out": "MLP output", "attn_out": "attention output"}  # site → name


@needs(lambda arms: arms.all_have("attention", "activation"), "not all arms have the tables attention and activation")
@needs(
    lambda arms: next(iter(arms.runs.values())).tables["activation"]["layer"].nunique() > 1,
    "the model has only one layer",
)
def draw_retrofit_layers(arms: TrainedArms) -> Figure:
    looks = arm_looks(arms.runs, UNTOUCHED)
    figure = new_figure(WIDE, 4.2 + 0.15 * (1 + len(looks) // 4))
    sites = {site for run in arms.runs.values() for site in run.tables["activation"]["site"]}
    panels = {"": METRICS["sink_rate"].short} | {site: name for site, name in SITES_WITH_NORMS.items() if site in sites}
    axes = plot.panel_grid(figure, len(panels), 2, "layer", sharey=False)
    for ax, (site, name) in zip(axes, panels.items(), strict=True):
        column, unit = ("norm_mean", "L2 norm") if site else ("sink_rate", "share of heads")
        for arm, run in arms.runs.items():
            activation = run.tables["activation"]
            rows = activation[activation["site"] == site] if site else run.tables["attention"]
            first = rows["position"] == 0
            means = [rows[chosen].groupby("layer")[column].mean() for chosen in (~first, first)]  # also over heads
            plot.line_by_layer(ax, means[0], zorder=2, **looks[arm] | FAINT)
            plot.line_by_layer(ax, means[1], zorder=3, **looks[arm])
        plot.panel(ax, name, unit, None, log=bool(site), share=not site)
    most = max(int(run.tables["attention"]["position"].max()) for run in arms.runs.values())
    signs = signs_of(looks) | {"position 0": {"color": "0.3", "marker": "o"}}
    signs |= {f"mean over {places(1, most)}": FAINT | {"color": "0.3", "alpha": 1}}
    return figure.finish(arms.title(arms.seeds_text(of_runs=True)), signs, ncols=4)


# --- Loss, the distance of the new parameters from their start, and metrics of the probe by training step, for all
# arms. A line is the mean over seeds, and its band reaches from the lowest to the highest.

# metrics of the whole model that `--probe` logs
PROBE_METRICS = ("held_out_loss", "first_norm", "massive_count", "value_gradient_norm", "sink_rate")


@needs(lambda arms: arms.has("training"), "nothing was logged in training: take a smaller --log-every")
def draw_retrofit_training(arms: TrainedArms) -> Figure:
    training = arms.tables["training"]
    whole = training[training["layer"] == WHOLE_MODEL]
    gates = training[training["metric"] == "gate_displacement_mean"]
    panels = [("training loss", "nats per token", whole[whole["metric"] == "loss"])]
    if len(gates):
        panels.append(("distance of new parameters from their start", "‖p − p₀‖,\nmean over heads", gates))
    if (whole["metric"] == "held_out_loss").any():
        logged = [name for name in PROBE_METRICS if (whole["metric"] == name).any()]
        panels += [(METRICS[name].short, METRICS[name].unit, whole[whole["metric"] == name]) for name in logged]
    across, down = min(ACROSS, len(panels)), -(-len(panels) // ACROSS)
    figure = new_figure(WIDE if len(panels) > 1 else style.TEXT, 0.5 + 2.1 * down)
    axes = plot.panel_grid(figure, len(panels), across, "training step", sharey=False)
    for ax, (name, unit, table) in zip(axes, panels, strict=True):
        for arm, look in arm_looks(training["condition"].unique(), UNTOUCHED).items():
            rows = table[table["condition"] == arm]
            if len(rows):
                means = rows.groupby(["step", "seed"])["value"].mean()  # over layers
                plot.curve_with_range(ax, means.reset_index(), **look)
        plot.panel(ax, name, unit, None)
    plot.step_axis(axes[0], sorted(training["step"].unique().tolist()))
    band = "bands: lowest to highest" if arms.seeds > 1 else ""
    return figure.finish(arms.title(arms.seeds_text(), band), axes[0].lines, ncols=4)


# --- The sink rate against the held-out loss that an arm has reached, a line for each seed. Arms are compared at equal
# loss, because one that learns more slowly also has its sink later. Many seeds are pale, beside their mean by step.

MANY_SEEDS = 8


@needs(lambda arms: arms.courses, "no arm has a held-out loss by step: train with --probe attention")
def draw_retrofit_equal_loss(arms: TrainedArms) -> Figure:
    looks = arm_looks(dict.fromkeys(arm for arm, _ in arms.courses), UNTOUCHED)
    figure = new_figure(style.TEXT, 3.0)
    ax = figure.subplots()
    has_means = arms.seeds > MANY_SEEDS
    single: Look = {"linewidth": 0.4, "alpha": 0.35, "markersize": 2.5} if has_means else {"linewidth": 0.9}
    lines = [(arm, course, single) for (arm, _), course in arms.courses.items()]
    for arm in looks if has_means else ():
        of_seeds = [course for (name, _), course in arms.courses.items() if name == arm]
        lines.append((arm, pd.concat(of_seeds).groupby(level=0).mean(), {}))
    for arm, course, how in lines:
        ax.plot(course["loss"], 100 * course["rate"], **looks[arm] | how | {"marker": ""})
        ax.plot(course["loss"].iloc[-1:], 100 * course["rate"].iloc[-1:], **looks[arm] | how | {"label": None})
    plot.value_axis(ax, f"{METRICS[HELD_OUT[1]].short} in %")
    ax.axhline(SINK_RATE, **style.REFERENCE)
    ax.invert_xaxis()  # training goes to the right
    label = METRICS[HELD_OUT[0]].label
    later = pd.concat([course["loss"].iloc[1:] for course in arms.courses.values()])
    if len(later) > len(arms.courses):  # the loss of random weights would take most of the axis
        margin = 0.05 * (later.max() - later.min())
        ax.set_xlim(later.max() + margin, later.min() - margin)
        label += ", from the second log on"
    ax.set_xlabel(label)
    marks = "thick: mean by step · marks: the end of training" if has_means else "marks: the end of training"
    title = arms.title(arms.seeds_text(), marks, width=style.TEXT)
    return figure.finish(title, signs_of(looks), ncols=4)


# --- Value drain and gates of each arm (VGA figures 1 and 4, GS §5)
# Panels: values as projected and as attended to (norm of each head ÷ its mean over the later positions), and gates;
# all are means over heads. Without gates the values are the same, in one panel. A line is position 0 by layer, over a
# band of the later positions in all arms; of a model with one layer, the line is by position. With register tokens,
# position 0 is the first register.

LATER_POSITIONS: Look = {"facecolor": "0.87", "linewidth": 0}


@needs(lambda arms: arms.all_have("geometry"), "not all arms have the table geometry")
def draw_retrofit_values(arms: TrainedArms) -> Figure:
    looks, has_gates = arm_looks(arms.runs, UNTOUCHED), any("gate" in run.tables for run in arms.runs.values())
    names = [METRICS["raw_value_drain"].short, "attended value norm ÷ others", "gate"] if has_gates else []
    names = names or [METRICS["value_drain"].short]
    values = {}  # arm → values as projected, values as attended to and gates, layers × positions
    for arm, run in arms.runs.items():
        attended = relative_to_later(run.tables["geometry"], "value_norm")
        shown = [attended, attended]
        if "gate" in run.tables:
            gate = run.tables["gate"]
            by_layer = gate.groupby(["layer", "position"])["gate"].mean().unstack()
            shown = [relative_to_later(gate, "raw_value_norm"), attended, by_layer]
        values[arm] = shown[: len(names)]
    is_deep = any(len(by_layer) > 1 for shown in values.values() for by_layer in shown)
    figure = new_figure(COLUMN, 0.75 + 1.15 * len(names) + 0.15 * -(-len(looks) // 2))
    axes = plot.panel_grid(figure, len(names), 1, "layer, at position 0" if is_deep else "position", sharey=False)
    for place, (ax, name) in enumerate(zip(axes, names, strict=True)):
        drawn = {arm: shown[place] for arm, shown in values.items() if place < len(shown)}
        for arm, by_layer in drawn.items():
            plot.line_by_layer(ax, by_layer[0] if is_deep else by_layer.iloc[0], **looks[arm])
            if is_deep and name == "gate":
                plot.line_by_layer(ax, by_layer.drop(columns=0).mean(axis=1), **looks[arm] | FAINT)
        if is_deep and name != "gate":
            later = pd.concat([by_layer.drop(columns=0) for by_layer in drawn.values()], axis=1)
            plot.band_by_layer(
                ax, later.quantile(0.1, axis=1), later.quantile(0.9, axis=1), **LATER_POSITIONS | {"zorder": 0}
            )
        ax.axhline(1.0, **style.NEUTRAL)
        if plot.panel(ax, name, "factor" if name == "gate" else "ratio of norms", None):
            ax.set_ylim(0, 1.08 * max(1.0, np.nanmax(plot.drawn(ax, "y"))))
    signs = signs_of(looks)
    if is_deep:
        signs["later positions, 10–90 %"] = LATER_POSITIONS
        signs |= {"later positions, mean": FAINT | {"color": "0.3"}} if has_gates else {}
    return figure.finish(arms.title(arms.seeds_text(of_runs=True), width=COLUMN), signs, ncols=2)


def relative_to_later(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """Return layers × positions: values ÷ their mean over later positions, averaged over heads (`value_drain` at 0)."""
    heads = table.pivot(index=["layer", "head"], columns="position", values=column)
    return heads.div(heads.drop(columns=0).mean(axis=1), axis=0).groupby("layer").mean()


# --- Attention of the arms of the Bigram-Backcopy task on one sequence (VGA figures 4 and 6).
# Upper row: a map of attention weights for each arm, in the head that attends most to <s>. Lower row: the norm of the
# value of each token; bars are values as projected, lines as attended to if there is a gate on the values.

SHORT_NAME = 20  # characters of an arm's name
TOKEN_SIZE = 5.5  # points: font size of the tokens


@needs(lambda arms: arms.has("attention_maps", "value_norms"), "there is no attention map")
def draw_backcopy_maps(arms: TrainedArms) -> Figure:
    attention_maps, value_norms = arms.tables["attention_maps"], arms.tables["value_norms"]
    names = list(attention_maps["condition"].unique())
    figure = new_figure(WIDE, 0.75 + 2.5 * WIDE / (len(names) + 0.4))
    axes = figure.subplots(2, len(names), sharex="col", sharey="row", squeeze=False, height_ratios=[3, 2])
    for (above, below), name in zip(axes.T, names, strict=True):
        maps = attention_maps[attention_maps["condition"] == name]
        later = maps[(maps["key"] == 0) & (maps["query"] > 0)]
        layer, head = later.groupby(["layer", "head"])["weight"].mean().idxmax()  # whose queries attend most to <s>
        norms = value_norms[(value_norms["condition"] == name) & (value_norms["layer"] == layer)]
        norms = norms.sort_values("position")
        weights = plot.square(maps[(maps["layer"] == layer) & (maps["head"] == head)], len(norms))
        image = above.imshow(weights, cmap=style.SEQUENTIAL.with_extremes(bad="white"), vmin=0, vmax=1, aspect="auto")
        positions = norms["position"].to_numpy()
        colors = [style.NAVY if position == 0 else style.SKY for position in positions]
        below.bar(positions, norms["norm"], width=0.8, color=colors)
        if not np.allclose(norms["norm"], norms["attended_norm"], rtol=1e-3):
            below.hlines(norms["attended_norm"], positions - 0.4, positions + 0.4, color=VERMILION, linewidth=1.1)
        plot.grid(below, "y")
        if above is axes[0, 0]:
            _name_tokens(above.yaxis, norms)
        _name_tokens(below.xaxis, norms)
        above.tick_params(length=0)
        which = f"\nlayer {layer}, head {head}" if maps.groupby(["layer", "head"]).ngroups > 1 else ""
        above.set_title(escape(shorten(name, SHORT_NAME)) + which)
    axes[0, 0].set_ylabel("query")
    axes[1, 0].set_ylabel("value, L2 norm")
    figure.colorbar(image, ax=axes[0], label="attention weight", aspect=20, pad=0.01)
    figure.supxlabel("token, triggers bold and red (bars: values as projected; lines: as attended to, after a gate)")
    return figure.finish(arms.title("one sequence", arms.seeds_text(of_runs=True)))


def _name_tokens(axis: Axis, norms: pd.DataFrame) -> None:
    """Name the tokens along an axis; triggers are bold and red, so that they are visible in grayscale, too."""
    axis.set_ticks(norms["position"], token_labels(norms["token_id"], norms["token"]), fontsize=TOKEN_SIZE)
    axis.set_tick_params(length=0)
    for label, is_trigger in zip(axis.get_ticklabels(), norms["is_trigger"], strict=True):
        if is_trigger:
            label.set(color=VERMILION, fontweight="bold")
    axis.get_ticklabels()[0].set_horizontalalignment("right")  # <s> is wider than the others


# --- The Bigram-Backcopy task by training step, a column for each arm (VGA figure 5, and figure 6 on the right).
# "Others" are tokens that are neither <s> nor triggers. Rows share their scale. A line is the mean over seeds, and its
# band reaches from the lowest to the highest. With several layers, the figure shows the layer whose sink is largest in
# the first arm.

BACKCOPY_ROWS: dict[str, dict[str, tuple[str, Look]]] = {  # name of a row → metric → its name and look
    "loss above\noptimum (nats)": {"backcopy_risk": ("backcopy", SINK), "bigram_risk": ("bigram", OTHERS)},
    "attention of\nothers (share)": {
        "attention_to_start": ("on <s>", SINK),
        "attention_to_triggers": ("on triggers", OTHERS),
        "early_attention_to_start": ("on <s>, before\nany trigger", style.HIGHEST),
    },
    "value\n(L2 norm)": {
        "start_value_norm": ("<s>", SINK),
        "other_value_norm": ("others", OTHERS),
        "start_attended_norm": ("<s>, gated", style.HIGHEST),
    },
    "Δlogit\nof <s>": {"delta_logit": ("", SINK)},
}
BACKCOPY_METRICS = [metric for row in BACKCOPY_ROWS.values() for metric in row]


@needs(
    lambda arms: arms.has("training") and arms.tables["training"]["metric"].isin(BACKCOPY_METRICS).any(),
    "the table training has no metric of the Bigram-Backcopy task",
)
def draw_backcopy_training(arms: TrainedArms) -> Figure:
    training = arms.tables["training"]
    table = training[training["metric"].isin(BACKCOPY_METRICS)]
    names = list(table["condition"].unique())
    layer = sinking_layer(table)
    figure = new_figure(WIDE, 4.1)
    axes = figure.subplots(len(BACKCOPY_ROWS), len(names), sharex=True, sharey="row", squeeze=False)
    for column, name in enumerate(names):
        rows = table[(table["condition"] == name) & table["layer"].isin((WHOLE_MODEL, layer))]
        for ax, curves in zip(axes[:, column], BACKCOPY_ROWS.values(), strict=True):
            for metric, (label, look) in curves.items():
                plot.curve_with_range(ax, rows[rows["metric"] == metric], 5, label=label, **look)
        axes[0, column].set_title(escape(shorten(name, SHORT_NAME)))
    for row, (label, curves) in zip(axes, BACKCOPY_ROWS.items(), strict=True):
        for ax in row:
            plot.value_axis(ax, "", log="backcopy_risk" in curves, share="attention_to_start" in curves)
        row[0].set_ylabel(label)
        if len(curves) > 1:
            row[-1].legend(loc="center left", bbox_to_anchor=(1, 0.5), handlelength=1.8, borderaxespad=0.2)
    ticks = max(2, min(5, 15 // len(names)))  # ticks of a panel: steps are logged evenly
    axes[-1, 0].xaxis.set_major_locator(MaxNLocator(ticks, integer=True))
    axes[-1, 0].xaxis.set_major_formatter(FuncFormatter(lambda step, _: plot.step_label(step)))
    figure.supxlabel("training step")
    layers, seeds = table.loc[table["layer"] != WHOLE_MODEL, "layer"].nunique(), table["seed"].nunique()
    where = f"layer {layer}" if layers > 1 else ""
    return figure.finish(arms.title(where, seeds_words(seeds), without_start(arms.runs.values())))

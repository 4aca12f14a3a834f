"""Figures of the residual stream: its entropy, the tokens that join the first sink, residual sinks and spikes."""

from sinkscope.figures import plot, style
from sinkscope.figures.labels import title, token_label
from sinkscope.figures.style import GUIDE, HIGHEST, OTHERS, SINK, WIDE, Figure, new_figure
from sinkscope.measuring.observables.residual_sinks import RESIDUAL
from sinkscope.measuring.observables.sink_tokens import FIRST_SINK, LASTING, SECONDARY
from sinkscope.results.metrics import METRICS
from sinkscope.results.run import RunData

# --- Compression valleys (2510.06477): the entropy of each layer's output with and without position 0, and with
# position 0 at the median norm; and the anisotropy with its bound, next to the sink rate of the layer that reads it.


def draw_entropy_by_layer(run: RunData) -> Figure:
    table = run.tables["entropy"].set_index("layer")
    figure = new_figure(WIDE, 2.4)
    left, right = figure.subplots(1, 2)
    for column, label, look in (
        ("entropy", "all tokens", SINK),
        ("entropy_without_first", "without position 0", OTHERS),
        ("entropy_rescaled", "position 0 at the median norm", HIGHEST),
        ("entropy_bound", "upper bound by norm and alignment", GUIDE),
    ):
        plot.line_by_layer(left, table[column], label=label, **look)
    plot.panel(left, METRICS["state_entropy"].short, "share of the largest entropy", share=True)
    plot.line_by_layer(right, table["anisotropy"], label=METRICS["anisotropy"].short, **SINK)
    plot.line_by_layer(right, table["anisotropy_bound"], label="lower bound by norm and alignment", **GUIDE)
    if "attention" in run.tables:
        rate = run.tables["attention"].query("position == 0").groupby("layer")["sink_rate"].mean()
        reading = rate.rename(lambda layer: layer - 1).drop(-1, errors="ignore")
        plot.line_by_layer(right, reading, label="sink rate of the next layer", **OTHERS)
    plot.panel(right, "anisotropy and sinks", "share", share=True)
    for ax in (left, right):
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.24), ncols=1)
    return figure.finish(title(run, WIDE))


# --- Tokens that join the first sink (2512.22213): shares of parallel tokens and of sinks by layer, and which they are.

MOST_TOKENS = 12
RARE = 0.1  # up to this share of tokens, the axis ends at the largest


def draw_sink_tokens(run: RunData) -> Figure:
    shares = run.tables["parallel_tokens"].set_index("layer")
    figure = new_figure(WIDE, 2.5)
    left, right = figure.subplots(1, 2, width_ratios=(1.3, 1))
    plot.line_by_layer(left, shares["parallel"], label="parallel to the first sink", **OTHERS)
    plot.line_by_layer(left, shares["sinks"], label="and with 3 × the median norm", **SINK)
    plot.panel(left, "tokens but the first sink", "share of tokens", share=bool(shares["parallel"].max() > RARE))
    table = run.tables["sink_tokens"]
    others = table[table["kind"] != FIRST_SINK]
    if others.empty:
        plot.say(right, "no other token is a sink")
    else:
        counts = others.groupby(["token_id", "token"], dropna=False)["kind"].value_counts().unstack(fill_value=0)
        counts = counts.reindex(columns=[SECONDARY, LASTING], fill_value=0)
        counts = counts.loc[counts.sum(axis=1).sort_values(ascending=False, kind="stable").index[:MOST_TOKENS]]
        plot.name_rows(right, [token_label(token, token_id) for token_id, token in counts.index], shaded=False)
        right.barh(range(len(counts)), counts[SECONDARY], color=style.VERMILION, height=0.65, label=SECONDARY)
        ends = counts[SECONDARY]
        right.barh(range(len(counts)), counts[LASTING], left=ends, color=style.NAVY, height=0.65, label=LASTING)
        right.set_ylim(max(len(counts), 4) - 0.4, -0.6)
        right.set_xlabel("number of sinks")
        right.xaxis.get_major_locator().set_params(integer=True)
        right.legend(loc="lower right")
    left.legend(loc="upper center", bbox_to_anchor=(0.5, -0.24), ncols=2)
    return figure.finish(title(run, WIDE))


# --- Residual sinks (2601.22966) and spikes (2603.05498): coordinates that are large at most tokens, the norm of each
# sequence's largest token, and its cosine over sequences.

MOST_COORDINATES = 6


def draw_residual_sinks(run: RunData) -> Figure:
    coordinates, spikes = run.tables["residual_sinks"], run.tables["spikes"].set_index("layer")
    figure = new_figure(WIDE, 2.6)
    left, middle, right = figure.subplots(1, 3)
    sinks = coordinates[coordinates["kind"] == RESIDUAL]
    layers = sinks.groupby("coordinate").size().sort_values(ascending=False, kind="stable")
    for coordinate, look in zip(layers.index[:MOST_COORDINATES], style.line_looks(), strict=False):
        own = coordinates[coordinates["coordinate"] == coordinate].set_index("layer")["share"]
        plot.line_by_layer(left, own, label=f"{coordinate}", **look)
    plot.line_by_layer(left, spikes["rotated_share"], label="rotated", **GUIDE)
    plot.panel(left, "coordinates with residual sinks", "share of tokens", share=True)
    plot.line_by_layer(middle, spikes["norm_ratio"], **SINK)
    plot.panel(middle, "norm of the largest token ÷ median", "ratio", log=True)
    for step, look in (("up", "-"), ("down", ":")):
        for layer in spikes.index[spikes["step"] == step]:
            middle.axvline(layer, color=style.GRAY, linewidth=0.9, linestyle=look, label=f"step {step}: layer {layer}")
    plot.line_by_layer(right, spikes["cosine"], label="largest tokens", **SINK)
    plot.line_by_layer(right, spikes["cosine_of_others"], label="tokens of the median norm", **OTHERS)
    plot.panel(right, "cosine of two sequences", "mean over pairs", share=True)
    for ax, columns in ((left, 3), (middle, 1), (right, 1)):
        ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.24), ncols=columns, columnspacing=0.8)
    return figure.finish(title(run, WIDE))

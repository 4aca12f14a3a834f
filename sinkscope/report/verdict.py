"""The verdict: what a run found, as a short table and one plain paragraph. Reads tables only."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from sinkscope.measuring.summary import FEWEST_QUERIES, OUTLIER, WHOLE_MODEL
from sinkscope.results.run import RunData

# Sink rates that WSE publishes, in percent: T = 64, ε = 0.3, position 0 (WSE table 1, claims C1 and C7).
WSE_NATURAL = {"LLaMA2-13B": 91.69, "LLaMA2-7B": 92.47, "Mistral-7B": 97.49, "LLaMA3-8B": 99.02}
WSE_RANDOM = {"GPT2-XL": 70.29, "LLaMA3-8B": 91.23}

STRONG = 0.5  # a layer "has the sink" when at least this share of its heads has it
SINK_GRADIENT = 3.0  # times the later tokens' gradient that make a gradient sink
DRAINED = 0.5  # value states are drained when the sink's norm is below this share of the others'

METRICS = {
    "sink_rate": ("sink rate at position 0", "{:.1%}"),
    "sink_rate_later": ("sink rate at any later position", "{:.1%}"),
    "window_mass": ("mean window mass at position 0", "{:.3f}"),
    "sink_mass": ("mean sink mass at position 0", "{:.3f}"),
    "repeated_bound": ("bound on it, repeated tokens (WSE prop. 4)", "{:.3f}"),
    "attention_entropy": ("attention entropy (nats)", "{:.2f}"),
    "missing_mass": ("attention mass taken by learned sink logits", "{:.3f}"),
    "value_drain": ("value norm at position 0 ÷ others", "{:.2f}"),
    "raw_value_drain": ("the same before its gate or scale", "{:.2f}"),
    "gate_first": ("mean gate at position 0", "{:.3f}"),
    "gate_later": ("mean gate at later positions", "{:.3f}"),
    "norm_ratio": ("residual norm at position 0 ÷ others", "{:.1f}"),
    "massive_count": ("massive activations per sequence, all layers", "{:.1f}"),
    "value_gradient_ratio": ("value gradient at position 0 ÷ positions ≥ 5", "{:.1f}"),
    "compress_slope": ("slope of log compress on log norm", "{:.2f}"),
    "delta_gap": ("Δ of the query bias, position 0 above later (in std)", "{:.1f}"),
    "key_alignment_first": ("cosine of W_k EPE₀ and the query bias", "{:.2f}"),
    "perplexity": ("perplexity", "{:.1f}"),
    "max_inf_norm": ("max infinity norm", "{:.0f}"),
    "kurtosis": ("mean kurtosis", "{:.0f}"),
}


def verdict(run: RunData) -> str:
    """Markdown: a table of the model-level figures, then the findings."""
    sentences = [
        _setting(run),
        _sink(run),
        _published(run),
        _later_sinks(run),
        _repeated(run),
        _massive(run),
        _drain(run),
        _gradient(run),
        _query_bias(run),
        _quantizing(run),
        _not_applicable(run),
        _files(run),
    ]
    paragraph = " ".join(sentence for sentence in sentences if sentence)
    return f"## {run.model}, {run.condition} input\n\n{_table(run)}\n\n{paragraph}"


def _table(run: RunData) -> str:
    lines = ["| whole model | |", "| --- | ---: |"]
    for metric, (label, form) in METRICS.items():
        value = run.metric(metric)
        if np.isfinite(value) and not (metric == "missing_mass" and value == 0):
            lines.append(f"| {label} | {form.format(value)} |")
    return "\n".join(lines)


def _setting(run: RunData) -> str:
    given, config = run.manifest["input"], run.manifest["config"]
    return (
        f"Measured on {given['sequences']} sequences of {config['seq_len']} tokens ({run.condition}), "
        f"position 0 being {given['token_zero']}, in {run.manifest['dtype']}."
    )


def _sink(run: RunData) -> str | None:
    if "attention" not in run.tables:
        return None
    rates = _by_layer(run, "sink_rate")
    epsilon = run.manifest["config"]["epsilon"]
    strong = list(rates[rates >= STRONG].index)
    head = f"At ε = {epsilon:g} the sink rate at position 0 is {run.metric('sink_rate'):.1%}"
    if not strong:
        none = "there is no sink at position 0" if rates.max() < 0.01 else "no layer has it in half of its heads"
        return f"{head}: {none}."
    everywhere = f"{head}: at least half of the heads have it in {_layers(strong)}"
    weakest = list(rates[rates < 0.05].index)
    return everywhere + (f", almost none in {_layers(weakest)}." if weakest else ".")


def _published(run: RunData) -> str | None:
    config = run.manifest["config"]
    comparable = config["seq_len"] == 64 and config["window"] == 64 and config["epsilon"] == 0.3
    published = {"natural": WSE_NATURAL, "random": WSE_RANDOM}.get(run.condition)
    if not comparable or published is None or "attention" not in run.tables:
        return None
    rate = 100 * run.metric("sink_rate")
    low, high = min(published, key=published.__getitem__), max(published, key=published.__getitem__)
    place = "below" if rate < published[low] else "above" if rate > published[high] else "within"
    return (
        f"That is {place} the {published[low]:.1f} % ({low}) to {published[high]:.1f} % ({high}) that WSE "
        f"publishes for {run.condition} tokens at the same T and ε."
    )


def _later_sinks(run: RunData) -> str | None:
    if "sink_positions" not in run.tables:
        return None
    rate = run.metric("sink_rate_later")
    length = run.manifest["config"]["seq_len"]
    sinks = run.tables["sink_positions"]
    sinks = sinks[(sinks["position"] > 0) & (sinks["position"] <= length - FEWEST_QUERIES)]
    if rate < 0.01 or sinks.empty:
        return "No other position is a sink."
    tokens = sinks["token"].value_counts(normalize=True).head(3)
    named = ", ".join(f"{token!r} ({share:.0%})" for token, share in tokens.items())
    rates = _by_layer(run, "sink_rate_later")
    where = list(rates[rates > max(0.05, rates.max() / 4)].index)
    place = f", mostly in {_layers(where)}" if where else ""
    return f"Later positions are sinks in {rate:.1%} of heads and sequences{place}, most often at the tokens {named}."


def _repeated(run: RunData) -> str | None:
    if run.condition != "repeated" or "attention" not in run.tables:
        return None
    bound = run.metric("repeated_bound")
    if np.isfinite(bound):
        return (
            f"All tokens being equal, a rotary model cannot tell position 0 from the rest: sink mass "
            f"{run.metric('sink_mass'):.3f}, under proposition 4's bound of {bound:.3f}."
        )
    positions = run.manifest["family"]["positions"]
    return f"This model's positions are {positions}, for which WSE expects the sink " + (
        "to survive repeated tokens." if positions == "learned" else "to vanish on repeated tokens."
    )


def _massive(run: RunData) -> str | None:
    if "massive" not in run.tables:
        return None
    table = run.tables["massive"]
    massive = table[table["is_massive"]]
    if massive.empty:
        nearest = table.loc[table["ratio"].idxmax()]
        return (
            f"No entry of the residual stream is a massive activation as Sun et al. (2024) define it; the nearest, at "
            f"coordinate {nearest.coordinate} of layer {nearest.layer}'s output and position {nearest.position}, is "
            f"{abs(nearest.value):,.0f}, {nearest.ratio:,.0f} × the median."
        )
    parts = []
    for coordinate, rows in _most_common(massive, "coordinate", 3):
        sequences = rows.groupby("layer")["sequence"].nunique() / run.manifest["input"]["sequences"]
        usual = sequences[sequences >= 0.5].index
        positions = rows["position"].value_counts(normalize=True)
        place = f"position {positions.index[0]}" if positions.iloc[0] > 0.9 else f"{len(positions)} positions"
        where = f"behind {_layers(usual)}" if len(usual) else "in less than half of the sequences"
        largest = rows["value"].abs().max()
        parts.append(f"coordinate {coordinate} {where}, at {place} (largest magnitude {largest:,.0f})")
    return f"Massive activations: {'; '.join(parts)}."


def _drain(run: RunData) -> str | None:
    if "geometry" not in run.tables or not np.isfinite(run.metric("value_drain")):
        return None
    drains = _by_layer(run, "value_drain")
    rates = _by_layer(run, "sink_rate")
    with_sink = drains[rates.reindex(drains.index) >= STRONG] if len(rates) else drains
    if with_sink.empty:
        return f"The value norm at position 0 is {drains.mean():.2f} of the others'."
    mean = float(with_sink.mean())
    state = "drained" if mean < DRAINED else "not drained"
    return f"Where the sink is, its value states are {state}: their norm is {mean:.2f} of the other positions'."


def _gradient(run: RunData) -> str | None:
    value, key = run.metric("value_gradient_ratio"), run.metric("key_gradient_ratio")
    if not np.isfinite(value):
        return None
    strongest = "value" if value >= key else "key"
    opening = (
        f"Backpropagation puts {value:.1f} × the value gradient and {key:.1f} × the key gradient of later tokens on "
        f"position 0"
    )
    if max(value, key) < SINK_GRADIENT:
        return f"{opening}: no gradient sink."
    bloat, compress = run.metric("bloat"), run.metric("compress")
    if not np.isfinite(bloat * compress):
        return f"{opening}: a gradient sink, strongest on the {strongest} pathway."
    return (
        f"{opening}: a gradient sink, strongest on the {strongest} pathway. The attention branch multiplies its "
        f"gradient by {bloat:,.0f} (later tokens: {run.metric('bloat_later'):.1f}) and the norm in front of it divides "
        f"it by {1 / compress:,.0f} ({1 / run.metric('compress_later'):,.0f}), so that the residual stream's gradient "
        f"changes by a factor of {run.metric('change'):.2f} only (medians over layers); log compress falls with the "
        f"log norm at slope {run.metric('compress_slope'):.2f}, r = {run.metric('compress_correlation'):.2f}."
    )


def _query_bias(run: RunData) -> str | None:
    gaps = _by_layer(run, "delta_gap")
    if gaps.empty:
        return None
    apart = list(gaps[gaps > OUTLIER].index)
    where = f"in {len(apart)} of {len(gaps)} layers ({_layers(apart)})" if apart else "in no layer"
    found = (
        f"The query bias lifts the logits of position 0 by more than {OUTLIER:g} standard deviations above those of "
        f"later positions {where}"
    )
    alignment, ratio = run.metric("key_alignment_first"), run.metric("gamma_ratio")
    if not np.isfinite(alignment):
        return f"{found}."
    found += f"; the key of that position alone, W_k EPE₀, has cosine {alignment:.2f} with the bias"
    found += f" (later positions {run.metric('key_alignment_later'):.2f})"
    if not np.isfinite(ratio):
        return f"{found}."
    gamma = run.tables["gamma"]
    massive = sorted(gamma[gamma["is_massive_epe"]]["coordinate"].unique())
    named = f"coordinate{'s' * (len(massive) > 1)} {', '.join(str(coordinate) for coordinate in massive)}"
    return f"{found}. EPE₀ is massive at {named}, where |γ| is {ratio:.1f} × its mean."


def _quantizing(run: RunData) -> str | None:
    if "massive" not in run.tables:
        return None
    by_layer = run.tables["massive"].assign(magnitude=run.tables["massive"]["value"].abs()).groupby("layer")
    largest, median = by_layer["magnitude"].max(), by_layer["median"].mean()
    steps = largest / 255 / median  # the finest step that 8 bits per tensor can have, in units of the median entry
    worst = steps.idxmax()
    tensor = (
        f"at the output of layer {worst} one step of per-tensor 8-bit activations is {steps[worst]:.1f} × the "
        f"median entry (largest {largest[worst]:,.0f}, median {median[worst]:.2g})"
    )
    if steps[worst] > 2:
        return (
            f"For quantization: {tensor}, so that most of the tensor rounds to zero: keep these tokens or "
            f"coordinates in higher precision, or scale per token."
        )
    return f"For quantization: {tensor}: outliers do not rule out per-tensor scales."


def _not_applicable(run: RunData) -> str | None:
    missing = [f"{site} ({reason})" for site, reason in run.manifest["absent"].items() if site == "mid"]
    missing += [f"{name} ({reason})" for name, reason in run.manifest.get("not_measured", {}).items()]
    if run.manifest["family"]["wiring"] == "post-norm":
        missing.append("comparison of residual norms with pre-norm models (this one normalises after each branch)")
    if "attention" in run.tables and not np.isfinite(run.metric("attention_entropy")):
        missing.append("attention entropy (needs all columns: --positions as long as --seq-len)")
    layer_types = run.manifest["model"]["layer_types"] or ()
    window = run.manifest["model"]["sliding_window"]
    sliding = [layer for layer, kind in enumerate(layer_types) if kind == "sliding_attention"]
    note = None
    if sliding and window and run.manifest["config"]["seq_len"] <= window:
        note = f"Layers {spans(sliding)} slide a window of {window} tokens, which these sequences do not reach."
    elif sliding:
        note = f"Layers {spans(sliding)} see only the last {window} tokens."
    absent = f"Does not apply here: {'; '.join(missing)}." if missing else None
    return " ".join(part for part in (note, absent) if part) or None


def _files(run: RunData) -> str | None:
    if run.folder is None:
        return None
    from sinkscope.report.figures import applicable

    recipe = run.manifest.get("recipe")  # which draws its own figures only
    figures = recipe["content"].get("figures", []) if recipe else applicable(run)
    return (
        f"The run folder holds run.json, verdict.md, the tables {', '.join(sorted(run.tables))}, "
        f"and the figures {', '.join(figures)}."
    )


def _by_layer(run: RunData, metric: str) -> pd.Series:
    summary = run.tables["summary"]
    rows = summary[(summary["metric"] == metric) & (summary["layer"] != WHOLE_MODEL)]
    return rows.set_index("layer")["value"]


def _most_common(table: pd.DataFrame, column: str, count: int) -> list[tuple[int, pd.DataFrame]]:
    return [(int(key), table[table[column] == key]) for key in table[column].value_counts().head(count).index]


def _layers(numbers: Sequence[int]) -> str:
    return f"layer{'s' if len(numbers) > 1 else ''} {spans(numbers)}"


def spans(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] → "0–2, 5"."""
    numbers = sorted(int(number) for number in numbers)
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)

"""What a run of `analyze` found: its tables become a table of metrics and findings."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
import pandas as pd

from sinkscope.measuring.observables.massive import THRESHOLD
from sinkscope.measuring.summary import WHOLE_MODEL, later_sinks
from sinkscope.models.family import ATTENTION
from sinkscope.report import published
from sinkscope.report.markdown import Report
from sinkscope.report.positions import ADDED, WITHIN_ATTENTION, kinds_of_positions, mixing_layers, outside
from sinkscope.results.findings import (
    ALMOST_NO_SINK,
    AT_ONE_POSITION,
    COARSE_STEP,
    DRAINED,
    MOSTLY,
    NO_SINK,
    OUTLIER,
    OVER_NULL,
    RARE,
    STRONG,
    USUAL,
    Finding,
    Outcome,
)
from sinkscope.results.metrics import METRICS
from sinkscope.results.run import RunData

SHOWN = (  # metrics of the whole model, in the order of the verdict's table
    "sink_rate", "sink_rate_outside", "sink_rate_later", "window_mass", "sink_mass", "repeated_bound",
    "attention_entropy", "missing_mass", "value_drain", "raw_value_drain", "gate_first", "gate_later", "norm_ratio",
    "massive_count", "value_gradient_ratio", "uniform_gradient_ratio", "compress_slope", "delta_gap",
    "key_alignment_first", "perplexity", "max_inf_norm", "kurtosis",
)  # fmt: skip
HIDDEN_AT_ZERO = ("missing_mass",)  # of models without learned sink logits it is 0 by definition

SINK, MASSIVE, GRADIENTS = "Sink", "Massive activations", "Gradients"
VALUES, BIAS, QUANTIZATION, NOT_HERE = "Value states", "Query bias", "Quantization", "Does not apply here"

MOST_COORDINATES = 3  # of massive activations that are named
MOST_TOKENS = 3  # of later sinks that are named
REGISTERS = "register tokens"  # of what is attended to outside the text: they stand in front of it
EIGHT_BITS = 255  # steps of an 8-bit grid


def report(run: RunData) -> Report:
    """The verdict on a run of `analyze`, as data."""
    return Report(f"{run.model}, {run.condition} input", settings(run), overview(run), findings(run))


def overview(run: RunData) -> pd.DataFrame:
    """The metrics of the whole model as printed."""
    values = {name: run.metric(name) for name in SHOWN}
    shown = {
        name: value for name, value in values.items() if np.isfinite(value) and (value or name not in HIDDEN_AT_ZERO)
    }
    rows = [(METRICS[name].label, METRICS[name].text(value)) for name, value in shown.items()]
    return pd.DataFrame(rows, columns=["whole model", "value"])


def findings(run: RunData) -> list[Finding]:
    """Everything that the tables say. Reads no text and makes none."""
    parts = (_sink, _repeated, _massive, _values, _gradients, _query_bias, _eight_bits, _windows, _not_applicable)
    return [finding for part in parts for finding in part(run)]


def settings(run: RunData, **more: int | str) -> list[Finding]:
    """How the run was measured, and whether its weights had been quantized before. `more`: of a command's own."""
    given = run.manifest["input"]
    numbers = {"sequences": given["sequences"], "lengths": (given["shortest"], given["longest"])}
    numbers |= {"condition": run.condition}
    first = f"the first register token, the text's own first {given['token_zero']}"
    has_registers = REGISTERS in (run.manifest.get("outside") or {})
    numbers |= {"token_zero": first if has_registers else given["token_zero"], "dtype": run.manifest["dtype"]} | more
    both_ways = [] if run.is_causal else [Finding("both-ways", "", numbers={"masked": given["masked"]})]
    return [Finding("setting", "", numbers=numbers), *both_ways, *quantized_source(run)]


def quantized_source(run: RunData, scheme: str = "") -> list[Finding]:
    """Where the weights come from a checkpoint of quantized weights, by its configuration or a GGUF file's name: in how
    many bits.

    Args:
        scheme: The quantization that is simulated on top of that, such as W8A8.
    """
    source, weights = (str(run.manifest["model"].get(entry, "")) for entry in ("source", "weights"))
    for file in (source, str(run.manifest.get("config", {}).get("gguf_file"))):
        gguf = re.search(r"(?<![A-Za-z0-9])(?P<kind>I?Q(?P<bits>\d)[\w-]*)(?=\.gguf$)", file, re.IGNORECASE)
        found = gguf or re.fullmatch(r"(?P<bits>\d+)-bit (?P<kind>.+)", weights)
        if found:
            name = re.split(r"[/\\]", file)[-1]
            numbers = {"file": name, "kind": found["kind"], "scheme": scheme, "dtype": run.manifest["dtype"]}
            return [Finding("quantized-source", QUANTIZATION, value=float(found["bits"]), numbers=numbers)]
    return []


# --- sections


def _sink(run: RunData) -> Iterator[Finding]:
    if "attention" not in run.tables:
        return
    rates, config = _by_layer(run, "sink_rate"), run.manifest["config"]
    strong, weak = _where(rates >= STRONG), _where(rates < ALMOST_NO_SINK)
    outcome, threshold = Outcome.PRESENT, STRONG
    if not strong:
        outcome, threshold = (Outcome.ABSENT, NO_SINK) if rates.max() < NO_SINK else (Outcome.WEAK, STRONG)
    comparable = run.is_causal and published.SETTING.items() <= (config | run.manifest["input"]).items()
    numbers = {"epsilon": config["epsilon"], "layers": strong, "weak_layers": weak, "few": ALMOST_NO_SINK}
    rates_of_wse = published.SINK_RATES.get(run.condition, ()) if comparable else ()
    value = run.metric("sink_rate")
    yield Finding("sink", SINK, outcome, value, None, threshold, rates_of_wse, numbers, is_headline=True)
    yield from _outside(run, comparable)
    yield from _attention_layers(run)
    if run.manifest["family"].get("gated") and "gate" in run.tables:
        there = Outcome.ABSENT if rates.max() < NO_SINK else Outcome.PRESENT
        numbers = {"later": run.metric("gate_later"), "rate": value}
        yield Finding("own-gates", SINK, there, run.metric("gate_first"), threshold=NO_SINK, numbers=numbers)
    if "sink_positions" in run.tables:
        yield _later_sinks(run)


def _outside(run: RunData, comparable: bool) -> Iterator[Finding]:
    """Attention that goes to no token of the text: only of models that have something else."""
    kinds, rates = run.manifest.get("outside"), _by_layer(run, "sink_rate_outside")
    if not kinds or rates.empty:
        return
    strong = _where(rates >= STRONG)
    outcome, threshold = Outcome.PRESENT, STRONG
    if not strong:
        outcome, threshold = (Outcome.ABSENT, NO_SINK) if rates.max() < NO_SINK else (Outcome.WEAK, STRONG)
    numbers = {
        "what": " and ".join(kinds),
        "epsilon": run.manifest["config"]["epsilon"],
        "layers": strong,
        "having": tuple(rates.index) if len(rates) < _by_layer(run, "sink_rate").size else (),
    }
    rate_of_wse = (published.OUTSIDE,) if comparable and run.condition == "natural" else ()
    value = run.metric("sink_rate_outside")
    yield Finding("sink-outside", SINK, outcome, value, None, threshold, rate_of_wse, numbers)


def _attention_layers(run: RunData) -> Iterator[Finding]:
    """Of a model that attends in some layers only."""
    kinds = run.manifest["family"].get("kinds") or ()
    layers = tuple(layer for layer, kind in enumerate(kinds) if kind == ATTENTION)
    others = tuple(kind for kind in kinds if kind != ATTENTION)
    if others:
        numbers = {"layers": layers, "others": _counted(others)}
        yield Finding("attention-layers", SINK, value=len(layers), numbers=numbers)


def _counted(kinds: Iterable[str]) -> str:
    """«3 × linear attention and 1 × mlp»."""
    return " and ".join(f"{count} × {kind.replace('_', ' ')}" for kind, count in Counter(kinds).items())


def _later_sinks(run: RunData) -> Finding:
    rate, rates = run.metric("sink_rate_later"), _by_layer(run, "sink_rate_later")
    sinks = later_sinks(run.tables["sink_positions"])
    if rate < NO_SINK or sinks.empty:
        return Finding("later-sinks", SINK, Outcome.ABSENT, rate, threshold=NO_SINK)
    tokens = sinks["token"].value_counts(normalize=True).head(MOST_TOKENS)
    tokens = tokens[(tokens >= RARE) | (tokens == tokens.max())]
    numbers = {
        "layers": _where(rates > max(ALMOST_NO_SINK, MOSTLY * rates.max())),
        "tokens": tuple((str(token), float(share)) for token, share in tokens.items()),
    }
    return Finding("later-sinks", SINK, Outcome.PRESENT, rate, threshold=NO_SINK, numbers=numbers)


def _repeated(run: RunData) -> Iterator[Finding]:
    if run.condition != "repeated" or "attention" not in run.tables:
        return
    bound, mass = run.metric("repeated_bound"), run.metric("sink_mass")
    if np.isfinite(bound):
        outcome = Outcome.CONFIRMED if mass <= bound else Outcome.REFUTED
        yield Finding("repeated-bound", SINK, outcome, mass, threshold=bound)
    else:
        positions = run.manifest["family"]["positions"]
        kinds, mixing, besides = kinds_of_positions(run), _counted(mixing_layers(run)), " and ".join(outside(run))
        if mixing or besides or not kinds <= ADDED | WITHIN_ATTENTION:
            numbers = {"positions": positions, "others": mixing, "outside": besides}
            yield Finding("repeated", SINK, Outcome.UNDECIDED, numbers=numbers)
            return
        outcome = Outcome.PRESENT if kinds & ADDED else Outcome.ABSENT
        yield Finding("repeated", SINK, outcome, numbers={"positions": positions})


def _massive(run: RunData) -> Iterator[Finding]:
    if "massive" not in run.tables:
        return
    table = run.tables["massive"]
    massive = table[table["is_massive"]]
    largest = table.loc[table["value"].abs().idxmax()]
    if massive.empty and run.condition == "repeated" and abs(largest["value"]) > THRESHOLD:
        yield _all_alike(run, largest)
        return
    if massive.empty:
        nearest = table.loc[table["ratio"].idxmax()]
        numbers = {name: nearest[name] for name in ("coordinate", "layer", "position", "ratio")}
        value = float(abs(nearest["value"]))
        yield Finding("massive", MASSIVE, Outcome.ABSENT, value, numbers=numbers, is_headline=True)
        return
    coordinates = tuple(int(coordinate) for coordinate in massive["coordinate"].value_counts().index[:MOST_COORDINATES])
    numbers = {"coordinates": coordinates, "largest": massive["value"].abs().max()}
    count = run.metric("massive_count")
    yield Finding("massive", MASSIVE, Outcome.PRESENT, count, numbers=numbers, is_headline=True)
    for coordinate in coordinates:
        rows = massive[massive["coordinate"] == coordinate]
        layers = _where(rows.groupby("layer")["sequence"].nunique() / run.manifest["input"]["sequences"] >= USUAL)
        positions = rows["position"].value_counts(normalize=True)
        is_one = positions.iloc[0] > AT_ONE_POSITION
        numbers = {
            "coordinate": coordinate,
            "layers": layers,
            "usual": None if layers else USUAL,
            "position": int(positions.index[0]) if is_one else None,
            "places": None if is_one else len(positions),
        }
        value = float(rows["value"].abs().max())
        yield Finding("massive-coordinate", MASSIVE, Outcome.PRESENT, value, numbers=numbers)


def _all_alike(run: RunData, largest: pd.Series) -> Finding:
    """On repeated tokens the median is as large as the rest where every token is massive: the rule then finds none."""
    numbers = {name: largest[name] for name in ("coordinate", "layer", "ratio")}
    if "activation_by_sequence" in run.tables:
        norms = run.tables["activation_by_sequence"].query("site == 'layer_out'").groupby("layer")
        first, smallest = (norms[name].mean()[largest["layer"]] for name in ("norm", "norm_smallest"))
        numbers |= {"first": first, "smallest": smallest}
    value = float(abs(largest["value"]))
    return Finding("massive", MASSIVE, Outcome.UNDECIDED, value, numbers=numbers, is_headline=True)


def _values(run: RunData) -> Iterator[Finding]:
    whole = run.metric("value_drain")
    if "geometry" not in run.tables or not np.isfinite(whole):
        return
    drains, rates = _by_layer(run, "value_drain"), _by_layer(run, "sink_rate")
    with_sink = drains[rates.reindex(drains.index) >= STRONG]
    if with_sink.empty:
        yield Finding("value-drain", VALUES, Outcome.MEASURED, whole)
        return
    mean = float(with_sink.mean())
    outcome = Outcome.PRESENT if mean < DRAINED else Outcome.ABSENT
    numbers = {"layers": tuple(with_sink.index), "all_layers": whole}
    yield Finding("value-drain", VALUES, outcome, mean, threshold=DRAINED, numbers=numbers)


def _gradients(run: RunData) -> Iterator[Finding]:
    """Numbers alone: whether they make a gradient sink is decided by the same model with random weights (GS-6)."""
    raw, behind = run.metric("raw_value_gradient_ratio"), run.metric("value_gradient_ratio")
    value = raw if np.isfinite(raw) else behind  # the papers' claims are about the raw values (GS §5.1, VGA eq. 8)
    if np.isfinite(value):
        numbers = {"key_ratio": run.metric("key_gradient_ratio"), "uniform": run.metric("uniform_gradient_ratio")}
        yield Finding("value-gradient", GRADIENTS, value=value, numbers=numbers, is_headline=True)
        if np.isfinite(raw):
            yield Finding("gradient-behind", GRADIENTS, value=behind)
        if run.is_causal:
            yield Finding("gradient-null", GRADIENTS, value=OVER_NULL)
    norms = run.metric("value_over_key_gradient")
    if np.isfinite(norms):
        yield Finding("gradient-norms", GRADIENTS, value=norms)
    gains = {name: run.metric(name) for name in ("bloat", "bloat_later", "compress", "compress_later", "change")}
    if np.isfinite([gains["bloat"], gains["compress"], gains["change"]]).all():
        yield Finding("reshaping", GRADIENTS, value=gains["change"], numbers=gains)
    slope, correlation = run.metric("compress_slope"), run.metric("compress_correlation")
    if np.isfinite([slope, correlation]).all():
        yield Finding("compress", GRADIENTS, value=correlation, numbers={"slope": slope})


def _query_bias(run: RunData) -> Iterator[Finding]:
    gaps = _by_layer(run, "delta_gap")
    if gaps.empty:
        return
    apart = _where(gaps > OUTLIER)
    numbers = {"layers": apart, "total": len(gaps)}
    outcome = Outcome.PRESENT if apart else Outcome.ABSENT
    yield Finding("query-bias", BIAS, outcome, len(apart), threshold=OUTLIER, numbers=numbers)
    alignment, ratio = run.metric("key_alignment_first"), run.metric("gamma_ratio")
    if not np.isfinite(alignment):
        return
    later = {"later": run.metric("key_alignment_later")}
    yield Finding("key-alignment", BIAS, value=alignment, numbers=later)
    if np.isfinite(ratio):
        gamma = run.tables["gamma"]
        coordinates = tuple(sorted(gamma[gamma["is_massive_epe"]]["coordinate"].unique()))
        yield Finding("massive-epe", BIAS, value=ratio, numbers={"coordinates": coordinates})


def _eight_bits(run: RunData) -> Iterator[Finding]:
    """The finest step that 8 bits for a whole tensor can have, in units of its median entry."""
    if "massive" not in run.tables:
        return
    by_layer = run.tables["massive"].assign(magnitude=run.tables["massive"]["value"].abs()).groupby("layer")
    largest, median = by_layer["magnitude"].max(), by_layer["median"].mean()
    steps = (largest / EIGHT_BITS / median).fillna(0.0)  # of layers that give zeros alone
    worst = steps.idxmax()
    outcome = Outcome.PRESENT if steps[worst] > COARSE_STEP else Outcome.ABSENT
    numbers = {"layer": worst, "largest": largest[worst], "median": median[worst]}
    yield Finding("8-bit-step", QUANTIZATION, outcome, float(steps[worst]), threshold=COARSE_STEP, numbers=numbers)


def _windows(run: RunData) -> Iterator[Finding]:
    kinds, window = run.manifest["model"]["layer_types"] or (), run.manifest["model"]["sliding_window"]
    sliding = tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
    if not sliding or not window:
        return
    longest = run.manifest["input"]["longest"]
    outcome = Outcome.ABSENT if longest <= window else Outcome.PRESENT
    name = "sliding-window" if run.is_causal else "window-both-ways"
    yield Finding(name, SINK, outcome, window, numbers={"layers": sliding, "longest": longest})


def _not_applicable(run: RunData) -> Iterator[Finding]:
    reasons = {site: reason for site, reason in run.manifest["absent"].items() if site == "mid"}
    reasons |= run.manifest.get("not_measured", {})
    if run.manifest["family"]["wiring"] == "post-norm":
        reasons["comparison of residual norms with pre-norm models"] = "this one normalizes after each branch"
    if "attention" in run.tables and not np.isfinite(run.metric("attention_entropy")):
        reasons[METRICS["attention_entropy"].short] = "needs all columns: --positions as long as --seq-len"
    if np.isnan(run.metric("value_gradient_ratio")) and not np.isnan(run.metric("value_over_key_gradient")):
        reasons[METRICS["value_gradient_ratio"].short] = "needs positions 5–15: --positions 16 or more"
    for what, reason in reasons.items():
        yield Finding("not-measured", NOT_HERE, numbers={"what": what, "reason": reason})


def _by_layer(run: RunData, metric: str) -> pd.Series:
    summary = run.tables["summary"]
    rows = summary[(summary["metric"] == metric) & (summary["layer"] != WHOLE_MODEL)]
    return rows.set_index("layer")["value"]


def _where(chosen: pd.Series) -> tuple[int, ...]:
    """The layers of a series of bool that are chosen."""
    return tuple(int(layer) for layer in chosen[chosen].index)

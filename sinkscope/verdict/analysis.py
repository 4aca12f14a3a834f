"""What a run of `analyze` found: its tables become a table of metrics and findings."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial

import numpy as np
import pandas as pd

from sinkscope.measuring.estimates import SPIKE, delta_gaps, gradient_ratio, sink_heads
from sinkscope.measuring.observables.massive import THRESHOLD
from sinkscope.measuring.observables.observable import LATER
from sinkscope.measuring.summary import WHOLE_MODEL, later_sinks
from sinkscope.models.family import ATTENTION
from sinkscope.results.bos import WITH
from sinkscope.results.findings import (
    ALMOST_NO_SINK,
    AT_ONE_POSITION,
    COARSE_STEP,
    MOSTLY,
    NO_SINK,
    OUTLIER,
    RARE,
    STRONG,
    USUAL,
    Finding,
    Outcome,
)
from sinkscope.results.metrics import METRICS
from sinkscope.results.papers import LENGTH, SETTING, SINK_RATES, published_rates
from sinkscope.results.positions import ADDED, WITHIN_ATTENTION, kinds_of_positions, unequal
from sinkscope.results.run import RunData
from sinkscope.results.sequences import Sequences
from sinkscope.results.statistics import Estimate
from sinkscope.verdict.claimed import finding, interval, is_known, measured, of_claim
from sinkscope.verdict.markdown import Report

SHOWN = (  # metrics of the whole model, in the order of the verdict's table
    "sink_rate", "sink_rate_outside", "sink_rate_later", "window_mass", "sink_mass", "repeated_bound",
    "attention_entropy", "missing_mass", "value_drain", "raw_value_drain", "gate_first", "gate_later", "norm_ratio",
    "massive_count", "value_gradient_ratio", "uniform_gradient_ratio", "compress_slope", "delta_gap",
    "key_alignment_first", "perplexity", "max_inf_norm", "kurtosis",
)  # fmt: skip
HIDDEN_AT_ZERO = ("missing_mass",)  # of models without learned sink logits it is 0 by definition

SINK, MASSIVE, GRADIENTS = "Sink", "Massive activations", "Gradients"
VALUES, BIAS, QUANTIZATION, NOT_HERE = "Value states", "Query bias", "Quantization", "Does not apply here"

# Whose published sink rates they are, by input.
WSE = {"natural": SINK_RATES, "random": published_rates("random")}

MOST_COORDINATES = 3  # of massive activations that are named
MOST_TOKENS = 3  # of later sinks that are named
REGISTERS = "register tokens"  # of what is attended to outside the text: they stand in front of it
EIGHT_BITS = 255  # steps of an 8-bit grid


def report(run: RunData) -> Report:
    """The verdict on a run of `analyze`, as data."""
    return Report(f"{run.model}, {run.reads}", settings(run), overview(run), findings(run))


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
    evidence = Sequences(run)
    of_claims = (_sink, _repeated, _massive, _values, _gradients, _query_bias)
    found = [one for part in of_claims for one in part(run, evidence)]
    return found + [one for part in (_eight_bits, _windows, _not_applicable) for one in part(run)]


def settings(run: RunData, **more: int | str) -> list[Finding]:
    """How the run was measured, and whether its weights had been quantized before. `more`: of a command's own."""
    given = run.manifest["input"]
    numbers = {"sequences": given["sequences"], "lengths": (given["shortest"], given["longest"])}
    numbers |= {"condition": run.condition}
    first = f"the first register token, the text's own first {given['token_zero']}"
    has_registers = REGISTERS in (run.manifest.get("outside") or {})
    numbers |= {"token_zero": first if has_registers else given["token_zero"], "dtype": run.manifest["dtype"]} | more
    alone = [Finding("one-sequence", "")] if given["sequences"] == 1 else []
    both_ways = [] if run.is_causal else [Finding("both-ways", "", numbers={"masked": given["masked"]})]
    return [Finding("setting", "", numbers=numbers), *alone, *both_ways, *quantized_source(run)]


def _alone(run: RunData) -> dict[str, str]:
    """The words added to a sentence whose finding needs an interval when a single sequence gives none."""
    return {"alone": ", as a single sequence has no interval"} if run.manifest["input"]["sequences"] == 1 else {}


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


def _sink(run: RunData, evidence: Sequences) -> Iterator[Finding]:
    rate = of_claim(evidence, "W-1")
    if "attention" not in run.tables or rate is None:
        return
    rates, config = _by_layer(run, "sink_rate"), run.manifest["config"]
    strong = _where(rates >= STRONG)
    lengths = {"shortest": LENGTH, "longest": LENGTH}
    comparable = run.is_causal and (SETTING | lengths).items() <= (config | run.manifest["input"]).items()
    numbers = {"epsilon": config["epsilon"], "strong": STRONG, "layers": strong, "none": None if strong else STRONG}
    numbers |= {"few": ALMOST_NO_SINK, "weak_layers": _where(rates < ALMOST_NO_SINK) if strong else ()} | _alone(run)
    published = WSE.get(run.condition, ()) if comparable else ()
    yield finding("sink", SINK, rate, "W-1", published=published, numbers=numbers, is_headline=True)
    yield from _outside(run)
    yield from _attention_layers(run)
    if operations := run.manifest["model"].get("operations"):
        yield Finding("proxy", SINK, value=len(operations), numbers={"what": " and ".join(operations)})
    if run.manifest["family"].get("gated") and "gate" in run.tables:
        there = Outcome.ABSENT if rates.max() < NO_SINK else Outcome.PRESENT
        numbers = {"later": run.metric("gate_later"), "rate": rate.value}
        yield Finding("own-gates", SINK, there, run.metric("gate_first"), threshold=NO_SINK, numbers=numbers)
    if "sink_positions" in run.tables:
        yield _later_sinks(run)


def _outside(run: RunData) -> Iterator[Finding]:
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
    value = run.metric("sink_rate_outside")
    yield Finding("sink-outside", SINK, outcome, value, threshold=threshold, numbers=numbers)


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


def _repeated(run: RunData, evidence: Sequences) -> Iterator[Finding]:
    if run.condition != "repeated" or "attention" not in run.tables:
        return
    if run.bos == WITH:
        yield Finding("repeated-bos", SINK, Outcome.UNDECIDED, numbers={"token": run.manifest["input"]["token_zero"]})
        return
    kinds, stay_equal = kinds_of_positions(run), not any(unequal(run).values())
    bound = of_claim(evidence, "W-9") if stay_equal and "rotary" in kinds and kinds <= WITHIN_ATTENTION else None
    if bound is not None:
        numbers = {"mass": run.metric("sink_mass"), "bound": run.metric("repeated_bound")}
        yield finding("repeated-bound", SINK, bound, "W-9", numbers=numbers)
    else:
        yield _expected_on_repeated(run)


def _expected_on_repeated(run: RunData) -> Finding:
    positions = run.manifest["family"]["positions"]
    kinds, reasons = kinds_of_positions(run), unequal(run)
    if any(reasons.values()) or not kinds <= ADDED | WITHIN_ATTENTION:
        mixing = _counted(reasons.pop("others"))
        numbers = {"positions": positions, "others": mixing} | {name: " and ".join(of) for name, of in reasons.items()}
        return Finding("repeated", SINK, Outcome.UNDECIDED, numbers=numbers)
    outcome = Outcome.PRESENT if kinds & ADDED else Outcome.ABSENT
    return Finding("repeated", SINK, outcome, numbers={"positions": positions})


def _massive(run: RunData, evidence: Sequences) -> Iterator[Finding]:
    count = of_claim(evidence, "S-6")
    if count is None:
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
    yield finding("massive", MASSIVE, count, "S-6", outcome=Outcome.PRESENT, numbers=numbers, is_headline=True)
    for coordinate in coordinates:
        rows = massive[massive["coordinate"] == coordinate]
        yield _massive_coordinate(coordinate, rows, run.manifest["input"]["sequences"])


def _massive_coordinate(coordinate: int, rows: pd.DataFrame, sequences: int) -> Finding:
    layers = _where(rows.groupby("layer")["sequence"].nunique() / sequences >= USUAL)
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
    return Finding("massive-coordinate", MASSIVE, Outcome.PRESENT, value, numbers=numbers)


def _all_alike(run: RunData, largest: pd.Series) -> Finding:
    """On repeated tokens the median is as large as the rest where every token is massive: the rule then finds none."""
    numbers = {name: largest[name] for name in ("coordinate", "layer", "ratio")}
    if "activation_by_sequence" in run.tables:
        norms = run.tables["activation_by_sequence"].query("site == 'layer_out'").groupby("layer")
        first, smallest = (norms[name].mean()[largest["layer"]] for name in ("norm", "norm_smallest"))
        numbers |= {"first": first, "smallest": smallest}
    value = float(abs(largest["value"]))
    return Finding("massive", MASSIVE, Outcome.UNDECIDED, value, numbers=numbers, is_headline=True)


def _values(run: RunData, evidence: Sequences) -> Iterator[Finding]:
    drain, having = of_claim(evidence, "GS-20"), of_claim(evidence, "GS-20", part=1)
    if drain is None or having is None or not is_known(drain):
        return
    if not having.value:  # then it is over all heads
        yield finding("value-drain", VALUES, drain, "GS-20", outcome=Outcome.MEASURED)
        return
    chosen, _ = sink_heads(evidence)
    numbers = {"heads": int(chosen.sum()), "total": round(chosen.sum() / having.value)} | _alone(run)
    yield finding("value-drain", VALUES, drain, "GS-20", numbers=numbers)


def _gradients(run: RunData, evidence: Sequences) -> Iterator[Finding]:
    """Numbers alone: whether they make a gradient sink is decided by the same model with random weights (GS-6)."""
    value, key = (measured(partial(_ratio, pathway), evidence) for pathway in ("value", "key"))
    if value is not None and is_known(value):
        numbers = {"uniform": run.metric("uniform_gradient_ratio")}
        numbers |= {"key": key.value, **interval(key, "key_")} if key is not None else {}
        yield finding("value-gradient", GRADIENTS, value, numbers=numbers, is_headline=True)
        if (run.tables["gradient"]["pathway"] == "raw_value").any():
            yield Finding("gradient-behind", GRADIENTS, value=run.metric("value_gradient_ratio"))
        if run.is_causal:
            yield Finding("gradient-null", GRADIENTS, value=SPIKE)
    norms = of_claim(evidence, "GS-8")
    if norms is not None and is_known(norms):
        yield finding("gradient-norms", GRADIENTS, norms, "GS-8", outcome=Outcome.MEASURED)
    gains = {name: run.metric(name) for name in ("bloat", "bloat_later", "compress", "compress_later", "change")}
    if np.isfinite([gains["bloat"], gains["compress"], gains["change"]]).all():
        yield Finding("reshaping", GRADIENTS, value=gains["change"], numbers=gains)
    slope, correlation = of_claim(evidence, "GS-17"), of_claim(evidence, "GS-17", part=1)
    if slope is not None and correlation is not None and is_known(slope) and is_known(correlation):
        numbers = {"r": correlation.value, **interval(correlation, "r_")}
        yield finding("compress", GRADIENTS, slope, "GS-17", outcome=Outcome.MEASURED, threshold=None, numbers=numbers)


def _ratio(pathway: str, evidence: Sequences) -> Estimate:
    return gradient_ratio(evidence, pathway)


def _query_bias(run: RunData, evidence: Sequences) -> Iterator[Finding]:
    apart = of_claim(evidence, "N-1")
    if apart is None or not is_known(apart):
        return
    layers = np.unique(run.tables["query_bias_by_sequence"]["layer"])
    numbers = {"layers": tuple(layers[delta_gaps(evidence)[0] > OUTLIER]), "total": len(layers), "outlier": OUTLIER}
    yield finding("query-bias", BIAS, apart, "N-1", outcome=Outcome.MEASURED, numbers=numbers)
    alignment, later = of_claim(evidence, "N-2"), of_claim(evidence, "N-2", part=1)
    if alignment is None or not is_known(alignment):
        return
    numbers = {"later": None if later is None else later.value}
    yield finding("key-alignment", BIAS, alignment, "N-2", outcome=Outcome.MEASURED, numbers=numbers)
    ratio = run.metric("gamma_ratio")
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
        option = "--positions" if run.manifest["input"]["longest"] > LATER.start else "--seq-len"
        reasons[METRICS["value_gradient_ratio"].short] = f"needs positions 5–15: {option} 16 or more"
    for what, reason in reasons.items():
        yield Finding("not-measured", NOT_HERE, numbers={"what": what, "reason": reason})


def _by_layer(run: RunData, metric: str) -> pd.Series:
    summary = run.tables["summary"]
    rows = summary[(summary["metric"] == metric) & (summary["layer"] != WHOLE_MODEL)]
    return rows.set_index("layer")["value"]


def _where(chosen: pd.Series) -> tuple[int, ...]:
    """The layers of a series of bool that are chosen."""
    return tuple(int(layer) for layer in chosen[chosen].index)

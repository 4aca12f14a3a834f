"""The findings of a run of `analyze` with their sentences, and the table `finding`, which has all their numbers.

A finding whose number belongs to a claim has the value, interval, threshold and published values of the scorecard.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from math import isfinite, isnan, nan
from numbers import Real
from typing import Any

import numpy as np
import pandas as pd

from sinkscope.errors import counted
from sinkscope.measuring.estimates import RUN_CLAIMS, SPIKE, clear_sink_rate, delta_gaps, gradient_ratio, sink_heads
from sinkscope.measuring.observables.massive import THRESHOLD
from sinkscope.measuring.observables.reductions import LATER
from sinkscope.measuring.summary import later_sinks
from sinkscope.models.family import ATTENTION, UNREAD
from sinkscope.results import findings as limits
from sinkscope.results.findings import ALMOST_NO_SINK, FINDING_COLUMNS, NO_SINK, STRONG, USUAL, Finding, Outcome
from sinkscope.results.judgment import NotDefined, estimated
from sinkscope.results.metrics import CLEAR, HEADLINE_METRICS, METRICS, has_no_rate, reason_without_rate
from sinkscope.results.papers import LENGTH, SINK_RATES, WSE_SETTING, published_rates
from sinkscope.results.positions import ADDED, WITHIN_ATTENTION, kinds_of_positions, unequal
from sinkscope.results.run import WITH, RunData
from sinkscope.results.sequences import Lacks, Sequences
from sinkscope.results.side_by_side import span
from sinkscope.results.statistics import Estimate
from sinkscope.results.tables import WHOLE_MODEL, names_of
from sinkscope.verdict import probes
from sinkscope.verdict.report import (
    Report,
    coordinates_text,
    finding,
    interval,
    judgment_of,
    layers_text,
    with_interval,
)

SINK, MASSIVE, GRADIENTS = "Sink", "Massive activations", "Gradients"
VALUES, BIAS, QUANTIZATION, NOT_HERE = "Value states", "Query bias", "Quantization", "Does not apply here"

MOST_NAMED = 3  # coordinates of massive activations, and tokens of later sinks
REGISTERS = "register tokens"  # the entry of the manifest's `outside` for registers, which precede the text
GGUF = re.compile(r"(?<![A-Za-z0-9])(?P<kind>I?Q(?P<bits>\d)[\w-]*)(?=\.gguf$)", re.IGNORECASE)  # at the end of a name


def report(run: RunData) -> Report:
    said = findings(run)
    return Report(f"{run.model}, {run.reads}", settings(run), overview(run, {each.name for each in said}), said)


def overview(run: RunData, said: Collection[str] = ()) -> pd.DataFrame:
    """Return the metrics of the whole model without those that the findings named `said` state."""
    rows = []
    for name, stated_by in HEADLINE_METRICS.items() if "summary" in run.tables else ():  # not of pictures alone
        value = run.metric(name)
        # without learned sink logits, the missing mass is 0 by definition
        if stated_by not in said and np.isfinite(value) and (value or name != "missing_mass"):
            rows.append((METRICS[name].label, METRICS[name].text(value)))
    return pd.DataFrame(rows, columns=["whole model", "value"])


def findings(run: RunData) -> list[Finding]:
    if "summary" not in run.tables:
        return list(probes.findings(run))
    evidence = Sequences(run)
    of_claims = (_sink, _repeated_tokens, _massive_activations, _values, _gradients, _query_bias)
    others = (probes.findings, _number_formats, _windows, _not_measured)
    return [one for part in of_claims for one in part(run, evidence)] + [one for part in others for one in part(run)]


def settings(run: RunData, sentence_end: str = "", **more: int | str) -> list[Finding]:
    """Return findings on how a run was measured, with `more` numbers, and on weights that were quantized before."""
    read, dtype, said = run.manifest["input"], run.manifest["dtype"], list[Finding]()
    lengths, token_zero = (read["shortest"], read["longest"]), read["token_zero"]
    if REGISTERS in (run.manifest.get("outside") or {}):
        token_zero = f"the first register token, the text's own first {token_zero}"
    numbers = {"sequences": read["sequences"], "lengths": lengths, "condition": run.condition}
    numbers |= {"token_zero": token_zero, "dtype": dtype} | more
    sentence = f"Measured on {counted(read['sequences'], 'sequence')} of {span(lengths)} tokens ({run.condition}), "
    begins = "with different tokens at position 0" if token_zero == "varies" else f"position 0 being {token_zero}"
    sentence += f"{begins}, in {dtype}{sentence_end}."
    said.append(finding("setting", "", nan, sentence, numbers))
    texts = len(np.unique(run.text_numbers))
    if 1 < texts < read["sequences"]:
        sentence = f"Only {texts} of the sequences are distinct; 95 % intervals count copies of a text once."
        said.append(finding("copies", "", nan, sentence, {"texts": texts}))
    if texts == 1:
        copies = f"All {read['sequences']} sequences are copies of one text. " if read["sequences"] > 1 else ""
        sentence = f"{copies}A single {_unit(run)} has no 95 % interval, so findings that need an interval are "
        sentence += f"undecided. Measure several {_unit(run)}s to decide them."
        said.append(finding("one-sequence", "", nan, sentence))
    if not run.is_causal:
        sentence = "The model attends in both directions: queries before and after a position attend to it"
        if read["masked"] is not None:
            sentence += f"; loss, perplexity and gradients are those of {read['masked']} masked tokens, everything "
            sentence += "else is measured on the text without masks"
        said.append(finding("both-ways", "", nan, f"{sentence}.", {"masked": read["masked"]}))
    return said + packed_source(run)


def packed_source(run: RunData, scheme: str = "") -> list[Finding]:
    """Return a finding with the bits of the weights if these come from a quantized checkpoint, else an empty list.

    `scheme` is the quantization that is simulated on top of it, such as W8A8.
    """
    source, weights = (str(run.manifest["model"].get(entry, "")) for entry in ("source", "weights"))
    for file in (source, str(run.manifest.get("config", {}).get("gguf_file"))):
        match = GGUF.search(file) or re.fullmatch(r"(?P<bits>\d+)-bit (?P<kind>.+)", weights)
        if match:
            name, bits, dtype = re.split(r"[/\\]", file)[-1], float(match["bits"]), run.manifest["dtype"]
            sentence = f"The weights are those of {name}, which are quantized to {bits:g} bits ({match['kind']})"
            if scheme:
                sentence += f": {scheme} begins from these, and full precision means these weights in {dtype}"
            numbers = {"file": name, "kind": match["kind"], "scheme": scheme, "dtype": dtype}
            return [finding("quantized-source", QUANTIZATION, bits, f"{sentence}.", numbers)]
    return []


def whole_model(run: RunData) -> pd.DataFrame:
    """Return the metrics of the whole model, for model cards; none of pictures alone."""
    if "summary" not in run.tables:
        return pd.DataFrame(columns=["setting", "metric", "value"])
    return run.tables["summary"].query("layer == @WHOLE_MODEL").assign(setting="")


def finding_table(run: RunData, report: Report) -> pd.DataFrame:
    """Return the table `finding`: every number that the verdict on a run of `analyze` states, with its interval."""
    rows = []
    for one in (*report.settings, *report.findings):
        about = (one.threshold, str(one.outcome), one.claim)
        if not isnan(one.value) or one.outcome == Outcome.UNDEFINED:
            rows.append((one.name, "value", one.value, one.low, one.high, *about, one.null))
        numbers = [(name, number) for name, value in one.numbers.items() for number in _numbers(value)]
        by_name = dict(numbers)
        ends = {f"{name}_{end}" for name in by_name for end in ("low", "high")}
        for name, value in numbers:
            if name not in ends:
                low, high = (by_name.get(f"{name}_{end}", nan) for end in ("low", "high"))
                rows.append((one.name, name, value, low, high, *about, nan))
    table = pd.DataFrame(rows, columns=names_of(FINDING_COLUMNS))
    table = table.astype({column.name: float for column in FINDING_COLUMNS if column.kind == "number"})
    for column, label in (("layer", WHOLE_MODEL), ("condition", run.condition), ("model", run.model)):
        table.insert(0, column, label)
    return table


def _numbers(value: Any) -> list[float]:
    """Return the numbers in a value of `Finding.numbers`, without NaN; numbers in nested tuples are in one list."""
    if isinstance(value, tuple | list):
        return [number for part in value for number in _numbers(part)]
    return [float(value)] if isinstance(value, Real) and value == value else []


# --- findings that are numbers of claims


def estimate_or_none(measure: Callable[[Sequences], Estimate], sequences: Sequences) -> Estimate | None:
    """Return an estimate; None if it is not defined for the model, is not finite, or the run lacks its table."""
    try:
        estimate = estimated(measure, sequences)
    except (NotDefined, Lacks):
        return None
    return estimate if isfinite(estimate.value) else None


def of_claim(sequences: Sequences, claim: str, part: int = 0) -> Estimate | None:
    return estimate_or_none(RUN_CLAIMS[claim].parts[part].measure, sequences)


def _single(run: RunData) -> str:
    """Return the text that a sentence adds if its finding needs an interval and the run has a single text."""
    return f", as a single {_unit(run)} has no interval" if len(np.unique(run.text_numbers)) == 1 else ""


def _unit(run: RunData) -> str:
    return "sequence" if len(run.text_numbers) == 1 else "text"


# --- sections


def _sink(run: RunData, evidence: Sequences) -> Iterator[Finding]:
    if "attention" not in run.tables:
        return
    rate, rates = of_claim(evidence, "W-1"), _by_layer(run, "sink_rate")
    if rate is None and not has_no_rate({name: run.metric(name) for name in ("sink_rate", "uniform_mass")}):
        return
    yield _sink_at_first(run, evidence, rate)
    yield from _outside(run)
    family, operations = run.manifest["family"], run.manifest["model"].get("operations")
    kinds = family.get("kinds") or ()  # the kind of every layer
    if others := _counted_kinds(kind for kind in kinds if kind != ATTENTION):
        layers = tuple(layer for layer, kind in enumerate(kinds) if kind == ATTENTION)
        read = " whose weights are read" if UNREAD in kinds else ""
        sentence = f"Only {layers_text(layers)} {'have' if len(layers) > 1 else 'has'} attention{read}, and means over "
        sentence += f"layers are over these; the other layers are {others}."
        yield finding("attention-layers", SINK, len(layers), sentence, {"layers": layers, "others": others})
    if operations:
        what = " and ".join(operations)
        sentence = f"This model's attention is not a softmax ({what}): its weights are |sim| ÷ Σ|sim|, a proxy."
        yield finding("proxy", SINK, len(operations), sentence, {"what": what})
    if family.get("gated") and "gate" in run.tables:
        outcome, numbers = Outcome.UNDEFINED, {"later": run.metric("gate_later")}
        sentence = f"The model's own gates leave {_metric(run, 'gate_first')} of the heads' outputs at position 0 and "
        sentence += f"{_metric(run, 'gate_later')} at later ones"
        if rate is not None:
            has_sink = rates.max() >= NO_SINK
            outcome = Outcome.PRESENT if has_sink else Outcome.ABSENT
            numbers["rate"] = rate.value
            where = "some layers still have" if has_sink else "no layer has"
            sentence += f"; {where} a sink at position 0 (sink rate {rate.value:.1f}%)"
        sentence += "."
        if "gate_heads" in run.tables:
            numbers |= {name: run.metric(f"gate_{name}") for name in ("mean", "closed", "deviation")}
            numbers["below"] = limits.CLOSED
            sentence += f" Over all tokens a gate is {_metric(run, 'gate_mean')} on average, "
            sentence += f"{_metric(run, 'gate_closed')} of gates are below {limits.CLOSED:g}, and a head's gate has a "
            sentence += f"standard deviation of {_metric(run, 'gate_deviation')} over tokens."
        first = run.metric("gate_first")
        yield finding("own-gates", SINK, first, sentence, numbers, outcome=outcome, threshold=NO_SINK)
    if "sink_positions" in run.tables:
        yield _later_sinks(run)


def _sink_at_first(run: RunData, evidence: Sequences, rate: Estimate | None) -> Finding:
    config, uniform = run.manifest["config"], run.metric("uniform_mass")
    epsilon, numbers = config["epsilon"], dict[str, Any]()
    if rate is None:
        sentence = f"Whether there is a sink at position 0 cannot be said: {reason_without_rate(uniform, epsilon)}. "
        sentence += "Longer sequences and windows, or a larger ε, have a sink rate."
        numbers |= {"epsilon": epsilon, "uniform": uniform}
        about = {"outcome": Outcome.UNDEFINED, "threshold": limits.SINK, "claim": "W-1", "is_headline": True}
        return finding("sink", SINK, nan, sentence, numbers, **about)
    rates, judgment = _by_layer(run, "sink_rate"), judgment_of("W-1", rate)
    clear = estimate_or_none(clear_sink_rate, evidence)
    strong = _chosen(rates >= STRONG)
    weak = _chosen(rates < ALMOST_NO_SINK) if strong else ()
    numbers |= {"epsilon": epsilon, "strong": STRONG, "layers": strong, "none": None if strong else STRONG}
    numbers |= {"few": ALMOST_NO_SINK, "weak_layers": weak, "uniform": uniform}
    notes = [f"95 % interval {rate.low:.1f} to {rate.high:.1f}%"] if interval(rate) else []
    notes = ["one text, so no interval"] if _single(run) else notes
    has_rate = np.isfinite(evidence.values("attention_by_sequence", "sink_rate", position=0))
    having = int(has_rate.any(1).sum())
    if having < run.manifest["input"]["sequences"]:  # the others are too short
        uniform = float(evidence.values("attention_by_sequence", "uniform_mass", position=0)[has_rate].mean())
        numbers |= {"sequences": having, "uniform": uniform}
        notes.append(f"in {counted(having, 'sequence')} long enough for it")
    if not isnan(uniform):
        notes.append(f"uniform attention gives it {100 * uniform:.1f}%")
    what = f"{rate.value:.1f}% of the heads give the first token more than {100 * epsilon:g}% of their attention"
    what += f" ({'; '.join(notes)})" if notes else ""
    limit = f"; a sink has more than {judgment['threshold']:g}%"
    sentence = f"Whether there is a sink at position 0 is not decided: {what}"
    if judgment["outcome"] == Outcome.ABSENT:
        sentence = f"There is no sink at position 0: only {what}{limit}."
    elif judgment["outcome"] != Outcome.PRESENT:
        sentence += f"{limit}."
    elif clear is None or judgment_of("W-1", clear)["outcome"] == Outcome.PRESENT:
        sentence = f"{what}."
    else:
        judgment["outcome"] = Outcome.UNDECIDED
        numbers |= {"clear": clear, "times": CLEAR}
        sentence += f"; but random weights may give as much. In {with_interval(clear, '.1f', '%')} of the heads the "
        sentence += f"odds are more than {CLEAR:g} times those of uniform attention{limit}."
    where = f"At least {STRONG:.0%} of the heads do in {layers_text(strong)}" if strong else ""
    sentence += f" {where or f'In no layer do {STRONG:.0%} of the heads'}"
    sentence += f"; fewer than {ALMOST_NO_SINK:.0%} in {layers_text(weak)}." if weak else "."
    lengths = {"shortest": LENGTH, "longest": LENGTH}
    comparable = run.is_causal and (WSE_SETTING | lengths).items() <= (config | run.manifest["input"]).items()
    of_input = {"natural": SINK_RATES, "random": published_rates("random")}  # WSE's
    published = of_input.get(run.condition, ()) if comparable else ()
    about = judgment | {"null": 0.0, "published": published, "is_headline": True}
    return finding("sink", SINK, rate, sentence, numbers, **about)


def _outside(run: RunData) -> Iterator[Finding]:
    """Yield the attention to keys that are not tokens of the text, such as registers, if the model has any."""
    terms, rates = run.manifest.get("outside"), _by_layer(run, "sink_rate_outside")
    if not terms or rates.empty:
        return
    what, epsilon, rate = " and ".join(terms), run.manifest["config"]["epsilon"], run.metric("sink_rate_outside")
    numbers: dict[str, Any] = {"what": what, "epsilon": epsilon}
    if isnan(rate):
        numbers["uniform"] = float(run.tables["attention_outside"]["uniform_mass"].mean())
        sentence = f"Whether there is a sink outside the text, in {what}, cannot be said: "
        sentence += f"{reason_without_rate(numbers['uniform'], epsilon)}."
        yield finding("sink-outside", SINK, nan, sentence, numbers, outcome=Outcome.UNDEFINED)
        return
    strong, having = _chosen(rates >= STRONG), tuple(rates.index)
    having = having if len(rates) < _by_layer(run, "sink_rate").size else ()
    outcome, threshold, kind, where = Outcome.WEAK, STRONG, "a weak", f"in no layer in {STRONG:.0%} of them"
    if strong:
        outcome, kind, where = Outcome.PRESENT, "a", f"in at least {STRONG:.0%} of them in {layers_text(strong)}"
    elif rates.max() < NO_SINK:
        outcome, threshold, kind, where = Outcome.ABSENT, NO_SINK, "no", f"below {NO_SINK:.0%} in every layer"
    sentence = f"There is {kind} sink outside the text: more than {epsilon:g} of the attention goes to {what} in "
    sentence += f"{_metric(run, 'sink_rate_outside')} of heads and sequences"
    sentence += f"{f' of {layers_text(having)}' if having else ''}, {where}."
    numbers |= {"layers": strong, "having": having}
    yield finding("sink-outside", SINK, rate, sentence, numbers, outcome=outcome, threshold=threshold)


def _later_sinks(run: RunData) -> Finding:
    rate, rates = run.metric("sink_rate_later"), _by_layer(run, "sink_rate_later")
    if isnan(rate):
        sentence = "Whether later positions are sinks cannot be said: none has a window of "
        sentence += f"{limits.FEWEST_QUERIES} queries or more."
        queries = {"queries": limits.FEWEST_QUERIES}
        return finding("later-sinks", SINK, nan, sentence, queries, outcome=Outcome.UNDEFINED)
    text, sinks = f"{_metric(run, 'sink_rate_later')} of heads and sequences", later_sinks(run.tables["sink_positions"])
    if rate < NO_SINK or sinks.empty:
        sentence = f"No later position is a sink: {text}, below {NO_SINK:.0%}."
        return finding("later-sinks", SINK, rate, sentence, outcome=Outcome.ABSENT, threshold=NO_SINK)
    tokens = sinks["token"].value_counts(normalize=True).head(MOST_NAMED)
    tokens = tokens[(tokens >= limits.RARE) | (tokens == tokens.max())]
    shares = tuple((str(token), float(share)) for token, share in tokens.items())
    layers = _chosen(rates > max(ALMOST_NO_SINK, limits.MOSTLY * rates.max()))
    sentence = f"Later positions are sinks in {text}{f', mostly in {layers_text(layers)}' if layers else ''}"
    sentence += f"; most often at the tokens {', '.join(f'{token!r} ({share:.0%})' for token, share in shares)}."
    numbers = {"layers": layers, "tokens": shares}
    return finding("later-sinks", SINK, rate, sentence, numbers, outcome=Outcome.PRESENT, threshold=NO_SINK)


def _repeated_tokens(run: RunData, evidence: Sequences) -> Iterator[Finding]:
    if run.condition != "repeated" or "attention" not in run.tables:
        return
    if run.bos == WITH:
        token = run.manifest["input"]["token_zero"]
        sentence = f"Position 0 is {token}, and one token is repeated after it: the propositions are about equal "
        sentence += "tokens from position 0 on, as `--bos never` gives them (WSE)."
        yield finding("repeated-bos", SINK, nan, sentence, {"token": token}, outcome=Outcome.UNDECIDED)
        return
    kinds, reasons, positions = kinds_of_positions(run), unequal(run), run.manifest["family"]["positions"]
    stay_equal = not any(reasons.values())
    bound = of_claim(evidence, "W-9") if stay_equal and "rotary" in kinds and kinds <= WITHIN_ATTENTION else None
    if bound is not None:
        numbers = {"mass": run.metric("sink_mass"), "bound": run.metric("repeated_bound")}
        judgment = judgment_of("W-9", bound)
        sentence = "All tokens are equal, and yet attention to position 0 exceeds proposition 4's bound (WSE): in one "
        sentence += f"layer and sequence only {bound.value:.1%} of the weights are within it"
        if judgment["outcome"] == Outcome.PRESENT:
            sentence = "All tokens are equal, so that a rotary model cannot distinguish position 0 from the rest: "
            sentence += "attention to it is within proposition 4's bound in every layer and sequence (WSE)"
        if not any(map(isnan, numbers.values())):
            sentence += f"; mean sink mass {_metric(run, 'sink_mass')}, mean bound {_metric(run, 'repeated_bound')}"
        yield finding("repeated-bound", SINK, bound, f"{sentence}.", numbers, **judgment)
    elif stay_equal and kinds <= ADDED | WITHIN_ATTENTION:
        outcome, fate = (Outcome.PRESENT, "survive") if kinds & ADDED else (Outcome.ABSENT, "vanish on")
        sentence = f"This model's positions are {positions}, with which the sink should {fate} repeated tokens (WSE)."
        yield finding("repeated", SINK, nan, sentence, {"positions": positions}, outcome=outcome)
    else:
        words = {"positions": positions, "others": _counted_kinds(reasons.pop("others"))}
        words |= {name: " and ".join(causes) for name, causes in reasons.items()}
        sentence = f"The propositions on repeated tokens do not cover this model: its positions are {positions}"
        sentence += f", and tokens are also mixed by {words['others']}" if words["others"] else ""
        if words["operations"]:
            sentence += f", its attention is {words['operations']}, whose weights do not sum to 1"
        if words["outside"]:
            sentence += f"; attention also goes to {words['outside']}, more of it if a query sees fewer tokens, so "
            sentence += "that equal tokens do not stay equal"
        yield finding("repeated", SINK, nan, f"{sentence} (WSE).", words, outcome=Outcome.UNDECIDED)


def _massive_activations(run: RunData, evidence: Sequences) -> Iterator[Finding]:
    count = of_claim(evidence, "S-6")
    if count is None:
        return
    table = run.tables["massive"]
    massive = table[table["is_massive"]]
    if massive.empty:
        yield _nothing_massive(run, table)
        return
    coordinates = tuple(int(coordinate) for coordinate in massive["coordinate"].value_counts().index[:MOST_NAMED])
    largest = massive["value"].abs().max()
    sentence = f"In the layer with the most, a sequence has {with_interval(count, '.3g', ' massive activations')}, "
    sentence += f"most often at {coordinates_text(coordinates)}; the largest over all sequences is "
    sentence += f"{largest:,.0f} (Sun et al. 2024)."
    numbers: dict[str, Any] = {"coordinates": coordinates, "largest": largest}
    about = {"claim": "S-6", "outcome": Outcome.PRESENT, "is_headline": True}
    yield finding("massive", MASSIVE, count, sentence, numbers, **about)
    for coordinate in coordinates:
        rows = massive[massive["coordinate"] == coordinate]
        layers = _chosen(rows.groupby("layer")["sequence"].nunique() / run.manifest["input"]["sequences"] >= USUAL)
        positions, value = rows["position"].value_counts(normalize=True), float(rows["value"].abs().max())
        is_one = positions.iloc[0] > limits.AT_ONE_POSITION
        position, places = (int(positions.index[0]), None) if is_one else (None, len(positions))
        rarely = f"in each layer in less than {USUAL:.0%} of the sequences"
        where = f"in the output of {layers_text(layers)}" if layers else rarely
        where += f", at position {position}" if is_one else f", at {places} positions"
        size = "" if value == largest else f"; its largest is {value:,.0f}"  # the headline has the largest of all
        numbers = {"coordinate": coordinate, "layers": layers, "usual": None if layers else USUAL}
        numbers |= {"position": position, "places": places}
        sentence = f"Coordinate {coordinate} is massive {where}{size}."
        yield finding("massive-coordinate", MASSIVE, value, sentence, numbers, outcome=Outcome.PRESENT)


def _nothing_massive(run: RunData, table: pd.DataFrame) -> Finding:
    # If all repeated tokens have the large entries, the median is also large, and the definition cannot identify them.
    entry, outcome = table.loc[table["value"].abs().idxmax()], Outcome.UNDECIDED
    if run.condition == "repeated" and abs(entry["value"]) > THRESHOLD:
        numbers = {name: entry[name] for name in ("coordinate", "layer", "ratio")}
        sentence = "On repeated tokens the median by which Sun et al. (2024) define massive activations grows with the "
        sentence += "other entries, so it cannot identify them. The largest entry, at coordinate "
        sentence += f"{entry['coordinate']} of layer {entry['layer']}'s output, is {abs(entry['value']):,.0f} "
        sentence += f"({entry['ratio']:,.0f} × the median)"
        if "activation_by_sequence" in run.tables:
            norms = run.tables["activation_by_sequence"].query("site == 'layer_out'").groupby("layer")
            first, smallest = (norms[name].mean()[entry["layer"]] for name in ("norm", "norm_smallest"))
            numbers |= {"first": first, "smallest": smallest}
            sentence += f"; there the norm of position 0 is {first:,.0f} and the smallest of any token "
            sentence += f"{smallest:,.0f}: `sinkscope claims`, W-6, compares these with the sink's on natural text"
    else:
        entry, outcome = table.loc[table["ratio"].idxmax()], Outcome.ABSENT
        numbers = {name: entry[name] for name in ("coordinate", "layer", "position", "ratio")}
        size = f"{abs(entry['value']):,.0f}" if abs(entry["value"]) >= 10 else f"{abs(entry['value']):.2g}"
        sentence = "No entry of the residual stream is a massive activation; the nearest, at coordinate "
        sentence += f"{entry['coordinate']} of layer {entry['layer']}'s output and position {entry['position']}, is "
        sentence += f"{size}: {entry['ratio']:,.0f} × the median (Sun et al. 2024)"
    value = float(abs(entry["value"]))
    return finding("massive", MASSIVE, value, f"{sentence}.", numbers, outcome=outcome, is_headline=True)


def _values(run: RunData, evidence: Sequences) -> Iterator[Finding]:
    drain, having = of_claim(evidence, "GS-20"), of_claim(evidence, "GS-20", part=1)
    if drain is None or having is None:
        return
    judgment = judgment_of("GS-20", drain)
    ratio = f"{with_interval(drain, '.2f')} of that at positions 5–15, median over"
    if not having.value:  # without such heads, the median is over all heads
        sentence = f"No head has its sink at position 0. The value norm there is {ratio} all heads."
        yield finding("value-drain", VALUES, drain, sentence, claim="GS-20", outcome=Outcome.MEASURED)
        return
    heads = int(sink_heads(evidence)[0].sum())
    total, limit = round(heads / having.value), f"{judgment['threshold']:g}"
    ratio = f"their norm is {ratio} the {heads} of {total} heads with a sink"
    sentences = {
        Outcome.PRESENT: f"Value states at position 0 are drained where the sink is: {ratio}.",
        Outcome.ABSENT: f"Value states at position 0 are not drained where the sink is: {ratio}, no less than {limit}.",
        Outcome.UNDECIDED: "Whether value states at position 0 are drained where the sink is, is not decided"
        f"{_single(run)}: {ratio}, compared with {limit}.",
    }
    sentence = sentences[judgment["outcome"]]
    yield finding("value-drain", VALUES, drain, sentence, {"heads": heads, "total": total}, claim="GS-20")


def _gradients(run: RunData, evidence: Sequences) -> Iterator[Finding]:
    """Yield numbers only: a gradient sink is decided by comparison with the same model with random weights (GS-6)."""
    value, key = (estimate_or_none(partial(gradient_ratio, pathway=of), evidence) for of in ("value", "key"))
    if value is not None:
        uniform = run.metric("uniform_gradient_ratio")
        sentence = f"The value gradient at position 0 is {with_interval(value, '.1f', ' ×')}"
        sentence += "" if key is None else f" and the key gradient {with_interval(key, '.1f', ' ×', label='')}"
        sentence += " that of positions 5–15"
        if not isnan(uniform):
            sentence += "; uniform causal attention alone makes the value gradient "
            sentence += f"{_metric(run, 'uniform_gradient_ratio')} × (with unrelated token gradients of equal size), "
            sentence += "and random weights may make it larger (GS-6)"
        numbers = {"uniform": uniform} | ({} if key is None else {"key": key})
        yield finding("value-gradient", GRADIENTS, value, f"{sentence}.", numbers, null=uniform, is_headline=True)
        if (run.tables["gradient"]["pathway"] == "raw_value").any():
            sentence = "That is the gradient before the gate or scale on the value states; after it, at what is "
            sentence += f"attended to, the gradient is {_metric(run, 'value_gradient_ratio')} × that of positions 5–15."
            yield finding("gradient-behind", GRADIENTS, run.metric("value_gradient_ratio"), sentence)
        if run.is_causal:
            sentence = "Whether that is a gradient sink is decided by comparison with the same model with random "
            sentence += f"weights: it must be at least {SPIKE:g} × the ratio of that model (`sinkscope claims`, GS-6)."
            yield finding("gradient-null", GRADIENTS, SPIKE, sentence)
    norms = of_claim(evidence, "GS-8")
    if norms is not None:
        sentence = f"At position 0 the value gradient is {with_interval(norms, '.1f', ' ×')} the key gradient."
        yield finding("gradient-norms", GRADIENTS, norms, sentence, claim="GS-8", outcome=Outcome.MEASURED)
    gains = {name: run.metric(name) for name in ("bloat", "bloat_later", "compress", "compress_later", "change")}
    texts = {name: f"× {gain:,.0f}" if abs(gain) >= 100 else f"× {gain:.3g}" for name, gain in gains.items()}
    if np.isfinite([gains["bloat"], gains["compress"], gains["change"]]).all():
        later = f"attention branch {texts['bloat_later']}, the norm before it {texts['compress_later']}"
        sentence = f"Gradient gains at position 0, medians over layers: attention branch {texts['bloat']}, the norm "
        sentence += f"before it {texts['compress']}, the residual stream {texts['change']}"
        has_later = np.isfinite([gains["bloat_later"], gains["compress_later"]]).all()
        sentence += f" (positions 5–15: {later})." if has_later else "."
        yield finding("reshaping", GRADIENTS, gains["change"], sentence, gains)
    slope, correlation = of_claim(evidence, "GS-17"), of_claim(evidence, "GS-17", part=1)
    if slope is not None and correlation is not None:
        sentence = f"log₁₀ compress against log₁₀‖h‖: slope {with_interval(slope, '.2f')}, r = "
        sentence += f"{with_interval(correlation, '.2f', label='')} (GS fig. 3)."
        about = {"claim": "GS-17", "outcome": Outcome.MEASURED, "threshold": None}
        yield finding("compress", GRADIENTS, slope, sentence, {"r": correlation}, **about)


def _query_bias(run: RunData, evidence: Sequences) -> Iterator[Finding]:
    apart, alignment, later = of_claim(evidence, "N-1"), of_claim(evidence, "N-2"), of_claim(evidence, "N-2", part=1)
    if apart is None:
        return
    every = np.unique(run.tables["query_bias_by_sequence"]["layer"])
    layers = tuple(every[delta_gaps(evidence)[0] > limits.OUTLIER])
    sentence = f"The query bias lifts the logits of position 0 by more than {limits.OUTLIER:g} standard deviations "
    sentence += f"above those of later tokens in {with_interval(apart, '.0%')} of the second half of the layers"
    sentence += f"; among all {len(every)} layers, in {layers_text(layers)}" if layers else ""
    numbers = {"layers": layers, "total": len(every), "outlier": limits.OUTLIER}
    yield finding("query-bias", BIAS, apart, f"{sentence}.", numbers, claim="N-1", outcome=Outcome.MEASURED)
    if alignment is None:
        return
    magnitude = None if later is None else later.value
    sentence = f"The part of the key that the first token alone determines, W_k EPE₀, has cosine {alignment.value:.2f} "
    sentence += "with the query bias, mean over the second half of the layers"
    sentence += "" if magnitude is None else f" (positions 5–15: {magnitude:.2f} in magnitude)"
    about = {"claim": "N-2", "outcome": Outcome.MEASURED}
    yield finding("key-alignment", BIAS, alignment, f"{sentence}.", {"later": magnitude}, **about)
    ratio = run.metric("gamma_ratio")
    if np.isfinite(ratio):
        gamma = run.tables["gamma"]
        coordinates = tuple(sorted(gamma[gamma["is_massive_epe"]]["coordinate"].unique()))
        sentence = f"EPE₀ is massive at {coordinates_text(coordinates)}, where |γ| is "
        sentence += f"{_metric(run, 'gamma_ratio')} × its mean."
        yield finding("massive-epe", BIAS, ratio, sentence, {"coordinates": coordinates})


def _number_formats(run: RunData) -> Iterator[Finding]:
    """Yield what the layers' outputs mean for 8-bit activations with one scale for a tensor, and for float16."""
    if "massive" not in run.tables:
        return
    table = run.tables["massive"].assign(magnitude=run.tables["massive"]["value"].abs())
    by_layer = table.groupby("layer")
    largest, median = by_layer["magnitude"].max(), by_layer["median"].mean()
    # the smallest possible of the 255 steps, in median entries; NaN in layers with only zero outputs
    steps = (largest / 255 / median).fillna(0.0)
    worst = steps.idxmax()
    step = float(steps[worst])
    outcome = Outcome.PRESENT if step > limits.COARSE_STEP else Outcome.ABSENT
    sentence = f"One step of per-tensor 8-bit activations is at most {step:.1f} × the median entry, at the output of "
    sentence += f"layer {worst}: outliers do not rule out per-tensor scales."
    if outcome == Outcome.PRESENT:
        sentence = f"One step of per-tensor 8-bit activations at the output of layer {worst} is {step:.1f} × the "
        sentence += f"median entry, more than {limits.COARSE_STEP:g}: most of the tensor rounds to zero. Keep these "
        sentence += "tokens or coordinates in higher precision, or scale per token."
    numbers = {"layer": worst, "largest": largest[worst], "median": median[worst]}
    decided = {"outcome": outcome, "threshold": limits.COARSE_STEP}
    yield finding("8-bit-step", QUANTIZATION, step, sentence, numbers, **decided)

    entry = table.loc[table["magnitude"].idxmax()]  # the largest entry of all sequences
    limit = f"{limits.LARGEST_FLOAT16:,.0f}"
    where = f"{entry['magnitude']:,.0f} at the output of layer {entry['layer']}"
    outcome = Outcome.ABSENT
    sentence = f"The residual stream fits float16, which ends at {limit}: no entry is more than half of that."
    if entry["magnitude"] > limits.LARGEST_FLOAT16:
        outcome = Outcome.PRESENT
        sentence = f"float16 overflows: it ends at {limit}, and the residual stream reaches {where}. `sinkscope "
        sentence += "doctor --dtype float16` shows where first, and what a clip or a rescaling costs."
    elif entry["magnitude"] > limits.LARGEST_FLOAT16 / limits.HEADROOM:
        outcome = Outcome.WEAK
        sentence = f"float16 is risky: it ends at {limit}, and the residual stream reaches {where}, more than "
        sentence += "half of that. `sinkscope doctor --dtype float16` checks every site."
    decided = {"outcome": outcome, "threshold": limits.LARGEST_FLOAT16}
    yield finding("float16", QUANTIZATION, float(entry["magnitude"]), sentence, {"layer": entry["layer"]}, **decided)


def _windows(run: RunData) -> Iterator[Finding]:
    kinds, window = run.manifest["model"]["layer_types"] or (), run.manifest["model"]["sliding_window"]
    sliding = tuple(layer for layer, kind in enumerate(kinds) if kind == "sliding_attention")
    if not sliding or not window:
        return
    longest, layers = run.manifest["input"]["longest"], layers_text(sliding)
    name = "sliding-window" if run.is_causal else "window-both-ways"
    reach = counted(f"{window:g}", "token") + ("" if run.is_causal else " to either side")
    outcome, seen = Outcome.PRESENT, f"the last {reach}" if run.is_causal else f"tokens at most {window:g} away"
    sentence = f"Only {seen} can be attended to in {layers}."
    if longest <= window:
        outcome, unseen = Outcome.ABSENT, f"The window of {reach} that {layers} attend to is never reached"
        sentence = f"{unseen}: sequences have at most {longest} tokens."
    yield finding(name, SINK, window, sentence, {"layers": sliding, "longest": longest}, outcome=outcome)


def _not_measured(run: RunData) -> Iterator[Finding]:
    reasons = {site: reason for site, reason in run.manifest["absent"].items() if site == "mid"}
    reasons |= run.manifest.get("not_measured", {})
    if run.manifest["family"]["wiring"] == "post-norm":
        reasons["comparison of residual norms with pre-norm models"] = "this model normalizes after each branch"
    if "attention" in run.tables and not np.isfinite(run.metric("attention_entropy")):
        reasons[METRICS["attention_entropy"].short] = "needs all columns: --positions as long as --seq-len"
    if np.isnan(run.metric("value_gradient_ratio")) and not np.isnan(run.metric("value_over_key_gradient")):
        option = "--positions" if run.manifest["input"]["longest"] > LATER.start else "--seq-len"
        reasons[METRICS["value_gradient_ratio"].short] = f"needs positions 5–15: {option} 16 or more"
    for what, reason in reasons.items():
        yield finding("not-measured", NOT_HERE, nan, f"{what} ({reason})", {"what": what, "reason": reason})


def _by_layer(run: RunData, metric: str) -> pd.Series:
    summary = run.tables["summary"]
    return summary[(summary["metric"] == metric) & (summary["layer"] != WHOLE_MODEL)].set_index("layer")["value"]


def _chosen(chosen: pd.Series) -> tuple[int, ...]:
    return tuple(int(layer) for layer in chosen[chosen].index)


def _metric(run: RunData, metric: str) -> str:
    """Return the value of the whole model in the metric's format."""
    return METRICS[metric].text(run.metric(metric))


def _counted_kinds(kinds: Iterable[str]) -> str:
    return " and ".join(f"{count} × {kind.replace('_', ' ')}" for kind, count in Counter(kinds).items())

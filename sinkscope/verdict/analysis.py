"""The findings of a run of `analyze` with their sentences, and the table `finding`, which has all their numbers.

A finding whose number belongs to a claim has the value, interval, threshold and published values of the scorecard.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from functools import partial
from math import inf, isfinite, isnan, nan
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
from sinkscope.results.metrics import CLEAR, METRICS, has_no_rate, reason_without_rate
from sinkscope.results.papers import LENGTH, SETTING, SINK_RATES, published_rates
from sinkscope.results.positions import ADDED, WITHIN_ATTENTION, kinds_of_positions, unequal
from sinkscope.results.run import WITH, RunData
from sinkscope.results.sequences import Lacks, Sequences
from sinkscope.results.side_by_side import span
from sinkscope.results.statistics import Estimate
from sinkscope.results.tables import WHOLE_MODEL, names_of
from sinkscope.verdict import pictures, probes
from sinkscope.verdict.report import Report, coordinates_text, interval, layers_text, with_interval

# metrics of the whole model, in the order of the verdict's table
SHOWN = (
    "sink_rate", "sink_rate_outside", "sink_rate_later", "window_mass", "sink_mass", "repeated_bound",
    "attention_entropy", "missing_mass", "value_drain", "raw_value_drain", "gate_first", "gate_later", "norm_ratio",
    "massive_count", "value_gradient_ratio", "uniform_gradient_ratio", "compress_slope", "delta_gap",
    "key_alignment_first", "perplexity", "max_inf_norm", "kurtosis", "state_entropy", "state_entropy_without_first",
    "secondary_sinks", "residual_share",
)  # fmt: skip
STATED = {  # metric → the finding whose sentence has it
    "sink_rate": "sink", "sink_rate_outside": "sink-outside", "sink_rate_later": "later-sinks",
    "gate_first": "own-gates", "gate_later": "own-gates", "value_gradient_ratio": "value-gradient",
    "uniform_gradient_ratio": "value-gradient", "compress_slope": "compress",
}  # fmt: skip
HIDDEN_AT_ZERO = ("missing_mass",)  # 0 by definition for models without learned sink logits

SINK, MASSIVE, GRADIENTS = "Sink", "Massive activations", "Gradients"
VALUES, BIAS, QUANTIZATION, NOT_HERE = "Value states", "Query bias", "Quantization", "Does not apply here"

# input → WSE's published sink rates for it
WSE = {"natural": SINK_RATES, "random": published_rates("random")}

MOST_COORDINATES = 3  # number of coordinates of massive activations that are named
MOST_TOKENS = 3  # number of tokens of later sinks that are named
REGISTERS = "register tokens"  # the entry of the manifest's `outside` for registers, which precede the text
EIGHT_BITS = 255  # steps of an 8-bit grid
GGUF = re.compile(r"(?<![A-Za-z0-9])(?P<kind>I?Q(?P<bits>\d)[\w-]*)(?=\.gguf$)", re.IGNORECASE)  # at the end of a name

# outcome of a claim's number → outcome of the finding
OUTCOMES = {
    Outcome.HOLDS: Outcome.PRESENT,
    Outcome.FAILS: Outcome.ABSENT,
    Outcome.INCONCLUSIVE: Outcome.UNDECIDED,
    Outcome.NOT_ENOUGH_SEEDS: Outcome.UNDECIDED,
}


def report(run: RunData) -> Report:
    found = findings(run)
    return Report(f"{run.model}, {run.reads}", settings(run), overview(run, {one.name for one in found}), found)


def overview(run: RunData, said: Collection[str] = ()) -> pd.DataFrame:
    """Return the metrics of the whole model without those that the findings named `said` state."""
    if "summary" not in run.tables:  # of pictures alone
        return pd.DataFrame(columns=["whole model", "value"])
    values = {name: run.metric(name) for name in SHOWN if STATED.get(name) not in said}
    shown = [name for name, x in values.items() if np.isfinite(x) and (x or name not in HIDDEN_AT_ZERO)]
    rows = [(METRICS[name].label, METRICS[name].text(values[name])) for name in shown]
    return pd.DataFrame(rows, columns=["whole model", "value"])


def findings(run: RunData) -> list[Finding]:
    if "summary" not in run.tables:
        return list(pictures.findings(run))
    evidence = Sequences(run)
    of_claims = (_sink, _repeated, _massive, _values, _gradients, _query_bias)
    found = [one for part in of_claims for one in part(run, evidence)]
    others = (probes.findings, pictures.findings, _eight_bits, _float16, _windows, _not_applicable)
    return found + [one for part in others for one in part(run)]


def settings(run: RunData, sentence_end: str = "", **more: int | str) -> list[Finding]:
    """Return findings on how a run was measured, with `more` numbers, and on weights that were quantized before."""
    given, dtype = run.manifest["input"], run.manifest["dtype"]
    lengths, token_zero = (given["shortest"], given["longest"]), given["token_zero"]
    if REGISTERS in (run.manifest.get("outside") or {}):
        token_zero = f"the first register token, the text's own first {token_zero}"
    numbers = {"sequences": given["sequences"], "lengths": lengths, "condition": run.condition}
    numbers |= {"token_zero": token_zero, "dtype": dtype} | more
    sentence = f"Measured on {counted(given['sequences'], 'sequence')} of {span(lengths)} tokens ({run.condition}), "
    sentence += f"position 0 being {token_zero}, in {dtype}{sentence_end}."
    found = [Finding("setting", "", numbers=numbers, sentence=sentence)]
    texts = len(np.unique(run.text_numbers))
    if 1 < texts < given["sequences"]:
        sentence = f"Only {texts} of the sequences are distinct; 95 % intervals count copies of a text once."
        found.append(Finding("copies", "", numbers={"texts": texts}, sentence=sentence))
    if texts == 1:
        copies = f"All {given['sequences']} sequences are copies of one text. " if given["sequences"] > 1 else ""
        sentence = (
            f"{copies}A single {_unit(run)} has no 95 % interval, so findings that need an interval are undecided. "
        )
        found.append(Finding("one-sequence", "", sentence=f"{sentence}Measure several {_unit(run)}s to decide them."))
    if not run.is_causal:
        sentence = "The model attends in both directions: queries before and after a position attend to it"
        if (masked := given["masked"]) is not None:
            sentence += f"; loss, perplexity and gradients are those of {masked} masked tokens, everything else is "
            sentence += "measured on the text without masks"
        found.append(Finding("both-ways", "", numbers={"masked": masked}, sentence=f"{sentence}."))
    return found + packed_source(run)


def packed_source(run: RunData, scheme: str = "") -> list[Finding]:
    """Return a finding with the bits of the weights if these come from a quantized checkpoint, else an empty list.

    `scheme` is the quantization that is simulated on top of it, such as W8A8.
    """
    source, weights = (str(run.manifest["model"].get(entry, "")) for entry in ("source", "weights"))
    for file in (source, str(run.manifest.get("config", {}).get("gguf_file"))):
        found = GGUF.search(file) or re.fullmatch(r"(?P<bits>\d+)-bit (?P<kind>.+)", weights)
        if found:
            name, bits, dtype = re.split(r"[/\\]", file)[-1], float(found["bits"]), run.manifest["dtype"]
            sentence = f"The weights are those of {name}, which are quantized to {bits:g} bits ({found['kind']})"
            if scheme:
                sentence += f": {scheme} begins from these, and full precision means these weights in {dtype}"
            numbers = {"file": name, "kind": found["kind"], "scheme": scheme, "dtype": dtype}
            return [Finding("quantized-source", QUANTIZATION, value=bits, numbers=numbers, sentence=f"{sentence}.")]
    return []


def finding_table(run: RunData, report: Report) -> pd.DataFrame:
    """Return the table `finding`: every number that the verdict on a run of `analyze` states, with its interval."""
    rows = []
    for finding in (*report.settings, *report.findings):
        about = (finding.threshold, str(finding.outcome), finding.claim)
        if not isnan(finding.value) or finding.outcome == Outcome.UNDEFINED:
            rows.append((finding.name, "value", finding.value, finding.low, finding.high, *about, finding.null))
        numbers = [(name, number) for name, value in finding.numbers.items() for number in _numbers(value)]
        by_name = dict(numbers)
        ends = {f"{name}_{end}" for name in by_name for end in ("low", "high")}
        for name, value in numbers:
            if name not in ends:
                low, high = (by_name.get(f"{name}_{end}", nan) for end in ("low", "high"))
                rows.append((finding.name, name, value, low, high, *about, nan))
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


def measured(measure: Callable[[Sequences], Estimate], sequences: Sequences) -> Estimate | None:
    """Return an estimate; None if it is not defined for the model, is not finite, or the run lacks its table."""
    try:
        found = estimated(measure, sequences)
    except (NotDefined, Lacks):
        return None
    return found if isfinite(found.value) else None


def of_claim(sequences: Sequences, claim: str, part: int = 0) -> Estimate | None:
    return measured(RUN_CLAIMS[claim].parts[part].measure, sequences)


def finding(name: str, section: str, estimate: Estimate, claim: str = "", **given: Any) -> Finding:
    """Return a finding with an estimate, and with outcome and threshold of a claim's first number if not `given`."""
    if claim:
        test = RUN_CLAIMS[claim].parts[0].test
        threshold = test.most if test.least == -inf else test.least
        given = {"outcome": OUTCOMES[test.outcome(estimate)], "threshold": threshold, "claim": claim} | given
    return Finding(name, section, value=estimate.value, **interval(estimate), **given)


def _text(metric: str, value: float) -> str:
    return METRICS[metric].text(value)


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
    yield _without_rate(run) if rate is None else _sink_at_first(run, evidence, rate)
    yield from _outside(run)
    kinds = run.manifest["family"].get("kinds") or ()
    if others := _counted_kinds(kind for kind in kinds if kind != ATTENTION):
        layers = tuple(layer for layer, kind in enumerate(kinds) if kind == ATTENTION)
        read = " whose weights are read" if UNREAD in kinds else ""
        sentence = f"Only {layers_text(layers)} {'have' if len(layers) > 1 else 'has'} attention{read}, and means over "
        sentence += f"layers are over these; the other layers are {others}."
        numbers: dict[str, Any] = {"layers": layers, "others": others}
        yield Finding("attention-layers", SINK, value=len(layers), numbers=numbers, sentence=sentence)
    if operations := run.manifest["model"].get("operations"):
        what = " and ".join(operations)
        sentence = f"This model's attention is not a softmax ({what}): its weights are |sim| ÷ Σ|sim|, a proxy."
        yield Finding("proxy", SINK, value=len(operations), numbers={"what": what}, sentence=sentence)
    if run.manifest["family"].get("gated") and "gate" in run.tables:
        first, later = run.metric("gate_first"), run.metric("gate_later")
        sentence = f"The model's own gates leave {_text('gate_first', first)} of the heads' outputs at position 0 and "
        sentence += f"{_text('gate_later', later)} at later ones"
        outcome, numbers = Outcome.UNDEFINED, {"later": later}
        if rate is not None:
            has_sink = rates.max() >= NO_SINK
            outcome = Outcome.PRESENT if has_sink else Outcome.ABSENT
            numbers |= {"rate": rate.value}
            where = "some layers still have" if has_sink else "no layer has"
            sentence += f"; {where} a sink at position 0 (sink rate {rate.value:.1f}%)"
        sentence += "."
        if "gate_heads" in run.tables:
            of_all = {name: run.metric(f"gate_{name}") for name in ("mean", "closed", "deviation")}
            numbers |= of_all | {"below": limits.CLOSED}
            mean, closed, deviation = (_text(f"gate_{name}", value) for name, value in of_all.items())
            sentence += f" Over all tokens a gate is {mean} on average, {closed} of gates are below {limits.CLOSED:g}, "
            sentence += f"and a head's gate has a standard deviation of {deviation} over tokens."
        yield Finding("own-gates", SINK, outcome, first, threshold=NO_SINK, numbers=numbers, sentence=sentence)
    if "sink_positions" in run.tables:
        yield _later_sinks(run)


def _without_rate(run: RunData) -> Finding:
    uniform, epsilon = run.metric("uniform_mass"), run.manifest["config"]["epsilon"]
    sentence = f"Whether there is a sink at position 0 cannot be said: {reason_without_rate(uniform, epsilon)}. Longer "
    sentence += "sequences and windows, or a larger ε, have a sink rate."
    about: dict[str, Any] = {"numbers": {"epsilon": epsilon, "uniform": uniform}, "sentence": sentence}
    return Finding("sink", SINK, Outcome.UNDEFINED, threshold=limits.SINK, claim="W-1", is_headline=True, **about)


def _sink_at_first(run: RunData, evidence: Sequences, rate: Estimate) -> Finding:
    rates, config = _by_layer(run, "sink_rate"), run.manifest["config"]
    uniform, clear = run.metric("uniform_mass"), measured(clear_sink_rate, evidence)
    strong = _where(rates >= STRONG)
    weak = _where(rates < ALMOST_NO_SINK) if strong else ()
    lengths = {"shortest": LENGTH, "longest": LENGTH}
    comparable = run.is_causal and (SETTING | lengths).items() <= (config | run.manifest["input"]).items()
    numbers = {"epsilon": config["epsilon"], "strong": STRONG, "layers": strong, "none": None if strong else STRONG}
    numbers |= {"few": ALMOST_NO_SINK, "weak_layers": weak, "uniform": uniform}
    published = WSE.get(run.condition, ()) if comparable else ()
    about: dict[str, Any] = {"null": 0.0, "published": published, "is_headline": True}
    found = finding("sink", SINK, rate, "W-1", **about)
    is_clear = clear is None or finding("sink", SINK, clear, "W-1").outcome == Outcome.PRESENT

    notes = [] if isnan(found.low) else [f"95 % interval {found.low:.1f} to {found.high:.1f}%"]
    notes = ["one text, so no interval"] if _single(run) else notes
    having = int(np.isfinite(evidence.values("attention_by_sequence", "sink_rate", position=0)).any(1).sum())
    if having < run.manifest["input"]["sequences"]:  # the others are too short
        numbers["sequences"] = having
        notes.append(f"in {counted(having, 'sequence')} long enough for it")
    if not isnan(uniform):
        notes.append(f"uniform attention gives it {100 * uniform:.1f}%")
    what = f"{found.value:.1f}% of the heads give the first token more than {100 * config['epsilon']:g}% of their "
    what += "attention" + (f" ({'; '.join(notes)})" if notes else "")
    limit = f"; a sink has more than {found.threshold:g}%"
    sentence = f"Whether there is a sink at position 0 is not decided: {what}{limit}."
    if found.outcome == Outcome.PRESENT and is_clear:
        sentence = f"{what}."
    elif found.outcome == Outcome.PRESENT and clear is not None:
        found = replace(found, outcome=Outcome.UNDECIDED)
        numbers |= {"clear": clear.value, **interval(clear, "clear_"), "times": CLEAR}
        sentence = (
            f"Whether there is a sink at position 0 is not decided: {what}; but random weights may give as much. "
        )
        sentence += f"In {with_interval(clear, '.1f', '%')} of the heads the odds are more than {CLEAR:g} times those "
        sentence += f"of uniform attention{limit}."
    elif found.outcome == Outcome.ABSENT:
        sentence = f"There is no sink at position 0: only {what}{limit}."
    where = f"At least {STRONG:.0%} of the heads do in {layers_text(strong)}" if strong else ""
    sentence += f" {where or f'In no layer do {STRONG:.0%} of the heads'}"
    sentence += f"; fewer than {ALMOST_NO_SINK:.0%} in {layers_text(weak)}." if weak else "."
    return replace(found, numbers=numbers, sentence=sentence)


def _outside(run: RunData) -> Iterator[Finding]:
    """Yield the attention to keys that are not tokens of the text, such as registers, if the model has any."""
    kinds, rates = run.manifest.get("outside"), _by_layer(run, "sink_rate_outside")
    if not kinds or rates.empty:
        return
    what, epsilon = " and ".join(kinds), run.manifest["config"]["epsilon"]
    strong, value = _where(rates >= STRONG), run.metric("sink_rate_outside")
    if isnan(value):
        uniform = float(run.tables["attention_outside"]["uniform_mass"].mean())
        sentence = f"Whether there is a sink outside the text, in {what}, cannot be said: "
        sentence += f"{reason_without_rate(uniform, epsilon)}."
        numbers = {"what": what, "epsilon": epsilon, "uniform": uniform}
        yield Finding("sink-outside", SINK, Outcome.UNDEFINED, numbers=numbers, sentence=sentence)
        return
    having = tuple(rates.index) if len(rates) < _by_layer(run, "sink_rate").size else ()
    share = f"more than {epsilon:g} of the attention goes to {what} in {_text('sink_rate_outside', value)} of heads "
    share += f"and sequences{f' of {layers_text(having)}' if having else ''}"
    outcome, kind, where = Outcome.WEAK, "a weak", f"in no layer in {STRONG:.0%} of them"
    if strong:
        outcome, kind, where = Outcome.PRESENT, "a", f"in at least {STRONG:.0%} of them in {layers_text(strong)}"
    elif rates.max() < NO_SINK:
        outcome, kind, where = Outcome.ABSENT, "no", f"below {NO_SINK:.0%} in every layer"
    threshold = NO_SINK if outcome == Outcome.ABSENT else STRONG
    numbers = {"what": what, "epsilon": epsilon, "layers": strong, "having": having}
    sentence = f"There is {kind} sink outside the text: {share}, {where}."
    yield Finding("sink-outside", SINK, outcome, value, threshold=threshold, numbers=numbers, sentence=sentence)


def _counted_kinds(kinds: Iterable[str]) -> str:
    return " and ".join(f"{count} × {kind.replace('_', ' ')}" for kind, count in Counter(kinds).items())


def _later_sinks(run: RunData) -> Finding:
    rate, rates = run.metric("sink_rate_later"), _by_layer(run, "sink_rate_later")
    if isnan(rate):
        sentence = "Whether later positions are sinks cannot be said: none has a window of "
        sentence += f"{limits.FEWEST_QUERIES} queries or more."
        queries = {"queries": limits.FEWEST_QUERIES}
        return Finding("later-sinks", SINK, Outcome.UNDEFINED, numbers=queries, sentence=sentence)
    text = f"{_text('sink_rate_later', rate)} of heads and sequences"
    sinks = later_sinks(run.tables["sink_positions"])
    if rate < NO_SINK or sinks.empty:
        sentence = f"No later position is a sink: {text}, below {NO_SINK:.0%}."
        return Finding("later-sinks", SINK, Outcome.ABSENT, rate, threshold=NO_SINK, sentence=sentence)
    tokens = sinks["token"].value_counts(normalize=True).head(MOST_TOKENS)
    tokens = tokens[(tokens >= limits.RARE) | (tokens == tokens.max())]
    layers = _where(rates > max(ALMOST_NO_SINK, limits.MOSTLY * rates.max()))
    shares = tuple((str(token), float(share)) for token, share in tokens.items())
    sentence = f"Later positions are sinks in {text}{f', mostly in {layers_text(layers)}' if layers else ''}"
    sentence += f"; most often at the tokens {', '.join(f'{token!r} ({share:.0%})' for token, share in shares)}."
    numbers = {"layers": layers, "tokens": shares}
    return Finding("later-sinks", SINK, Outcome.PRESENT, rate, threshold=NO_SINK, numbers=numbers, sentence=sentence)


def _repeated(run: RunData, evidence: Sequences) -> Iterator[Finding]:
    if run.condition != "repeated" or "attention" not in run.tables:
        return
    if run.bos == WITH:
        token = run.manifest["input"]["token_zero"]
        sentence = f"Position 0 is {token}, and one token is repeated after it: the propositions are about equal "
        sentence += "tokens from position 0 on, as `--bos never` gives them (WSE)."
        yield Finding("repeated-bos", SINK, Outcome.UNDECIDED, numbers={"token": token}, sentence=sentence)
        return
    kinds, stay_equal = kinds_of_positions(run), not any(unequal(run).values())
    bound = of_claim(evidence, "W-9") if stay_equal and "rotary" in kinds and kinds <= WITHIN_ATTENTION else None
    if bound is None:
        yield _expected_on_repeated(run)
        return
    numbers = {"mass": run.metric("sink_mass"), "bound": run.metric("repeated_bound")}
    found = finding("repeated-bound", SINK, bound, "W-9", numbers=numbers)
    if found.outcome == Outcome.PRESENT:
        sentence = "All tokens are equal, so that a rotary model cannot distinguish position 0 from the rest: "
        sentence += "attention to it is within proposition 4's bound in every layer and sequence (WSE)"
    else:
        sentence = "All tokens are equal, and yet attention to position 0 exceeds proposition 4's bound (WSE): in one "
        sentence += f"layer and sequence only {found.value:.1%} of the weights are within it"
    if not any(map(isnan, numbers.values())):
        mass, limit = _text("sink_mass", numbers["mass"]), _text("repeated_bound", numbers["bound"])
        sentence += f"; mean sink mass {mass}, mean bound {limit}"
    yield replace(found, sentence=f"{sentence}.")


def _expected_on_repeated(run: RunData) -> Finding:
    positions = run.manifest["family"]["positions"]
    kinds, reasons = kinds_of_positions(run), unequal(run)
    if not any(reasons.values()) and kinds <= ADDED | WITHIN_ATTENTION:
        outcome, fate = (Outcome.PRESENT, "survive") if kinds & ADDED else (Outcome.ABSENT, "vanish on")
        sentence = f"This model's positions are {positions}, with which the sink should {fate} repeated tokens (WSE)."
        return Finding("repeated", SINK, outcome, numbers={"positions": positions}, sentence=sentence)
    others = _counted_kinds(reasons.pop("others"))
    words = {name: " and ".join(of) for name, of in reasons.items()}
    sentence = f"The propositions on repeated tokens do not cover this model: its positions are {positions}"
    sentence += f", and tokens are also mixed by {others}" if others else ""
    if operations := words.get("operations"):
        sentence += f", its attention is {operations}, whose weights do not sum to 1"
    if outside := words.get("outside"):
        sentence += f"; attention also goes to {outside}, more of it if a query sees fewer tokens, so that equal "
        sentence += "tokens do not stay equal"
    numbers = {"positions": positions, "others": others} | words
    return Finding("repeated", SINK, Outcome.UNDECIDED, numbers=numbers, sentence=f"{sentence} (WSE).")


def _massive(run: RunData, evidence: Sequences) -> Iterator[Finding]:
    count = of_claim(evidence, "S-6")
    if count is None:
        return
    table = run.tables["massive"]
    massive = table[table["is_massive"]]
    if massive.empty:
        yield _nothing_massive(run, table)
        return
    coordinates = tuple(int(coordinate) for coordinate in massive["coordinate"].value_counts().index[:MOST_COORDINATES])
    largest = massive["value"].abs().max()
    sentence = f"In the layer with the most, a sequence has {with_interval(count, '.3g', ' massive activations')}, "
    sentence += f"most often at {coordinates_text(coordinates)}; the largest over all sequences is "
    sentence += f"{largest:,.0f} (Sun et al. 2024)."
    numbers = {"coordinates": coordinates, "largest": largest}
    given = {"outcome": Outcome.PRESENT, "numbers": numbers, "is_headline": True, "sentence": sentence}
    yield finding("massive", MASSIVE, count, "S-6", **given)
    for coordinate in coordinates:
        rows = massive[massive["coordinate"] == coordinate]
        shares = rows.groupby("layer")["sequence"].nunique() / run.manifest["input"]["sequences"]
        layers = _where(shares >= USUAL)
        positions = rows["position"].value_counts(normalize=True)
        is_one = positions.iloc[0] > limits.AT_ONE_POSITION
        position, places = (int(positions.index[0]), None) if is_one else (None, len(positions))
        value = float(rows["value"].abs().max())
        where = f"in the output of {layers_text(layers)}" if layers else f"in less than {USUAL:.0%} of the sequences"
        where += f", at position {position}" if is_one else f", at {places} positions"
        size = "" if value == largest else f"; its largest is {value:,.0f}"  # the headline has the largest of all
        sentence = f"Coordinate {coordinate} is massive {where}{size}."
        numbers = {"coordinate": coordinate, "layers": layers, "usual": None if layers else USUAL}
        numbers |= {"position": position, "places": places}
        yield Finding("massive-coordinate", MASSIVE, Outcome.PRESENT, value, numbers=numbers, sentence=sentence)


def _nothing_massive(run: RunData, table: pd.DataFrame) -> Finding:
    # If all repeated tokens have the large entries, the median is also large, and the definition cannot identify them.
    entry = table.loc[table["value"].abs().idxmax()]
    if run.condition == "repeated" and abs(entry["value"]) > THRESHOLD:
        outcome, value = Outcome.UNDECIDED, float(abs(entry["value"]))
        sentence = "On repeated tokens the median by which Sun et al. (2024) define massive activations grows with the "
        sentence += "other entries, so it cannot identify them. The largest entry, at coordinate "
        sentence += f"{entry['coordinate']} of layer {entry['layer']}'s output, is {value:,.0f} ({entry['ratio']:,.0f} "
        sentence += "× the median)"
        numbers = {name: entry[name] for name in ("coordinate", "layer", "ratio")}
        if "activation_by_sequence" in run.tables:
            norms = run.tables["activation_by_sequence"].query("site == 'layer_out'").groupby("layer")
            first, smallest = (norms[name].mean()[entry["layer"]] for name in ("norm", "norm_smallest"))
            numbers |= {"first": first, "smallest": smallest}
            sentence += f"; there the norm of position 0 is {first:,.0f} and the smallest of any token "
            sentence += f"{smallest:,.0f}: `sinkscope claims`, W-6, compares these with the sink's on natural text"
    else:
        entry = table.loc[table["ratio"].idxmax()]
        outcome, value = Outcome.ABSENT, float(abs(entry["value"]))
        sentence = "No entry of the residual stream is a massive activation; the nearest, at coordinate "
        sentence += f"{entry['coordinate']} of layer {entry['layer']}'s output and position {entry['position']}, is "
        size = f"{value:,.0f}" if value >= 10 else f"{value:.2g}"
        sentence += f"{size}: {entry['ratio']:,.0f} × the median (Sun et al. 2024)"
        numbers = {name: entry[name] for name in ("coordinate", "layer", "position", "ratio")}
    return Finding("massive", MASSIVE, outcome, value, numbers=numbers, is_headline=True, sentence=f"{sentence}.")


def _values(run: RunData, evidence: Sequences) -> Iterator[Finding]:
    drain, having = of_claim(evidence, "GS-20"), of_claim(evidence, "GS-20", part=1)
    if drain is None or having is None:
        return
    ratio = f"{with_interval(drain, '.2f')} of that at positions 5–15, median over"
    if not having.value:  # in this case, the median is over all heads
        sentence = f"No head has its sink at position 0. The value norm there is {ratio} all heads."
        yield finding("value-drain", VALUES, drain, "GS-20", outcome=Outcome.MEASURED, sentence=sentence)
        return
    chosen, _ = sink_heads(evidence)
    heads = int(chosen.sum())
    total = round(heads / having.value)
    found = finding("value-drain", VALUES, drain, "GS-20", numbers={"heads": heads, "total": total})
    ratio = f"their norm is {ratio} the {heads} of {total} heads with a sink"
    if found.outcome == Outcome.PRESENT:
        sentence = f"Value states at position 0 are drained where the sink is: {ratio}"
    elif found.outcome == Outcome.ABSENT:
        sentence = f"Value states at position 0 are not drained where the sink is: {ratio}, no less than "
        sentence += f"{found.threshold:g}"
    else:
        sentence = "Whether value states at position 0 are drained where the sink is, is not decided"
        sentence += f"{_single(run)}: {ratio}, compared with {found.threshold:g}"
    yield replace(found, sentence=f"{sentence}.")


def _gradients(run: RunData, evidence: Sequences) -> Iterator[Finding]:
    """Yield numbers only: a gradient sink is decided by comparison with the same model with random weights (GS-6)."""
    value, key = (measured(partial(gradient_ratio, pathway=of), evidence) for of in ("value", "key"))
    if value is not None:
        uniform = run.metric("uniform_gradient_ratio")
        numbers = {"uniform": uniform}
        sentence = f"The value gradient at position 0 is {with_interval(value, '.1f', ' ×')}"
        if key is not None:
            numbers |= {"key": key.value, **interval(key, "key_")}
            sentence += f" and the key gradient {with_interval(key, '.1f', ' ×', label='')}"
        sentence += " that of positions 5–15"
        if not isnan(uniform):
            alone = _text("uniform_gradient_ratio", uniform)
            sentence += f"; uniform causal attention alone makes the value gradient {alone} × (with unrelated token "
            sentence += "gradients of equal size), and random weights may make it larger (GS-6)"
        about: dict[str, Any] = {"numbers": numbers, "is_headline": True, "sentence": f"{sentence}."}
        yield finding("value-gradient", GRADIENTS, value, null=uniform, **about)
        if (run.tables["gradient"]["pathway"] == "raw_value").any():
            attended = run.metric("value_gradient_ratio")
            sentence = "That is the gradient before the gate or scale on the value states; after it, at what is "
            sentence += f"attended to, the gradient is {_text('value_gradient_ratio', attended)} × that of positions "
            sentence += "5–15."
            yield Finding("gradient-behind", GRADIENTS, value=attended, sentence=sentence)
        if run.is_causal:
            sentence = "Whether that is a gradient sink is decided by comparison with the same model with random "
            sentence += f"weights: it must be at least {SPIKE:g} × the ratio of that model (`sinkscope claims`, GS-6)."
            yield Finding("gradient-null", GRADIENTS, value=SPIKE, sentence=sentence)
    norms = of_claim(evidence, "GS-8")
    if norms is not None:
        sentence = f"At position 0 the value gradient is {with_interval(norms, '.1f', ' ×')} the key gradient."
        yield finding("gradient-norms", GRADIENTS, norms, "GS-8", outcome=Outcome.MEASURED, sentence=sentence)
    gains = {name: run.metric(name) for name in ("bloat", "bloat_later", "compress", "compress_later", "change")}
    texts = {name: f"× {gain:,.0f}" if abs(gain) >= 100 else f"× {gain:.3g}" for name, gain in gains.items()}
    if np.isfinite([gains["bloat"], gains["compress"], gains["change"]]).all():
        later = f"attention branch {texts['bloat_later']}, the norm before it {texts['compress_later']}"
        sentence = f"Gradient gains at position 0, medians over layers: attention branch {texts['bloat']}, the norm "
        sentence += f"before it {texts['compress']}, the residual stream {texts['change']}"
        has_later = np.isfinite([gains["bloat_later"], gains["compress_later"]]).all()
        sentence += f" (positions 5–15: {later})." if has_later else "."
        yield Finding("reshaping", GRADIENTS, value=gains["change"], numbers=gains, sentence=sentence)
    slope, correlation = of_claim(evidence, "GS-17"), of_claim(evidence, "GS-17", part=1)
    if slope is not None and correlation is not None:
        sentence = f"log₁₀ compress against log₁₀‖h‖: slope {with_interval(slope, '.2f')}, r = "
        sentence += f"{with_interval(correlation, '.2f', label='')} (GS fig. 3)."
        numbers = {"r": correlation.value, **interval(correlation, "r_")}
        given = {"outcome": Outcome.MEASURED, "threshold": None, "numbers": numbers, "sentence": sentence}
        yield finding("compress", GRADIENTS, slope, "GS-17", **given)


def _query_bias(run: RunData, evidence: Sequences) -> Iterator[Finding]:
    apart = of_claim(evidence, "N-1")
    if apart is None:
        return
    every = np.unique(run.tables["query_bias_by_sequence"]["layer"])
    layers = tuple(every[delta_gaps(evidence)[0] > limits.OUTLIER])
    numbers = {"layers": layers, "total": len(every), "outlier": limits.OUTLIER}
    sentence = f"The query bias lifts the logits of position 0 by more than {limits.OUTLIER:g} standard deviations "
    sentence += f"above those of later tokens in {with_interval(apart, '.0%')} of the second half of the layers"
    sentence += f"; among all {len(every)} layers, in {layers_text(layers)}" if layers else ""
    given = {"outcome": Outcome.MEASURED, "numbers": numbers, "sentence": f"{sentence}."}
    yield finding("query-bias", BIAS, apart, "N-1", **given)
    alignment, later = of_claim(evidence, "N-2"), of_claim(evidence, "N-2", part=1)
    if alignment is None:
        return
    sentence = f"The part of the key that the first token alone determines, W_k EPE₀, has cosine {alignment.value:.2f} "
    sentence += "with the query bias, mean over the second half of the layers"
    magnitude = None if later is None else later.value
    sentence += "" if magnitude is None else f" (positions 5–15: {magnitude:.2f} in magnitude)"
    given = {"outcome": Outcome.MEASURED, "numbers": {"later": magnitude}, "sentence": f"{sentence}."}
    yield finding("key-alignment", BIAS, alignment, "N-2", **given)
    ratio = run.metric("gamma_ratio")
    if np.isfinite(ratio):
        gamma = run.tables["gamma"]
        coordinates = tuple(sorted(gamma[gamma["is_massive_epe"]]["coordinate"].unique()))
        sentence = f"EPE₀ is massive at {coordinates_text(coordinates)}, where |γ| is "
        sentence += f"{_text('gamma_ratio', ratio)} × its mean."
        yield Finding("massive-epe", BIAS, value=ratio, numbers={"coordinates": coordinates}, sentence=sentence)


def _eight_bits(run: RunData) -> Iterator[Finding]:
    """Yield the smallest possible step of 8 bits with one scale for a tensor, in units of its median entry."""
    if "massive" not in run.tables:
        return
    by_layer = run.tables["massive"].assign(magnitude=run.tables["massive"]["value"].abs()).groupby("layer")
    largest, median = by_layer["magnitude"].max(), by_layer["median"].mean()
    steps = (largest / EIGHT_BITS / median).fillna(0.0)  # NaN in layers with only zero outputs
    worst = steps.idxmax()
    step, threshold = float(steps[worst]), limits.COARSE_STEP
    outcome = Outcome.PRESENT if step > threshold else Outcome.ABSENT
    sentence = f"One step of per-tensor 8-bit activations is at most {step:.1f} × the median entry, at the output of "
    sentence += f"layer {worst}: outliers do not rule out per-tensor scales."
    if outcome == Outcome.PRESENT:
        sentence = f"One step of per-tensor 8-bit activations at the output of layer {worst} is {step:.1f} × the "
        sentence += f"median entry, more than {threshold:g}: most of the tensor rounds to zero. Keep these "
        sentence += "tokens or coordinates in higher precision, or scale per token."
    numbers = {"layer": worst, "largest": largest[worst], "median": median[worst]}
    yield Finding("8-bit-step", QUANTIZATION, outcome, step, threshold=threshold, numbers=numbers, sentence=sentence)


def _float16(run: RunData) -> Iterator[Finding]:
    """Yield whether the layers' outputs fit float16, from the largest over all sequences."""
    if "massive" not in run.tables:
        return
    entry = run.tables["massive"].loc[run.tables["massive"]["value"].abs().idxmax()]
    largest, limit = float(abs(entry["value"])), limits.LARGEST_FLOAT16
    where = f"{largest:,.0f} at the output of layer {entry['layer']}"
    sentence = f"The residual stream fits float16, which ends at {limit:,.0f}: no entry is more than half of that."
    outcome = Outcome.ABSENT
    if largest > limit:
        outcome = Outcome.PRESENT
        sentence = f"float16 overflows: it ends at {limit:,.0f}, and the residual stream reaches {where}. `sinkscope "
        sentence += "doctor --dtype float16` shows where first, and what a clip or a rescaling costs."
    elif largest > limit / limits.HEADROOM:
        outcome = Outcome.WEAK
        sentence = f"float16 is risky: it ends at {limit:,.0f}, and the residual stream reaches {where}, more than "
        sentence += "half of that. `sinkscope doctor --dtype float16` checks every site."
    numbers = {"layer": entry["layer"]}
    yield Finding("float16", QUANTIZATION, outcome, largest, threshold=limit, numbers=numbers, sentence=sentence)


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
    yield Finding(name, SINK, outcome, window, numbers={"layers": sliding, "longest": longest}, sentence=sentence)


def _not_applicable(run: RunData) -> Iterator[Finding]:
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
        numbers = {"what": what, "reason": reason}
        yield Finding("not-measured", NOT_HERE, numbers=numbers, sentence=f"{what} ({reason})")


def _by_layer(run: RunData, metric: str) -> pd.Series:
    summary = run.tables["summary"]
    return summary[(summary["metric"] == metric) & (summary["layer"] != WHOLE_MODEL)].set_index("layer")["value"]


def _where(chosen: pd.Series) -> tuple[int, ...]:
    return tuple(int(layer) for layer in chosen[chosen].index)

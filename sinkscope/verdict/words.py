"""Findings in words: one template for each name and outcome of a finding, and nothing else.

A template is a format string over the finding's numbers, its `value`, `low`, `high`, `spread` and `threshold`:

    {value:sink_rate}     a number in the format of that metric
    {layers:layers}       in words, by one of the functions of `_WAYS`
    {count:|site}         with the noun in the number that fits; {x:.3g|entry|entries} where the plural is no added s
    {label.sink_rate}     the label of a metric
    {metric:short}        the short label of the metric that a number names
    [, in {layers:layers}]    left out where one of its numbers is missing: None, NaN or empty
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from math import isnan
from string import Formatter
from types import SimpleNamespace
from typing import Any

from sinkscope.errors import counted
from sinkscope.results.findings import Finding, Outcome, Published
from sinkscope.results.metrics import METRICS

LABELS = SimpleNamespace(**{name: metric.label for name, metric in METRICS.items()})

MEASURED, PRESENT, WEAK, ABSENT = Outcome.MEASURED, Outcome.PRESENT, Outcome.WEAK, Outcome.ABSENT
RISES, FALLS, UNCHANGED, UNDECIDED = Outcome.RISES, Outcome.FALLS, Outcome.UNCHANGED, Outcome.UNDECIDED
CONFIRMED, PARTLY, REFUTED = Outcome.CONFIRMED, Outcome.PARTLY, Outcome.REFUTED

_CHANGE = (
    "The {metric:short} at position {position} …: {before:{metric}} → {value:{metric}}"
    "[, control {control:{metric}}][ ± {spread:{metric}}][, most in {layers:layers}]."
)
_INTERVAL = "[ (95 % interval {low:.2f} to {high:.2f})]"
_RATE = "{value:.1f}% ([95 % interval {low:.1f} to {high:.1f}%, ]ε = {epsilon:g})."
_DRAIN = (
    "their norm is {value:.2f}" + _INTERVAL + " of that at positions 5–15, median over the {heads} of {total} heads "
    "with a sink"
)
_IN_LAYERS = (
    "[ At least {strong:.0%} of the heads have it in {layers:layers}.][ In no layer have {none:.0%} of the heads it.]"
    "[ Fewer than {few:.0%} have it in {weak_layers:layers}.]"
)
# fmt: off
TEMPLATES: dict[tuple[str, Outcome], str] = {
    # analyze
    ("setting", MEASURED): "Measured on {sequences:|sequence} of {lengths:span} tokens ({condition}), position 0 "
        "being {token_zero}, in {dtype}[; static ranges from the {calibration:|sequence} after them. Quantized: input, "
        "weight and output of {linear_layers:|linear layer}, but not the LM head][; besides them {further}]"
        "[; {grids}].",
    ("one-sequence", MEASURED): "A single sequence has no 95 % interval: what an interval decides is not decided. "
        "Several sequences have one.",
    ("both-ways", MEASURED): "The model attends both ways: attention to a position is from queries on both sides of it"
        "[; loss, perplexity and gradients are of {masked} masked tokens, all else is of the text as it is].",
    ("control", MEASURED): "Controls are random changes of the same kind, at most {value:g} for each arm; of several, "
        "the mean ± the standard deviation.",
    ("quantized-source", MEASURED): "The weights are those of {file}, which are quantized to {value:g} bits "
        "({kind})[: {scheme} begins from these, and full precision means these weights in {dtype}].",
    ("sink", PRESENT): f"The {{label.sink_rate}} is {_RATE}{_IN_LAYERS}",
    ("sink", ABSENT): f"There is no sink at position 0: the {{label.sink_rate}} is {_RATE} That is not more than "
        f"{{threshold:g}}%.{_IN_LAYERS}",
    ("sink", UNDECIDED): f"Whether there is a sink at position 0 is not decided[{{alone}}]: the {{label.sink_rate}} is "
        f"{_RATE} A sink has more than {{threshold:g}}%.{_IN_LAYERS}",
    ("sink-outside", PRESENT): "There is a sink outside the text: more than {epsilon:g} of the attention goes to "
        "{what} in {value:sink_rate_outside} of heads and sequences[ of {having:layers}], in at least {threshold:.0%} "
        "of them in {layers:layers}.",
    ("sink-outside", WEAK): "More than {epsilon:g} of the attention goes to {what} in {value:sink_rate_outside} of "
        "heads and sequences[ of {having:layers}], in no layer in {threshold:.0%} of them.",
    ("sink-outside", ABSENT): "There is no sink outside the text: more than {epsilon:g} of the attention goes to "
        "{what} in {value:sink_rate_outside} of heads and sequences[ of {having:layers}], below {threshold:.0%} in "
        "every layer.",
    ("later-sinks", PRESENT): "Later positions are sinks in {value:sink_rate_later} of heads and sequences[, mostly "
        "in {layers:layers}][; most often at the tokens {tokens:shares}].",
    ("later-sinks", ABSENT): "No later position is a sink: {value:sink_rate_later} of heads and sequences, below "
        "{threshold:.0%}.",
    ("repeated-bound", PRESENT): "All tokens are equal, so that a rotary model cannot tell position 0 from the rest: "
        "attention to it is within proposition 4's bound in every layer and sequence (WSE)[; mean sink mass "
        "{mass:sink_mass}, mean bound {bound:repeated_bound}].",
    ("repeated-bound", ABSENT): "All tokens are equal, and yet attention to position 0 exceeds proposition 4's bound "
        "(WSE): in one layer and sequence only {value:.1%} of the weights are within it[; mean sink mass "
        "{mass:sink_mass}, mean bound {bound:repeated_bound}].",
    ("repeated", PRESENT): "This model's positions are {positions}, for which WSE expects the sink to survive "
        "repeated tokens.",
    ("repeated", UNDECIDED): "WSE's propositions on repeated tokens do not cover this model: its positions are "
        "{positions}[, and tokens are also mixed by {others}][, its attention is {operations}, whose weights do not "
        "sum to 1][; attention also goes to {outside}, the more the fewer tokens a query sees, so that equal tokens do "
        "not stay equal].",
    ("repeated", ABSENT): "This model's positions are {positions}, for which WSE expects the sink to vanish on "
        "repeated tokens.",
    ("repeated-bos", UNDECIDED): "Position 0 is {token}, and one token is repeated after it: WSE's propositions are "
        "about equal tokens from position 0 on, as `--bos never` gives them.",
    ("massive", PRESENT): "In the layer with most, a sequence has {value:.3g|massive activation} (Sun et al. 2024)"
        "[, 95 % interval {low:.3g} to {high:.3g}], most often at {coordinates:coordinates}; the largest of all "
        "sequences is {largest:,.0f}.",
    ("massive-coordinate", PRESENT): "Coordinate {coordinate} is massive[ in the output of {layers:layers}][ in less "
        "than {usual:.0%} of the sequences], at [position {position}][{places} positions]; the largest of all "
        "sequences is {value:,.0f}.",
    ("massive", ABSENT): "No entry of the residual stream is a massive activation as Sun et al. (2024) define it; the "
        "nearest, at coordinate {coordinate} of layer {layer}'s output and position {position}, is {value:,.0f}: "
        "{ratio:,.0f} × the median.",
    ("massive", UNDECIDED): "On repeated tokens massive activations cannot be told by the median, as Sun et al. (2024) "
        "define them: it grows with the rest. The largest entry, at coordinate {coordinate} of layer {layer}'s output, "
        "is {value:,.0f} ({ratio:,.0f} × the median)[; there the norm of position 0 is {first:,.0f} and the smallest "
        "of any token {smallest:,.0f}: `sinkscope claims`, W-6, holds these against the sink's on natural text].",
    ("value-drain", PRESENT): f"Value states at position 0 are drained where the sink is: {_DRAIN}.",
    ("value-drain", ABSENT): f"Value states at position 0 are not drained where the sink is: {_DRAIN}, no less than "
        "{threshold:g}.",
    ("value-drain", UNDECIDED): "Whether value states at position 0 are drained where the sink is, is not decided"
        f"[{{alone}}]: {_DRAIN}, against {{threshold:g}}.",
    ("value-drain", MEASURED): f"No head has its sink at position 0. The value norm there is {{value:.2f}}{_INTERVAL} "
        "of that at positions 5–15, median over all heads.",
    ("value-gradient", MEASURED): "The value gradient at position 0 is {value:.1f} ×[ (95 % interval {low:.1f} to "
        "{high:.1f})][ and the key gradient {key:.1f} ×][ ({key_low:.1f} to {key_high:.1f})] that of positions 5–15"
        "[; uniform causal attention alone makes the value gradient {uniform:uniform_gradient_ratio} × (gradients of "
        "tokens unrelated and of one size)].",
    ("gradient-behind", MEASURED): "That is the gradient of the value states in front of the gate or scale on them; "
        "behind it, at what is attended to, it is {value:value_gradient_ratio} × later ones.",
    ("gradient-null", MEASURED): "Whether that is a gradient sink is decided against the same model with random "
        "weights, of which it has to be at least {value:g} × (`sinkscope claims`, GS-6).",
    ("gradient-norms", MEASURED): "At position 0 the value gradient is {value:.1f} ×[ (95 % interval {low:.1f} to "
        "{high:.1f})] the key gradient.",
    ("reshaping", MEASURED): "Gradient gains at position 0, medians over layers: attention branch {bloat:gain}, the "
        "norm before it {compress:gain}, the residual stream {value:gain}[ (positions 5–15: attention branch "
        "{bloat_later:gain}, the norm before it {compress_later:gain})].",
    ("compress", MEASURED): f"log₁₀ compress against log₁₀‖h‖: slope {{value:.2f}}{_INTERVAL}, r = {{r:.2f}}"
        "[ ({r_low:.2f} to {r_high:.2f})] (GS fig. 3).",
    ("query-bias", MEASURED): "The query bias lifts the logits of position 0 by more than {outlier:g} standard "
        "deviations above those of later tokens in {value:.0%}[ (95 % interval {low:.0%} to {high:.0%})] of the second "
        "half of the layers[; of all {total} in {layers:layers}].",
    ("key-alignment", MEASURED): "The key of position 0 alone, W_k EPE₀, has cosine {value:.2f} with the query bias, "
        "mean over the second half of the layers[ (positions 5–15: {later:.2f} in magnitude)].",
    ("massive-epe", MEASURED): "EPE₀ is massive at {coordinates:coordinates}, where |γ| is {value:gamma_ratio} × its "
        "mean.",
    ("8-bit-step", PRESENT): "One step of per-tensor 8-bit activations at the output of layer {layer} is {value:.1f} "
        "× the median entry (largest over all sequences {largest:,.0f}, median {median:.2g}), more than "
        "{threshold:g}: most of the tensor rounds to zero. Keep these tokens or coordinates in higher precision, or "
        "scale per token.",
    ("8-bit-step", ABSENT): "One step of per-tensor 8-bit activations is at most {value:.1f} × the median entry, at "
        "the output of layer {layer} (largest over all sequences {largest:,.0f}, median {median:.2g}): outliers do "
        "not rule out per-tensor scales.",
    ("own-gates", ABSENT): "The model's own gates leave {value:gate_first} of the heads' outputs at position 0 and "
        "{later:gate_later} at later ones; no layer has a sink at position 0 (sink rate {rate:.1f}%).",
    ("own-gates", PRESENT): "The model's own gates leave {value:gate_first} of the heads' outputs at position 0 and "
        "{later:gate_later} at later ones; the sink at position 0 is there all the same (sink rate {rate:.1f}%).",
    ("attention-layers", MEASURED): "Attention is in {layers:layers} alone, and means over layers are over these; the "
        "other layers are {others}.",
    ("proxy", MEASURED): "Its attention is no softmax ({what}): weights are |sim| ÷ Σ|sim|, a proxy.",
    ("sliding-window", ABSENT): "The window of {value:g|token} that {layers:layers} attend to is never reached: "
        "sequences have at most {longest} tokens.",
    ("sliding-window", PRESENT): "Only the last {value:g|token} can be attended to in {layers:layers}.",
    ("window-both-ways", ABSENT): "The window of {value:g|token} to either side that {layers:layers} attend to is "
        "never reached: sequences have at most {longest} tokens.",
    ("window-both-ways", PRESENT): "Only tokens at most {value:g} away are attended to in {layers:layers}.",
    ("not-measured", MEASURED): "{what} ({reason})",
    # intervene
    ("skipped", MEASURED): "`{what}` does not apply: {reason}.",
    ("failed", MEASURED): "`{what}` could not be measured: {reason}.",
    ("change", ABSENT): "There is no sink at position {position}, before or after.",
    ("change", FALLS): _CHANGE.replace("…", "falls"),
    ("change", RISES): _CHANGE.replace("…", "rises"),
    ("change", UNCHANGED): _CHANGE.replace("…", "changes no more than under the control"),
    ("change", UNDECIDED): _CHANGE.replace("…", "has too few controls to judge by"),
    ("perplexity", MEASURED): "Perplexity {before:perplexity} → {value:perplexity}[, control {control:perplexity}][ ± "
        "{spread:perplexity}].",
    ("largest-rises", MEASURED): "The largest |activation| rises, {before:massive_magnitude} → "
        "{value:massive_magnitude}: it is now at coordinate {coordinate} of layer {layer}'s output and position "
        "{position}, a {place} that `{what}` leaves as it is.",
    ("streaming", MEASURED): "The last {window:|token}[ and the first {keep}]: perplexity {value:perplexity}; with "
        "dense attention {dense:perplexity}.",
    ("sink-falls", UNDECIDED): "{paper} found that the sink falls. Here there are too few controls to judge by.",
    ("sink-falls", CONFIRMED): "{paper} found that the sink falls. Here it does: {before:sink_rate} → "
        "{value:sink_rate}.",
    ("sink-falls", PARTLY): "{paper} found that the sink falls. Here it does, but more than {threshold:.0%} of it is "
        "left: {before:sink_rate} → {value:sink_rate}.",
    ("sink-falls", REFUTED): "{paper} found that the sink falls. Here it does not fall beyond the control's spread: "
        "{before:sink_rate} → {value:sink_rate}.",
    ("sink-falls", ABSENT): "{paper} found that the sink falls. Here there is no sink to begin with.",
    ("sink-stays", UNDECIDED): "{paper} found that the sink stays. Here there are too few controls to judge by.",
    ("sink-stays", CONFIRMED): "{paper} found that the sink stays. Here it does: {before:sink_rate} → "
        "{value:sink_rate}.",
    ("sink-stays", PARTLY): "{paper} found that the sink stays. Here it does, though some of it goes: "
        "{before:sink_rate} → {value:sink_rate}.",
    ("sink-stays", REFUTED): "{paper} found that the sink stays. Here less than {threshold:.0%} of it is left: "
        "{before:sink_rate} → {value:sink_rate}.",
    ("sink-stays", ABSENT): "{paper} found that the sink stays. Here there is no sink to begin with.",
    ("sink-moves", UNDECIDED): "{paper} found that the sink moves. Here there are too few controls to judge by.",
    ("sink-moves", CONFIRMED): "{paper} found that the sink moves. Here the sink moved to position {target}.",
    ("sink-moves", PARTLY): "{paper} found that the sink moves. Here position {target} becomes a sink, and position "
        "{source} stays one.",
    ("sink-moves", REFUTED): "{paper} found that the sink moves. Here it did not move: position {target} gains "
        "nothing beyond the control's spread.",
    ("perplexity-collapses", CONFIRMED): "{paper} found that perplexity collapses. Here it is multiplied by "
        "{value:,.4g}.",
    ("perplexity-collapses", REFUTED): "{paper} found that perplexity collapses. Here it is multiplied by "
        "{value:,.4g}, which is no collapse (that begins at {threshold:g}).",
    ("perplexity-unharmed", CONFIRMED): "{paper} found that perplexity is unharmed. Here it changes by {value:+.1%}.",
    ("perplexity-unharmed", REFUTED): "{paper} found that perplexity is unharmed. Here it changes by {value:+.1%}, "
        "by more than {threshold:.0%}.",
    # quantize
    ("cost", ABSENT): "{scheme} is harmless: perplexity {before:perplexity} → {after:perplexity}.",
    ("cost", PRESENT): "{scheme} multiplies perplexity by {value:,.4g}: {before:perplexity} → {after:perplexity}.",
    ("cost-parts", MEASURED): "Weights alone cost {weights:cost} nats per token, activations alone "
        "{activations:cost}, both {value:cost}.",
    ("kind", PRESENT): "`{kind}` quantized alone costs {value:cost} nats per token (all layers, first "
        "{sequences:|sequence}).",
    ("kind", ABSENT): "No kind of site costs {threshold:g} nats per token when it is quantized alone (first "
        "{sequences:|sequence}).",
    ("kept", MEASURED): "Left in full precision alone, `{kind}` saves most: {before:cost} → {value:cost} nats per "
        "token.",
    ("site", PRESENT): "`{kind}` of layer {layer} quantized alone costs {value:cost} nats per token; in "
        "calibration its largest entry is {largest:,.0f}, the median {median:.2g}, and {zeroed:.0%} round to zero.",
    ("massive-sites", PRESENT): "Massive activations are held by {sites:sites}.",
    ("massive-sites", ABSENT): "Nothing that is quantized holds massive activations.",
    ("costliest", MEASURED): "The {count:|costliest site} of {total}[, {massive} of which hold massive activations]: "
        "{sites:sites}.",
    ("restored", ABSENT): "Leaving {which} in full precision wins nothing back: perplexity {perplexity:perplexity}.",
    ("restored", PARTLY): "Leaving {which} in full precision wins {value:.0%} of the cost back: perplexity "
        "{perplexity:perplexity}.",
    ("restored", CONFIRMED): "Leaving {which} in full precision nearly restores perplexity: {perplexity:perplexity}, "
        "{value:.0%} of the cost gone.",
    ("not-quantized", MEASURED): "Not quantized: {parameters:code}, which are no linear layers ({value:.0%} of all "
        "parameters).",
    # retrofit and train
    ("gates-moved", MEASURED): "{arm}: new parameters moved by {mean:gate_displacement_mean} on average, by "
        "{value:gate_displacement_max} at most[, in layer {layer}]",
}
# fmt: on


def say(finding: Finding) -> str:
    """The finding as a sentence."""
    own = {name: getattr(finding, name) for name in ("value", "spread", "threshold", "low", "high")}
    given = own | dict(finding.numbers)
    template = TEMPLATES[finding.name, finding.outcome]
    template = re.sub(r"\[([^\[\]]*)\]", lambda part: part[1] if _is_given(part[1], given) else "", template)
    return _Words().vformat(template, (), given | {"label": LABELS})


def say_published(published: Sequence[Published]) -> list[str]:
    """Published values as a list for each setting: «Published at T = 64 (WSE table 1): LLaMA2-13B 91.69%, …»."""
    lines = []
    for (setting, source), some in groupby(published, lambda value: (value.setting, value.source)):
        listed = ", ".join(f"{value.name} {value.value:.2f}%{value.mark}" for value in some)
        note = " († from a transcription of the paper)" if "†" in listed else ""
        lines.append(f"Published, {setting} ({source}): {listed}{note}.")
    return lines


def _is_given(part: str, given: Mapping[str, Any]) -> bool:
    """Whether all numbers of an optional part are known."""
    return all(_is_known(given.get(name)) for _, name, _, _ in Formatter().parse(part) if name)


def _is_known(value: Any) -> bool:
    if isinstance(value, float):
        return not isnan(value)
    return value is not None and (not hasattr(value, "__len__") or len(value) > 0)


class _Words(Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec in METRICS:
            return METRICS[format_spec].text(value)
        if format_spec in _WAYS:
            return _WAYS[format_spec](value)
        if "|" in format_spec:
            form, *nouns = format_spec.split("|")
            return counted(format(value, form), *nouns)
        return str(format(value, format_spec))


def layers_text(layers: Iterable[int]) -> str:
    """(0, 1, 2, 5) → "layers 0–2, 5"."""
    return _counted("layer", list(layers))


def _counted(what: str, numbers: Sequence[int]) -> str:
    return f"{what}{'s' * (len(numbers) > 1)} {spans(numbers)}"


def spans(numbers: Iterable[int]) -> str:
    """(0, 1, 2, 5) → "0–2, 5"."""
    spans: list[list[int]] = []
    for number in sorted(int(number) for number in numbers):
        if spans and number == spans[-1][-1] + 1:
            spans[-1].append(number)
        else:
            spans.append([number])
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}–{span[-1]}" for span in spans)


def span(ends: tuple[int, int]) -> str:
    """(64, 64) → "64", (5, 12) → "5 to 12"."""
    return f"{ends[0]}" if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"


def _shares(shares: Iterable[tuple[str, float]]) -> str:
    return ", ".join(f"{name!r} ({share:.0%})" for name, share in shares)


def _sites(sites: Iterable[tuple[str, Sequence[int]]]) -> str:
    """Kinds of site, each with its layers; a site outside the layers has none."""
    return ", ".join(f"`{kind}`" + (f" of {layers_text(layers)}" if layers else "") for kind, layers in sites)


# format specification → how numbers are put in words
_WAYS: dict[str, Callable[[Any], str]] = {
    "short": lambda metric: METRICS[metric].short,
    "layers": layers_text,
    "span": span,
    "coordinates": lambda numbers: f"coordinate{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}",
    "shares": _shares,
    "sites": _sites,
    "gain": lambda x: f"× {x:,.0f}" if abs(x) >= 100 else f"× {x:.3g}",
    "code": lambda names: ", ".join(f"`{name}`" for name in names),
}

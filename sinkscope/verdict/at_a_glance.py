"""Five numbers of a run for a reader in a hurry: what each means, what it would be without a sink, and elsewhere."""

from collections.abc import Iterator, Mapping
from math import isfinite, isnan
from typing import Any, NamedTuple

from sinkscope.results.findings import LARGEST_FLOAT16
from sinkscope.results.metrics import METRICS
from sinkscope.results.run import RunData

# metric → title, and its values in reports/ (natural text, 100 × 64 tokens; of MGM text sampled from itself)
KNOWN: Mapping[str, tuple[str, Mapping[str, float]]] = {
    "sink_rate": ("Attention sink", {"SmolLM2-135M": 0.7289, "Gemma3-270M": 0.7872, "MGM": 0.4255}),
    "max_inf_norm": ("Massive activation", {"SmolLM2-135M": 23457, "Gemma3-270M": 104061, "MGM": 1551}),
    "value_drain": ("Value drain", {"SmolLM2-135M": 0.3738, "Gemma3-270M": 0.2569, "MGM": 0.1477}),
    "value_gradient_ratio": ("Gradient sink", {"SmolLM2-135M": 18.98, "Gemma3-270M": 37.47, "MGM": 9.507}),
    "kurtosis": ("Outliers", {"SmolLM2-135M": 13835, "Gemma3-270M": 7969, "MGM": 2883}),
}


class Glance(NamedTuple):
    """One number with its meaning."""

    metric: str  # a key of METRICS
    title: str
    value: str
    meaning: str
    null: str  # what the number would be without the phenomenon
    elsewhere: str  # where it is among other models


def glances(run: RunData) -> Iterator[Glance]:
    """Yield the numbers of `KNOWN` that a run of `analyze` has measured."""
    for name, (title, known) in KNOWN.items():
        value = run.metric(name)
        if isfinite(value):
            others = ", ".join(f"{model} {_text(name, other)}" for model, other in known.items())
            among = [value >= 0.99 * min(known.values()), value <= 1.01 * max(known.values())]
            place = "Among" if all(among) else "Above" if among[0] else "Below"
            yield Glance(name, title, _text(name, value), *_words(name, value, run), f"{place} three models: {others}.")


def _text(name: str, value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else METRICS[name].text(value)


def _words(name: str, value: float, run: RunData) -> tuple[str, str]:
    """Return what a number means, and its null."""
    manifest: Mapping[str, Any] = run.manifest
    epsilon = manifest["config"]["epsilon"]
    match name:
        case "sink_rate":
            uniform = run.metric("uniform_mass")
            mass = "" if isnan(uniform) else f" it {METRICS['uniform_mass'].text(uniform)} of the attention, that is"
            meaning = f"of the heads give the first token more than {epsilon:g} of their attention."
            return meaning, f"Uniform attention gives{mass} 0%."
        case "max_inf_norm":
            meaning = "is the largest activation of a sequence, on average."
            room = LARGEST_FLOAT16 / value
            return meaning, f"float16 holds {room:,.2g} times that; below 1, it overflows."
        case "value_drain":
            return "is the norm of the first token's values, relative to later tokens.", "Without one it is 1."
        case "value_gradient_ratio":
            meaning = "is the gradient at the first token's values, relative to positions 5–15."
            null = METRICS[name].text(run.metric("uniform_gradient_ratio"))
            return meaning, f"Uniform attention alone gives {null}."
        case _:
            return "is the kurtosis of the activations (few large entries).", "A normal distribution has 3."

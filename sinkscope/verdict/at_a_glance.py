"""Five numbers of a run for a reader in a hurry: what each means, what it would be without a sink, and elsewhere."""

from collections.abc import Iterator, Mapping
from functools import cache
from math import isfinite, isnan
from typing import Any, NamedTuple

from sinkscope.options.recipe import shipped
from sinkscope.results.findings import LARGEST_FLOAT16
from sinkscope.results.metrics import METRICS
from sinkscope.results.run import RunData
from sinkscope.results.tables import of_whole_model, read_table

TITLES = {  # by metric
    "sink_rate": "Attention sink",
    "max_inf_norm": "Massive activation",
    "value_drain": "Value drain",
    "value_gradient_ratio": "Gradient sink",
    "kurtosis": "Outliers",
}
REPORTED = {"SmolLM2-135M": "smollm2-135m", "Gemma3-270M": "gemma3-270m", "MGM": "mgm"}  # model → folder in reports/


class Glance(NamedTuple):
    """One number with its meaning."""

    metric: str  # a key of METRICS
    title: str
    value: str
    meaning: str
    null: str  # what the number would be without the phenomenon
    elsewhere: str  # where it is among other models


def glances(run: RunData) -> Iterator[Glance]:
    """Yield the numbers of `TITLES` that a run of `analyze` has measured."""
    reported = _reported()
    for name, title in TITLES.items():
        value = run.metric(name)
        if isfinite(value):
            known = {model: own[name] for model, own in reported.items()}
            others = ", ".join(f"{model} {_text(name, other)}" for model, other in known.items())
            among = [value >= 0.99 * min(known.values()), value <= 1.01 * max(known.values())]
            place = "Among" if all(among) else "Above" if among[0] else "Below"
            yield Glance(name, title, _text(name, value), *_words(name, value, run), f"{place} three models: {others}.")


@cache
def _reported() -> Mapping[str, Mapping[str, float]]:
    """Return model → metric → its value in reports/ (100 × 64 tokens of text, of MGM sampled from itself)."""
    found = {}
    for model, folder in REPORTED.items():
        found[model] = of_whole_model(read_table(shipped("reports") / folder / "tables" / "summary.parquet"))
    return found


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
            times = f"{room:,.0f}" if room >= 10 else f"{room:.2g}"
            return meaning, f"float16 holds {times} times that; below 1, it overflows."
        case "value_drain":
            return "is the norm of the first token's values, relative to later tokens.", "Without one it is 1."
        case "value_gradient_ratio":
            meaning = "is the gradient at the first token's values, relative to positions 5–15."
            null = METRICS[name].text(run.metric("uniform_gradient_ratio"))
            return meaning, f"Uniform attention alone gives {null}; random weights may give more (claim GS-6)."
        case _:
            return "is the kurtosis of the activations (few large entries).", "A normal distribution has 3."

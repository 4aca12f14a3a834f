"""Numbers of a run at a glance: what each means, its value without a sink, and its value in other models."""

from collections.abc import Iterator, Mapping
from functools import cache
from math import isfinite, isnan, nan
from typing import NamedTuple

from sinkscope.options.recipe import shipped
from sinkscope.results.findings import LARGEST_FLOAT16
from sinkscope.results.metrics import METRICS
from sinkscope.results.run import RunData
from sinkscope.results.tables import of_whole_model, read_table

# metric → its title, its meaning, and what it would be without the phenomenon
GLANCES = {
    "sink_rate": ("Attention sink", "of the heads give the first token more than {epsilon:g} of their attention.",
        "Uniform attention gives{uniform_mass} 0%."),
    "max_inf_norm": ("Massive activation", "is the largest activation of a sequence, on average.",
        "float16 holds {room} times that; below 1, it would be infinite."),
    "value_drain": ("Value drain", "is the norm of the first token's values, relative to later tokens.",
        "Without one it is 1."),
    "value_gradient_ratio": (
        "Gradient sink", "is the gradient at the first token's values, relative to positions 5–15.",
        "Uniform attention alone gives {uniform_ratio}; random weights may give more (claim GS-6)."),
    "kurtosis": ("Outliers", "is the kurtosis of the activations (few large entries).",
        "A normal distribution has 3."),
}  # fmt: skip
REPORTED = {"SmolLM2-135M": "smollm2-135m", "Gemma3-270M": "gemma3-270m", "MGM": "mgm"}  # model → folder in reports/


class Glance(NamedTuple):
    """One number with its meaning."""

    metric: str  # a key of METRICS
    title: str
    value: str
    meaning: str
    null: str  # its value without the phenomenon
    elsewhere: str  # its rank among other models


def glances(run: RunData) -> Iterator[Glance]:
    """Yield the numbers of `GLANCES` that a run of `analyze` has measured."""
    uniform, room = run.metric("uniform_mass"), LARGEST_FLOAT16 / (run.metric("max_inf_norm") or nan)
    mass = "" if isnan(uniform) else f" it {METRICS['uniform_mass'].text(uniform)} of the attention, that is"
    words = {
        "epsilon": run.manifest["config"]["epsilon"],
        "uniform_mass": mass,
        "room": f"{room:,.0f}" if room >= 10 else f"{room:.2g}",
        "uniform_ratio": METRICS["value_gradient_ratio"].text(run.metric("uniform_gradient_ratio")),
    }
    for name, (title, meaning, null) in GLANCES.items():
        value = run.metric(name)
        if isfinite(value):
            elsewhere = ""
            if all(name in values for values in _reported().values()):  # reports/ lacks a metric that is new
                by_model = {model: values[name] for model, values in _reported().items()}
                others = ", ".join(f"{model} {_short(name, other)}" for model, other in by_model.items())
                among = [value >= 0.99 * min(by_model.values()), value <= 1.01 * max(by_model.values())]
                elsewhere = f"{'Among' if all(among) else 'Above' if among[0] else 'Below'} three models: {others}."
            yield Glance(name, title, _short(name, value), meaning.format(**words), null.format(**words), elsewhere)


@cache
def _reported() -> Mapping[str, Mapping[str, float]]:
    """Return model → metric → its value in reports/ (100 × 64 tokens of text, of MGM sampled from itself)."""
    folders = {model: shipped("reports") / folder / "tables" for model, folder in REPORTED.items()}
    return {model: of_whole_model(read_table(path / "summary.parquet")) for model, path in folders.items()}


def _short(name: str, value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else METRICS[name].text(value)

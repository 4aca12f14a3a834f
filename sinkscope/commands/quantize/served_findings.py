"""The findings of a run of `quantize` on presets with their sentences, and its recipes for llm-compressor."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import pandas as pd
import yaml

from sinkscope.commands.quantize.manifest import EncodingEntry
from sinkscope.commands.quantize.served import ALL, INPUTS, WEIGHTS
from sinkscope.errors import counted
from sinkscope.measuring.sink_rule import FIRST_TOKENS
from sinkscope.quantization.formats import PRESETS, Encoding, Preset
from sinkscope.quantization.settings import COSTLY
from sinkscope.results.findings import Finding, Outcome
from sinkscope.results.metrics import METRICS
from sinkscope.results.run import RunData
from sinkscope.results.statistics import Estimate
from sinkscope.verdict.analysis import settings
from sinkscope.verdict.report import Report, with_interval

COSTS, SPARED, SINKS, NOT_SERVED = "Cost", "Modules to spare", "Sink tokens", "Not quantized"
NATS = METRICS["cost"].text


def report(run: RunData) -> Report:
    entry = run.manifest["served"]
    sentence = f"; static ranges from the {counted(entry['calibration'], 'sequence')} after them. Quantized: weights "
    sentence += f"and inputs of {counted(entry['matrices'], 'matrix', 'matrices')} ({entry['share']:.0%} of all "
    sentence += "parameters), without the LM head; no outputs"
    about = settings(run, sentence, calibration=entry["calibration"], matrices=entry["matrices"], share=entry["share"])
    title = f"{run.model}: simulated {', '.join(presets(run))}, {run.reads}"
    return Report(title, about, overview(run), list(findings(run)))


def presets(run: RunData) -> dict[str, Preset]:
    """Return the presets of a run, with the groups that fit its model."""

    def encoding(values: Mapping[str, Any] | None) -> Any:
        return values and Encoding(**{name: values[name] for name in EncodingEntry.model_fields})

    schemes = run.manifest["served"]["schemes"]
    return {name: Preset(encoding(each["weights"]), encoding(each["inputs"])) for name, each in schemes.items()}


def part(run: RunData, name: str) -> pd.DataFrame:
    """Return the rows of the table for one part, by scheme."""
    table = run.tables["formats"]
    return table[table["part"] == name].set_index("scheme")


def estimate(row: Any, name: str) -> Estimate:
    return Estimate(float(row[name]), float(row[f"{name}_low"]), float(row[f"{name}_high"]))


def overview(run: RunData) -> pd.DataFrame:
    whole, weights, inputs = (part(run, name) for name in (ALL, WEIGHTS, INPUTS))
    rows = []
    for scheme, preset in presets(run).items():
        row = whole.loc[scheme]
        rows.append(
            {
                "scheme": scheme,
                "weights": str(preset.weights),
                "inputs": str(preset.inputs or "as they are"),
                "perplexity ×": f"{row['ratio']:.3f}",
                "cost (nats per token)": with_interval(estimate(row, "cost"), "z.3f"),
                "weights alone": NATS(weights.loc[scheme, "cost"]),
                "inputs alone": NATS(inputs["cost"].get(scheme, float("nan"))),
                "sinks' share": NATS(row["sink_share"]),
            }
        )
    return pd.DataFrame(rows)


def findings(run: RunData) -> Iterator[Finding]:
    whole, weights, inputs = (part(run, name) for name in (ALL, WEIGHTS, INPUTS))
    for scheme, preset in presets(run).items():
        row, cost = whole.loc[scheme], estimate(whole.loc[scheme], "cost")
        outcome = Outcome.UNDECIDED
        if cost.low >= COSTLY:
            outcome = Outcome.PRESENT
        elif cost.high < COSTLY:
            outcome = Outcome.ABSENT
        sentence = f"{scheme} multiplies perplexity by {row['ratio']:.3f}: it costs {with_interval(cost, 'z.3f')} nats "
        sentence += "per token"
        parts = {"weights": float(weights.loc[scheme, "cost"])}
        if preset.inputs is not None:
            parts |= {"inputs": float(inputs.loc[scheme, "cost"])}
            sentence += f", weights alone {NATS(parts['weights'])}, inputs alone {NATS(parts['inputs'])}"
        numbers = {"scheme": scheme, "ratio": float(row["ratio"]), **parts}
        about: dict[str, Any] = {"low": cost.low, "high": cost.high, "threshold": COSTLY, "numbers": numbers}
        yield Finding("cost", COSTS, outcome, cost.value, is_headline=True, sentence=f"{sentence}.", **about)
    entry = run.manifest["served"]
    tokens = f"sink tokens ({entry['sinks']:.3g} of a sequence)"
    if entry["sink_layer"] < 0:
        tokens = f"the first {FIRST_TOKENS} tokens (no massive activation predicts sinks)"
    if "formats_spared" in run.tables:
        for _, row in run.tables["formats_spared"].iterrows():
            yield _spared(run, row)
    for scheme, preset in presets(run).items():
        if preset.inputs is not None:
            yield _sinks(scheme, whole.loc[scheme], tokens)
    for scheme, reason in entry["absent"].items():
        yield Finding("absent", NOT_SERVED, numbers={"scheme": scheme}, sentence=f"{scheme} does not apply: {reason}.")
    if left := entry["not_quantized"]:
        share, names = sum(left.values()), ", ".join(f"`{name}`" for name in left)
        sentence = f"Not quantized: {names} ({share:.2%} of all parameters)."
        yield Finding("not-quantized", NOT_SERVED, value=share, numbers={"parameters": tuple(left)}, sentence=sentence)


def is_worth_sparing(row: pd.Series) -> bool:
    """Return whether modules recover something, and more than random ones."""
    return bool(min(row["recovered_low"], row["ahead_low"]) > 0)


def ignored(run: RunData, scheme: str) -> list[str]:
    """Return the modules that a recipe leaves in full precision because that recovers cost."""
    if "formats_spared" not in run.tables:
        return []
    row = run.tables["formats_spared"].set_index("scheme").loc[scheme]
    modules = run.tables["formats_modules"]
    return list(modules["module"][(modules["scheme"] == scheme) & modules["is_spared"] & is_worth_sparing(row)])


def _spared(run: RunData, row: pd.Series) -> Finding:
    scheme, recovered, random = row["scheme"], estimate(row, "recovered"), estimate(row, "random_recovered")
    is_worth = is_worth_sparing(row)
    modules = counted(row["modules"], "module")
    sentence = f"{scheme}: full precision for the {modules} that cost most {'' if is_worth else 'is not shown to '}"
    sentence += f"{'recovers' if is_worth else 'recover more than random ones:'} {with_interval(recovered, 'z.3f')} of "
    sentence += f"{NATS(row['cost'])} nats per token; as many random modules recover {NATS(random.low)} to "
    sentence += f"{NATS(random.high)}. " + ("The recipe ignores them." if is_worth else "The recipe ignores none.")
    outcome = Outcome.PRESENT if is_worth else Outcome.UNDECIDED
    numbers = {"scheme": scheme, "modules": int(row["modules"]), "random_low": random.low, "random_high": random.high}
    about: dict[str, Any] = {"low": recovered.low, "high": recovered.high, "numbers": numbers}
    return Finding("spared", SPARED, outcome, recovered.value, is_headline=True, sentence=sentence, **about)


def _sinks(scheme: str, row: pd.Series, what: str) -> Finding:
    cost, share, random = (estimate(row, name) for name in ("cost", "sink_share", "random_share"))
    chance = max(0.0, random.high)
    if cost.low <= 0:
        sentence = f"{scheme}: the cost is not above 0, so that sink tokens have no share of it."
        return Finding("sink-share", SINKS, Outcome.UNDECIDED, numbers={"scheme": scheme}, sentence=sentence)
    if share.low > chance:
        outcome, verdict = Outcome.PRESENT, "recovers"
    elif share.high <= chance:
        outcome, verdict = Outcome.ABSENT, "does not recover more than random tokens do:"
    else:
        outcome, verdict = Outcome.UNDECIDED, "is not shown to recover more than random tokens do:"
    sentence = f"{scheme}: full precision for the inputs of {what} {verdict} "
    sentence += f"{with_interval(share, 'z.3f')} of {NATS(row['cost'])} nats per token; as many random tokens recover "
    sentence += f"{NATS(random.low)} to {NATS(random.high)}."
    numbers = {"scheme": scheme, "random": random.value, "random_low": random.low, "random_high": random.high}
    about: dict[str, Any] = {"low": share.low, "high": share.high, "numbers": numbers}
    return Finding("sink-share", SINKS, outcome, share.value, sentence=sentence, **about)


# --- recipes


def files(run: RunData) -> Mapping[str, Callable[[], str] | None]:
    """Map the recipes for llm-compressor, which knows torch.nn.Linear, to functions that return their texts."""
    if run.manifest["served"]["full_precision_modules"] is None:
        return {}
    return {f"llm-compressor-{scheme}.yaml": partial(_recipe_text, run, scheme) for scheme in presets(run)}


def _recipe_text(run: RunData, scheme: str) -> str:
    lines = [
        f"{run.model} in {scheme}: llmcompressor.oneshot(model=…, recipe=this file, dataset=…, output_dir=DIR),",
        "with a dataset where inputs have static ranges (FP8, NVFP4); then: vllm serve DIR",
    ]
    return "".join(f"# {line}\n" for line in lines) + yaml.safe_dump(recipe(run, scheme), sort_keys=False)


def recipe(run: RunData, scheme: str) -> dict[str, Any]:
    """Return a recipe of llm-compressor: one QuantizationModifier with the scheme."""
    preset = presets(run)[scheme]
    modifier: dict[str, Any] = {"ignore": [*run.manifest["served"]["full_precision_modules"], *ignored(run, scheme)]}
    if preset == PRESETS[scheme]:
        modifier |= {"targets": ["Linear"], "scheme": scheme}
    else:  # groups that fit the model
        weights = asdict(preset.weights) | {"symmetric": True}
        modifier |= {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    return {"quant_stage": {"quant_modifiers": {"QuantizationModifier": modifier}}}

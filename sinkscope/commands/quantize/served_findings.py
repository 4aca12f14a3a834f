"""The findings of a run of `quantize` on presets with their sentences, and its recipes for llm-compressor."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pandas as pd
import yaml

from sinkscope.commands.quantize.manifest import EncodingEntry
from sinkscope.commands.quantize.served import ALL, INPUTS, WEIGHTS
from sinkscope.errors import counted
from sinkscope.measuring.sink_rule import FIRST_TOKENS
from sinkscope.quantization.formats import PRESETS, CureName, Encoding, Preset
from sinkscope.quantization.settings import COSTLY
from sinkscope.results.findings import Finding, Outcome
from sinkscope.results.metrics import METRICS
from sinkscope.results.run import RunData
from sinkscope.results.statistics import Estimate
from sinkscope.results.tables import models_or_cells
from sinkscope.verdict.analysis import settings
from sinkscope.verdict.report import Report, with_interval

COSTS, CURED, SINKS, NOT_SERVED = "Cost", "Cures", "Sink tokens", "Not quantized"
NATS, estimate = METRICS["cost"].text, Estimate.of_columns


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


def cells_as_text(tables: Mapping[str, pd.DataFrame]) -> dict[str, pd.DataFrame]:
    """Return the cost of every scheme (rows) in every run (columns), from the tables of several runs."""
    if (table := tables.get("formats")) is None:
        return {}
    table = table[table["part"] == ALL]
    names = models_or_cells(table)
    costs = [with_interval(estimate(row, "cost"), "z.3f", label="") for _, row in table.iterrows()]
    wide = pd.DataFrame({"scheme": table["scheme"], "cell": names, "cost": costs})
    wide = wide.pivot(index="scheme", columns="cell", values="cost").reindex(table["scheme"].unique())[names.unique()]
    wide = wide.fillna("does not apply").rename_axis(columns=None).reset_index()
    return {"Cost of formats in nats per token, with its 95 % interval over texts": wide}


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
    if (cures := run.tables.get("formats_cures")) is not None:
        yield from _worth(run, cures)
        yield from (_cure(row) for _, row in cures.iterrows())
    for scheme, preset in presets(run).items():
        if preset.inputs is not None:
            yield _sinks(scheme, whole.loc[scheme], tokens)
    for scheme, reason in entry["absent"].items():
        yield Finding("absent", NOT_SERVED, numbers={"scheme": scheme}, sentence=f"{scheme} does not apply: {reason}.")
    if left := entry["not_quantized"]:
        share, names = sum(left.values()), ", ".join(f"`{name}`" for name in left)
        sentence = f"Not quantized: {names} ({share:.2%} of all parameters)."
        yield Finding("not-quantized", NOT_SERVED, value=share, numbers={"parameters": tuple(left)}, sentence=sentence)


def is_worth(row: pd.Series) -> bool:
    """Return whether a cure recovers something, and more than its control."""
    return bool(min(row["recovered_low"], row["ahead_low"]) > 0)


def ignored(run: RunData, scheme: str) -> list[str]:
    """Return the modules that a recipe leaves in full precision because that recovers cost."""
    if (cures := run.tables.get("formats_cures")) is None or (modules := run.tables.get("formats_modules")) is None:
        return []
    row = cures[(cures["scheme"] == scheme) & (cures["cure"] == "spare")].iloc[0]
    spared = modules["module"][(modules["scheme"] == scheme) & modules["is_spared"] & is_worth(row)]
    # llm-compressor stores an expert's stacked matrix as two linear layers
    names = (re.sub(r"(\.\d+\.)gate_up_proj$", rf"\1{half}_proj", path) for path in spared for half in ("gate", "up"))
    return list(dict.fromkeys(names))


# cure → (what is done, from the column `setting`; its control)
CURES: dict[CureName, tuple[str, str]] = {
    "spare": ("full precision for the {} modules that cost most", "as many random modules"),
    "smoothquant": ("SmoothQuant (α {})", "its factors at random channels"),
    "awq": ("AWQ's scales", "the same at random channels"),
    "rotation": ("a rotation of the residual stream", "permutations of its coordinates"),
    "prefix": ("a prefix (token ids {})", "prefixes of random tokens"),
}


def _cure(row: pd.Series) -> Finding:
    what, control = CURES[row["cure"]]
    one = _recovery(row["scheme"], row, ("recovered", "random_recovered"), what.format(row["setting"]), control)
    ignored = f" The recipe ignores {'them' if is_worth(row) else 'none'}." if row["cure"] == "spare" else ""
    numbers = {**one.numbers, "cure": row["cure"], "setting": row["setting"]}
    return replace(one, name="cure", section=CURED, sentence=one.sentence + ignored, numbers=numbers)


def _sinks(scheme: str, row: pd.Series, tokens: str) -> Finding:
    if row["cost_low"] > 0:
        what = f"full precision for the inputs of {tokens}"
        return _recovery(scheme, row, ("sink_share", "random_share"), what, "as many random tokens")
    sentence = f"{scheme}: the cost is not above 0, so that sink tokens have no share of it."
    return Finding("sink-share", SINKS, Outcome.UNDECIDED, numbers={"scheme": scheme}, sentence=sentence)


def _recovery(scheme: str, row: pd.Series, columns: tuple[str, str], what: str, control: str) -> Finding:
    """Say whether something recovers cost, and more than its control; `columns` name what the two recover."""
    recovered, random, ahead = (estimate(row, name) for name in (*columns, "ahead"))
    outcome, verb = Outcome.UNDECIDED, f"is not shown to recover more than {control}:"
    if min(recovered.low, ahead.low) > 0:
        outcome, verb = Outcome.PRESENT, f"recovers more than {control}:"
    elif recovered.high < 0:
        outcome, verb = Outcome.ABSENT, "adds cost: it recovers"
    elif ahead.high < 0:
        outcome, verb = Outcome.ABSENT, f"recovers less than {control}:"
    elif ahead.low > 0:
        verb = "is not shown to recover cost:"
    sentence = f"{scheme}: {what} {verb} {with_interval(recovered, 'z.3f')} of {NATS(row['cost'])} nats per token "
    sentence += f"against {NATS(random.low)} to {NATS(random.high)}; paired by text, the difference is "
    sentence += f"{with_interval(ahead, 'z.3f')}."
    numbers = {"scheme": scheme, **random.as_columns("random"), **ahead.as_columns("ahead")}
    about: dict[str, Any] = {"low": recovered.low, "high": recovered.high, "numbers": numbers}
    return Finding("sink-share", SINKS, outcome, recovered.value, sentence=sentence, **about)


def _worth(run: RunData, table: pd.DataFrame) -> Iterator[Finding]:
    """Say which cures are worth it, scheme by scheme."""
    for scheme, rows in table.groupby("scheme", sort=False):
        worth = [row for _, row in rows.iterrows() if is_worth(row)]
        best = max(worth, key=lambda row: row["recovered"], default=None)
        tried = ", ".join(rows["cure"])
        sentence = f"{scheme}: of {tried}, none is shown to recover cost, and more than its control."
        if best is not None:
            sentence = f"{scheme}: of {tried}, worth it is {', '.join(row['cure'] for row in worth)}; "
            sentence += f"{best['cure']} recovers most, {with_interval(estimate(best, 'recovered'), 'z.3f')} of "
            sentence += f"{NATS(best['cost'])} nats per token."
        for cure, reason in run.manifest["served"]["absent_cures"].get(scheme, {}).items():
            sentence += f" Not measured: {cure} ({reason})."
        outcome = Outcome.UNDECIDED if best is None else Outcome.PRESENT
        numbers = {"scheme": scheme, "worth": tuple(row["cure"] for row in worth)}
        yield Finding("worth", CURED, outcome, is_headline=True, numbers=numbers, sentence=sentence)


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

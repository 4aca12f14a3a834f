"""The findings of a run of `kv-plan` with their sentences, and the plans as files for other tools.

plan.json has every plan with its windows and bits by layer and key/value head, the rule that predicts sinks, and
options of vLLM, which can quantize the cache by layers (`kv_cache_dtype` and `kv_cache_dtype_skip_layers` of its
CacheConfig) but evict nothing by heads and spare no tokens. plan_press.py is a press for kvpress.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from sinkscope.commands.kv_plan.plan import (
    ABLE,
    AS_MANY,
    CACHE_BITS,
    COMBINED,
    COSTLIEST_SPARED,
    DENSE,
    FIRST_AND_LAST,
    FIRST_FOUR,
    FULL_BITS,
    NO_SINKS,
    PREDICTED,
    RANDOM,
    RANDOM_COMBINED,
    RANDOM_SPARED,
    RANKINGS,
    SERVED,
)
from sinkscope.commands.kv_plan.study import number_spared
from sinkscope.commands.kv_plan.texts import COPY
from sinkscope.errors import counted
from sinkscope.measuring.sink_rule import FIRST_TOKENS
from sinkscope.results.findings import KEPT_RETRIEVAL, SMALL_RATIO, Finding, Outcome
from sinkscope.results.metrics import METRICS
from sinkscope.results.run import RunData
from sinkscope.verdict.analysis import settings
from sinkscope.verdict.report import Report

PLAN, EVICTION, CONTROLS, SINKS, TASKS = "Plan", "Eviction alone", "Controls", "Sinks", "Retrieval by the tokens kept"
SERVED_FORMATS, BITS_OF_CACHE = "Formats that vLLM serves", "Bits of the cache"
JSON, PRESS = "plan.json", "plan_press.py"
FEWEST_DOCUMENTS = 8  # with fewer, an interval says little about other texts


def report(run: RunData) -> Report:
    entry, guessed = run.manifest["kv_plan"], run.tables["kv_plan"]["guessed"].iloc[0]
    sentence = f"; plans are made on the {counted(entry['calibration'], 'sequence')} after them. The measured texts "
    sentence += f"are from {counted(entry['documents'], 'document')}"
    sentence += ", which are few for an interval" * (entry["documents"] < FEWEST_DOCUMENTS) + ". Retrieval is of "
    sentence += f"the first {entry['copied']} tokens, which follow a text once more; {guessed:.0%} are predicted where "
    sentence += "they occur first. Memory is that at the end of the text, of 16 bits or fewer; on fewer bits, a token "
    sentence += "takes a step and a zero more for each head, whose keys and values are centered and rotated before "
    sentence += "they are rounded; formats that vLLM serves have its scales and grids"
    title = f"{run.model}: plans for the KV cache, {run.reads}"
    about = settings(run, sentence, copied=entry["copied"], documents=entry["documents"])
    return Report(title, about, overview(run), findings(run))


def overview(run: RunData) -> pd.DataFrame:
    table = run.tables["kv_plan"]
    return pd.DataFrame(
        {
            "memory": table["memory"].map("{:.1%}".format),
            "plan": [plan_label(row) for row in table.itertuples()],
            METRICS["perplexity"].label: table["perplexity"].map(METRICS["perplexity"].text),
            "÷ dense": [_interval(row.ratio, row.ratio_low, row.ratio_high, ".3f") for row in table.itertuples()],
            "retrieval": table["retrieval"].map("{:.1%}".format),
            "of dense": [_interval(row.kept, row.kept_low, row.kept_high, ".0%") for row in table.itertuples()],
        }
    )


def plan_label(row: Any) -> str:
    """Return the name of a plan for people, with what its heads keep."""
    if row.plan == DENSE:
        return DENSE
    if row.plan == FIRST_AND_LAST:
        return f"first {FIRST_TOKENS} + last {row.window} in all heads"
    if row.budget == 1:
        what = {AS_MANY: "as many first tokens", FIRST_FOUR: "first 4 tokens", NO_SINKS: "no token"}
        return f"{row.plan}, {what.get(row.sinks, row.sinks)} in full precision"
    bits = "" if row.bits == FULL_BITS else f", {row.bits:.3g} bits"
    if row.window < 0:
        return f"{row.plan}: all heads whole{bits}"
    return f"{row.plan}: {row.whole_heads} heads whole, others last {row.window}{bits}"


def _interval(value: float, low: float, high: float, form: str) -> str:
    ends = f" ({low:{form}} to {high:{form}})" if math.isfinite(low) and math.isfinite(high) else ""
    return "–" if math.isnan(value) else f"{value:{form}}{ends}"


# --- findings


def findings(run: RunData) -> list[Finding]:
    found: list[Finding] = []
    for budget in run.manifest["kv_plan"]["budgets"]:
        found += [*_at_budget(run, budget), *_retrieved(run, budget)]
    table = run.tables["kv_plan"].query("budget == 1").set_index(["plan", "sinks"])
    found += [_served(run, name, table) for name in SERVED]
    for bits in CACHE_BITS:
        rows = table.loc[f"{bits} bits"]
        ratio, first, none = (rows["ratio"][sinks] for sinks in (PREDICTED, AS_MANY, NO_SINKS))
        sentence = f"Keys and values on {bits} bits: perplexity × {_ratio_of(rows.loc[PREDICTED])} with the predicted "
        sentence += f"sinks in full precision, {first:.3f} with as many first tokens, {none:.3f} with none."
        numbers: dict[str, Any] = {"bits": bits, "first": first, "none": none}
        found.append(Finding("bits", BITS_OF_CACHE, value=ratio, numbers=numbers, sentence=sentence))
    entry = run.manifest["kv_plan"]
    most, layer = max(entry["sinks"]), entry["sink_layer"]
    if layer < 0:
        sentence = f"No layer has massive activations, so the first {most} tokens are taken as sinks."
        return [*found, Finding("sink-rule", SINKS, Outcome.ABSENT, sentence=sentence)]
    coordinates = ", ".join(map(str, entry["sink_coordinates"]))
    sentence = f"Tokens with a massive activation after layer {layer} (coordinates {coordinates}) are predicted to be "
    sentence += f"sinks: at most {most} in a text."
    numbers = {"layer": layer, "coordinates": tuple(entry["sink_coordinates"])}
    return [*found, Finding("sink-rule", SINKS, Outcome.PRESENT, most, numbers=numbers, sentence=sentence)]


def _ratio_of(row: Any) -> str:
    return _interval(row["ratio"], row["ratio_low"], row["ratio_high"], ".3f")


def _cost_text(row: Any) -> str:
    retrieval = _interval(row["kept"], row["kept_low"], row["kept_high"], ".0%")
    compared = "not defined" if math.isnan(row["kept"]) else f"{retrieval} of the dense cache's"
    return f"perplexity × {_ratio_of(row)}, retrieval {compared}"


def _at_budget(run: RunData, budget: float) -> Iterator[Finding]:
    """Yield the best plan of a budget, the rankings without quantization, and the controls."""
    table = run.tables["kv_plan"]
    rows = table[table["budget"] == budget].set_index("plan")
    row = rows.loc[COMBINED]
    met = int(row["ratio"] <= SMALL_RATIO) + int(row["kept"] >= KEPT_RETRIEVAL)
    is_known = not math.isnan(row["kept"])
    outcome = (Outcome.REFUTED, Outcome.PARTLY, Outcome.CONFIRMED)[met] if is_known else Outcome.UNDEFINED
    heads = f"{counted(int(row['whole_heads']), 'key/value head')} with all tokens"
    heads += f", the others with sinks and the last {row['window']:g}" if row["window"] >= 0 else ""
    bits = "" if row["bits"] == FULL_BITS else f", on {row['bits']:.3g} bits, mean over keys and values of all layers"
    sentence = f"With {row['memory']:.1%} of the memory ({heads}{bits}): {_cost_text(row)}. This is a bound for what "
    sentence += f"engines could do: none runs such a plan, which takes {row['paged_memory']:.1%} where the heads of a "
    sentence += "layer share blocks."
    sentence += "" if is_known else f" The dense cache retrieves less than {ABLE:.0%}, too few to compare plans."
    numbers = {what: row[what] for what in ("budget", "memory", "paged_memory", "kept", "bits")}
    ends = {"low": row["ratio_low"], "high": row["ratio_high"], "threshold": SMALL_RATIO}
    yield Finding("plan", PLAN, outcome, row["ratio"], numbers=numbers, is_headline=True, sentence=sentence, **ends)
    listed = [f"`{name}`, {_cost_text(rows.loc[name])} ({rows.loc[name]['paged_memory']:.1%})" for name in RANKINGS]
    numbers = {"budget": budget}
    names = itertools.product(("ratio", "kept", "paged_memory"), RANKINGS)
    numbers |= {f"{what} {name}": rows.loc[name][what] for what, name in names}
    sentence = f"At a budget of {budget:.0%}, on {FULL_BITS} bits: {'; '.join(listed)}. In brackets, the memory where "
    sentence += "the heads of a layer share blocks, so that what only some of them evict is masked; the press for "
    sentence += "kvpress masks all of it and frees none."
    yield Finding("ranking", EVICTION, numbers=numbers, is_headline=True, sentence=sentence)
    first = rows.loc[FIRST_AND_LAST]
    sentence = f"At {budget:.0%}, the first {FIRST_TOKENS} and the last {first['window']:g} tokens in all heads: "
    sentence += _cost_text(first)
    numbers = {"budget": budget, "first": first["ratio"], "first_kept": first["kept"]}
    for name, what in ((RANDOM, "heads in the best ranking's"), (RANDOM_COMBINED, "heads and layers in the complete")):
        draws = rows[rows.index.str.fullmatch(rf"{name} \d+")]
        retrieval = _interval(draws["kept"].mean(), draws["kept"].min(), draws["kept"].max(), ".0%")
        sentence += f"; random {what} plan ({counted(len(draws), 'draw')}): perplexity × {draws['ratio'].min():.3f} to "
        sentence += f"{draws['ratio'].max():.3f}, retrieval {retrieval}"
        numbers |= {name: tuple(draws["ratio"]), f"{name} kept": tuple(draws["kept"])}
    yield Finding("controls", CONTROLS, numbers=numbers, sentence=f"{sentence}.")


def _retrieved(run: RunData, budget: float) -> Iterator[Finding]:
    """Yield what each task's plans retrieve at a budget, those that evict after the prompt first."""
    if (tasks := run.tables.get("kv_tasks")) is None:  # a folder that was shared without them
        return
    for task, table in tasks.query("budget == @budget").groupby("task", sort=False):
        dense, *rows = table.to_dict("records")
        where = "follows the prompt" if task == COPY else "ends the prompt, which is read before an eviction"
        sentence = f"`{task}`, whose question {where}: the dense cache predicts {dense['retrieval']:.0%} of the tokens"
        numbers = {"budget": budget} | {row["plan"]: row["kept"] for row in rows}
        if dense["retrieval"] < ABLE:
            outcome, sentence = Outcome.UNDEFINED, f"{sentence}, less than {ABLE:.0%}, too few to compare plans."
        else:
            shares = [
                f"`{row['plan']}` {_interval(row['kept'], row['kept_low'], row['kept_high'], '.0%')}" for row in rows
            ]
            outcome = Outcome.MEASURED
            sentence += f"; at a budget of {budget:.0%} of these {', '.join(shares)}."
        yield Finding(str(task), TASKS, outcome, dense["retrieval"], numbers=numbers, sentence=sentence)


def _served(run: RunData, name: str, table: pd.DataFrame) -> Finding:
    """Return what a format costs, with its options; `table` has the plans without a budget by plan and sinks."""
    alone, first = table.loc[name, NO_SINKS], table.loc[name, FIRST_FOUR]
    spared, drawn = (table.loc[f"{name}, {which}", NO_SINKS] for which in (COSTLIEST_SPARED, RANDOM_SPARED))
    layers = _costliest_layers(run, name)
    sentence = f"`--kv-cache-dtype {name}` ({SERVED[name].about}): {_size_text(alone)}. With "
    sentence += f"`--kv-cache-dtype-skip-layers {' '.join(map(str, layers))}`, the layers whose output loses most: "
    sentence += f"{_size_text(spared)} (as many random layers: {_ratio_of(drawn)}). With the {first.name[1]} tokens in "
    sentence += f"full precision, for which vLLM has no option: {_size_text(first)}."
    numbers = {"memory": alone["memory"], "layers": tuple(layers), "spared": spared["ratio"], "random": drawn["ratio"]}
    numbers |= {"spared memory": spared["memory"], "first": first["ratio"], "first memory": first["memory"]}
    ends = {"low": alone["ratio_low"], "high": alone["ratio_high"]}
    return Finding(name, SERVED_FORMATS, value=alone["ratio"], numbers=numbers, sentence=sentence, **ends)


def _size_text(row: Any) -> str:
    return f"perplexity × {_ratio_of(row)} in {row['memory']:.1%} of the memory"


def _costliest_layers(run: RunData, name: str) -> list[int]:
    """Return the layers that a format with spared layers does not quantize, in ascending order."""
    table = run.tables["kv_layers"].query("format == @name").set_index("layer")
    losses = table[["key_loss", "value_loss"]].sum(axis=1).sort_values(ascending=False, kind="stable")
    return sorted(map(int, losses.index[: number_spared(len(losses))]))


# --- files for other tools


def files(run: RunData) -> Mapping[str, Callable[[], str]]:
    """Map the files for other tools to functions that return their texts."""
    press = Path(__file__).with_name("assets") / PRESS
    return {JSON: lambda: json.dumps(plans(run), indent=1) + "\n", PRESS: lambda: press.read_text("utf-8")}


def plans(run: RunData) -> dict[str, Any]:
    """Return the content of plan.json."""
    entry, made = run.manifest["kv_plan"], []
    measured = {(row["budget"], row["plan"]): row for row in run.tables["kv_plan"].to_dict("records")}
    for (budget, name), heads in run.tables["kv_heads"].groupby(["budget", "plan"], sort=False):
        by_layer = [rows for _, rows in heads.groupby("layer")]
        windows = [[None if window < 0 else int(window) for window in rows["window"]] for rows in by_layer]
        bits = [rows[["key_bits", "value_bits"]].iloc[0].tolist() for rows in by_layer]
        plan = {"budget": budget, "plan": name, "windows": windows, "bits": bits}
        row = measured[budget, name]
        for what in ("memory", "perplexity", "ratio", "retrieval", "kept"):
            plan[what] = float(row[what]) if math.isfinite(row[what]) else None
        made.append(plan)
    sinks = {what: entry[f"sink_{what}"] for what in ("layer", "coordinates", "at_least")}
    return {
        "model": run.model,
        "tokens": run.manifest["input"]["longest"],
        "layers": sorted(map(int, run.tables["kv_layers"]["layer"].unique())),
        "sinks": sinks | {"first": max(entry["sinks"])},
        "plans": made,
        "vllm": vllm_options(run),
    }


def vllm_options(run: RunData) -> dict[str, Any]:
    """Return the options of vLLM's CacheConfig that take least memory and keep perplexity; none if no format does."""
    table = run.tables["kv_plan"].query("budget == 1 and sinks == @NO_SINKS").set_index("plan")
    names = [f"{name}{spared}" for name in SERVED for spared in ("", f", {COSTLIEST_SPARED}")]
    cheap = table.loc[names].query("ratio <= @SMALL_RATIO")
    if cheap.empty:
        return {}
    name, _, spared = str(cheap["memory"].idxmin()).partition(", ")
    skipped = [str(layer) for layer in _costliest_layers(run, name)] if spared else []
    return {"kv_cache_dtype": name, "kv_cache_dtype_skip_layers": skipped}

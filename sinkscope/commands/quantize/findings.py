"""The findings of a run of `quantize` with their sentences, and files for other tools with the sites to spare.

The files list the sites that the run kept in full precision last (`costliest-kept`): spared.json has the sites, the
cost of quantizing each of them alone, and their modules; llm-compressor.yaml is a recipe with the bits and grids of the
run, and these modules in `ignore`. llm-compressor leaves out complete modules: input, weight and output.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import yaml

from sinkscope.commands.quantize import split_findings as quantization_split
from sinkscope.errors import counted
from sinkscope.models.projections import NO_LAYER
from sinkscope.quantization import settings as levels
from sinkscope.quantization.prefix_cache import CACHE, HOW
from sinkscope.quantization.settings import ALL, ALL_LAYERS, ALONE, COSTLIEST_KEPT, COSTLY, FULL, MASSIVE_KEPT
from sinkscope.quantization.sites import CACHED, FULL_SCHEME, LINEAR_SCHEME, PARTS
from sinkscope.results.findings import Finding, Outcome
from sinkscope.results.metrics import METRICS
from sinkscope.results.run import RunData
from sinkscope.results.statistics import Estimate
from sinkscope.verdict.analysis import quantized_source, settings
from sinkscope.verdict.report import Report, interval, layers_text, with_interval

SHOWN = 5  # entries of a ranking
COLUMNS = ("perplexity", "loss", "max_inf_norm", "kurtosis")

COST, KINDS, SITES = "Cost", "Kinds of site that cost most", "Single sites that cost most"
OUTLIERS, REST = "Outliers", "Not quantized"

FURTHER = "the weights and outputs of embeddings, residual sums, attention scores and softmax outputs"
GRIDS = {
    "weights_per": {"channel": "weights have a grid for each output channel"},
    "activations_per": {"token": "activations have a grid for each token, computed when it is quantized"},
    "kv_cache_per": {
        "tensor": "keys and values are quantized, each with one static range",
        "channel": "keys and values are quantized, with a static range for each channel of a head",
        "token": "keys and values are quantized, with a grid for each token and head, computed when it is quantized",
    },
}
# settings of the whole model
WHOLE = (FULL, ALL, levels.WEIGHTS, levels.ACTIVATIONS, levels.KV_CACHE, MASSIVE_KEPT, COSTLIEST_KEPT)
NATS = METRICS["cost"].text


def report(run: RunData) -> Report:
    given = run.manifest["quantization"]
    further = FURTHER if given.get("scheme", LINEAR_SCHEME) == FULL_SCHEME else ""
    # all grids except a single static range for each tensor
    grids = "; ".join(words[given[name]] for name, words in GRIDS.items() if given.get(name) in words)
    numbers = {"calibration": given["calibration"], "linear_layers": given["linear_layers"]}
    sentence = f"; static ranges from the {counted(given['calibration'], 'sequence')} after them. Quantized: input, "
    sentence += f"weight and output of {counted(given['linear_layers'], 'linear layer')}, except the LM head"
    sentence += f"; also {further}" if further else ""
    sentence += f"; {grids}" if grids else ""
    found = settings(run, sentence, **numbers, further=further, grids=grids)
    found = [finding for finding in found if finding.name != "quantized-source"]
    title = f"{run.model}: simulated {bits(run)}, {run.reads}"
    return Report(title, found + quantized_source(run, bits(run)), overview(run), findings(run))


# --- reading the tables


def bits(run: RunData) -> str:
    given = run.manifest["quantization"]
    scheme = given.get("scheme", LINEAR_SCHEME)
    cache = f"KV{given['bits_kv_cache']}" if given.get("kv_cache_per") else ""
    return f"W{given['bits_weights']}A{given['bits_activations']}{cache}" + f" ({scheme})" * (scheme != LINEAR_SCHEME)


def whole(run: RunData) -> pd.DataFrame:
    """Return the settings of the whole model on all sequences; the index is the setting."""
    table = run.tables["quantization"]
    table = table[(table["sequences"] == table["sequences"].max()) & table["setting"].isin(WHOLE)]
    return table.drop_duplicates("setting", keep="last").set_index("setting")


def probed(run: RunData, setting: str) -> pd.DataFrame:
    """Return the rows of the search for costly sites, the costliest first; `name` is site and part."""
    table = run.tables["quantization"]
    table = table[(table["setting"] == setting) & (table["sequences"] == table["sequences"].min())]
    return table.assign(name=table["site"] + " " + table["part"]).sort_values("cost", ascending=False, kind="stable")


def kept_names(run: RunData) -> list[str]:
    """Return the printed names of the sites that were kept in full precision last; [""] if there are none."""
    return whole(run)["kept"].get(COSTLIEST_KEPT, "").split(", ")


def label(run: RunData, name: str) -> str:
    given, count = run.manifest["quantization"], len(kept_names(run))
    return {
        FULL: "full precision",
        ALL: bits(run),
        levels.WEIGHTS: f"weights only ({given['bits_weights']} bits)",
        levels.ACTIVATIONS: f"activations only ({given['bits_activations']} bits)",
        levels.KV_CACHE: f"keys and values only ({given.get('bits_kv_cache')} bits)",
        MASSIVE_KEPT: f"{bits(run)} except sites with massive activations",
        COSTLIEST_KEPT: f"{bits(run)} except the costliest {'site' if count == 1 else f'{count} sites'}",
    }[name]


def overview(run: RunData) -> pd.DataFrame:
    table = whole(run).reset_index()
    texts = {METRICS[name].label: table[name].map(METRICS[name].text) for name in COLUMNS}
    return pd.DataFrame({"setting": [label(run, name) for name in table["setting"]], **texts})


# --- findings


def findings(run: RunData) -> list[Finding]:
    is_harmless = bool(whole(run)["cost"][ALL] < COSTLY)
    found = [*_cost(run, is_harmless), *quantization_split.findings(run), *_outliers(run, is_harmless)]
    if not is_harmless:
        found += [*_kinds(run), *_sites(run)]
    if left := run.manifest["quantization"]["not_quantized"]:
        share, names = sum(left.values()), ", ".join(f"`{name}`" for name in left)
        sentence = f"Not quantized: {names}, which are not linear layers ({share:.0%} of all parameters)."
        numbers = {"parameters": tuple(left)}
        found.append(Finding("not-quantized", REST, value=share, numbers=numbers, sentence=sentence))
    return found


def _cost(run: RunData, is_harmless: bool) -> Iterator[Finding]:
    table = whole(run)
    cost, perplexity = table["cost"], table["perplexity"]
    ends = table.reindex(columns=["cost", "cost_low", "cost_high"])  # a run of an older format has no interval
    value, low, high = np.exp(ends.loc[ALL])
    factor = Estimate(value, low, high)
    numbers = {"scheme": bits(run), "before": perplexity[FULL], "after": perplexity[ALL]}
    sentence = f"{bits(run)} {'is harmless: it ' * is_harmless}multiplies perplexity by "
    sentence += f"{with_interval(factor, ',.4g')}."
    about: dict[str, Any] = {"threshold": COSTLY, "numbers": numbers, "is_headline": True, "sentence": sentence}
    outcome = Outcome.ABSENT if is_harmless else Outcome.PRESENT
    yield Finding("cost", COST, outcome, factor.value, **interval(factor), **about)
    if not is_harmless:
        weights, activations = cost[levels.WEIGHTS], cost[levels.ACTIVATIONS]
        sentence = f"Weights alone cost {NATS(weights)} nats per token, activations alone {NATS(activations)}, both "
        sentence += f"{NATS(cost[ALL])}."
        about = {"numbers": {"weights": weights, "activations": activations}, "is_headline": True}
        yield Finding("cost-parts", COST, value=cost[ALL], sentence=sentence, **about)


def _outliers(run: RunData, is_harmless: bool) -> Iterator[Finding]:
    """Yield the sites with massive activations and the costliest sites, with the cost that sparing them recovers."""
    sites = run.tables["quantization_sites"]
    massive = sites[sites["is_massive"]]
    if massive.empty:
        sentence = "No quantized site holds massive activations."
        yield Finding("massive-sites", OUTLIERS, Outcome.ABSENT, sentence=sentence)
    else:
        by_kind = _by_kind(massive)
        sentence = f"Massive activations are in {_sites_text(by_kind)}."
        yield Finding("massive-sites", OUTLIERS, Outcome.PRESENT, numbers={"sites": by_kind}, sentence=sentence)
        if not is_harmless:
            yield _restored(run, MASSIVE_KEPT, "the sites with massive activations", is_headline=True)
    if COSTLIEST_KEPT not in whole(run).index:
        return
    kept = sites[site_names(sites).isin(kept_names(run))]
    holding, by_kind = int(kept["is_massive"].sum()) or None, _by_kind(kept)
    holds = f", {holding} of which {'hold' if len(kept) > 1 else 'holds'} massive activations" if holding else ""
    sentence = f"The {counted(len(kept), 'costliest site')} of {len(sites)}{holds}: {_sites_text(by_kind)}."
    numbers = {"count": len(kept), "total": len(sites), "massive": holding, "sites": by_kind}
    yield Finding("costliest", OUTLIERS, numbers=numbers, sentence=sentence)
    if not is_harmless:
        yield _restored(run, COSTLIEST_KEPT, "the costliest sites")


def _restored(run: RunData, kept: str, which: str, is_headline: bool = False) -> Finding:
    cost, perplexity, threshold = whole(run)["cost"], whole(run)["perplexity"][kept], 1 - levels.RESTORED
    share = 1 - float(cost[kept] / cost[ALL])
    effect = f"recovers {share:.0%} of the cost in nats" if share > 0 else "recovers nothing"
    outcome = Outcome.ABSENT if share <= 0 else Outcome.CONFIRMED if share >= threshold else Outcome.PARTLY
    about: dict[str, Any] = {"threshold": threshold, "numbers": {"which": which, "perplexity": perplexity}}
    about |= {"is_headline": is_headline, "sentence": f"Leaving {which} in full precision {effect}."}
    return Finding("restored", OUTLIERS, outcome, share, **about)


def _kinds(run: RunData) -> Iterator[Finding]:
    """Yield the costs of kinds of site, each quantized alone, and the cost with one kind in full precision."""
    table = probed(run, ALONE)
    sequences = int(table["sequences"].min())
    first = f"first {counted(sequences, 'sequence')}"
    kinds = table[table["layer"] == ALL_LAYERS]
    costly = kinds[kinds["cost"] >= COSTLY].head(SHOWN)
    about: dict[str, Any] = {"threshold": COSTLY, "numbers": {"sequences": sequences}}
    if costly.empty:
        sentence = f"No kind of site costs {COSTLY:g} nats per token when it is quantized alone ({first})."
        yield Finding("kind", KINDS, Outcome.ABSENT, sentence=sentence, **about)
        return
    for name, cost in zip(costly["name"], costly["cost"], strict=True):
        sentence = f"`{name}` quantized alone costs {NATS(cost)} nats per token (all layers, {first})."
        about["numbers"] = {"sequences": sequences, "kind": name}
        yield Finding("kind", KINDS, Outcome.PRESENT, cost, sentence=sentence, **about)
    kept = probed(run, levels.KEPT)
    if len(kept):
        name, left = kept["name"].iloc[-1], float(kept["cost"].iloc[-1])
        before = float(probed(run, ALL)["cost"].iloc[0])
        what = f"No single kind of site saves anything in full precision; the cost is lowest with `{name}`"
        what = f"Kept in full precision, the single kind `{name}` saves most" if left < before else what
        sentence = f"{what}: {NATS(before)} → {NATS(left)} nats per token."
        yield Finding("kept", KINDS, value=left, numbers={"kind": name, "before": before}, sentence=sentence)


def _sites(run: RunData) -> Iterator[Finding]:
    table = probed(run, ALONE)
    sites = table[(table["layer"] != ALL_LAYERS) & (table["cost"] >= COSTLY)].head(SHOWN)
    ranges = run.tables["quantization_sites"].set_index(["layer", "site", "part"])
    for _, row in sites.iterrows():
        known = ranges.loc[(row["layer"], row["site"], row["part"])]
        numbers = {"kind": row["name"], "layer": row["layer"], "largest": known["max_abs"]}
        numbers |= {"median": known["median_abs"], "zeroed": known["zeroed"]}
        sentence = f"`{row['name']}` of layer {row['layer']} quantized alone costs {NATS(row['cost'])} nats per token; "
        sentence += f"in calibration its largest entry is {known['max_abs']:,.0f}, the median "
        sentence += f"{known['median_abs']:.2g}, and {known['zeroed']:.0%} round to zero."
        yield Finding("site", SITES, Outcome.PRESENT, row["cost"], threshold=COSTLY, numbers=numbers, sentence=sentence)


def site_names(sites: pd.DataFrame) -> pd.Series:
    layer = np.where(sites["layer"] == NO_LAYER, "", "layer " + sites["layer"].astype(str) + " ")
    return layer + sites["site"] + " " + sites["part"]


def _by_kind(sites: pd.DataFrame) -> tuple[tuple[str, tuple[int, ...]], ...]:
    by_kind = sites.groupby(sites["site"] + " " + sites["part"], sort=False)["layer"]
    return tuple((str(kind), tuple(sorted({int(at) for at in layers if at != NO_LAYER}))) for kind, layers in by_kind)


def _sites_text(sites: Sequence[tuple[str, Sequence[int]]]) -> str:
    return ", ".join(f"`{kind}`" + (f" of {layers_text(layers)}" if layers else "") for kind, layers in sites)


# --- files for other tools

JSON, RECIPE = "spared.json", "llm-compressor.yaml"
RECORDED = {"full_precision_modules", "bits_kv_cache", "weights_per", "activations_per", "kv_cache_per"}


def files(run: RunData) -> Mapping[str, Callable[[], str] | None]:
    """Map the files for other tools to functions that return their texts; None for those of the prefix's cache.

    Runs of versions without these files have none.
    """
    given = run.manifest["quantization"]
    if not given.keys() >= RECORDED:
        return {}
    texts: dict[str, Callable[[], str] | None] = {
        JSON: lambda: json.dumps(spared(run), indent=2, ensure_ascii=False) + "\n"
    }
    if given["full_precision_modules"] is not None:
        texts[RECIPE] = lambda: _comments(run) + yaml.safe_dump(llm_compressor_recipe(run), sort_keys=False)
    has_cache = given.get("prefix") and not given.get("without_cache")
    return texts | (dict.fromkeys((CACHE, HOW)) if has_cache else {})


def spared(run: RunData) -> dict[str, Any]:
    """Return the content of spared.json, with None for numbers that were not measured."""
    sites, perplexity = _spared_sites(run), whole(run)["perplexity"]
    names = {"full_precision": FULL, "quantized": ALL, "spared": COSTLIEST_KEPT}
    return {
        "model": run.model,
        "sites": [{name: _plain(value) for name, value in row.items()} for row in sites.to_dict("records")],
        "modules": _modules(sites),
        "perplexity": {name: _plain(perplexity.get(setting)) for name, setting in names.items()},
    }


def _spared_sites(run: RunData) -> pd.DataFrame:
    """Return a row for each spared site, the costliest first: module, layer, part, cost, is_massive."""
    table = run.tables["quantization_sites"]
    sites = table[site_names(table).isin(kept_names(run))].rename(columns={"path": "module"})
    keys = ["layer", "site", "part"]
    costs = probed(run, ALONE).drop_duplicates(keys)[[*keys, "cost"]]
    sites = sites.merge(costs, on=keys, how="left").sort_values("cost", ascending=False, kind="stable")
    sites.loc[sites.duplicated(keys, keep=False), "cost"] = math.nan  # experts share a name
    return sites[["module", "layer", "part", "cost", "is_massive"]].reset_index(drop=True)


def llm_compressor_recipe(run: RunData) -> dict[str, Any] | None:
    """Return a recipe of llm-compressor: one QuantizationModifier with the run's grids of weights and inputs.

    The outputs of linear layers, which the run quantizes, too, stay as they are: no kernel that serves quantizes them.
    """
    # None if the linear layers are not torch.nn.Linear, because llm-compressor quantizes no others
    given = run.manifest["quantization"]
    if given["full_precision_modules"] is None:
        return None
    group = {
        "targets": ["Linear"],
        "weights": _grid(given["bits_weights"], given["weights_per"], is_symmetric=True),
        "input_activations": _grid(given["bits_activations"], given["activations_per"]),
    }
    modules = [*given["full_precision_modules"], *_modules(_spared_sites(run))]
    modifier: dict[str, Any] = {"ignore": list(dict.fromkeys(modules)), "config_groups": {"group_0": group}}
    if given["kv_cache_per"] == "tensor":
        modifier["kv_cache_scheme"] = _grid(given["bits_kv_cache"], "tensor")
    return {"quant_stage": {"quant_modifiers": {"QuantizationModifier": modifier}}}


def _plain(value: Any) -> Any:
    """Return a value for JSON: None in place of numbers that are not finite."""
    return None if value is None or (isinstance(value, float) and not math.isfinite(value)) else value


def _grid(bits: int, per: str, is_symmetric: bool = False) -> dict[str, Any]:
    is_dynamic = per == "token"
    grid = {"num_bits": bits, "type": "int", "symmetric": is_symmetric, "strategy": per, "dynamic": is_dynamic}
    return grid if is_symmetric or is_dynamic else grid | {"observer": "static_minmax"}


def _modules(sites: pd.DataFrame) -> list[str]:
    return list(dict.fromkeys(sites.loc[sites["part"].isin(PARTS), "module"]))


def _comments(run: RunData) -> str:
    cache = run.manifest["quantization"]["kv_cache_per"]
    lines = [f"{run.model}: the modules to keep in full precision are in `ignore`."]
    lines.append("Weights and inputs are quantized. The run's cost is with quantized outputs, too.")
    beyond = [f"{row.module} {row.part}" for row in _spared_sites(run).itertuples() if row.part not in PARTS]
    if beyond:
        lines.append(f"These costly sites are no modules that can be left out: {', '.join(beyond)}.")
    if cache not in ("tensor", None):
        lines.append(f"{' and '.join(CACHED).capitalize()} by {cache} cannot be written as a recipe.")
    return "".join(f"# {line}\n" for line in lines)

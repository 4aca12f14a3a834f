"""The findings of a run of `quantize` with their sentences, and a file with the sites to spare.

spared.json lists the sites that a static scheme kept in full precision last (`costliest-kept`), the cost of quantizing
each of them alone, and their modules. No server runs a static scheme with quantized outputs, so there is no recipe.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from sinkscope.commands.quantize import served_findings
from sinkscope.errors import counted
from sinkscope.models.projections import NO_LAYER
from sinkscope.quantization import settings as levels
from sinkscope.quantization.formats import FULL_SCHEME
from sinkscope.quantization.prefix_cache import CACHE, HOW
from sinkscope.quantization.settings import (
    ALL,
    ALL_LAYERS,
    ALONE,
    BOTH,
    CARRIES,
    COORDINATES,
    COSTLIEST_KEPT,
    COSTLY,
    FULL,
    MASSIVE_KEPT,
    NO_DRAW,
    PREFIX,
    ROTATION,
    TOKENS,
)
from sinkscope.quantization.sites import PARTS
from sinkscope.results.findings import Finding, Outcome
from sinkscope.results.metrics import METRICS
from sinkscope.results.run import RunData
from sinkscope.results.statistics import Estimate
from sinkscope.verdict.analysis import packed_source, settings
from sinkscope.verdict.report import Report, interval, layers_text, with_interval

SHOWN_SITES = 5  # entries of a ranking
COST, OUTLIERS, REST = "Cost", "Outliers", "Not quantized"
KINDS, SITES = "Kinds of site that cost most", "Single sites that cost most"
SPLIT, PREFIXES, ROTATIONS = "Tokens or coordinates", "Prefix", "Rotation"
BY_CHANCE = 0.05  # a prefix is better than random ones if at most this share of prefixes, itself included, is as good

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
WHOLE_MODEL_SETTINGS = (FULL, ALL, levels.WEIGHTS, levels.ACTIVATIONS, levels.KV_CACHE, MASSIVE_KEPT, COSTLIEST_KEPT)
NATS, PERPLEXITY = METRICS["cost"].text, METRICS["perplexity"].text


def report(run: RunData) -> Report:
    if "served" in run.manifest:
        return served_findings.report(run)
    entry = run.manifest["quantization"]
    further = FURTHER if entry["scheme"] == FULL_SCHEME else ""
    # all grids except a single static range for each tensor
    grids = "; ".join(words[entry[name]] for name, words in GRIDS.items() if entry[name] in words)
    numbers = {"calibration": entry["calibration"], "linear_layers": entry["linear_layers"]}
    sentence = f"; static ranges from the {counted(entry['calibration'], 'sequence')} after them. Quantized: input, "
    sentence += f"weight and output of {counted(entry['linear_layers'], 'linear layer')}, except the LM head"
    sentence += f"; also {further}" if further else ""
    sentence += f"; {grids}" if grids else ""
    about = settings(run, sentence, **numbers, further=further, grids=grids)
    about = [finding for finding in about if finding.name != "quantized-source"] + packed_source(run, bits(run))
    return Report(f"{run.model}: simulated {bits(run)}, {run.reads}", about, overview(run), findings(run))


# --- reading the tables


def bits(run: RunData) -> str:
    entry = run.manifest["quantization"]
    cache = f"KV{entry['bits_kv_cache']}" if entry["kv_cache_per"] else ""
    static = "static " if entry["activations_per"] == "tensor" else ""
    full = " (full)" if entry["scheme"] == FULL_SCHEME else ""
    return f"{static}W{entry['bits_weights']}A{entry['bits_activations']}{cache}{full}"


def whole(run: RunData) -> pd.DataFrame:
    """Return the settings of the whole model on all sequences; the index is the setting."""
    table = run.tables["quantization"]
    table = table[(table["sequences"] == table["sequences"].max()) & table["setting"].isin(WHOLE_MODEL_SETTINGS)]
    return table.drop_duplicates("setting", keep="last").set_index("setting")


def probed_settings(run: RunData, setting: str) -> pd.DataFrame:
    """Return the rows of the search for costly sites, the costliest first; `name` is site and part."""
    table = run.tables["quantization"]
    table = table[(table["setting"] == setting) & (table["sequences"] == table["sequences"].min())]
    return table.assign(name=table["site"] + " " + table["part"]).sort_values("cost", ascending=False, kind="stable")


def split_settings(run: RunData) -> pd.DataFrame:
    """Return the settings of `--prefix` without the random controls; the index is the setting."""
    table = run.tables["quantization_split"]
    return table[table["draw"] == NO_DRAW].set_index("setting")


def split_controls(run: RunData, setting: str) -> pd.DataFrame:
    table = run.tables["quantization_split"]
    return table[(table["setting"] == setting) & (table["draw"] != NO_DRAW)]


def kept_names(run: RunData) -> list[str]:
    """Return the printed names of the sites that were kept in full precision last; [""] if there are none."""
    return whole(run)["kept"].get(COSTLIEST_KEPT, "").split(", ")


def setting_label(run: RunData, name: str) -> str:
    entry, count = run.manifest["quantization"], len(kept_names(run))
    return {
        FULL: "full precision",
        ALL: bits(run),
        levels.WEIGHTS: f"weights only ({entry['bits_weights']} bits)",
        levels.ACTIVATIONS: f"activations only ({entry['bits_activations']} bits)",
        levels.KV_CACHE: f"keys and values only ({entry['bits_kv_cache']} bits)",
        MASSIVE_KEPT: f"{bits(run)} except sites with massive activations",
        COSTLIEST_KEPT: f"{bits(run)} except the costliest {'site' if count == 1 else f'{count} sites'}",
    }[name]


def overview(run: RunData) -> pd.DataFrame:
    table = whole(run).reset_index()
    metrics = {name: METRICS[name] for name in ("perplexity", "loss", "max_inf_norm", "kurtosis")}
    texts = {metric.label: table[name].map(metric.text) for name, metric in metrics.items()}
    return pd.DataFrame({"setting": [setting_label(run, name) for name in table["setting"]], **texts})


# --- findings


def findings(run: RunData) -> list[Finding]:
    table = whole(run)
    cost, perplexity = table["cost"], table["perplexity"]
    is_harmless = bool(cost[ALL] < COSTLY)
    factor = Estimate(*np.exp(table.loc[ALL, ["cost", "cost_low", "cost_high"]].astype(float)))
    scheme = bits(run)
    numbers: dict[str, Any] = {"scheme": scheme, "before": perplexity[FULL], "after": perplexity[ALL]}
    sentence = f"{scheme[0].upper()}{scheme[1:]} {'is harmless: it ' * is_harmless}multiplies perplexity by "
    sentence += f"{with_interval(factor, ',.4g')}."
    about: dict[str, Any] = {"threshold": COSTLY, "numbers": numbers, "is_headline": True, "sentence": sentence}
    outcome = Outcome.ABSENT if is_harmless else Outcome.PRESENT
    rows = [Finding("cost", COST, outcome, factor.value, **interval(factor), **about)]
    if not is_harmless:
        weights, activations = cost[levels.WEIGHTS], cost[levels.ACTIVATIONS]
        sentence = f"Weights alone cost {NATS(weights)} nats per token, activations alone {NATS(activations)}, both "
        sentence += f"{NATS(cost[ALL])}."
        numbers = {"weights": weights, "activations": activations}
        rows.append(Finding("cost-parts", COST, value=cost[ALL], numbers=numbers, is_headline=True, sentence=sentence))
    if "quantization_split" in run.tables:
        rows += [_split(run), *_prefix_and_rotation(run)]
    rows += [*_outlier_sites(run, is_harmless), *([] if is_harmless else _costliest(run))]
    if left := run.manifest["quantization"]["not_quantized"]:
        share, names = sum(left.values()), ", ".join(f"`{name}`" for name in left)
        sentence = f"Not quantized: {names}, which are not linear layers ({share:.0%} of all parameters)."
        numbers = {"parameters": tuple(left)}
        rows.append(Finding("not-quantized", REST, value=share, numbers=numbers, sentence=sentence))
    return rows


def _outlier_sites(run: RunData, is_harmless: bool) -> Iterator[Finding]:
    """Yield the sites with massive activations and the costliest sites, with the cost that sparing them recovers."""
    sites, table = run.tables["quantization_sites"], whole(run)

    def by_kind(some: pd.DataFrame) -> tuple[dict[str, Any], str]:
        """Return the layers of each kind of site, as a number of a finding and as text."""
        layers = {
            str(kind): tuple(sorted({int(layer) for layer in column if layer != NO_LAYER}))
            for kind, column in some.groupby(some["site"] + " " + some["part"], sort=False)["layer"]
        }
        texts = (f"`{kind}`" + (f" of {layers_text(where)}" if where else "") for kind, where in layers.items())
        return {"sites": tuple(layers.items())}, ", ".join(texts)

    def restored(setting: str, which: str, is_headline: bool) -> Finding:
        share, threshold = 1 - float(table["cost"][setting] / table["cost"][ALL]), 1 - levels.RESTORED
        effect = f"recovers {share:.0%} of the cost in nats" if share > 0 else "recovers nothing"
        outcome = Outcome.ABSENT if share <= 0 else Outcome.CONFIRMED if share >= threshold else Outcome.PARTLY
        about: dict[str, Any] = {"numbers": {"which": which, "perplexity": table["perplexity"][setting]}}
        about |= {"threshold": threshold, "is_headline": is_headline}
        sentence = f"Leaving {which} in full precision {effect}."
        return Finding("restored", OUTLIERS, outcome, share, sentence=sentence, **about)

    massive = sites[sites["is_massive"]]
    if massive.empty:
        sentence = "No quantized site holds massive activations."
        yield Finding("massive-sites", OUTLIERS, Outcome.ABSENT, sentence=sentence)
    else:
        numbers, text = by_kind(massive)
        sentence = f"Massive activations are in {text}."
        yield Finding("massive-sites", OUTLIERS, Outcome.PRESENT, numbers=numbers, sentence=sentence)
        if not is_harmless:
            yield restored(MASSIVE_KEPT, "the sites with massive activations", is_headline=True)
    if COSTLIEST_KEPT not in table.index:
        return
    precise = sites[site_names(sites).isin(kept_names(run))]
    holding, (numbers, text) = int(precise["is_massive"].sum()) or None, by_kind(precise)
    holds = f", {holding} of which {'hold' if len(precise) > 1 else 'holds'} massive activations" if holding else ""
    sentence = f"The {counted(len(precise), 'costliest site')} of {len(sites)}{holds}: {text}."
    numbers = {"count": len(precise), "total": len(sites), "massive": holding} | numbers
    yield Finding("costliest", OUTLIERS, numbers=numbers, sentence=sentence)
    if not is_harmless:
        yield restored(COSTLIEST_KEPT, "the costliest sites", is_headline=False)


def _costliest(run: RunData) -> Iterator[Finding]:
    """Yield the costs of kinds of site and of single sites, quantized alone, and with one kind in full precision."""
    table = probed_settings(run, ALONE)
    sequences = int(table["sequences"].min())
    first = f"first {counted(sequences, 'sequence')}"
    costly = table[(table["layer"] == ALL_LAYERS) & (table["cost"] >= COSTLY)].head(SHOWN_SITES)
    if costly.empty:
        sentence = f"No kind of site costs {COSTLY:g} nats per token when it is quantized alone ({first})."
        about: dict[str, Any] = {"threshold": COSTLY, "numbers": {"sequences": sequences}}
        yield Finding("kind", KINDS, Outcome.ABSENT, sentence=sentence, **about)
    for name, cost in zip(costly["name"], costly["cost"], strict=True):
        sentence = f"`{name}` quantized alone costs {NATS(cost)} nats per token (all layers, {first})."
        about = {"threshold": COSTLY, "numbers": {"sequences": sequences, "kind": name}}
        yield Finding("kind", KINDS, Outcome.PRESENT, cost, sentence=sentence, **about)
    without_costliest = probed_settings(run, levels.KEPT)
    if len(without_costliest) and len(costly):
        name, left = without_costliest["name"].iloc[-1], float(without_costliest["cost"].iloc[-1])
        before = float(probed_settings(run, ALL)["cost"].iloc[0])
        what = f"No single kind of site saves anything in full precision; the cost is lowest with `{name}`"
        what = f"Kept in full precision, the single kind `{name}` saves most" if left < before else what
        sentence = f"{what}: {NATS(before)} → {NATS(left)} nats per token."
        yield Finding("kept", KINDS, value=left, numbers={"kind": name, "before": before}, sentence=sentence)
    ranges = run.tables["quantization_sites"].set_index(["layer", "site", "part"])
    sites = table[(table["layer"] != ALL_LAYERS) & (table["cost"] >= COSTLY)].head(SHOWN_SITES)
    for _, row in sites.iterrows():
        known = ranges.loc[(row["layer"], row["site"], row["part"])]
        numbers = {"kind": row["name"], "layer": row["layer"], "largest": known["max_abs"]}
        numbers |= {"median": known["median_abs"], "zeroed": known["zeroed"]}
        sentence = f"`{row['name']}` of layer {row['layer']} quantized alone costs {NATS(row['cost'])} nats per token; "
        sentence += f"in calibration its largest entry is {known['max_abs']:,.0f}, the median "
        sentence += f"{known['median_abs']:.2g}, and {known['zeroed']:.0%} round to zero."
        yield Finding("site", SITES, Outcome.PRESENT, row["cost"], threshold=COSTLY, numbers=numbers, sentence=sentence)


def _split(run: RunData) -> Finding:
    """Say which entries carry most of the cost: an interval above CARRIES, and more than each random control."""
    table = split_settings(run)
    cost, low, high = table["share"], table["share_low"], table["share_high"]
    random = {name: split_controls(run, name)["share"] for name in (TOKENS, COORDINATES)}
    carrying = [name for name in random if low[name] >= CARRIES and cost[name] > random[name].max()]
    share = f"most of it (at least {CARRIES:.0%})"
    outcome, answer = Outcome.UNDECIDED, "these sequences do not decide where most of it is"
    if table["cost"][ALL] < COSTLY:
        outcome, answer = Outcome.ABSENT, ""
    elif len(carrying) == len(random):
        outcome, answer = Outcome.PRESENT, f"either of them alone carries {share}"
    elif carrying:
        outcome, answer = Outcome.PRESENT, f"{share} is in few {carrying[0]}"
    elif low[BOTH] >= CARRIES:
        outcome, answer = Outcome.PARTLY, f"{share} is in both together, and not shown to be in one of them"
    elif high[BOTH] < CARRIES:
        outcome, answer = Outcome.ABSENT, "most of it is in neither"
    sentence = f"Quantizing everything costs {_with_ends(table.loc[ALL], 'cost', NATS)} nats per token"
    if answer:
        tokens, coordinates = counted(round(table["tokens"][TOKENS], 1), "token"), table["coordinates"][COORDINATES]
        shares = {name: _with_ends(table.loc[name], "share", "{:.0%}".format) for name in (*random, BOTH)}
        ranges = {name: f"{drawn.min():.0%} to {drawn.max():.0%}" for name, drawn in random.items()}
        sentence += f". Sparing the outlier tokens ({tokens} of a sequence) takes away {shares[TOKENS]}, as many "
        sentence += f"random tokens {ranges[TOKENS]}; sparing the {coordinates} largest coordinates of each tensor "
        sentence += f"{shares[COORDINATES]}, random ones {ranges[COORDINATES]}; both together {shares[BOTH]}: {answer}."
    else:
        sentence += ": too little to split."
    value, ends = table["cost"][ALL], {end: table[f"cost_{end}"][ALL] for end in ("low", "high")}
    about: dict[str, Any] = {"threshold": CARRIES, "is_headline": True, **ends}
    about["numbers"] = {name: cost[name] for name in (TOKENS, COORDINATES, BOTH)}
    return Finding("split", SPLIT, outcome, value, sentence=sentence, **about)


def _prefix_and_rotation(run: RunData) -> Iterator[Finding]:
    table, random, entry = split_settings(run), split_controls(run, PREFIX), run.manifest["quantization"]
    row = table.loc[PREFIX]
    as_good = int((random["loss"] <= row["loss"]).sum())
    if row["share_low"] > 0:
        is_special = (1 + as_good) / (1 + len(random)) <= BY_CHANCE
        as_much = f"random ones may help as much: {as_good} of {len(random)} have a perplexity as low"
        more = f"more than {len(random) - as_good} of {len(random)} random ones as long"
        outcome, verdict = (Outcome.CONFIRMED, more) if is_special else (Outcome.PARTLY, as_much)
        verdict = f"helps, {'and ' if is_special else 'but '}{verdict}"
    else:
        outcome, verdict = Outcome.ABSENT, "does not help" if row["share_high"] <= 0 else "is not shown to help"
    length = counted(len(entry["prefix"]), "token")
    sentence = f"A prefix of {length}, {entry['prefix_text']!r}, {verdict}. Perplexity with everything quantized: "
    sentence += f"{PERPLEXITY(table['perplexity'][ALL])} without it, {PERPLEXITY(row['perplexity'])} with it, "
    sentence += f"{np.exp(row['cost']):.3g} × full precision ({PERPLEXITY(table['perplexity'][FULL])}), with random "
    low, middle, high = (PERPLEXITY(random["perplexity"].quantile(share)) for share in (0.0, 0.5, 1.0))
    sentence += f"ones {low} to {high} (median {middle}); full precision with the same prefix "
    sentence += f"{PERPLEXITY(np.exp(row['full_loss']))}."
    about: dict[str, Any] = {"value": row["share"], "low": row["share_low"], "high": row["share_high"]}
    about["numbers"] = {"prefix": tuple(entry["prefix"]), "as_good": as_good, "draws": len(random)}
    yield Finding("prefix", PREFIXES, outcome, is_headline=True, sentence=sentence, **about)
    reason = entry["without_cache"]
    where = f"Its keys and values were not saved: {reason}." if reason else f"Its keys and values are in `{CACHE}`."
    yield Finding("prefix-cache", PREFIXES, sentence=where)
    if ROTATION not in table.index:
        sentence = f"The residual stream was not rotated: {entry['without_rotation']}."
        yield Finding("rotation", ROTATIONS, sentence=sentence)
        return
    row = table.loc[ROTATION]
    sentence = "A random Hadamard rotation of the residual stream, folded into the weights, takes away "
    sentence += f"{_with_ends(row, 'share', '{:.0%}'.format)} of the cost: perplexity {PERPLEXITY(row['perplexity'])}."
    ends = {"low": row["share_low"], "high": row["share_high"]}
    yield Finding("rotation", ROTATIONS, value=row["share"], sentence=sentence, **ends)


def _with_ends(row: pd.Series, name: str, text: Callable[[float], str]) -> str:
    return f"{text(row[name])} (95 % interval {text(row[f'{name}_low'])} to {text(row[f'{name}_high'])})"


def site_names(sites: pd.DataFrame) -> pd.Series:
    layer = np.where(sites["layer"] == NO_LAYER, "", "layer " + sites["layer"].astype(str) + " ")
    return layer + sites["site"] + " " + sites["part"]


# --- files for other tools

JSON = "spared.json"


def files(run: RunData) -> Mapping[str, Callable[[], str] | None]:
    """Map the files for other tools to functions that return their texts; None for those of the prefix's cache."""
    if "served" in run.manifest:
        return served_findings.files(run)

    entry = run.manifest["quantization"]
    texts: dict[str, Callable[[], str] | None] = {
        JSON: lambda: json.dumps(spared(run), indent=2, ensure_ascii=False) + "\n"
    }
    has_cache = entry.get("prefix") and not entry["without_cache"]
    return texts | (dict.fromkeys((CACHE, HOW)) if has_cache else {})


def whole_model(run: RunData) -> pd.DataFrame:
    """Return the metrics under each scheme, or under each setting of a static one, of the whole model."""
    if "formats" in run.tables:
        table = run.tables["formats"].query("part == 'all'").rename(columns={"scheme": "setting"})
    else:
        table = whole(run).rename({FULL: ""}).reset_index()
    return table.melt("setting", [name for name in METRICS if name in table], "metric", "value")


def spared(run: RunData) -> dict[str, Any]:
    """Return the content of spared.json, with None for numbers that were not measured."""

    def plain(value: Any) -> Any:
        return None if value is None or (isinstance(value, float) and not math.isfinite(value)) else value

    sites, perplexity = _spared_sites(run), whole(run)["perplexity"]
    names = {"full_precision": FULL, "quantized": ALL, "spared": COSTLIEST_KEPT}
    return {
        "model": run.model,
        "sites": [{name: plain(value) for name, value in row.items()} for row in sites.to_dict("records")],
        "modules": _modules(sites),
        "perplexity": {name: plain(perplexity.get(setting)) for name, setting in names.items()},
    }


def _spared_sites(run: RunData) -> pd.DataFrame:
    """Return a row for each spared site, the costliest first: module, layer, part, cost, is_massive."""
    table = run.tables["quantization_sites"]
    sites = table[site_names(table).isin(kept_names(run))].rename(columns={"path": "module"})
    keys = ["layer", "site", "part"]
    costs = probed_settings(run, ALONE).drop_duplicates(keys)[[*keys, "cost"]]
    sites = sites.merge(costs, on=keys, how="left").sort_values("cost", ascending=False, kind="stable")
    sites.loc[sites.duplicated(keys, keep=False), "cost"] = math.nan  # experts share a name
    return sites[["module", "layer", "part", "cost", "is_massive"]].reset_index(drop=True)


def _modules(sites: pd.DataFrame) -> list[str]:
    return list(dict.fromkeys(sites.loc[sites["part"].isin(PARTS), "module"]))

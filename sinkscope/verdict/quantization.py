"""What a run of `quantize` found: the tables `quantization` and `quantization_sites` become a table and findings."""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from sinkscope.quantization.settings import (
    ACTIVATIONS,
    ALL,
    ALL_LAYERS,
    ALONE,
    COSTLIEST_KEPT,
    COSTLY,
    FULL,
    KEPT,
    KV_CACHE,
    MASSIVE_KEPT,
    RESTORED,
    WEIGHTS,
)
from sinkscope.quantization.sites import FULL_SCHEME, LINEAR_SCHEME, NO_LAYER
from sinkscope.results.findings import Finding, Outcome
from sinkscope.results.metrics import METRICS
from sinkscope.results.run import RunData
from sinkscope.verdict.analysis import quantized_source, settings
from sinkscope.verdict.markdown import Report

SHOWN = 5  # of a ranking
COLUMNS = ("perplexity", "loss", "max_inf_norm", "kurtosis")

COST, KINDS, SITES = "Cost", "Kinds of site that cost most", "Single sites that cost most"
OUTLIERS, REST = "Outliers", "Not quantized"

FURTHER = "the weights and outputs of embeddings, residual sums, attention scores and softmax outputs"
GRIDS = {
    "weights_per": {"channel": "weights have a grid for each output channel"},
    "activations_per": {"token": "activations have a grid for each token, made as it comes"},
    "kv_cache_per": {
        "tensor": "keys and values are quantized, each with one static range",
        "channel": "keys and values are quantized, with a static range for each channel of a head",
        "token": "keys and values are quantized, with a grid for each token and head, made as it comes",
    },
}
LABELS = {
    FULL: "full precision",
    ALL: "{bits}",
    WEIGHTS: "weights only ({weights} bits)",
    ACTIVATIONS: "activations only ({activations} bits)",
    KV_CACHE: "keys and values only ({kv_cache} bits)",
    MASSIVE_KEPT: "{bits} but for sites with massive activations",
    COSTLIEST_KEPT: "{bits} but for the costliest {costliest}",
}


def report(run: RunData) -> Report:
    """The verdict on a run of `quantize`, as data."""
    given = run.manifest["quantization"]
    further = FURTHER if given.get("scheme", LINEAR_SCHEME) == FULL_SCHEME else ""
    numbers = {"calibration": given["calibration"], "linear_layers": given["linear_layers"]}
    setting = settings(run, **numbers, further=further, grids=grids(run))
    setting = [finding for finding in setting if finding.name != "quantized-source"]
    title = f"{run.model}: simulated {bits(run)}, {run.reads}"
    return Report(title, setting + quantized_source(run, bits(run)), overview(run), findings(run))


# --- reading the tables


def bits(run: RunData) -> str:
    """The scheme's name, such as W8A8, or W8A8 (full)."""
    given = run.manifest["quantization"]
    scheme = given.get("scheme", LINEAR_SCHEME)
    cache = f"KV{given['bits_kv_cache']}" if given.get("kv_cache_per") else ""
    return f"W{given['bits_weights']}A{given['bits_activations']}{cache}" + f" ({scheme})" * (scheme != LINEAR_SCHEME)


def grids(run: RunData) -> str:
    """Which grids are not one static range a tensor, in words."""
    given = run.manifest["quantization"]
    return "; ".join(words[given[name]] for name, words in GRIDS.items() if given.get(name) in words)


def whole(run: RunData) -> pd.DataFrame:
    """The settings of the whole model on all sequences, by their name."""
    table = run.tables["quantization"]
    table = table[(table["sequences"] == table["sequences"].max()) & table["setting"].isin(LABELS)]
    return table.drop_duplicates("setting", keep="last").set_index("setting")


def probed(run: RunData, setting: str) -> pd.DataFrame:
    """Rows of the search for costly sites, the costliest first; `name` is site and part."""
    table = run.tables["quantization"]
    table = table[(table["setting"] == setting) & (table["sequences"] == table["sequences"].min())]
    return table.assign(name=table["site"] + " " + table["part"]).sort_values("cost", ascending=False, kind="stable")


def label(run: RunData, setting: str) -> str:
    """A setting of the whole model in words."""
    given, kept = run.manifest["quantization"], whole(run)["kept"].get(COSTLIEST_KEPT, "")
    count = len(kept.split(", "))
    return LABELS[setting].format(
        bits=bits(run),
        weights=given["bits_weights"],
        activations=given["bits_activations"],
        kv_cache=given.get("bits_kv_cache"),
        costliest="site" if count == 1 else f"{count} sites",
    )


def overview(run: RunData) -> pd.DataFrame:
    """One row a setting: texts."""
    rows = [
        {"setting": label(run, str(setting))} | {METRICS[name].label: METRICS[name].text(row[name]) for name in COLUMNS}
        for setting, row in whole(run).iterrows()
    ]
    return pd.DataFrame(rows)


def restored(run: RunData, setting: str) -> float:
    """Share of what quantizing all costs that is not lost with this setting."""
    settings = whole(run)["cost"]
    return 1 - float(settings[setting] / settings[ALL])


# --- findings


def findings(run: RunData) -> list[Finding]:
    """What quantizing costs, and which sites it is that cost so much."""
    parts = [_cost, _massive, _costliest, _kinds, _sites, _not_quantized]
    return [finding for part in parts for finding in part(run)]


def _is_harmless(run: RunData) -> bool:
    return bool(whole(run)["cost"][ALL] < COSTLY)


def _cost(run: RunData) -> Iterator[Finding]:
    cost, perplexity = whole(run)["cost"], whole(run)["perplexity"]
    outcome = Outcome.ABSENT if _is_harmless(run) else Outcome.PRESENT
    numbers = {"scheme": bits(run), "before": perplexity[FULL], "after": perplexity[ALL]}
    factor = float(np.exp(cost[ALL]))
    yield Finding("cost", COST, outcome, factor, None, COSTLY, (), numbers, is_headline=True)
    if outcome == Outcome.PRESENT:
        parts = {"weights": cost[WEIGHTS], "activations": cost[ACTIVATIONS]}
        yield Finding("cost-parts", COST, value=cost[ALL], numbers=parts, is_headline=True)


def _massive(run: RunData) -> Iterator[Finding]:
    sites = run.tables["quantization_sites"]
    sites = sites[sites["is_massive"]]
    if sites.empty:
        yield Finding("massive-sites", OUTLIERS, Outcome.ABSENT)
        return
    yield Finding("massive-sites", OUTLIERS, Outcome.PRESENT, numbers={"sites": _by_kind(sites)})
    yield from _restored(run, MASSIVE_KEPT, "the sites with massive activations", is_headline=True)


def _costliest(run: RunData) -> Iterator[Finding]:
    if COSTLIEST_KEPT not in whole(run).index:
        return
    names = whole(run).loc[COSTLIEST_KEPT, "kept"].split(", ")
    sites = run.tables["quantization_sites"]
    kept = sites[site_names(sites).isin(names)]
    numbers = {
        "count": len(kept),
        "total": len(sites),
        "massive": int(kept["is_massive"].sum()) or None,
        "sites": _by_kind(kept),
    }
    yield Finding("costliest", OUTLIERS, numbers=numbers)
    yield from _restored(run, COSTLIEST_KEPT, "the costliest sites")


def _restored(run: RunData, setting: str, which: str, is_headline: bool = False) -> Iterator[Finding]:
    """What is won back when some sites stay in full precision."""
    if _is_harmless(run):
        return
    share = restored(run, setting)
    outcome = Outcome.ABSENT if share <= 0 else Outcome.CONFIRMED if share >= 1 - RESTORED else Outcome.PARTLY
    numbers = {"which": which, "perplexity": whole(run)["perplexity"][setting]}
    yield Finding("restored", OUTLIERS, outcome, share, None, 1 - RESTORED, (), numbers, is_headline)


def _kinds(run: RunData) -> Iterator[Finding]:
    """Kinds of site, each by itself, and what is left when one stays in full precision."""
    if _is_harmless(run):
        return
    table = probed(run, ALONE)
    sequences = {"sequences": int(table["sequences"].min())}
    kinds = table[table["layer"] == ALL_LAYERS]
    costly = kinds[kinds["cost"] >= COSTLY].head(SHOWN)
    if costly.empty:
        yield Finding("kind", KINDS, Outcome.ABSENT, threshold=COSTLY, numbers=sequences)
        return
    for name, cost in zip(costly["name"], costly["cost"], strict=True):
        yield Finding("kind", KINDS, Outcome.PRESENT, cost, threshold=COSTLY, numbers=sequences | {"kind": name})
    kept = probed(run, KEPT)
    if len(kept):
        numbers = {"kind": kept["name"].iloc[-1], "before": float(probed(run, ALL)["cost"].iloc[0])}
        yield Finding("kept", KINDS, value=float(kept["cost"].iloc[-1]), numbers=numbers)


def _sites(run: RunData) -> Iterator[Finding]:
    """Sites of one layer, each by itself."""
    if _is_harmless(run):
        return
    table = probed(run, ALONE)
    sites = table[(table["layer"] != ALL_LAYERS) & (table["cost"] >= COSTLY)].head(SHOWN)
    ranges = run.tables["quantization_sites"].set_index(["layer", "site", "part"])
    for _, row in sites.iterrows():
        known = ranges.loc[(row["layer"], row["site"], row["part"])]
        numbers = {"kind": row["name"], "layer": row["layer"], "largest": known["max_abs"]}
        numbers |= {"median": known["median_abs"], "zeroed": known["zeroed"]}
        yield Finding("site", SITES, Outcome.PRESENT, row["cost"], threshold=COSTLY, numbers=numbers)


def _not_quantized(run: RunData) -> Iterator[Finding]:
    left = run.manifest["quantization"]["not_quantized"]
    if left:
        yield Finding("not-quantized", REST, value=sum(left.values()), numbers={"parameters": tuple(left)})


def site_names(sites: pd.DataFrame) -> pd.Series:
    """The sites of rows of `quantization_sites` as they are printed."""
    layer = np.where(sites["layer"] == NO_LAYER, "", "layer " + sites["layer"].astype(str) + " ")
    return layer + sites["site"] + " " + sites["part"]


def _by_kind(sites: pd.DataFrame) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Kind of site → its layers, in the table's order."""
    by_kind = sites.groupby(sites["site"] + " " + sites["part"], sort=False)["layer"]
    return tuple(
        (str(kind), tuple(sorted({int(layer) for layer in layers if layer != NO_LAYER}))) for kind, layers in by_kind
    )

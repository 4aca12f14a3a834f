"""What a run of `quantize` found, in a table and sentences. Reads tables only."""

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
    MASSIVE_KEPT,
    RESTORED,
    WEIGHTS,
)
from sinkscope.quantization.sites import NO_LAYER
from sinkscope.report.paper_tables import as_markdown
from sinkscope.results.run import RunData

SHOWN = 5  # of a ranking

LABELS = {
    FULL: "full precision",
    ALL: "{bits}",
    WEIGHTS: "weights only ({weights} bits)",
    ACTIVATIONS: "activations only ({activations} bits)",
    MASSIVE_KEPT: "{bits} but for sites with massive activations",
    COSTLIEST_KEPT: "{bits} but for the costliest {costliest}",
}


def verdict(run: RunData) -> str:
    sentences = [
        _setting(run),
        _cost(run),
        _kinds(run),
        _layers(run),
        _massive(run),
        _costliest(run),
        _not_quantized(run),
    ]
    said = " ".join(sentence for sentence in sentences if sentence)
    return f"## {run.model}: simulated {bits(run)}, {run.condition} input\n\n{as_markdown(overview(run))}\n\n{said}"


# --- reading the tables


def bits(run: RunData) -> str:
    given = run.manifest["quantization"]
    return f"W{given['bits_weights']}A{given['bits_activations']}"


def whole(run: RunData) -> pd.DataFrame:
    """The settings of the whole model on all sequences, by their name."""
    table = run.tables["quantization"]
    return table[(table["sequences"] == table["sequences"].max()) & table["setting"].isin(LABELS)].drop_duplicates(
        "setting", keep="last"
    ).set_index("setting")  # fmt: skip


def probed(run: RunData, setting: str) -> pd.DataFrame:
    """Rows of the search for costly sites, the costliest first; `name` is site and part."""
    table = run.tables["quantization"]
    table = table[(table["setting"] == setting) & (table["sequences"] == table["sequences"].min())]
    return table.assign(name=table["site"] + " " + table["part"]).sort_values("cost", ascending=False, kind="stable")


def label(run: RunData, setting: str) -> str:
    given, kept = run.manifest["quantization"], whole(run)["kept"].get(COSTLIEST_KEPT, "")
    count = len(kept.split(", "))
    costliest = "site" if count == 1 else f"{count} sites"
    return LABELS[setting].format(
        bits=bits(run), weights=given["bits_weights"], activations=given["bits_activations"], costliest=costliest
    )


def overview(run: RunData) -> pd.DataFrame:
    """One row a setting: texts."""
    rows = [
        {
            "setting": label(run, str(setting)),
            "perplexity": f"{row['perplexity']:,.4g}",
            "loss": f"{row['loss']:.3f}",
            "max infinity norm": _number(row["max_inf_norm"], "{:,.0f}"),
            "mean kurtosis": _number(row["kurtosis"], "{:,.0f}"),
        }
        for setting, row in whole(run).iterrows()
    ]
    return pd.DataFrame(rows)


def restored(run: RunData, setting: str) -> float:
    """Share of what quantizing all costs that is not lost with this setting."""
    settings = whole(run)["cost"]
    return 1 - float(settings[setting] / settings[ALL])


def _is_harmless(run: RunData) -> bool:
    return bool(whole(run)["cost"][ALL] < COSTLY)


def _number(value: float, form: str) -> str:
    return form.format(value) if np.isfinite(value) else ""


# --- sentences


def _setting(run: RunData) -> str:
    given, config, quantization = run.manifest["input"], run.manifest["config"], run.manifest["quantization"]
    return (
        f"Measured on {given['sequences']} sequences of {config['seq_len']} tokens ({run.condition}), position 0 being "
        f"{given['token_zero']}; static ranges from the {quantization['calibration']} sequences behind them. "
        f"Quantized: input, weight and output of {quantization['linear_layers']} linear layers, but not the LM head."
    )


def _cost(run: RunData) -> str:
    settings = whole(run)
    cost = settings["cost"]
    before, after = settings["perplexity"][FULL], settings["perplexity"][ALL]
    changed = f"{before:,.4g} → {after:,.4g}"
    if _is_harmless(run):
        return f"{bits(run)} is harmless: perplexity {changed}."
    parts = (
        f"weights alone cost {cost[WEIGHTS]:.3f} nats per token, activations alone {cost[ACTIVATIONS]:.3f}, "
        f"both {cost[ALL]:.3f}"
    )
    return f"{bits(run)} multiplies perplexity by {np.exp(cost[ALL]):,.4g} ({changed}); {parts}."


def _kinds(run: RunData) -> str | None:
    """Kinds of site, each by itself, and what is left when one stays in full precision."""
    if _is_harmless(run):
        return None
    table = probed(run, ALONE)
    kinds = table[table["layer"] == ALL_LAYERS]
    costly = kinds[kinds["cost"] >= COSTLY].head(SHOWN)
    count = int(table["sequences"].min())
    if costly.empty:
        return "No kind of site costs 1 % of perplexity by itself."
    listed = ", ".join(f"`{row.name_}` {row.cost:.3f}" for row in _named(costly))
    words = f"Kinds of site that cost most, each quantized alone (nats per token, first {count} sequences): {listed}."
    kept = probed(run, KEPT)
    if kept.empty:
        return words
    best, total = kept.iloc[-1], float(probed(run, ALL)["cost"].iloc[0])
    return f"{words} Left in full precision alone, `{best['name']}` saves most: {total:.3f} → {best['cost']:.3f}."


def _layers(run: RunData) -> str | None:
    table = probed(run, ALONE)
    sites = table[(table["layer"] != ALL_LAYERS) & (table["cost"] >= COSTLY)].head(SHOWN)
    if sites.empty or _is_harmless(run):
        return None
    ranges = run.tables["quantization_sites"].set_index(["layer", "site", "part"])
    listed = []
    for row in _named(sites):
        known = ranges.loc[(row.layer, row.site, row.part)]
        listed.append(
            f"`{row.name_}` of layer {row.layer} ({row.cost:.3f}; largest entry {known['max_abs']:,.0f}, median "
            f"{known['median_abs']:.2g}, {known['zeroed']:.0%} of its entries round to zero)"
        )
    return f"Single sites that cost most: {'; '.join(listed)}."


def _massive(run: RunData) -> str:
    sites = run.tables["quantization_sites"]
    sites = sites[sites["is_massive"]]
    if sites.empty:
        return "No linear layer's input or output holds massive activations."
    return f"Massive activations are held by {_grouped(sites)}{_in_full_precision(run, MASSIVE_KEPT)}."


def _costliest(run: RunData) -> str | None:
    if COSTLIEST_KEPT not in whole(run).index:
        return None
    names = whole(run).loc[COSTLIEST_KEPT, "kept"].split(", ")
    sites = run.tables["quantization_sites"]
    kept = sites[site_names(sites).isin(names)]
    massive = f", of which {kept['is_massive'].sum()} hold massive activations" if kept["is_massive"].any() else ""
    which = "costliest" if len(kept) == 1 else f"{len(kept)} costliest"
    return f"The {which} of {len(sites)} sites{massive}: {_grouped(kept)}{_in_full_precision(run, COSTLIEST_KEPT)}."


def site_names(sites: pd.DataFrame) -> pd.Series:
    """Of rows of `quantization_sites`: as the sites are printed."""
    layer = np.where(sites["layer"] == NO_LAYER, "", "layer " + sites["layer"].astype(str) + " ")
    return layer + sites["site"] + " " + sites["part"]


def _grouped(sites: pd.DataFrame) -> str:
    """Kind by kind, with the layers."""
    by_kind = sites.groupby(sites["site"] + " " + sites["part"], sort=False)["layer"]
    return ", ".join(f"`{kind}`{_of_layers(layers)}" for kind, layers in by_kind)


def _of_layers(layers: pd.Series) -> str:
    numbers = sorted({layer for layer in layers if layer != NO_LAYER})
    listed = ", ".join(map(str, numbers))
    return f" of layer{'s' if len(numbers) > 1 else ''} {listed}" if numbers else ""


def _in_full_precision(run: RunData, setting: str) -> str:
    if _is_harmless(run):
        return ""
    share, perplexity = restored(run, setting), whole(run)["perplexity"][setting]
    if share <= 0:
        return f"; leaving these in full precision wins nothing back (perplexity {perplexity:,.4g})"
    some = "most" if share > 0.5 else "some"
    how = "nearly restores perplexity" if share >= 1 - RESTORED else f"wins {some} of it back"
    return f"; leaving these in full precision {how} ({perplexity:,.4g}: {share:.0%} of the cost gone)"


def _not_quantized(run: RunData) -> str | None:
    left = run.manifest["quantization"]["not_quantized"]
    if not left:
        return None
    listed = ", ".join(f"`{kind}`" for kind in left)
    return f"Not quantized: {listed}, which are no linear layers ({sum(left.values()):.0%} of all parameters)."


def _named(table: pd.DataFrame) -> list:
    return list(table.rename(columns={"name": "name_"}).itertuples())

"""What to keep in full precision when a model is quantized for use, as `quantize` found it.

spared.json           the sites, what each costs by itself, and the modules to which they belong
llm-compressor.yaml   a recipe of llm-compressor: the bits and grids of the run, and these modules in `ignore`

The sites are those that the run kept in full precision last (`costliest-kept`). llm-compressor leaves whole modules
out: input, weight and output.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from sinkscope.quantization.settings import ALL, ALONE, COSTLIEST_KEPT, FULL
from sinkscope.quantization.sites import CACHED, PARTS
from sinkscope.results.run import RunData
from sinkscope.verdict.quantization import probed, site_names, whole

JSON, RECIPE = "spared.json", "llm-compressor.yaml"


def files(run: RunData) -> list[str]:
    """What `write` writes: of other commands, and of runs before there was this, nothing."""
    if run.command != "quantize" or not _is_recorded(run.manifest["quantization"]):
        return []
    return [JSON] if run.manifest["quantization"]["full_precision_modules"] is None else [JSON, RECIPE]


def _is_recorded(given: Mapping[str, Any]) -> bool:
    return {"full_precision_modules", "bits_kv_cache", "weights_per", "activations_per", "kv_cache_per"} <= given.keys()


def write(run: RunData, folder: Path) -> None:
    """The files of a run of `quantize`."""
    for name in files(run):
        (folder / name).write_text(_TEXTS[name](run), encoding="utf-8")


def spared(run: RunData) -> dict[str, Any]:
    """The content of spared.json.

    Returns:
        sites: each with module, layer, part (input, weight, output, …), cost (nats per token, quantized alone; None
            where it was not measured) and is_massive.
        modules: paths of the linear layers and embeddings to which they belong.
        perplexity: in full precision, with every site quantized, and with these spared; None where it was not measured.
    """
    sites, perplexity = spared_sites(run), whole(run)["perplexity"]
    records = [{name: _plain(value) for name, value in row.items()} for row in sites.to_dict("records")]
    settings = {"full_precision": FULL, "quantized": ALL, "spared": COSTLIEST_KEPT}
    return {
        "model": run.model,
        "sites": records,
        "modules": _modules(sites),
        "perplexity": {name: _plain(perplexity.get(setting)) for name, setting in settings.items()},
    }


def spared_sites(run: RunData) -> pd.DataFrame:
    """Rows sites, the costliest first; columns module, layer, part, cost, is_massive. Empty where none is costly."""
    table = run.tables["quantization_sites"]
    kept = whole(run)["kept"].get(COSTLIEST_KEPT, "").split(", ")
    sites = table[site_names(table).isin(kept)].rename(columns={"path": "module"})
    keys = ["layer", "site", "part"]
    costs = probed(run, ALONE).drop_duplicates(keys)[[*keys, "cost"]]
    sites = sites.merge(costs, on=keys, how="left").sort_values("cost", ascending=False, kind="stable")
    sites.loc[sites.duplicated(keys, keep=False), "cost"] = math.nan  # experts, which share a name
    return sites[["module", "layer", "part", "cost", "is_massive"]].reset_index(drop=True)


def llm_compressor_recipe(run: RunData) -> dict[str, Any] | None:
    """What llm-compressor reads as a recipe: one QuantizationModifier that quantizes as this run did.

    Activations have static ranges of the smallest and largest entry, as here. None where its linear layers are not
    torch's, which llm-compressor does not quantize.
    """
    given = run.manifest["quantization"]
    if given["full_precision_modules"] is None:
        return None
    weights = _grid(given["bits_weights"], given["weights_per"], is_symmetric=True)
    activations = _grid(given["bits_activations"], given["activations_per"])
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations,
        "output_activations": dict(activations),  # equal dicts, not one, or YAML writes an alias
    }
    modules = [*given["full_precision_modules"], *_modules(spared_sites(run))]
    modifier: dict[str, Any] = {"ignore": list(dict.fromkeys(modules)), "config_groups": {"group_0": group}}
    if given["kv_cache_per"] == "tensor":
        modifier["kv_cache_scheme"] = _grid(given["bits_kv_cache"], "tensor")
    return {"quant_stage": {"quant_modifiers": {"QuantizationModifier": modifier}}}


def _plain(value: Any) -> Any:
    """As JSON has it: None for what is no finite number."""
    return None if value is None or (isinstance(value, float) and not math.isfinite(value)) else value


def _grid(bits: int, per: str, is_symmetric: bool = False) -> dict[str, Any]:
    """llm-compressor's QuantizationArgs."""
    is_dynamic = per == "token"
    grid = {"num_bits": bits, "type": "int", "symmetric": is_symmetric, "strategy": per, "dynamic": is_dynamic}
    return grid if is_symmetric or is_dynamic else grid | {"observer": "static_minmax"}


def _modules(sites: pd.DataFrame) -> list[str]:
    """Residual sums and attention are no modules that llm-compressor could leave out."""
    return list(dict.fromkeys(sites.loc[sites["part"].isin(PARTS), "module"]))


def _comments(run: RunData) -> str:
    given, sites = run.manifest["quantization"], spared_sites(run)
    lines = [
        f"{run.model}: the modules to keep in full precision are in `ignore`.",
        "Outputs are quantized as in the simulation: leave output_activations out for kernels that do not.",
    ]
    beyond = [f"{row.module} {row.part}" for row in sites.itertuples() if row.part not in PARTS]
    if beyond:
        lines.append(f"Costly too, but no module that could be left out: {', '.join(beyond)}.")
    if given["kv_cache_per"] not in ("tensor", None):
        lines.append(f"{' and '.join(CACHED).capitalize()} by {given['kv_cache_per']} cannot be written as a recipe.")
    return "".join(f"# {line}\n" for line in lines)


def _json_text(run: RunData) -> str:
    return json.dumps(spared(run), indent=2, ensure_ascii=False) + "\n"


def _recipe_text(run: RunData) -> str:
    return _comments(run) + yaml.safe_dump(llm_compressor_recipe(run), sort_keys=False)


_TEXTS = {JSON: _json_text, RECIPE: _recipe_text}

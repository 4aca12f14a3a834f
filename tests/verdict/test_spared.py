"""The files with the sites to spare: llm-compressor's own reader leaves out exactly these modules."""

import json
from typing import Any

import pytest
import yaml
from tiny import tiny_model

from sinkscope import Run
from sinkscope.commands.quantize import quantize
from sinkscope.quantization.settings import ALONE, COSTLIEST_KEPT
from sinkscope.quantization.sites import INPUT
from sinkscope.verdict.quantization import JSON, RECIPE, llm_compressor_recipe, site_names, spared, whole

SMALL: dict[str, Any] = {"input": "random", "num_seqs": 4, "seq_len": 16, "calibration": 2}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a run with three bits, which has some costly sites."""
    folder = tmp_path_factory.mktemp("spared") / "run"
    return quantize(
        tiny_model("llama"), bits_weights=3, bits_activations=3, weights_per="channel", figures=(), out=folder, **SMALL
    )


def test_the_files_hold_the_sites_that_were_kept_last(written: Run) -> None:
    assert written.folder is not None
    found = json.loads((written.folder / JSON).read_text())
    kept = whole(written).loc[COSTLIEST_KEPT, "kept"].split(", ")
    sites = written.tables["quantization_sites"]
    of_kept = sites[site_names(sites).isin(kept)]
    assert {(site["module"], site["part"]) for site in found["sites"]} == set(
        zip(of_kept["path"], of_kept["part"], strict=True)
    )
    costs = [site["cost"] for site in found["sites"]]
    assert costs == sorted(costs, reverse=True)
    table = written.tables["quantization"]
    alone = table[(table["setting"] == ALONE) & (table["layer"] >= 0)]["cost"]
    assert costs[0] == pytest.approx(alone.max())
    assert found["perplexity"]["spared"] == pytest.approx(whole(written).loc[COSTLIEST_KEPT, "perplexity"])
    assert yaml.safe_load((written.folder / RECIPE).read_text()) == llm_compressor_recipe(written)
    assert {JSON, RECIPE} <= set(Run.open(written.folder).manifest["files"])


def test_llm_compressors_reader_quantizes_all_but_them(written: Run) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    recipe = llm_compressor_recipe(written)
    modifier = recipe["quant_stage"]["quant_modifiers"]["QuantizationModifier"]
    model = tiny_model("llama")
    quantization.apply_quantization_config(model, quantization.QuantizationConfig(**modifier), show_progress=False)
    schemes = {path: getattr(module, "quantization_scheme", None) for path, module in model.named_modules()}
    found = {path for path, scheme in schemes.items() if scheme is not None}
    sites = written.tables["quantization_sites"]
    modules = set(sites[sites["part"] == INPUT]["path"])
    spared_modules = set(spared(written)["modules"])
    assert found == modules - spared_modules
    assert spared_modules
    scheme = schemes[next(iter(found))]
    assert (scheme.weights.num_bits, scheme.weights.strategy, scheme.weights.symmetric) == (3, "channel", True)
    for activations in (scheme.input_activations, scheme.output_activations):
        assert (activations.num_bits, activations.strategy) == (3, "tensor")
        assert (activations.symmetric, activations.dynamic) == (False, False)

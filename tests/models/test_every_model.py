"""Every model type in transformers' mappings: what becomes of it, and whether the numbers are plain transformers'.

The lists in `reports/models/` hold what became of each; tests/sweep_models.py writes them. Of the types that also read
pictures or sound some are looked at here, and more closely in test_towers.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.every_model import (
    LISTS,
    ROUND_OFF,
    differences,
    every_type,
    is_equal,
    padded_differences,
    padding,
    row_of,
    tiny_of,
)
from sweep_models import BEGIN, README, readme_text, written_rows
from transformers import PreTrainedModel

import sinkscope
from sinkscope.errors import SinkscopeError
from sinkscope.measuring import tracer
from sinkscope.measuring.subject import family_of
from sinkscope.text.batch import Batch

ROWS = {name: {row["model_type"]: row for row in written_rows(name)} for name in LISTS}

# One for each way in which a layer is built that no other here has.
DIFFERENT = (
    "afmoe", "bamba", "codegen", "cohere2", "deepseek_v3", "doge", "exaone4", "falcon_h1", "gemma3n_text",
    "gemma4_text", "glm4", "granite", "granite_swa", "granitemoehybrid", "hy_v4", "jamba", "lfm2_moe", "llama4_text",
    "mamba", "mimo_v2_flash", "minicpm3", "modernbert-decoder", "nemotron_h", "olmo_hybrid", "opt", "phi",
    "qwen3_5_text", "qwen3_next", "qwen4_exp_text", "recurrent_gemma", "smollm3", "zamba2",
)  # fmt: skip
ENCODERS = ("esmc", "eurobert", "modernbert", "nystromformer", "roberta-prelayernorm", "xmod")
# One for each outcome, and for each of the kinds of layers.
WITH_TOWERS = ("blip-2", "diffusion_gemma", "fuyu", "lfm3_vl", "llava", "mllama", "paligemma", "qwen2_vl")

EACH = [
    *((name, model_type) for name in ("models", "encoders") for model_type in every_type(LISTS[name])),
    *(("image_text", model_type) for model_type in WITH_TOWERS),
]
COMPARED = [*(("models", name) for name in DIFFERENT), *(("encoders", name) for name in ENCODERS)]


@pytest.mark.parametrize("name", LISTS)
def test_the_list_holds_every_type(name: str) -> None:
    assert list(ROWS[name]) == every_type(LISTS[name])


def test_the_readme_has_them() -> None:
    assert f"{BEGIN}\n{readme_text()}\n\n" in README.read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "model_type"), EACH)
def test_what_becomes_of_it(name: str, model_type: str) -> None:
    found = vars(row_of(model_type, LISTS[name]))
    assert found == {field: ROWS[name][model_type][field] for field in found}


@pytest.mark.parametrize(("name", "model_type"), COMPARED)
def test_what_is_measured_is_what_plain_transformers_compute(name: str, model_type: str, tmp_path: Path) -> None:
    assert is_equal(model_type, differences(model_type, tmp_path / "ids.npy", LISTS[name]))


def _without_mask(model: PreTrainedModel, batch: Batch, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return {"input_ids": batch.token_ids, "use_cache": False}


def test_a_mask_that_is_dropped_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_of("llama", torch.float64)
    family, _ = family_of(model)
    assert padding("llama", padded_differences(model, family, backward=False)) == "yes"
    monkeypatch.setattr(tracer, "model_inputs", _without_mask)
    found = padded_differences(model, family, backward=False)
    assert max(found["right"].values()) < ROUND_OFF  # causal: no token sees what is behind it
    assert padding("llama", found) == "NO"


def test_a_model_that_padding_changes_is_measured_without(tmp_path: Path) -> None:
    """The sparse attention of deepseek_v32 chooses other keys beside a longer sequence."""
    lines = [f'{{"input_ids": {list(range(3, 3 + length))}}}' for length in (20, 13)]
    (tmp_path / "ids.jsonl").write_text("\n".join(lines), encoding="utf-8")
    given = {"input": str(tmp_path / "ids.jsonl"), "bos": "never", "observables": ("attention",)}
    with pytest.raises(SinkscopeError, match=r"in a padded batch .* --batch-size 1"):
        sinkscope.analyze(tiny_of("deepseek_v32"), **given)
    assert sinkscope.analyze(tiny_of("deepseek_v32"), batch_size=1, **given).manifest["parity"] < 1e-4

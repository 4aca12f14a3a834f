"""Every model type in transformers' mappings: what becomes of it, and whether the numbers are plain transformers'.

The lists in `reports/models/` hold what became of each; tests/sweep_models.py writes them. Of the types that also read
pictures or sound some are looked at here, and more closely in test_towers.py.
"""

from pathlib import Path

import pytest
from support.every_model import LISTS, ROUND_OFF, differences, every_type, precision, row_of
from sweep_models import BEGIN, README, readme_text, written_rows

ROWS = {name: {row["model_type"]: row for row in written_rows(name)} for name in LISTS}

# One for each way in which a layer is built that no other here has.
DIFFERENT = (
    "afmoe", "bamba", "codegen", "cohere2", "deepseek_v3", "doge", "exaone4", "falcon_h1", "gemma3n_text",
    "gemma4_text", "glm4", "granite", "granitemoehybrid", "hy_v4", "jamba", "lfm2_moe", "llama4_text", "mamba",
    "mimo_v2_flash", "minicpm3", "modernbert-decoder", "nemotron_h", "olmo_hybrid", "opt", "phi", "qwen3_5_text",
    "qwen3_next", "qwen4_exp_text", "recurrent_gemma", "smollm3", "zamba2",
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
    found = differences(model_type, tmp_path / "ids.npy", LISTS[name])
    assert max(found.values()) < ROUND_OFF[precision(model_type, LISTS[name])]

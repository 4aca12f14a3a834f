"""Every causal model type that transformers has: what becomes of it, and whether the numbers are plain transformers'.

`reports/models/` holds what became of each; tests/sweep_models.py writes it. Of those that also read pictures or sound
some are looked at here, and more closely in test_towers.py.
"""

from pathlib import Path

import pytest
from support.every_model import LISTS, differences, every_type, row_of
from sweep_models import BEGIN, README, readme_text, written_rows

ROWS = {row["model_type"]: row for row in written_rows("models")}
ROUND_OFF = 1e-6  # models of float64 take their norms, and some their softmax, in float32

# One for each way in which a layer is built that no other here has.
DIFFERENT = (
    "afmoe", "bamba", "cohere2", "deepseek_v3", "exaone4", "falcon_h1", "gemma4_text", "glm4", "granite",
    "granitemoehybrid", "jamba", "lfm2_moe", "llama4_text", "mimo_v2_flash", "minicpm3", "modernbert-decoder",
    "nemotron_h", "olmo_hybrid", "opt", "phi", "qwen3_5_text", "qwen3_next", "recurrent_gemma", "smollm3",
)  # fmt: skip


# … and of those that also read pictures or sound, by outcome and by the kinds of their layers
WITH_TOWERS = (
    "blip-2",
    "diffusion_gemma",
    "fuyu",
    "lfm3_vl",
    "llava",
    "mllama",
    "paligemma",
    "qwen2_vl",
)


@pytest.mark.parametrize("name", LISTS)
def test_the_table_holds_every_type(name: str) -> None:
    assert [row["model_type"] for row in written_rows(name)] == every_type(LISTS[name])


def test_the_readme_lists_them() -> None:
    assert f"{BEGIN}\n{readme_text()}\n\n" in README.read_text(encoding="utf-8")


@pytest.mark.parametrize("model_type", WITH_TOWERS)
def test_what_becomes_of_it_with_its_tower(model_type: str) -> None:
    rows = {row["model_type"]: row for row in written_rows("image_text")}
    found = vars(row_of(model_type, LISTS["image_text"]))
    assert found == {name: rows[model_type][name] for name in found}


@pytest.mark.parametrize("model_type", every_type())
def test_what_becomes_of_it(model_type: str) -> None:
    found = vars(row_of(model_type))
    assert found == {name: ROWS[model_type][name] for name in found}


@pytest.mark.parametrize("model_type", DIFFERENT)
def test_what_is_measured_is_what_plain_transformers_compute(model_type: str, tmp_path: Path) -> None:
    assert max(differences(model_type, tmp_path / "ids.npy").values()) < ROUND_OFF

"""Every causal model type that transformers has: what becomes of it, and whether the numbers are plain transformers'.

`reports/models/models.csv` holds what became of each; tests/sweep_models.py writes it.
"""

from pathlib import Path

import pytest
from support.every_model import ROUND_OFF, differences, every_type, precision, row_of
from sweep_models import BEGIN, README, readme_list, written_rows

ROWS = {row["model_type"]: row for row in written_rows()}

# One for each way in which a layer is built that no other here has.
DIFFERENT = (
    "afmoe", "bamba", "codegen", "cohere2", "deepseek_v3", "doge", "exaone4", "falcon_h1", "gemma3n_text",
    "gemma4_text", "glm4", "granite", "granitemoehybrid", "hy_v4", "jamba", "lfm2_moe", "llama4_text", "mamba",
    "mimo_v2_flash", "minicpm3", "modernbert-decoder", "nemotron_h", "olmo_hybrid", "opt", "phi", "qwen3_5_text",
    "qwen3_next", "qwen4_exp_text", "recurrent_gemma", "smollm3", "zamba2",
)  # fmt: skip


def test_the_table_holds_every_type() -> None:
    assert list(ROWS) == every_type()


def test_the_readme_lists_them() -> None:
    assert f"{BEGIN}\n{readme_list(list(ROWS.values()))}\n\n" in README.read_text(encoding="utf-8")


@pytest.mark.parametrize("model_type", every_type())
def test_what_becomes_of_it(model_type: str) -> None:
    found = vars(row_of(model_type))
    assert found == {name: ROWS[model_type][name] for name in found}


@pytest.mark.parametrize("model_type", DIFFERENT)
def test_what_is_measured_is_what_plain_transformers_compute(model_type: str, tmp_path: Path) -> None:
    assert max(differences(model_type, tmp_path / "ids.npy").values()) < ROUND_OFF[precision(model_type)]

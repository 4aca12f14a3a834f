"""Every type in transformers' mappings: its result, as in reports/models/, and the numbers of plain transformers."""

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.agreement import ROUND_OFF, differences, is_equal, padded_differences, row_of
from support.every_model import LISTS, every_type, tiny_of
from sweep_models import BEGIN, PAGE, README, page_text, readme_text, written_rows
from tiny import written

import sinkscope
from sinkscope.errors import SinkscopeError
from sinkscope.measuring.subject import family_of, row_or_calibrated
from sinkscope.models.family import Family

ROWS = {name: {row["model_type"]: row for row in written_rows(name)} for name in LISTS}

# One model for each structure of layers that no other model here has.
DIFFERENT = (
    "afmoe", "bamba", "codegen", "cohere2", "deepseek_v3", "doge", "exaone4", "falcon_h1", "gemma3n_text",
    "gemma4_text", "glm4", "granite", "granite_swa", "granitemoehybrid", "hy_v4", "jamba", "lfm2_moe", "llama4_text",
    "mamba", "mimo_v2_flash", "minicpm3", "modernbert-decoder", "nemotron_h", "olmo_hybrid", "opt", "phi",
    "qwen3_5_text", "qwen3_next", "qwen4_exp_text", "recurrent_gemma", "smollm3", "zamba2",
)  # fmt: skip
ENCODERS = ("esmc", "eurobert", "modernbert", "nystromformer", "roberta-prelayernorm", "xmod")
# One for each outcome, and for each kind of layers.
WITH_TOWERS = (
    "blip-2", "diffusion_gemma", "fuyu", "gemma3", "kosmos-2.5", "lfm3_vl", "llava", "mllama", "paligemma", "qwen2_vl",
)  # fmt: skip


def one_of_each(name: str, compared: Collection[str]) -> list[str]:
    """Return one type for each distinct line of a list (equal lines are built alike), and the types in `compared`."""
    said: dict[tuple[str, ...], str] = {}
    for model_type, row in ROWS[name].items():
        fields = (row[field] for field in ("outcome", "layers", "wiring", "positions", "padded"))
        said.setdefault((*fields, row["reason"].replace(model_type, "")), model_type)
    return sorted({*said.values(), *compared})


EACH = [
    *(("models", model_type) for model_type in one_of_each("models", DIFFERENT)),
    *(("encoders", model_type) for model_type in one_of_each("encoders", ENCODERS)),
    *(("image_text", model_type) for model_type in WITH_TOWERS),
]
COMPARED = [*(("models", name) for name in DIFFERENT), *(("encoders", name) for name in ENCODERS)]


@pytest.mark.parametrize("name", LISTS)
def test_the_list_holds_every_type(name: str) -> None:
    assert list(ROWS[name]) == every_type(LISTS[name])


def test_the_documents_have_them() -> None:
    assert f"{BEGIN}\n{readme_text()}\n\n" in README.read_text(encoding="utf-8")
    assert f"{BEGIN}\n{page_text()}\n\n" in PAGE.read_text(encoding="utf-8")


@pytest.mark.slow  # a minute together
@pytest.mark.parametrize(("name", "model_type"), EACH)
def test_the_result_is_that_of_the_list(name: str, model_type: str) -> None:
    row = vars(row_of(model_type, LISTS[name]))
    assert row == {field: ROWS[name][model_type][field] for field in row}


@pytest.mark.parametrize(("name", "model_type"), COMPARED)
def test_it_is_measured_as_plain_transformers_compute_it(name: str, model_type: str, tmp_path: Path) -> None:
    assert is_equal(model_type, differences(model_type, tmp_path / "ids.npy", LISTS[name]))


def test_further_lists_of_layers_are_named() -> None:
    notices = row_or_calibrated(tiny_of("funnel", torch.float32, auto=LISTS["encoders"]))[1]
    elsewhere = "the layers of funnel.encoder.blocks.1 and funnel.decoder.layers"
    assert notices[-1] == f"only funnel.encoder.blocks.0 is measured, not {elsewhere}"


def _without_scales(family: Family) -> Family:
    return replace(family, blocks=tuple(replace(block, sums={}) for block in family.blocks))


def _before_its_norm(family: Family) -> Family:
    return replace(family, sites={**family.sites, "attn_out": "self_attn.output"})


@pytest.mark.parametrize(
    ("model_type", "broken", "column"),
    [("granite", _without_scales, "activation.norm_mean"), ("gemma2", _before_its_norm, "activation.norm_max")],
)
def test_a_branch_that_is_read_elsewhere_is_noticed(
    model_type: str, broken: Callable[[Family], Family], column: str
) -> None:
    model = tiny_of(model_type, torch.float64)
    family, _ = family_of(model)
    by_side = padded_differences(model, broken(family), whole=True)
    assert all(by_side[side][column] > 1e-2 for side in by_side)
    assert by_side["right"]["attention.sink_mass"] < ROUND_OFF


def test_a_model_that_padding_changes_is_measured_without(tmp_path: Path) -> None:
    """The sparse attention of deepseek_v32 chooses other keys if a longer sequence is in the batch."""
    path = written(tmp_path / "ids.jsonl", [range(3, 23), range(3, 16)])
    options = {"input": str(path), "bos": "never", "observables": ("attention",)}
    with pytest.raises(SinkscopeError, match=r"in a padded batch .* batch_size=1"):
        sinkscope.analyze(tiny_of("deepseek_v32"), **options)
    assert sinkscope.analyze(tiny_of("deepseek_v32"), batch_size=1, **options).manifest["parity"] < 1e-4

"""`doctor --images`: overflow in vision towers and projectors, which text does not pass."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from support.pictures import draw_pictures, processor, save, seeing
from support.retrofit_command import command_line
from torch import nn

from sinkscope import doctor
from sinkscope.commands.doctor.overflow import Prediction
from sinkscope.results.findings import Outcome
from sinkscope.text.batch import Batch
from sinkscope.text.pictures import question_batch, read_pictures

SMALL: dict[str, Any] = {"input": "random", "seq_len": 12, "num_seqs": 2}
NORM = "model.multi_modal_projector.mm_soft_emb_norm"


@pytest.fixture(scope="module")
def gemma() -> Any:
    """A Gemma whose projector's norm has outputs that float16 cannot hold."""
    model = seeing("gemma3")
    with torch.no_grad():
        model.get_submodule(NORM).weight.add_(3e5)
    return model


def largest_of(model: Any, kind: str, path: str, folder: Path) -> float:
    """Return the largest magnitude of a module's output on all pictures, by plain transformers."""
    outputs: list[torch.Tensor] = []

    def keep(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        outputs.append(output)

    with torch.no_grad(), model.get_submodule(path).register_forward_hook(keep):
        for picture in read_pictures(folder, 2):
            batch, _ = question_batch(picture, processor(kind), model.config.image_token_id, 0)
            model(batch.token_ids, **batch.pictures)
    return max(float(output.abs().max()) for output in outputs)


def first(table: pd.DataFrame) -> str:
    return table.sort_values("order")["path"].iloc[0]


def test_a_projector_that_overflows_is_seen_with_pictures_only(gemma: Any, tmp_path: Path) -> None:
    folder, pictures = save("gemma3", tmp_path / "gemma", gemma), draw_pictures(tmp_path / "pictures")
    assert doctor(folder, dtype="float16", **SMALL).ok
    report = doctor(folder, dtype="float16", images=pictures, **SMALL)
    assert report.run is not None
    table = report.run.tables["overflow"]
    outside = table[~table["is_inside"]]
    assert first(outside[outside["overflows"]]) == first(table[~table["is_finite"]]) == f"{NORM}.output"
    row = table.set_index("path").loc[f"{NORM}.output"]
    assert row["largest"] == pytest.approx(largest_of(gemma, "gemma3", NORM, pictures), rel=1e-5)
    assert (row["layer"], row["position"], row["sequence"] in (2, 3)) == (-1, -1, True)
    outcomes = {finding.name: finding.outcome for finding in report.run.findings}
    assert outcomes["overflow"] == Outcome.PRESENT
    assert outcomes["overflow-clipped"] == outcomes["overflow-rescaled"] == Outcome.ABSENT  # of the residual stream
    assert not report.ok


def test_linear_layers_of_a_tower_are_rounded_to_float8(tmp_path: Path) -> None:
    model = seeing("llava")
    folder, pictures = save("llava", tmp_path / "llava", model), draw_pictures(tmp_path / "pictures")
    run = doctor(folder, dtype="float8_e4m3", images=pictures, **SMALL).run
    assert run is not None
    table = run.tables["overflow"].set_index("path")
    path = "model.multi_modal_projector.act"  # whose output the second linear layer reads
    assert table.loc[f"{path}.output", "largest"] == pytest.approx(largest_of(model, "llava", path, pictures), rel=1e-5)
    assert table.index.str.contains("vision_tower").any()


def test_patches_are_not_tokens_where_they_are_as_many() -> None:
    prediction = Prediction.__new__(Prediction)
    prediction.magnitudes = {}
    ids = torch.arange(5)[None]
    prediction._batch = Batch(ids, torch.ones_like(ids), pictures={"pixel_values": torch.zeros(1)})
    for layer, position in ((-1, -1), (0, 4)):
        prediction._note(f"{layer}", torch.arange(10.0).view(1, 5, 2), layer, "output")
        assert prediction.magnitudes[f"{layer}"].position == position


def test_pictures_need_a_dtype(tmp_path: Path) -> None:
    pictures = draw_pictures(tmp_path / "pictures")
    done = command_line("doctor", save("llava", tmp_path / "llava"), "--images", pictures)
    assert (done.exit_code, "--out and --images need --dtype, because nothing else is measured" in done.stderr) == (
        2,
        True,
    )

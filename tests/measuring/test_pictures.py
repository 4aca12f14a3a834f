"""Pictures: visual sinks and outlier patches, against plain transformers in float64."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.pictures import MARKS, PATCH, SEEING, SIDE, draw_pictures, processor, save, seeing
from transformers import (
    AutoModel,
    CLIPVisionConfig,
    Dinov2WithRegistersConfig,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
    ViTConfig,
)

import sinkscope
from sinkscope import InputError
from sinkscope.measuring.pictures import encode, massive_coordinates, phi
from sinkscope.results.findings import PHI
from sinkscope.text.pictures import asked_about, places_of, read_pictures

NEAR = {"rtol": 1e-5, "atol": 1e-6}  # norms of transformers compute in float32
GIVEN: dict[str, Any] = {"input": "random", "num_seqs": 2, "seq_len": 12, "observables": ["massive"]}


@pytest.mark.parametrize("kind", SEEING)
def test_attention_to_patches_and_phi_are_those_of_plain_transformers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeing(kind, torch.float64)
    if kind == "llava":  # a coordinate that is massive at every token
        model.model.language_model.layers[1].mlp.down_proj.weight[7] *= 3000
    folder = save(kind, tmp_path / "model", model)
    monkeypatch.setattr("sinkscope.models.loading.DTYPES", {"float32": torch.float64})
    run = sinkscope.analyze(str(folder), images=draw_pictures(tmp_path / "pictures"), **GIVEN)
    coordinates, is_massive = massive_coordinates(run.tables["massive"])
    assert run.manifest["pictures"] == {"pictures": 2, "coordinates": coordinates, "is_massive": is_massive}
    assert is_massive == (kind == "llava")

    model.set_attn_implementation("eager")
    for at, picture in enumerate(read_pictures(tmp_path / "pictures", 2)):
        batch, places = asked_about(picture, processor(kind), MARKS.index("<image>"), at)
        given = {name: x.double() if x.is_floating_point() else x for name, x in batch.pictures.items()}
        found = model(batch.token_ids, **given, output_attentions=True, output_hidden_states=True)
        for layer, weights in enumerate(found.attentions):
            mass = weights[0, :, int(places.column[-1]) + 1 :].mean(1)
            rows = run.tables["visual_patch"].query("layer == @layer and sequence == @at")
            torch.testing.assert_close(torch.tensor(rows["mass"].to_numpy()), mass[:, places.column].mean(0), **NEAR)
            hidden = found.hidden_states[layer][0, places.column]
            expected = hidden[:, coordinates].abs().amax(1) / (hidden.pow(2).mean(1) + 1e-6).sqrt()
            torch.testing.assert_close(torch.tensor(rows["phi"].to_numpy()), expected, **NEAR)
            heads = run.tables["visual_head"].query("layer == @layer and sequence == @at")
            torch.testing.assert_close(torch.tensor(heads["first_mass"].to_numpy()), mass[:, 0], **NEAR)
            sinks = mass[:, places.column] @ (expected > PHI).double()
            torch.testing.assert_close(torch.tensor(heads["sink_mass"].to_numpy()), sinks, **NEAR)
    assert run.figure("visual-sinks") is not None
    assert any(one.name == "visual-sinks" for one in run.findings)


def test_phi_by_hand() -> None:
    hidden = torch.tensor([[3.0, -4.0, 0.0, 0.0]])
    assert float(phi(hidden, torch.tensor([1, 2]))) == pytest.approx(4 / 2.5, rel=1e-6)


def test_places_of_tiles_and_of_merged_patches() -> None:
    visual = torch.tensor([0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0]).bool()
    places = places_of(visual)
    assert places.tile.tolist() == [0] * 4 + [1] * 4
    assert places.grid_row.tolist() == [0, 0, 1, 1] * 2
    wide = places_of(torch.ones(6).bool(), torch.tensor([[1, 4, 6]]))  # 24 patches, 2 × 2 merged
    assert wide.grid_row.tolist() == [0, 0, 0, 1, 1, 1]
    assert wide.grid_column.tolist() == [0, 1, 2] * 2


SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
ENCODERS = {
    "vit": (ViTConfig, 1),
    "dinov2 with registers": (Dinov2WithRegistersConfig, 5),
    "siglip": (SiglipVisionConfig, 0),
    "clip": (CLIPVisionConfig, 1),
}


def encoder(kind: str, **more: Any) -> Any:
    config, _ = ENCODERS[kind]
    torch.manual_seed(0)
    return AutoModel.from_config(config(**SMALL, image_size=SIDE, patch_size=PATCH, **more)).eval().double()


@pytest.mark.parametrize("kind", ENCODERS)
def test_norms_and_attention_of_an_encoder_are_those_of_plain_transformers(kind: str, tmp_path: Path) -> None:
    model, images = encoder(kind), SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE})
    pictures = read_pictures(draw_pictures(tmp_path), 2)
    table, tokens, seen = encode(model, images, pictures)
    assert np.array_equal(np.asarray(seen[0].image), np.asarray(pictures[0].image))
    special = ENCODERS[kind][1]
    assert tokens == special + (SIDE // PATCH) ** 2
    assert (table.query("layer == 0 and sequence == 0")["row"] < 0).sum() == special
    model.set_attn_implementation("eager")
    pixels = images(images=[picture.image for picture in pictures], return_tensors="pt")["pixel_values"].double()
    plain = model(pixels, output_attentions=True, output_hidden_states=True)
    for layer, weights in enumerate(plain.attentions):
        rows = table[table["layer"] == layer]
        mass, norm = weights.mean((1, 2)).flatten(), plain.hidden_states[layer + 1].norm(dim=-1).flatten()
        torch.testing.assert_close(torch.tensor(rows["mass"].to_numpy()), mass)
        torch.testing.assert_close(torch.tensor(rows["norm"].to_numpy()), norm)


def test_a_run_on_an_encoder(tmp_path: Path) -> None:
    encoder("vit").float().save_pretrained(tmp_path / "vit")
    SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}).save_pretrained(tmp_path / "vit")
    out = tmp_path / "run"
    run = sinkscope.analyze(str(tmp_path / "vit"), images=draw_pictures(tmp_path / "pictures"), out=out)
    assert set(run.tables) == {"encoder_patch", "picture", "finding"}
    assert (out / "index.html").is_file()
    assert (out / "figures" / "outlier-patches.png").is_file()
    assert "Pictures" in sinkscope.Run.open(out).verdict


def test_models_and_folders_without_pictures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no picture"):
        read_pictures(tmp_path, 1)
    with pytest.raises(InputError, match="no such folder"):
        read_pictures(tmp_path / "away", 1)
    with pytest.raises(InputError, match="reads no pictures"):
        sinkscope.analyze(images=draw_pictures(tmp_path / "pictures"), **GIVEN)

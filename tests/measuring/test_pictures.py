"""Pictures: visual sinks and outlier patches, against plain transformers in float64."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.pictures import MARKS, PATCH, SEEING, SIDE, draw_pictures, processor, save, seeing
from support.plain import only_float64
from tiny import tiny_model
from tokenizers import processors
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
from sinkscope.commands.claims.claim import judge
from sinkscope.commands.claims.evidence import MAIN, Evidence
from sinkscope.commands.claims.register import CLAIMS
from sinkscope.measuring.estimates import outlier_patches, outlier_share, visual_sink_attention, visual_sink_share
from sinkscope.measuring.observables.observable import Reading
from sinkscope.measuring.pictures import RANDOM_SETS, VisualSinks, encoder_patches, phi, phi_coordinates
from sinkscope.options.measuring import RunConfig
from sinkscope.results.findings import PHI, Outcome
from sinkscope.results.run import RunData
from sinkscope.text.batch import Batch
from sinkscope.text.pictures import QUESTION, places_of, question_batch, read_pictures

NEAR = {"rtol": 1e-10, "atol": 1e-12}
GIVEN: dict[str, Any] = {"input": "random", "num_seqs": 2, "seq_len": 12, "observables": ["massive"]}


@pytest.mark.parametrize("kind", SEEING)
@only_float64()
def test_attention_to_patches_and_phi_are_those_of_plain_transformers(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = seeing(kind, torch.float64)
    if kind == "llava":  # a coordinate that is massive at every token
        model.model.language_model.layers[1].mlp.down_proj.weight[7] *= 3000
    folder = save(kind, tmp_path / "model", model)
    monkeypatch.setattr("sinkscope.models.loading.DTYPES", {"float32": torch.float64})
    run = sinkscope.analyze(str(folder), images=draw_pictures(tmp_path / "pictures"), **GIVEN)
    coordinates, is_massive = phi_coordinates(run.tables["massive"])
    assert run.manifest["pictures"] == {"pictures": 2, "coordinates": coordinates, "is_massive": is_massive}
    assert is_massive == (kind == "llava")

    model.set_attn_implementation("eager")
    for at, picture in enumerate(read_pictures(tmp_path / "pictures", 2)):
        batch, places = question_batch(picture, processor(kind), MARKS.index("<image>"), at)
        pictures = {name: x.double() if x.is_floating_point() else x for name, x in batch.pictures.items()}
        output = model(batch.token_ids, **pictures, output_attentions=True, output_hidden_states=True)
        for layer, weights in enumerate(output.attentions):
            mass = weights[0, :, int(places.column[-1]) + 1 :].mean(1)
            rows = run.tables["visual_patch"].query("layer == @layer and sequence == @at")
            torch.testing.assert_close(torch.tensor(rows["mass"].to_numpy()), mass[:, places.column].mean(0), **NEAR)
            hidden = output.hidden_states[layer][0, places.column]
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


def test_coordinates_are_the_massive_ones_or_those_with_the_largest_ratio() -> None:
    massive = pd.DataFrame({"coordinate": [9, 3, 9, 5, 7], "ratio": [4.0, 800.0, 700.0, 600.0, 1.0]})
    massive["is_massive"] = False
    assert phi_coordinates(massive) == ([3, 9], False)
    massive.loc[[0, 3], "is_massive"] = True
    assert phi_coordinates(massive) == ([5, 9], True)
    random = VisualSinks(RunConfig(), [5, 1], 6).random
    assert random.shape == (RANDOM_SETS, 2)
    assert set(random.flatten().tolist()) == {0, 2, 3, 4}
    assert (random[:, 0] != random[:, 1]).all()


def test_attention_to_sinks_and_to_sinks_by_random_coordinates_by_hand() -> None:
    """The second token is large in a given coordinate, the third in another, and all the others are drawn."""
    observable = VisualSinks(RunConfig(), range(450), 900)
    observable.places = places_of(torch.tensor([0, 1, 1, 1, 0, 0]).bool())
    states = torch.ones(1, 6, 900)
    states[0, 1, 3] = states[0, 2, 500] = 100.0
    batch = Batch(torch.ones(1, 6, dtype=torch.long), torch.ones(1, 6, dtype=torch.long))
    observable.see(0, "layer_in", Reading(states, batch), batch)
    weights = torch.rand(1, 2, 6, 6).softmax(-1)
    read: Any = SimpleNamespace(length=6, weights=lambda rows, columns: (weights[:, :, rows, columns], None))
    observable.see_attention(0, read, batch)
    tables = observable.tables()
    mass = weights[0, :, 4:].mean(1)
    masses = tables["visual_head"][["first_mass", "sink_mass", "random_sink_mass"]].to_numpy()
    np.testing.assert_allclose(masses, mass[:, :3], rtol=1e-6)
    np.testing.assert_allclose(tables["visual_head"]["visual_mass"], mass[:, 1:4].sum(1), rtol=1e-6)
    assert tables["visual_patch"]["random_share"].tolist() == [0.0, 1.0, 0.0]
    assert (tables["visual_patch"]["phi"] > PHI).tolist() == [True, False, False]


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
    table, tokens, seen = encoder_patches(model, images, pictures)
    assert np.array_equal(np.asarray(seen[0].image), np.asarray(pictures[0].image))
    special = ENCODERS[kind][1]
    assert tokens == special + (SIDE // PATCH) ** 2
    places = [(-1, column) for column in range(special)]
    places += [(row, column) for row in range(SIDE // PATCH) for column in range(SIDE // PATCH)]
    assert [
        *table.query("layer == 1 and sequence == 1")[["row", "column"]].itertuples(index=False, name=None)
    ] == places
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
    refused: dict[str, Any] = {"generate": 5, "export_mask": True, "keep": "layer_out", "heads": "0.1", "bos": "always"}
    for option, value in refused.items():
        with pytest.raises(InputError, match=f"{option}=.* is not possible for a vision transformer"):
            sinkscope.analyze(str(tmp_path / "vit"), images=tmp_path / "pictures", **{option: value})
    in_memory = sinkscope.analyze(str(tmp_path / "vit"), images=tmp_path / "pictures")
    assert "run.save(folder) writes it" in repr(in_memory)
    assert (in_memory.save(tmp_path / "saved").folder / "run.json").is_file()


def test_pictures_are_read_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = sorted(path.name for path in draw_pictures(tmp_path).iterdir())
    listed = [tmp_path / name for name in names]
    monkeypatch.setattr(Path, "iterdir", lambda folder: reversed(listed))
    assert [picture.name for picture in read_pictures(tmp_path, 9)] == names
    assert [picture.name for picture in read_pictures(tmp_path, 1)] == names[:1]


def test_models_and_folders_without_pictures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no picture"):
        read_pictures(tmp_path, 1)
    with pytest.raises(InputError, match="no such folder"):
        read_pictures(tmp_path / "away", 1)
    with pytest.raises(InputError, match="reads no pictures"):
        sinkscope.analyze(tiny_model("llama"), images=draw_pictures(tmp_path / "pictures"), **GIVEN)


def made_up(**tables: pd.DataFrame) -> RunData:
    return RunData({"model": {"text_tower": {"path": "model"}}, "command": "analyze", "condition": "natural"}, tables)


def test_visual_sinks_by_hand() -> None:
    """Two pictures with the same two tokens; layer 1 is before the layers that count."""
    rows = [(2, 30.0, 0.4, 0.0), (2, 10.0, 0.1, 0.5), (1, 99.0, 0.9, 1.0)]
    both = [(at, *row) for at in range(2) for row in rows]
    run = made_up(visual_patch=pd.DataFrame(both, columns=["sequence", "layer", "phi", "mass", "random_share"]))
    share, ratio = visual_sink_share(run), visual_sink_attention(run)
    assert (share.value, share.low, share.high, share.null) == (0.5, 0.5, 0.5, 0.25)
    assert (ratio.value, ratio.null) == pytest.approx((4.0, 0.1 / (0.45 / 1.5)))
    judged = {id: judge(CLAIMS[id], Evidence({MAIN: run})).outcome for id in ("VS-1", "VS-2")}
    assert set(judged.values()) == {Outcome.HOLDS}
    none = made_up(visual_patch=run.tables["visual_patch"].assign(phi=1.0))
    judged = {id: judge(CLAIMS[id], Evidence({MAIN: none})).outcome for id in ("VS-1", "VS-2")}
    assert judged == {"VS-1": Outcome.FAILS, "VS-2": Outcome.DOES_NOT_APPLY}
    assert judge(CLAIMS["VS-1"], Evidence({MAIN: made_up()})).outcome == Outcome.NOT_MEASURED


def test_outlier_patches_by_hand() -> None:
    norms = [1.0, 2.0, 2.0, 7.0]  # 7 is more than three times the median
    table = pd.DataFrame({"sequence": 0, "layer": 0, "row": [0, 0, 1, 1], "column": [0, 1, 0, 1], "norm": norms})
    special = pd.DataFrame({"sequence": [0], "layer": 0, "row": -1, "column": 0, "norm": 100.0})
    run = made_up(encoder_patch=pd.concat([special, table], ignore_index=True))
    assert outlier_patches(run)["is_outlier"].tolist() == [False, False, False, True]
    assert outlier_share(run).value == 0.25


def test_a_template_that_writes_the_bos_gets_no_second_one(tmp_path: Path) -> None:
    seer: Any = processor("gemma3")
    adding = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", MARKS.index("<s>"))])
    seer.tokenizer.backend_tokenizer.post_processor = adding
    part = "{{ '<boi>' if part['type'] == 'image' else part['text'] }}"
    content = f"{{% for part in message['content'] %}}{part}{{% endfor %}}"
    seer.chat_template = f"{{{{ bos_token }}}}{{% for message in messages %}}{content}{{% endfor %}}"
    picture = read_pictures(draw_pictures(tmp_path), 1)[0]
    batch, _ = question_batch(picture, seer, MARKS.index("<image>"), 0)
    parts = [{"type": "image", "image": picture.image}, {"type": "text", "text": QUESTION}]
    asked = [{"role": "user", "content": parts}]
    expected = seer.apply_chat_template(asked, add_generation_prompt=True, tokenize=True, return_dict=True)
    assert batch.token_ids.flatten().tolist() == torch.tensor(expected["input_ids"]).flatten().tolist()
    assert batch.token_ids.flatten().tolist().count(MARKS.index("<s>")) == 1

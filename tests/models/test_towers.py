"""Models that also read pictures or sound: their text tower is found and measured."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.every_model import LISTS, TOLD, VOCAB, tiny_config, tiny_of
from tiny import tiny_model
from transformers import AutoConfig, PreTrainedModel

import sinkscope
from sinkscope import InputError, retrofit_model
from sinkscope.measuring.subject import family_of
from sinkscope.models import families
from sinkscope.models.calibrate import calibrate
from sinkscope.models.families import find_family
from sinkscope.models.family import check_reads_text, placeholders, read_a_token, text_tower, vocabulary
from sinkscope.models.in_memory import undisturbed
from sinkscope.models.loading import class_for, load
from sinkscope.quantization.sites import sites_of

LENGTH = 12
IDS = torch.arange(3, 3 + LENGTH)


@cache
def _original(kind: str) -> PreTrainedModel:
    return tiny_of(kind, auto=LISTS["image_text"])


def tiny(kind: str) -> PreTrainedModel:
    return copy.deepcopy(_original(kind))


def test_the_tower_for_pictures_is_not_taken_for_the_one_for_text() -> None:
    """The LLaVA also reads a black picture, with more layers than it has for text."""
    config: Any = tiny_config("llava")
    config.vision_config.num_hidden_layers = 12
    model: Any = LISTS["image_text"].from_config(config).eval()
    model.model.register_forward_pre_hook(lambda *_: model.model.vision_tower(torch.zeros(1, 3, 16, 16)) and None)
    layers = calibrate(model, IDS[None]).layers
    assert layers == "model.language_model.layers"
    assert find_family(model).layers == layers
    check_reads_text(model, layers)
    with pytest.raises(InputError, match=r"text does not pass the layers at 'model\.vision_tower"):
        check_reads_text(tiny("llava"), "model.vision_tower.encoder.layers")


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl", "paligemma", "voxtral"])
def test_the_row_of_a_tower_is_what_is_found_numerically(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(kind)
    row = find_family(model)
    monkeypatch.setattr(families, "FAMILIES", {})
    with undisturbed(model):
        calibrated, _ = family_of(model)
    for name in ("layers", "attention", "sites", "wiring", "door", "qkv", "output", "mlp", "blocks"):
        assert getattr(row, name) == getattr(calibrated, name)


def test_paligemma_reads_text_as_what_follows_its_prompt() -> None:
    """Without token_type_ids a token would see later tokens if there is no padding, and otherwise not."""
    model: Any = tiny("paligemma")
    ids, changed = IDS[None], torch.cat([IDS[:-1], IDS[:1]])[None]
    assert not torch.allclose(model(ids).logits[:, :-1], model(changed).logits[:, :-1])
    suffix = torch.ones_like(ids)
    with undisturbed(model):
        logits = model(ids).logits
        torch.testing.assert_close(logits[:, :-1], model(changed).logits[:, :-1])
    assert torch.equal(logits, model(ids, token_type_ids=suffix).logits)
    assert not model._forward_pre_hooks
    with pytest.raises(InputError, match="register-tokens does not apply to this model: token_type_ids"):
        retrofit_model(model, None, "register-tokens")
    with pytest.raises(InputError, match="depends on an input for each token"):
        sinkscope.intervene(model, "streaming-window:window=8,keep=2", input="random", num_seqs=1, seq_len=16)


def test_ids_without_a_logit_and_placeholders_are_no_text() -> None:
    model: Any = tiny("mllama")
    assert (len(model.get_input_embeddings().weight), vocabulary(model)) == (VOCAB + 8, VOCAB)
    assert model.config.image_token_id in placeholders(model)
    plain = tiny_model("gpt2")
    assert (text_tower(plain), placeholders(plain)) == (("", plain), ())


def test_only_what_text_passes_is_changed() -> None:
    model: Any = tiny("llava")
    assert model.lm_head.weight is not model.get_input_embeddings().weight
    assert vocabulary(model) == VOCAB
    paths = {site.path for site in sites_of(model, find_family(model))}
    assert paths <= read_a_token(model)[0]
    assert all(path.startswith("model.language_model.layers.") for path in paths)
    assert len(paths) == 4 * 7
    pictures = torch.ones(1, 3, 16, 16)
    before = model.model.vision_tower(pictures).last_hidden_state
    with sinkscope.intervening(model, "mask-sink"):
        model(IDS[None])
        assert torch.equal(model.model.vision_tower(pictures).last_hidden_state, before)
    run = sinkscope.intervene(model, "mask-sink", input="random", num_seqs=2, seq_len=8)
    effects = run.tables["effect"].query("metric == 'window_mass' and layer == -1 and position == 0")
    effects = effects.set_index("arm")["value"]
    assert effects["after"] < effects["before"]
    assert torch.equal(model.model.vision_tower(pictures).last_hidden_state, before)


@pytest.mark.parametrize(
    ("kind", "method"), [("qwen2_vl", "vga"), ("llava", "learnable-sink"), ("paligemma", "key-bias")]
)
def test_a_retrofitted_tower_is_saved_and_loaded_by_its_own_class(kind: str, method: str, tmp_path: Path) -> None:
    model: Any = tiny(kind)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    retrofit_model(model, None, method)
    for name, tensor in before.items():
        assert torch.equal(model.state_dict()[name], tensor)
    told = {name: torch.full_like(IDS[None], value) for name, value in TOLD.get(kind, {}).items()}
    logits = model(IDS[None], **told).logits
    changed = torch.cat([IDS[:-1], IDS[:1]])[None]
    torch.testing.assert_close(logits[:, :-1], model(changed, **told).logits[:, :-1])  # its masks have been restored
    assert model.config.vision_config._attn_implementation == "sdpa"
    model.save_pretrained(tmp_path)
    loaded = load(str(tmp_path))
    assert type(loaded.model) is type(model)
    assert torch.equal(loaded.model(IDS[None], **told).logits, logits)
    run = sinkscope.analyze(loaded, input="random", num_seqs=1, seq_len=8)
    assert run.tables["attention"]["layer"].nunique() == 4
    assert run.manifest["model"]["text_tower"]["path"] == "model.language_model"


def test_a_configuration_is_loaded_by_the_class_that_it_names() -> None:
    config = AutoConfig.for_model("qwen3_5")
    for named, auto in (
        (["Qwen3_5ForConditionalGeneration"], "AutoModelForImageTextToText"),
        (["Qwen3_5ForCausalLM"], "AutoModelForCausalLM"),
        (None, "AutoModelForCausalLM"),
    ):
        config.architectures = named
        assert class_for(config, "x").__name__ == auto
    assert class_for(AutoConfig.for_model("voxtral"), "x").__name__ == "AutoModelForMultimodalLM"
    with pytest.raises(InputError, match="it is an encoder–decoder"):
        class_for(AutoConfig.for_model("florence2"), "x")
    with pytest.raises(InputError, match="no such class"):
        class_for(AutoConfig.for_model("vit"), "x")

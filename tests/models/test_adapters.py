"""--adapter: measurements equal those of PEFT's model, and an adapter that does not fit is refused."""

import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from hub import Hub, Repo
from safetensors.torch import load_file, save_file
from tiny import edit_json, tiny_model
from transformers import AutoModelForCausalLM

import sinkscope
from sinkscope.commands.analyze.options import AnalyzeOptions
from sinkscope.errors import InputError, SinkscopeError
from sinkscope.models import adapters
from sinkscope.models.loading import load
from sinkscope.options.option import checked

SMALL: dict[str, Any] = {"input": "random", "num_seqs": 2, "seq_len": 8, "observables": ("attention",)}
LORA = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)


def save_adapter(base: Path, folder: Path, config: peft.PeftConfig) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base)
    peft.get_peft_model(model, config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "base"
    tiny_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved(base: Path) -> Path:
    return save_adapter(base, base.parent / "lora", LORA)


@pytest.fixture
def adapter(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "lora"))


def test_it_computes_what_peft_does(base: Path, saved: Path) -> None:
    ids = torch.arange(3, 19)[None]
    bare: Any = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        untouched = bare(ids).logits
        expected = peft.PeftModel.from_pretrained(bare, str(saved)).eval()(ids).logits
    loaded = load(str(base), adapter=str(saved))
    torch.testing.assert_close(loaded.model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert (expected - untouched).abs().max() > 0.01
    assert type(loaded.model) is type(tiny_model("llama"))
    assert not [name for name, _ in loaded.model.named_parameters() if "lora" in name]
    assert loaded.adapter is not None
    assert (loaded.name, loaded.adapter["method"], loaded.adapter["merged"]) == ("base+lora", "LORA", True)


HEAD, BOTH_ENDS = ["lm_head"], ["lm_head", "embed_tokens"]
TIED: dict[str, peft.PeftConfig] = {
    "LoRA of the head": peft.LoraConfig(r=2, target_modules=HEAD, init_lora_weights=False),
    "LoRA of the embedding": peft.LoraConfig(r=2, target_modules=["embed_tokens"], init_lora_weights=False),
    "DoRA of both": peft.LoraConfig(r=2, target_modules=BOTH_ENDS, init_lora_weights=False, use_dora=True),
    "IA3 of the head": peft.IA3Config(target_modules=HEAD, feedforward_modules=[], init_ia3_weights=False),
    "LoKr of the head": peft.LoKrConfig(r=2, target_modules=HEAD, init_weights=False),
    "trained tokens": peft.TrainableTokensConfig(token_indices=[3, 5], target_modules=["embed_tokens"]),
    "a head of its own": peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=HEAD),
}


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose head has the weights of its embedding."""
    folder = tmp_path_factory.mktemp("models") / "tied"
    tiny_model("llama", spread=1.0, tie_word_embeddings=True).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", TIED)
@torch.no_grad()
def test_a_merge_leaves_tied_weights_alone(kind: str, tied: Path, tmp_path: Path) -> None:
    ids = torch.arange(3, 19)[None]
    torch.manual_seed(1)
    wrapped: Any = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tied), TIED[kind])
    for parameter in wrapped.parameters():
        parameter += 0.1 * torch.randn_like(parameter) * parameter.requires_grad
    wrapped.save_pretrained(tmp_path / "adapter")
    loaded = load(str(tied), adapter=str(tmp_path / "adapter"))
    torch.testing.assert_close(loaded.model(ids).logits, wrapped.eval()(ids).logits, rtol=1e-4, atol=1e-5)
    assert (wrapped(ids).logits - AutoModelForCausalLM.from_pretrained(tied)(ids).logits).abs().max() > 0.01
    assert loaded.model.config.tie_word_embeddings is False
    loaded.model.save_pretrained(tmp_path / "merged")  # not tied again when it is read
    again = load(str(tmp_path / "merged")).model
    torch.testing.assert_close(again(ids).logits, loaded.model(ids).logits)


def test_a_merge_that_changes_the_model_is_refused(tied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_adapter(tied, tmp_path / "adapter", TIED["LoRA of the head"])
    monkeypatch.setattr(adapters, "_untie", lambda model: False)
    with pytest.raises(InputError, match=r"\(LORA\) cannot be merged: the model would compute something else"):
        load(str(tied), adapter=str(folder))


def test_runs_with_an_adapter(base: Path, saved: Path) -> None:
    run = sinkscope.analyze(str(base), adapter=str(saved), **SMALL)
    assert run.manifest["model"]["adapter"]["source"] == str(saved)
    assert len(run.manifest["model"]["adapter"]["sha256"]) == 64
    repeated = checked(AnalyzeOptions, run.manifest["config"])  # as --from does
    assert sinkscope.analyze(repeated.model, config=repeated).tables["attention"].equals(run.tables["attention"])
    assert not run.tables["attention"].equals(sinkscope.analyze(str(base), **SMALL).tables["attention"])
    assert repeated.folder() == Path("runs/base+lora-random")
    few = {name: value for name, value in SMALL.items() if name != "observables"} | {"adapter": str(saved)}
    sinkscope.intervene(str(base), "zero-key-columns:coordinates=3", draws=1, **few)  # weights can be edited
    assert (
        sinkscope.quantize(str(base), scheme="static", calibration=2, **few).manifest["quantization"]["linear_layers"]
        == 21
    )


def test_the_base_of_an_adapter(hub: Hub, base: Path, adapter: Path) -> None:
    hub.repos["org/lora"] = Repo({"main": adapter})
    loaded = load(str(base), adapter="org/lora")
    assert loaded.notices == ("adapter org/lora: merged into the model's weights",)
    assert loaded.adapter is not None
    assert loaded.adapter["commit"] == hub.repos["org/lora"].commit("main")
    with pytest.raises(InputError, match=rf"it is an adapter of {base}; name that model, and this with --adapter"):
        load(str(adapter))
    edit_json(adapter / adapters.ADAPTER_CONFIG, base_model_name_or_path="org/other")
    assert "trained on org/other, which may be another model" in load(str(base), adapter=str(adapter)).notices[1]
    shutil.copy(base / "config.json", adapter)  # some tools save this file with an adapter
    with pytest.raises(InputError, match="no weights of a whole model: it is an adapter of"):
        load(str(adapter))


def test_one_that_does_not_fit_is_refused(base: Path, adapter: Path) -> None:
    def refusal(match: str, **options: Any) -> None:
        with pytest.raises(InputError, match=match):
            load(str(base), adapter=str(adapter), **options)

    weights = load_file(adapter / adapters.SAFE)
    name = next(iter(weights))
    save_file({stored: value for stored, value in weights.items() if stored != name}, adapter / adapters.SAFE)
    refusal("does not fit .*base: it lacks base_model.*layers.0")
    save_file(weights | {name.replace("layers.0", "layers.7"): weights[name].clone()}, adapter / adapters.SAFE)
    refusal("does not fit .*: it has, and the model does not have, .*layers.7")
    save_file(weights | {name: weights[name][:, :-1].contiguous()}, adapter / adapters.SAFE)
    refusal("does not fit .*size mismatch")
    (adapter / adapters.SAFE).write_bytes(b"version https://git-lfs")
    refusal("damaged or cut short")
    (adapter / adapters.SAFE).rename(adapter / adapters.PICKLED)
    refusal("pickle only.*--allow-pickle")
    (adapter / adapters.PICKLED).unlink()
    refusal("has no weights to read")
    edit_json(adapter / adapters.ADAPTER_CONFIG, task_type="SEQ_CLS")
    save_file(weights, adapter / adapters.SAFE)
    refusal("for another task")
    edit_json(adapter / adapters.ADAPTER_CONFIG, task_type="CAUSAL_LM", peft_type="TOMORROW")
    refusal("PEFT cannot use its adapter_config.json")


def test_prompts_and_names_that_are_no_adapter(
    base: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    folder = save_adapter(base, tmp_path / "prompts", prompts)
    for source, match in (
        (str(folder), "adds prompts"),
        (str(base), "is not an adapter: it has no adapter_config.json"),
        (str(tmp_path / "none"), "no such folder"),
        (str(base / "config.json"), "is a file: name the folder"),
    ):
        with pytest.raises(InputError, match=match):
            load(str(base), adapter=source)
    with pytest.raises(InputError, match="an adapter was named for a model that is loaded already"):
        sinkscope.analyze(tiny_model("llama"), adapter=str(folder), **SMALL)
    monkeypatch.setattr(adapters.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SinkscopeError, match=r"not installed: pip install peft"):
        load(str(base), adapter=str(saved))

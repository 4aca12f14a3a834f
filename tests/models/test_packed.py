"""Quantized checkpoints: measured as plain transformers runs them, or refused where weights are needed."""

import copy
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.plain import run_plainly
from tiny import edit_json, tiny_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

import sinkscope
from sinkscope import InputError, Run, doctor, retrofit_model
from sinkscope.commands.train.trainer import check_trainable
from sinkscope.measuring.subject import inputs_for
from sinkscope.models import loading, packed
from sinkscope.models.families import find_family
from sinkscope.models.files import find_files
from sinkscope.models.loading import LoadedModel, load
from sinkscope.options.measuring import make_config
from sinkscope.verdict.analysis import packed_source

LENGTH = 12
SMALL: dict[str, Any] = {"input": "random", "num_seqs": 1, "seq_len": LENGTH}
EIGHT_BITS = {"num_bits": 8, "type": "int", "symmetric": True}
SETTINGS: dict[str, dict[str, Any]] = {  # for the checkpoints written by hand
    "compressed-tensors": {
        "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {
            "format": "int-quantized", "targets": ["Linear"], "weights": EIGHT_BITS | {"strategy": "channel"},
            "input_activations": EIGHT_BITS | {"strategy": "token", "dynamic": True},
        }},
    },
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}  # fmt: skip
STORED = {"compressed-tensors": "8-bit compressed-tensors, dequantized", "fp8": "8-bit fp8, dequantized"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized") / "plain"
    # on CPUs that multiply in bfloat16, bitsandbytes' kernel needs rows of a multiple of 64
    tiny_model("llama", hidden_size=64, intermediate_size=128).save_pretrained(folder)
    return folder


def by_bitsandbytes(plain: Path, folder: Path, **how: Any) -> Path:
    pytest.importorskip("bitsandbytes")
    model: Any = AutoModelForCausalLM.from_pretrained(plain, quantization_config=BitsAndBytesConfig(**how))
    model.save_pretrained(folder)
    return folder


def by_hand(plain: Path, folder: Path, method: str) -> tuple[Path, dict[str, torch.Tensor]]:
    """Write a checkpoint with one scale per row or per linear layer; return it with its dequantized weights."""
    if method == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
    stored, whole = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        stored[name] = whole[name] = weight
        if not name.endswith("proj.weight"):
            continue
        if method == "fp8":
            scale = weight.abs().max()[None, None] / 448
            stored[name], stored[f"{name}_scale_inv"] = (weight / scale).to(torch.float8_e4m3fn), scale
        else:
            scale = weight.abs().amax(1, keepdim=True) / 127
            stored[name], stored[f"{name}_scale"] = (weight / scale).round().to(torch.int8), scale
        whole[name] = stored[name].float() * scale
    folder.mkdir()
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(plain / "config.json", folder)
    edit_json(folder / "config.json", quantization_config=SETTINGS[method])
    return folder, whole


def repacked(model: PreTrainedModel) -> bool:
    """Return whether bitsandbytes packs 4-bit weights for a kernel without gradients, as for CPUs with bfloat16."""
    # it packs them in the first pass that needs no gradients, which is run here
    with torch.no_grad():
        model(torch.ones(1, LENGTH, dtype=torch.long))
    states = (getattr(weight, "quant_state", None) for weight in model.parameters())
    return any(getattr(state, "packing_format_for_cpu", False) for state in states)


def assert_measured_as_plain_transformers_computes(run: Run, model: PreTrainedModel) -> None:
    loaded = LoadedModel(model, None, "", "", None, None, ())
    (ids,) = inputs_for(loaded, make_config(**SMALL)).sequences
    without_gradients = repacked(model)
    expected = run_plainly(model, "model.layers", torch.as_tensor(ids)[None], torch.ones(1, len(ids)))
    attention, gradient = run.tables["attention"], run.tables.get("gradient")
    assert (gradient is None) == without_gradients
    for layer, weights in enumerate(attended.weights for attended in expected.attended):
        ours = attention.query(f"layer == {layer} and position == 0").sort_values("head")["window_mass"].to_numpy()
        torch.testing.assert_close(torch.tensor(ours), weights[0, :, :, 0].mean(1).double(), rtol=1e-4, atol=1e-5)
        for pathway in ("query", "key", "value") if gradient is not None else ():
            rows = gradient.query(f"head == -1 and layer == {layer} and pathway == '{pathway}'").sort_values("position")
            norms = expected.grad_norms(pathway)[layer][0].double()
            torch.testing.assert_close(torch.tensor(rows["grad_norm"].to_numpy()), norms, rtol=1e-3, atol=1e-6)


BITS: dict[str, dict[str, Any]] = {
    "4-bit bitsandbytes": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "8-bit bitsandbytes": {"load_in_8bit": True},
}


@pytest.mark.parametrize("stored", BITS)
def test_on_packed_weights_all_but_edits_of_weights_is_right(stored: str, plain: Path, tmp_path: Path) -> None:
    folder = by_bitsandbytes(plain, tmp_path / "packed", **BITS[stored])
    loaded = load(str(folder))
    assert (loaded.weights, packed.is_packed(loaded.model)) == (stored, True)
    run = sinkscope.analyze(loaded, **SMALL)
    assert_measured_as_plain_transformers_computes(run, AutoModelForCausalLM.from_pretrained(folder))
    assert doctor(loaded).ok
    sinkscope.intervene(loaded, "scale-sink-value:heads=1", draws=0, **SMALL)  # changes outputs instead of weights
    with pytest.raises(InputError, match=r"zero-key-columns does not apply .* its weights are quantized"):
        sinkscope.intervene(loaded, "zero-key-columns:coordinates=3", **SMALL)
    with pytest.raises(InputError, match="simulated quantization needs weights that are not quantized"):
        sinkscope.quantize(loaded, calibration=2, **SMALL)
    with pytest.raises(InputError, match="its weights are quantized"):
        retrofit_model(loaded.model, find_family(loaded.model), "vga")
    with pytest.raises(InputError, match="training needs weights that are not quantized"):
        check_trainable(loaded.model, only_new=False)


@pytest.mark.parametrize("method", SETTINGS)
def test_unpacked_weights_are_those_of_the_checkpoint(method: str, plain: Path, tmp_path: Path) -> None:
    folder, whole = by_hand(plain, tmp_path / method, method)
    loaded = load(str(folder), dtype="float32")
    assert (loaded.weights, packed.is_packed(loaded.model)) == (STORED[method], False)
    for name, parameter in loaded.model.named_parameters():
        torch.testing.assert_close(parameter, whole[name], rtol=1e-6, atol=0)
    assert packed.without_gradients(loaded.model) is None
    run = sinkscope.intervene(loaded, "zero-key-columns:coordinates=3", draws=0, **SMALL)
    assert [(finding.value, finding.numbers["kind"]) for finding in packed_source(run)] == [(8, STORED[method][6:])]


def test_weights_that_fit_only_packed_stay_packed(plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU that transformers' kernels for fp8 run on, and with the user's permission to download them."""
    folder, _ = by_hand(plain, tmp_path / "fp8", "fp8")
    stored = (folder / "model.safetensors").stat().st_size
    monkeypatch.setattr(loading, "stays_on_cpu", lambda device_map: False)
    monkeypatch.setattr(packed, "is_kernels_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)

    def placed(room: float, trust: bool = False, dtype: str = "auto") -> tuple[str, bool, str]:
        monkeypatch.setattr(loading, "free_memory", lambda device: int(room / loading.FILLED) + 1)
        config = AutoConfig.from_pretrained(folder)
        packed.set_unpacking(config, True)
        place, said = loading._place_for(find_files(str(folder), None, None, False), config, dtype, trust)
        return place, config.quantization_config["dequantize"], said

    capability = (9, 0)
    whole = 2 * sum(weight.numel() for weight in load_file(plain / "model.safetensors").values())
    assert placed(whole) == placed(whole, trust=True) == ("cuda", True, "")
    assert placed(whole, dtype="float32")[0] == "auto"
    assert placed(whole - 1, trust=True) == ("cuda", False, "its weights are measured as they are packed,")
    assert placed(whole - 1)[:2] == placed(stored - 1, trust=True)[:2] == ("auto", True)
    assert "--trust-remote-code" in placed(whole - 1)[2]
    capability = (8, 0)  # has no products of fp8
    assert placed(whole - 1, trust=True) == ("auto", True, "its weights are")


def test_what_to_do_is_said_before_packed_weights_are_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss-120b takes 61 GiB packed and 218 unpacked: its checkpoint's size, and two bytes a parameter."""
    modules = ["model.layers.*.self_attn", "model.layers.*.mlp.router"]
    packing = {"quant_method": "mxfp4", "modules_to_not_convert": modules}
    config = AutoConfig.for_model("gpt_oss", dtype="bfloat16", quantization_config=packing)
    plain = copy.deepcopy(config)
    del plain.quantization_config
    assert packed.packed_bytes(loading.on_meta(plain).bfloat16(), config) == pytest.approx(65.2e9, rel=0.01)
    monkeypatch.setattr(loading, "stays_on_cpu", lambda device_map: False)
    monkeypatch.setattr(loading, "runs_packed", lambda config: True)
    checked: list[Any] = []

    def check(gigabytes: int, device_map: str | None = None, trust: bool = False) -> int:
        monkeypatch.setattr(loading, "free_memory", lambda device: gigabytes << 30)
        files: Any = SimpleNamespace(gguf=None, source="openai/gpt-oss-120b")
        checked.clear()
        loading._check_meta_model(checked.append, files, config, None, device_map, trust)
        return len(checked)

    message = r"217.6 GiB unpacked, and the GPU has .*--trust-remote-code .*--device-map auto"
    with pytest.raises(InputError, match=message):
        check(80)
    assert check(80, trust=True) == 0  # its size is not that of the sketch
    assert check(80, device_map="auto") == check(300) == check(40) == 1


def test_gradients_through_packed_experts_are_not_measured() -> None:
    model: Any = tiny_model("gpt_oss")
    model.is_quantized = True
    assert packed.without_gradients(model) is None
    model.model.layers[1].mlp.experts = Mxfp4GptOssExperts(model.config)
    assert "model.layers.1.mlp.experts" in str(packed.without_gradients(model))


def test_weights_that_are_still_packed_are_refused() -> None:
    model = tiny_model("llama")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(InputError, match="unpacked in its first run: run it once before"):
        sinkscope.analyze(model, **SMALL)

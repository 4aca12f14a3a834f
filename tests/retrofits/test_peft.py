"""Adapters on retrofitted models: the order in which they are added, and merging them, change nothing."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from support.retrofitted import IDS, METHODS, assert_close, in_double, plain_model, train
from transformers import AutoModelForCausalLM, PreTrainedModel

import sinkscope
from sinkscope.measuring.tracer import open_tracer
from sinkscope.models.families import find_family
from sinkscope.models.loading import load
from sinkscope.retrofits import has_gates, retrofit_model

ALL = METHODS | {"value-bias": ("value-bias", {"deviation": 0.5}), "operation": ("operation", {"kind": "mlp-kernel"})}
AT_PROJECTIONS = ("vga", "vga-output", "vscale", "iga", "iga-output", "value-bias")
TARGETS = {
    "llama": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "qwen2": ["v_proj", "o_proj"],
    "phi3": ["qkv_proj", "o_proj"],
    "gpt2": ["c_attn", "c_proj"],
    "gpt_neox": ["query_key_value", "dense"],
    "falcon-new": ["query_key_value", "dense"],
    "bloom": ["query_key_value", "dense"],
}


def lora(targets: list[str], **options: Any) -> peft.PeftConfig:
    return peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False, **options)


KINDS = {
    "lora": lora,
    "dora": lambda targets: lora(targets, use_dora=True),
    # IA³ multiplies the input of the output projection
    "ia3": lambda targets: peft.IA3Config(
        target_modules=targets, feedforward_modules=targets[-1:], init_ia3_weights=False
    ),
}


def retrofit(model: PreTrainedModel, label: str) -> PreTrainedModel:
    method, parameters = ALL[label]
    torch.manual_seed(1)
    retrofit_model(model, None, method, **parameters)
    train(model)
    return model


def adapted(model: PreTrainedModel, config: peft.PeftConfig) -> Any:
    torch.manual_seed(2)
    wrapped = peft.get_peft_model(model, config).eval()
    return wrapped.double() if model.dtype == torch.float64 else wrapped


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    with in_double(inner):
        return model(IDS, use_cache=False).logits


ORDERS = [
    *(("llama", label, "lora") for label in ALL),
    *(("llama", label, kind) for kind in KINDS for label in ("vga", "vga-output", "value-bias") if kind != "lora"),
    # every form of projection
    *((name, AT_PROJECTIONS[(2 * at + more) % 6], "lora") for at, name in enumerate(TARGETS) for more in range(2)),
]


@pytest.mark.parametrize(("name", "label", "kind"), list(dict.fromkeys(ORDERS)))
def test_all_orders(name: str, label: str, kind: str) -> None:
    """All are compared with the definition: an adapter is merged into a plain model, which is then retrofitted."""
    config = KINDS[kind](TARGETS[name])
    expected = logits(retrofit(adapted(plain_model(name), copy.deepcopy(config)).merge_and_unload(), label))
    alone = logits(retrofit(plain_model(name), label))
    after = adapted(retrofit(plain_model(name), label), copy.deepcopy(config))
    before = adapted(plain_model(name), copy.deepcopy(config))
    retrofit(before.get_base_model(), label)
    for model in (after, before):
        with open_tracer(model.get_base_model(), find_family(model.get_base_model())):
            assert_close(logits(model), expected)  # tracing restores the hooks that its first forward pass has moved
        assert_close(logits(model), expected)
        with model.disable_adapter():
            assert_close(logits(model), alone)
        assert_close(logits(model.merge_and_unload()), expected)
    assert (expected - alone).abs().max() > 0.01


@pytest.mark.parametrize("label", [label for label in ALL if label != "vscale-fixed"])
def test_a_retrofit_that_peft_trains_as_a_whole_is_the_one_that_acts(label: str) -> None:
    """`modules_to_save=["retrofit"]` makes a copy of each part, and trains and saves the copy."""
    model = adapted(retrofit(plain_model("llama"), label), lora(["v_proj"], modules_to_save=["retrofit"]))
    before = logits(model)
    copies = {name: p for name, p in model.named_parameters() if "retrofit.modules_to_save.default" in name}
    assert copies
    with torch.no_grad():
        for parameter in copies.values():
            parameter.add_(0.3 * torch.randn_like(parameter))
    moved = logits(model)
    assert (moved - before).abs().max() > 1e-3 * before.abs().max()
    assert_close(logits(copy.deepcopy(model)), moved)
    with model.disable_adapter():
        assert_close(logits(model), logits(retrofit(plain_model("llama"), label)))
    assert_close(logits(model.merge_and_unload()), moved)
    if label in ("vga", "vga-output"):  # a completely trained projection is gated once
        model = adapted(retrofit(plain_model("llama"), label), lora(["up_proj"], modules_to_save=["v_proj"]))
        expected = logits(adapted(retrofit(plain_model("llama"), label), lora(["up_proj"])))
        assert_close(logits(model), expected)
        assert_close(logits(model.merge_and_unload()), expected)


@pytest.mark.parametrize(("label", "kept"), [("vga", ["retrofit"]), ("learnable-sink", None)])
def test_it_is_measured_as_the_merged_one(label: str, kept: list[str] | None) -> None:
    model = adapted(retrofit(plain_model("llama", torch.float32), label), lora(["v_proj"], modules_to_save=kept))
    options: dict[str, Any] = {"input": "random", "num_seqs": 2, "seq_len": 32, "epsilon": 0.1}
    wrapped = sinkscope.analyze(model, **options)
    assert has_gates(model) == (label == "vga")
    merged = sinkscope.analyze(model.merge_and_unload(), **options)
    assert wrapped.tables.keys() == merged.tables.keys()
    assert wrapped.metric("attention_entropy") > 0
    values = [run.tables["summary"]["value"].to_numpy() for run in (wrapped, merged)]
    np.testing.assert_allclose(*values, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("label", ["vga", "iga-output", "register-tokens"])
def test_saved_and_loaded_again(label: str, tmp_path: Path) -> None:
    plain = plain_model("llama", torch.float32)
    retrofit(plain, label).save_pretrained(tmp_path / "base")
    model = adapted(plain, lora(["v_proj", "o_proj"], modules_to_save=["retrofit"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
        expected = model(IDS, use_cache=False).logits
        model.save_pretrained(tmp_path / "adapter")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        wrapped = peft.PeftModel.from_pretrained(again, str(tmp_path / "adapter")).eval()
        assert_close(wrapped(IDS, use_cache=False).logits, expected, 1e-5)
        merged = load(str(tmp_path / "base"), adapter=str(tmp_path / "adapter")).model
        assert_close(merged(IDS, use_cache=False).logits, expected, 1e-4)
        merged.save_pretrained(tmp_path / "merged")
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        assert torch.equal(whole(IDS, use_cache=False).logits, merged(IDS, use_cache=False).logits)

"""A model that computes something else under the tracer than by itself is refused, at the run's own length."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import TINY, ragged_tokens, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import sinkscope
from sinkscope.attention import interceptor, seam
from sinkscope.attention.taps import NAME
from sinkscope.errors import SinkscopeError
from sinkscope.measuring.parity import largest_difference
from sinkscope.measuring.subject import inputs_for
from sinkscope.models.loading import LoadedModel
from sinkscope.options.measuring import make_config

OPTIONS: dict[str, Any] = {"input": "random", "num_seqs": 4, "seq_len": 40}
COMMANDS: dict[str, Callable[..., Any]] = {
    "analyze": sinkscope.analyze,
    "intervene": lambda model, **options: sinkscope.intervene(model, "mask-sink", draws=0, **options),
    "quantize": lambda model, **options: sinkscope.quantize(model, calibration=2, **options),
}


def sparse_model() -> PreTrainedModel:
    """DeepSeek 3.2 in small: each query reads the 16 keys that an indexer ranks highest, by a mask that its code makes
    for the attention implementations that it knows by name.
    """
    config = AutoConfig.for_model(
        "deepseek_v32", **TINY["llama"][1] | {"num_key_value_heads": 4}, q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, n_group=1, topk_group=1, first_k_dense_replace=1, n_shared_experts=1, index_topk=16,
        index_n_heads=2, index_head_dim=16,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.data.mul_(8.0 if parameter.dim() > 1 else 1.0)
    return model


def test_a_sparse_model_keeps_its_mask() -> None:
    """Entropies against those of transformers' eager attention."""
    model = sparse_model()
    run = sinkscope.analyze(model, observables=("attention",), **OPTIONS)
    loaded = LoadedModel(model, None, "x", "x", None, None, ())
    ids = torch.as_tensor(np.stack(inputs_for(loaded, make_config(**OPTIONS)).sequences))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
    entropies = [-(weights * weights.clamp_min(1e-30).log()).sum(-1).mean() for weights in attentions]
    assert run.metric("attention_entropy") == pytest.approx(float(torch.stack(entropies).mean()), rel=1e-5)
    assert run.manifest["parity"] < 1e-5


@pytest.mark.parametrize("command", COMMANDS)
def test_under_another_name_it_would_be_refused(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seam, "_interface", lambda model: seam.attention_implementation(model, NAME))
    with pytest.raises(SinkscopeError, match=r"something else than by itself .*--skip-parity measures all the same"):
        COMMANDS[command](sparse_model(), **OPTIONS)
    # below 16 tokens it is dense
    COMMANDS[command](sparse_model(), **OPTIONS | {"seq_len": 12})


def without_mask(plain: Callable[..., Any]) -> Callable[..., Any]:
    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        return plain(module, query, key, value, None, *rest, **options)

    return attend


def without_scale(plain: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *tensors, scaling=None, **options: plain(*tensors, scaling=1.0, **options)


def twice(plain: Callable[..., Any]) -> Callable[..., Any]:
    def attend(*tensors: Any, **options: Any) -> Any:
        mix, weights = plain(*tensors, **options)
        return 2 * mix, weights

    return attend


BREAKS = {"a mask dropped": without_mask, "a scale ignored": without_scale, "attention called twice": twice}


@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_interface_is_noticed(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seam, "attend", BREAKS[what](seam.attend))
    path = tmp_path / "ragged.jsonl"
    path.write_text("".join(f'{{"input_ids": {ids.tolist()}}}\n' for ids in ragged_tokens([9, 40, 20, 40])))
    model = tiny_model("qwen2" if what == "a scale ignored" else "mistral", spread=4.0)
    with pytest.raises(SinkscopeError, match="something else than by itself"):
        sinkscope.analyze(model, **OPTIONS | {"input": str(path)})


@pytest.mark.parametrize("name", ["bloom", "falcon", "gpt_neo"])
def test_a_broken_interceptor_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = interceptor.Interceptor._own_heads
    monkeypatch.setattr(interceptor.Interceptor, "_own_heads", lambda self, x: plain(self, x).flip(1) * 1.1)
    with pytest.raises(SinkscopeError, match="something else than by itself"):
        sinkscope.analyze(tiny_model(name, spread=4.0), **OPTIONS)


def test_it_may_be_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seam, "attend", twice(seam.attend))
    run = sinkscope.analyze(tiny_model("llama"), skip_parity=True, **OPTIONS)
    assert run.manifest["parity"] is None
    assert run.manifest["config"]["skip_parity"] is True


def test_the_difference_is_the_largest_of_any_real_token() -> None:
    expected = torch.ones(1, 3, 4)
    found = expected.clone()
    found[0, 1, 0] += 0.2
    found[0, 2] = 100.0
    assert largest_difference(found, expected, torch.tensor([[1, 1, 0]])) == pytest.approx(0.1)

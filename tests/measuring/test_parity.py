"""A model that computes something different under the tracer is refused, at the sequence length of the run."""

from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.every_model import tiny_of
from support.retrofitted import each_pair
from tiny import padded, ragged_tokens, tiny_model, written
from transformers import PreTrainedModel

import sinkscope
from sinkscope.attention import seam, taps, weights
from sinkscope.attention.kernels import AttentionCall
from sinkscope.attention.weights import AttentionRead
from sinkscope.commands.doctor.command import doctor
from sinkscope.errors import SinkscopeError
from sinkscope.measuring import parity, subject
from sinkscope.measuring.parity import AttentionComparison, RoundOff, attention_round_off, largest_difference
from sinkscope.measuring.subject import inputs_for
from sinkscope.models.families import find_family
from sinkscope.models.loading import LoadedModel
from sinkscope.options.measuring import make_config

OPTIONS: dict[str, Any] = {"input": "random", "num_seqs": 4, "seq_len": 40}


def test_a_sparse_model_keeps_its_mask() -> None:
    """Entropies are compared with those of transformers' eager attention.

    In DeepSeek 3.2 each query reads the keys that an indexer ranks highest. Its code makes the mask for these keys only
    for attention implementations with certain names.
    """
    model = tiny_of("deepseek_v32")
    run = sinkscope.analyze(model, observables=("attention",), **OPTIONS)
    loaded = LoadedModel(model, None, "x", "x", None, None, ())
    ids = torch.as_tensor(np.stack(inputs_for(loaded, make_config(**OPTIONS)).sequences))
    model.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
    entropies = [-(weights * weights.clamp_min(1e-30).log()).sum(-1).mean() for weights in attentions]
    assert run.metric("attention_entropy") == pytest.approx(float(torch.stack(entropies).mean()), rel=1e-5)
    assert run.manifest["parity"] < 1e-5


LONG = {"short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0], "original_max_position_embeddings": 16}
ROPES: dict[str, dict[str, Any]] = {"longrope": LONG, "dynamic": {"factor": 4.0}}
RAGGED = (10, 12, 9, 40, 11, 30, 12, 40, 40, 8)


def with_rope(kind: str) -> PreTrainedModel:
    """A tiny Llama whose rotary frequencies are others past 16 tokens."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, **ROPES[kind]}
    positions = 64 if kind == "longrope" else 16
    return tiny_model("llama", spread=6.0, max_position_embeddings=positions, rope_parameters=rope)


@pytest.mark.parametrize("kind", ROPES)
def test_a_text_beside_a_longer_one_has_its_own_rotary_frequencies(kind: str) -> None:
    texts = [ids.tolist() for ids in ragged_tokens(RAGGED)]
    options: dict[str, Any] = {"input": texts, "bos": "never", "batch_size": 3}
    model = with_rope(kind)
    run = sinkscope.analyze(model, observables="massive", **options)
    largest = run.tables["massive"].query("layer == 1").groupby("sequence")["value"].agg(lambda x: x.abs().max())
    with torch.no_grad():  # a new model, because dynamic frequencies stay those of the longest text before
        outputs = [with_rope(kind)(torch.tensor([ids]), output_hidden_states=True).hidden_states[2] for ids in texts]
    np.testing.assert_allclose(largest, [float(x.abs().max()) for x in outputs], rtol=1e-5)
    changed = sinkscope.intervene(model, "zero-key-columns:coordinates=3", draws=0, **options)
    before = changed.tables["massive"].query("condition == 'before' and layer == 1").groupby("sequence")["value"]
    np.testing.assert_allclose(before.agg(lambda x: x.abs().max()), largest, rtol=1e-5)


def test_a_model_that_reads_padded_texts_differently_is_noticed_after_the_first_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subject, "rotary_limits", lambda config: {})
    options: dict[str, Any] = {"input": [ids.tolist() for ids in ragged_tokens(RAGGED)], "bos": "never"}
    with pytest.raises(SinkscopeError, match=r"in a padded batch .*beside a longer text .*batch_size=1"):
        sinkscope.analyze(with_rope("longrope"), observables="massive", batch_size=3, **options)
    plain = sinkscope.analyze(tiny_model("llama"), observables="massive", batch_size=3, **options)
    assert plain.manifest["parity"] < 1e-5


def without_mask(plain: Callable[..., Any]) -> Callable[..., Any]:
    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, *arguments: Any, **options: Any) -> Any:
        return plain(module, query, key, value, None, *arguments, **options)

    return attend


def twice(plain: Callable[..., Any]) -> Callable[..., Any]:
    def attend(*tensors: Any, **options: Any) -> Any:
        mix, weights = plain(*tensors, **options)
        return 2 * mix, weights

    return attend


def test_attention_called_twice_is_noticed_in_padded_batches_and_may_be_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seam, "attend", twice(seam.attend))
    path = written(tmp_path / "ragged.jsonl", ragged_tokens([9, 40, 20, 40]))
    with pytest.raises(SinkscopeError, match="something different from the bare model"):
        sinkscope.analyze(tiny_model("mistral", spread=4.0), **OPTIONS | {"input": str(path)})
    run = sinkscope.analyze(tiny_model("llama"), skip_parity=True, **OPTIONS)
    assert run.manifest["parity"] is None
    assert run.manifest["config"]["skip_parity"] is True


@pytest.mark.parametrize("name", ["bloom", "falcon", "gpt_neo"])
def test_a_broken_interceptor_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = taps.Interceptor._own_heads
    monkeypatch.setattr(taps.Interceptor, "_own_heads", lambda self, x: plain(self, x).flip(1) * 1.1)
    with pytest.raises(SinkscopeError, match="something different from the bare model"):
        sinkscope.analyze(tiny_model(name, spread=4.0), **OPTIONS)


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PASSES: dict[str, Any] = {"input": "random", "num_seqs": 2, "seq_len": 24, "observables": ("attention",)}


def with_key_biases(size: float, dtype: torch.dtype, implementation: str = "sdpa") -> PreTrainedModel:
    """Return a tiny Qwen2 with large logits, mostly because of a term that is the same for all keys."""
    model = tiny_model("qwen2", dtype=dtype, spread=6.0)
    draw = torch.Generator().manual_seed(0)
    for layer in model.model.layers:
        bias = layer.self_attn.k_proj.bias
        bias.data.copy_(size * torch.randn(bias.shape, generator=draw).sign())
    model.set_attn_implementation(implementation)
    return model


@pytest.mark.parametrize(
    ("dtype", "size", "implementation"),
    [(torch.float32, 50.0, "sdpa"), (torch.float32, 200.0, "eager"), (torch.bfloat16, 200.0, "sdpa"),
     (torch.float16, 50.0, "eager")],
)  # fmt: skip
def test_large_key_biases_are_no_fault(dtype: torch.dtype, size: float, implementation: str) -> None:
    """The doctor and a run agree, as they make the same comparison."""
    report = doctor(with_key_biases(size, dtype, implementation))
    assert report.ok, str(report)
    assert sinkscope.analyze(with_key_biases(size, dtype, implementation), **PASSES).manifest["parity"] is not None


def at_another_temperature(plain: Callable[..., Any]) -> Callable[..., Any]:
    def attend(module: Any, query: Any, *arguments: Any, scaling: float | None = None, **options: Any) -> Any:
        return plain(module, query, *arguments, scaling=(scaling or query.shape[-1] ** -0.5) / 1.1, **options)

    return attend


def without(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda plain: lambda *tensors, **options: plain(*tensors, **options | {name: None})


FAULTS: dict[str, tuple[str, Callable[..., Any]]] = {
    "a temperature of 1.1": ("llama", at_another_temperature),
    "that with key biases of 50": ("qwen2", at_another_temperature),
    "a mask left out": ("mistral", without_mask),
    "a sink logit missing": ("gpt_oss", without("s_aux")),
    "a softcap ignored": ("gemma2", without("softcap")),
}


@each_pair(list(FAULTS), DTYPES, ("what", "dtype"))
def test_a_fault_is_noticed_in_every_dtype(
    what: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    name, broken = FAULTS[what]
    model = with_key_biases(50.0, dtype) if name == "qwen2" else tiny_model(name, dtype=dtype, spread=4.0)
    monkeypatch.setattr(seam, "attend", broken(seam.attend))
    with pytest.raises(SinkscopeError, match="something different from the bare model"):
        sinkscope.analyze(model, **PASSES)
    assert not doctor(model).ok


def test_weights_that_are_read_otherwise_than_they_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = weights.raw_logits
    monkeypatch.setattr(weights, "raw_logits", lambda q, k, call: plain(q, k, replace(call, softcap=None)))
    with pytest.raises(SinkscopeError, match="computes a different attention: on the same queries and keys"):
        sinkscope.analyze(tiny_model("gemma2", spread=4.0), **PASSES)


@pytest.mark.parametrize("bias", [0.0, 50.0, 200.0])
def test_round_off_is_within_its_bound_and_no_fault_is(bias: float) -> None:
    """Softmax attention in float32 is compared with float64, also for nearly equal logits in the thousands."""
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, 40, 16, generator=draw) for _ in range(3))
    key = key + bias
    read = AttentionRead(query, key, value, query[..., 0], AttentionCall(None, 0.25), padded([np.arange(40)] * 2))

    def mix(dtype: torch.dtype, scaling: float) -> torch.Tensor:
        q, k, v = (x.to(dtype) for x in (query, key, value))
        logits = (scaling * q @ k.mT).masked_fill(~torch.ones(40, 40, dtype=torch.bool).tril(), -torch.inf)
        return logits.softmax(-1) @ v

    largest = value.norm(dim=-1).amax(-1, keepdim=True)
    exact = mix(torch.float64, 0.25)
    rounded = (mix(torch.float32, 0.25) - exact).norm(dim=-1) / largest / attention_round_off(read)
    at_another_scale = (mix(torch.float32, 0.25 / 1.1) - exact).norm(dim=-1) / largest / attention_round_off(read)
    assert rounded.max() < 0.5
    assert at_another_scale.max() > 5


def test_the_bound_grows_with_the_largest_bias_and_sink_logit() -> None:
    """A bias that hides a key does not count."""
    query, key, value = torch.randn(3, 1, 2, 4, 8, generator=torch.Generator().manual_seed(0))

    def bound(**of_call: Any) -> torch.Tensor:
        call = AttentionCall(scaling=0.25, **of_call)
        return attention_round_off(
            AttentionRead(query, key, value, torch.zeros(1, 2, 4), call, padded(ragged_tokens((4,))))
        )

    bias = torch.zeros(1, 1, 4, 4)
    hidden, large = bias.clone(), bias.clone()
    hidden[..., 0, 1:] = torch.finfo(torch.float32).min
    large[..., 3, 0] = -50.0
    plain = bound(mask=None)
    torch.testing.assert_close(bound(mask=hidden), plain)
    assert (bound(mask=large) > 5 * plain).all()
    assert (bound(mask=None, sink_logits=torch.tensor([0.0, 50.0])) > 5 * plain).all()


def test_differences_are_of_their_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = count()
    monkeypatch.setattr(parity, "_difference", lambda *_: torch.tensor([next(numbers), 0.5]))
    model, batch = tiny_model("llama", num_hidden_layers=3), padded(ragged_tokens((4,)))
    with torch.no_grad(), parity.comparing(model, find_family(model), batch) as comparisons:
        model(batch.token_ids)
    assert comparisons == [AttentionComparison(layer, float(layer), 0.5) for layer in range(3)]


def test_the_difference_is_the_largest_of_any_real_token() -> None:
    expected = torch.ones(1, 3, 4)
    changed = expected.clone()
    changed[0, 1, 0] += 0.2
    changed[0, 2] = 100.0
    assert largest_difference(changed, expected, torch.tensor([[1, 1, 0]])) == pytest.approx(0.1)


def test_one_layer_beyond_its_bound_is_named() -> None:
    layers = (AttentionComparison(0, 0.3, 0.5), AttentionComparison(1, 0.2, 3.0), AttentionComparison(2, 0.1, 1.0))
    with pytest.raises(SinkscopeError, match=r"layer 1 computes a different attention.* by 2\.0e-01 .* 3 times"):
        RoundOff(1.0, layers).check_attention()
    RoundOff(1.0, layers[::2]).check_attention()

"""The seam changes nothing, is removed completely, and refuses attention that it does not recognize."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from support.attention_reads import causal_mask, dense
from support.everything import assert_as_before, logits, state_of
from tiny import measured, padded, ragged_tokens, tiny_model, tiny_tokens
from torch import nn
from transformers import PreTrainedModel

from sinkscope.attention.kernels import (
    KERNELS,
    AttentionCall,
    ForbiddenKeys,
    chunked_attention,
    fused_attention,
    repeat_heads,
)
from sinkscope.attention.seam import attend, open_seam
from sinkscope.attention.taps import NAME, Seam
from sinkscope.attention.weights import AttentionRead
from sinkscope.errors import SinkscopeError
from sinkscope.measuring.nnsight import save
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.observable import Observable, Settings
from sinkscope.measuring.tracer import model_inputs, open_tracer
from sinkscope.models.families import find_family
from sinkscope.text.batch import Batch

SETTINGS = Settings(positions=4, window=4)
ONE_OF_EACH_DOOR = ("llama", "gemma2", "gpt_oss", "falcon", "bloom", "gptj")


def batch() -> Batch:
    return padded(ragged_tokens((9, 9)))


@pytest.mark.parametrize("name", ONE_OF_EACH_DOOR)
def test_the_model_is_as_before_if_the_seam_cannot_be_installed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes, and exceptions in them, are tested in tests/models/test_in_memory.py."""
    model = tiny_model(name)
    before = state_of(model)
    for part in ("attending_by", "Interceptor"):
        monkeypatch.setattr(f"sinkscope.attention.seam.{part}", Mock(side_effect=torch.OutOfMemoryError))
    with pytest.raises(torch.OutOfMemoryError), open_seam(model, find_family(model)):
        pass
    assert_as_before(model, before)


def test_a_tracer_serves_forward_after_forward_and_another_inside_it_is_refused() -> None:
    """The seams do not keep values of the last batch for the next one."""
    model = tiny_model("mistral")
    family = find_family(model)
    alone = measured(model, [batch()], SETTINGS, ("attention",))["attention"]
    warm_up, observable = (OBSERVABLES["attention"](SETTINGS) for _ in range(2))
    with open_tracer(model, family) as outer:
        with pytest.raises(SinkscopeError, match="already"), open_tracer(model, family):
            pass
        outer.forward(padded(ragged_tokens((7, 3), seed=5), "left"), [warm_up])
        outer.forward(batch(), [observable])
    assert observable.tables()["attention"].equals(alone)


def test_attend_without_a_seam_is_plain_sdpa() -> None:
    query, key, value = torch.randn(3, 1, 2, 5, 4).unbind()
    module = nn.Module()
    module.is_causal = False
    mix, _ = attend(module, query, key, value, None, scaling=0.3, is_causal=False)
    expected = F.scaled_dot_product_attention(query, key, value, scale=0.3)
    assert torch.equal(mix, expected.transpose(1, 2))


def random_qkv(heads: int = 4, kv_heads: int = 2, length: int = 11) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, length, 6), (2, kv_heads, length, 6), (2, kv_heads, length, 6)]
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)


def masks() -> dict[str, torch.Tensor | None]:
    window = causal_mask(11, window=4).expand(2, 1, 11, 11)
    bias = torch.linspace(-1, 1, 11, dtype=torch.float64).masked_fill(~window, -torch.inf)
    return {"causal": None, "bool": window, "additive": bias}


EXTRAS = {
    "plain": {},
    "softcap": {"softcap": 1.5},
    "sink": {"sink_logits": torch.tensor([0.3, -1.0, 2.0, 0.0], dtype=torch.float64)},
}


@pytest.mark.parametrize("mask", ["causal", "bool", "additive"])
def test_kernels_give_mix_and_log_sum_exp(mask: str) -> None:
    query, key, value = random_qkv()
    for extra in EXTRAS.values():
        call = AttentionCall(masks()[mask], 0.7, **extra)
        expected = dense(query, key, value, call)[1:]
        chunked = [partial(chunked_attention, chunk=chunk) for chunk in (1, 4, 11, 128)]
        for kernel in (*KERNELS.values(), *chunked):
            for mine, theirs in zip(kernel(query, key, value, call), expected, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-13)


def test_without_a_mask_a_lone_query_is_the_last_token_and_several_are_the_first() -> None:
    """Several queries with more keys mean a static cache with empty last slots, as in transformers."""
    query, key, value = random_qkv()
    call = AttentionCall(None, 0.7)
    _, mix, lse = dense(query, key, value, call)
    for kernel in KERNELS.values():
        for rows in (slice(query.shape[2] - 1, None), slice(0, 3)):
            some_mix, some_lse = kernel(query[:, :, rows], key, value, call)
            torch.testing.assert_close(some_mix, mix[:, :, rows])
            torch.testing.assert_close(some_lse, lse[:, :, rows])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_fused_kernel_forbids_keys_without_a_mask(dtype: torch.dtype) -> None:
    """A further coordinate that is -10000 in the logits has the effect of a mask."""
    query, key, value = (x.to(dtype) for x in random_qkv())
    length, columns = query.shape[2], torch.tensor([[2, 5], [0, 3]])

    def pairs(rows: slice, cols: slice, device: torch.device) -> torch.Tensor:
        row, col = torch.arange(rows.start, rows.stop), torch.arange(cols.start, cols.stop)
        hidden = torch.tensor([True, False, True, True])[:, None, None]
        is_column = (col == columns[:, :, None]).any(1)
        return (is_column[:, None] & (row[:, None] > col))[:, None] & hidden

    forbidden = ForbiddenKeys(pairs, lambda device: columns, (0, 2, 3))
    call = AttentionCall(None, 0.7, forbidden=(forbidden,))
    mix, lse = fused_attention(query, key, value, call)
    mask = causal_mask(length) & ~pairs(slice(0, length), slice(0, length), mix.device)
    _, expected, expected_lse = dense(*(x.double() for x in (query, key, value)), AttentionCall(mask, 0.7))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 3e-2)
    torch.testing.assert_close(mix.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=tolerance, atol=tolerance)


# torch's fused kernel takes exp(x) of half-precision inputs from a cubic polynomial (`fexp_u20`) wherever a row has
# keys for a whole vector: 8 with AVX2, 16 with AVX-512. Its relative error is at most 1.0704e-4 (at powers of 2), so
# for any number of keys the relative error of their sum is at most this δ, and the error of its logarithm at most
# -log(1 - δ). float32's own error is added: 11 terms, each rounded. The error of sums in bfloat16 would be 2⁻⁹ = 2e-3.
FAST_EXPONENTIAL = 1.08e-4 + 11 * torch.finfo(torch.float32).eps


def test_half_precision_sums_in_float32() -> None:
    query, key, value = (x.bfloat16() for x in random_qkv())
    call = AttentionCall(None, 0.7)
    expected = dense(*(x.double() for x in (query, key, value)), call)[2].float()
    for kernel in KERNELS.values():
        mix, lse = kernel(query, key, value, call)
        assert mix.dtype == torch.bfloat16
        assert lse.dtype == torch.float32
        torch.testing.assert_close(lse, expected, rtol=1e-6, atol=FAST_EXPONENTIAL)


@contextmanager
def attention_of_gptj(mixed: Callable) -> Iterator[PreTrainedModel]:
    """Yield a tiny GPT-J whose attention modules compute their mix by another function of query, key and value."""

    def forward(module: Any, hidden_states: torch.Tensor, **kwargs: Any) -> tuple:
        projections = (module.q_proj, module.k_proj, module.v_proj)
        mix = mixed(module, *(x(hidden_states).unflatten(-1, (4, 8)).transpose(1, 2) for x in projections))
        return module.out_proj(mix.transpose(1, 2).flatten(2)), None

    model = tiny_model("gptj")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.transformer.h[0].attn), "forward", forward)
        yield model


def blockwise_attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Compute attention with a separate call for the second half of the queries."""
    half = query.shape[2] // 2
    early = F.scaled_dot_product_attention(query[:, :, :half], key[:, :, :half], value[:, :, :half], is_causal=True)
    mask = causal_mask(query.shape[2])[half:]
    return torch.cat([early, F.scaled_dot_product_attention(query[:, :, half:], key, value, attn_mask=mask)], dim=2)


UNRECOGNIZED: dict[str, Callable] = {
    "none": lambda module, query, key, value: value,
    "sigmoid": lambda module, query, key, value: torch.sigmoid(query @ key.mT).tril() @ value,
    "blockwise": blockwise_attention,
    "linear": lambda module, query, key, value: query.softmax(-1) @ (key.softmax(-1).mT @ value),  # over the width
    "bidirectional": lambda module, query, key, value: F.scaled_dot_product_attention(query, key, value),
}


@pytest.mark.parametrize("kind", UNRECOGNIZED)
def test_attention_that_is_not_recognized_is_refused(kind: str) -> None:
    """Sites of the residual stream can still be measured."""
    refusal = r"layer 0: its attention is not one softmax|layer 0: it attends to \d keys for 9 tokens"
    with attention_of_gptj(UNRECOGNIZED[kind]) as model:
        with pytest.raises(SinkscopeError, match=refusal):
            measured(model, [batch()], SETTINGS, ("attention",))
        assert set(measured(model, [batch()], SETTINGS, ("massive",))["massive"]["layer"]) == {0, 1, 2}


@pytest.mark.parametrize("mask", [None, "bool", "additive"])
def test_a_bias_and_sinks_of_each_query_are_in_the_softmax(mask: str | None) -> None:
    """Inkling adds both to the logits; their gradients reach the tensors from which they are computed."""
    module = nn.Module()
    module.add_module(NAME, Seam("sdpa", "interface"))
    query, key, value = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64).unbind()
    bias = torch.randn(1, 2, 5, 5, dtype=torch.float64, requires_grad=True)
    sinks = torch.randn(1, 2, 5, 1, dtype=torch.float64, requires_grad=True)
    seen = torch.ones(1, 1, 5, 5, dtype=torch.bool).tril()
    seen[..., 3:, 0] = mask is None
    least = torch.finfo(torch.float64).min
    masks = {None: None, "bool": seen, "additive": torch.zeros(1, 1, 5, 5).double().masked_fill(~seen, least)}
    mix, _ = attend(module, query, key, value, masks[mask], scaling=0.5, position_bias=bias, sinks=sinks)
    logits = (0.5 * query @ key.mT + bias).masked_fill(~seen, least)
    weights = torch.cat([logits, sinks], dim=-1).softmax(-1)[..., :-1]
    expected = (weights @ value).transpose(1, 2)
    torch.testing.assert_close(mix, expected)
    for mine, theirs in zip(*(torch.autograd.grad(x.sum(), (bias, sinks)) for x in (mix, expected)), strict=True):
        torch.testing.assert_close(mine, theirs)


class Busy(Observable):
    """An observable that calls, at the taps, the functions that the interceptor looks for."""

    name = about = "busy"
    sites = ("attention",)

    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        scores = torch.matmul(read.query, repeat_heads(read.key, read.query.shape[1]).transpose(-1, -2))
        F.softmax(scores, dim=-1) @ repeat_heads(read.value, read.query.shape[1])
        F.scaled_dot_product_attention(read.query, read.query, read.query, is_causal=True)


@pytest.mark.parametrize("name", ["bloom", "gptj", "falcon", "falcon-alibi"])
def test_what_an_observable_computes_is_not_intercepted(name: str) -> None:
    model = tiny_model(name)
    bare = logits(model)
    with open_tracer(model, find_family(model)) as tracer:
        alone, together = OBSERVABLES["attention"](SETTINGS), OBSERVABLES["attention"](SETTINGS)
        tracer.forward(batch(), [alone])
        tracer.forward(batch(), [Busy(SETTINGS), together, Busy(SETTINGS)])
        traced = tracer.logits(Batch(tiny_tokens(2, 9), torch.ones(2, 9, dtype=torch.long)))
    assert alone.tables()["attention"].equals(together.tables()["attention"])
    torch.testing.assert_close(traced, bare)


DOORS = ["llama", "gpt2", "gpt_oss", "falcon", "falcon-new", "gptj", "gpt_neo"]


@pytest.mark.parametrize("name", DOORS)
def test_a_tensor_overwritten_at_its_tap_is_used(name: str) -> None:
    """Interventions write where observables read. With q or k = 0, the log-sum-exp of every query is log(t+1)."""
    model = tiny_model(name)
    family = find_family(model)
    outputs = []
    with open_tracer(model, family) as tracer, torch.no_grad():
        taps = tracer.traced.get(family.layers)[0].get(f"{family.attention}.{NAME}")
        for tap, factor, read in (("value", 1, "mix"), ("value", 3, "mix"), ("query", 0, "lse"), ("key", 0, "lse")):
            with tracer.traced.trace(**model_inputs(tracer.model, batch())):
                overwritten = getattr(taps, tap)
                overwritten.output = factor * overwritten.output
                seen = save(getattr(taps, read).output)
            outputs.append(seen)
    assert outputs[0].abs().max() > 0.1
    torch.testing.assert_close(outputs[1], 3 * outputs[0])
    if name != "gpt_oss":  # the sink logits of gpt_oss are part of the log-sum-exp
        expected = torch.arange(1, 10).log().expand(2, outputs[2].shape[1], 9)
        for lse in outputs[2:]:
            torch.testing.assert_close(lse, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "scaling"),
    [("gptj", 8**-0.5), ("gpt_neo", 1.0), ("falcon", 8**-0.5), ("bloom", math.nan), ("mpt", math.nan)],
)
def test_the_scaling_of_the_models_own_code_is_found(name: str, scaling: float) -> None:
    """With ALiBi there is no single scaling."""
    model = tiny_model(name)
    with open_tracer(model, find_family(model)) as tracer:
        for padding in ("left", "right"):
            tracer.forward(padded(ragged_tokens((9, 4)), padding), [OBSERVABLES["attention"](SETTINGS)])
            scalings = [seam.call.scaling for seam in tracer.seams.values() if seam.call]
            assert scalings == pytest.approx([scaling] * 3, rel=1e-6, nan_ok=True)

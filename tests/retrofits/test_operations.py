"""Attention operations and biases against their formulas, in plain transformers with the test's own attention."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.attention_rows import rows_of
from support.retrofitted import (
    FURTHER,
    IDS,
    assert_close,
    each_pair,
    in_double,
    plain_model,
    retrofitted,
    shared,
)
from tiny import tiny_tokens
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from sinkscope.attention import kernels
from sinkscope.attention.seam import open_seam
from sinkscope.attention.streaming import streaming
from sinkscope.models.families import find_family
from sinkscope.quantization.simulation import attending_with
from sinkscope.retrofits.operation import OPERATION_KINDS

NAME = "formula"
FORMULA = "formula_of_the_test"  # the attribute of an attention module: (logits, seen) → weights of the mix

ELEMENTWISE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "softmax": torch.exp,
    "sigmoid": lambda s: 1 / (1 + torch.exp(-s)),
    "elu": lambda s: torch.where(s > 0, s + 1, torch.exp(s)),
    "identity": lambda s: s,
}
SUMS = ("softmax", "sigmoid-normalized", "elu-kernel")
AT_LEAST_ONE = ("identity-normalized", "mlp-kernel-normalized")

FAMILIES = ("llama", "gemma2", "gpt2")  # grouped queries; softcap and window; learned positions


def formula(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute v_i = Z_i⁻¹ Σ_j sim(φ(q_i), φ(k_j)) v_j, and the biases, as WSE writes them."""
    method, settings, parameters = getattr(module, FORMULA)
    heads, width = query.shape[1], query.shape[-1]
    key, value = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (key, value))
    kind = settings.get("kind", "softmax")
    if kind.startswith("elu-kernel"):
        query, key = ELEMENTWISE["elu"](query), ELEMENTWISE["elu"](key)
    if kind.startswith("mlp-kernel"):
        weights = parameters["weights"]
        first, second = weights.repeat_interleave(heads // weights.shape[1], dim=1)
        query, key = (F.gelu(x @ first) @ second for x in (query, key))
    scaling = width**-0.5 if scaling is None else scaling
    logits = query @ key.transpose(2, 3) * scaling
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    seen = torch.ones(logits.shape[-2:], dtype=torch.bool).tril() if attention_mask is None else attention_mask > -1
    further = 0.0
    if method in ("key-bias", "off-by-one"):  # a key and a value of 0 add 1 to the denominator
        k, v = torch.zeros(2, heads, width, dtype=torch.float64)
        if method == "key-bias":
            k[:, : parameters["key"].shape[1]] = parameters["key"]
        if settings.get("value") == "learned":
            v[:] = parameters["value"]
        if settings.get("value") == "axis":
            v[:, 0] = settings["norm"]
        if settings.get("value") == "uniform":
            v[:] = settings["norm"] / width**0.5
        extra = (query * k[:, None]).sum(-1, keepdim=True) * scaling
        logits = torch.cat([logits, extra if softcap is None else softcap * torch.tanh(extra / softcap)], dim=-1)
        seen = F.pad(seen, (0, 1), value=True)
        value = torch.cat([value, v[:, None].expand(len(value), -1, -1, -1)], dim=2)
    if method == "value-bias":
        further = parameters["bias"].expand(heads, -1)[:, None]
    weights, module.proxy = weights_of(kind, settings, logits, seen)
    return (weights @ value + further).transpose(1, 2).contiguous(), None


def weights_of(
    kind: str, settings: dict[str, Any], logits: torch.Tensor, seen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sim ÷ Z, and |sim| ÷ Σ |sim|."""
    name = kind if kind in ELEMENTWISE else "sigmoid" if kind.startswith("sigmoid") else "identity"
    sim = torch.where(seen, ELEMENTWISE[name](logits), 0.0)
    if kind == "softpick":
        change = torch.where(seen, torch.exp(logits) - 1, 0.0)
        picked = F.relu(change)
        # where a query picks no key, its shares are uniform
        shares = torch.where(seen, picked.clamp(min=torch.finfo(picked.dtype).tiny), 0.0)
        return picked / (change.abs().sum(-1, keepdim=True) + 1e-8), shares / shares.sum(-1, keepdim=True)
    proxy = sim.abs() / sim.abs().sum(-1, keepdim=True)
    if kind in SUMS:
        p = settings.get("power", 1.0)
        return sim / (sim**p).sum(-1, keepdim=True) ** (1 / p) * settings.get("factor", 1.0), proxy
    if kind in AT_LEAST_ONE:
        return sim / sim.sum(-1, keepdim=True).abs().clamp(min=1), proxy
    return sim * settings.get("factor", 1.0), proxy


AttentionInterface.register(NAME, formula)
AttentionMaskInterface.register(NAME, eager_mask)


def by_formula(name: str, label: str) -> PreTrainedModel:
    """Return the plain model with the attention of this file."""
    model, ours = plain_model(name), shared(name, label)
    model.set_attn_implementation(NAME)
    pairs = zip(find_family(model).attentions(model).values(), find_family(ours).attentions(ours).values(), strict=True)
    for attention, twin in pairs:
        parameters = {key: p.detach() for key, p in twin.retrofit.named_parameters()}
        setattr(attention, FORMULA, (*FURTHER[label], parameters))
    return model


def loss(model: PreTrainedModel, ids: torch.Tensor = IDS) -> torch.Tensor:
    with in_double(model):
        logits = model(ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@each_pair(FAMILIES, list(FURTHER))
def test_logits_and_gradients_are_the_formulas(name: str, label: str) -> None:
    ours, expected = retrofitted(name, label).requires_grad_(True), by_formula(name, label).requires_grad_(True)
    for model in (ours, expected):
        loss(model).backward()
    with torch.no_grad(), in_double(ours), in_double(expected):
        assert_close(ours(IDS).logits, expected(IDS).logits)
    gradients = dict(ours.named_parameters())
    for path, parameter in expected.named_parameters():
        assert_close(gradients[path].grad, parameter.grad, 1e-9)


@each_pair(["llama", "gemma2"], [label for label in FURTHER if not label.startswith("value")])
def test_what_is_measured_is_the_proxy(name: str, label: str) -> None:
    kernel = "sdpa" if name == "llama" else "eager"
    model, expected = shared(name, label), by_formula(name, label)
    with torch.no_grad(), in_double(expected):
        expected(IDS)
        proxies = rows_of(model, IDS, kernel).weights
    for weights, attention in zip(proxies, find_family(expected).attentions(expected).values(), strict=True):
        assert_close(weights, attention.proxy[..., : IDS.shape[1]])


@pytest.mark.parametrize("label", [label for label, (method, _) in FURTHER.items() if method == "operation"])
def test_other_kernels_change_nothing(label: str) -> None:
    """The other kernels are for a cache that holds everything, and for quantized scores, here without rounding."""
    model = shared("llama", label)
    family = find_family(model)
    with torch.no_grad(), in_double(model), open_seam(model, family) as seams:
        expected = model(IDS, use_cache=False).logits
        with streaming(model, family, seams, 1, IDS.shape[1]):
            assert_close(model(IDS, use_cache=False).logits, expected)
        with attending_with(seams, dict.fromkeys(seams, lambda part, x, rows: x)):
            assert_close(model(IDS, use_cache=False).logits, expected)


@pytest.mark.parametrize("label", ["sigmoid", "identity-normalized", "p-norm"])
def test_gradients_keep_no_weights_of_the_whole_sequence(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for the backward pass grows with T, and the gradients of chunks equal those of all rows at once."""
    model = retrofitted("llama", label).requires_grad_(True)

    def kept(length: int) -> int:
        sizes: dict[int, int] = {}

        def pack(x: torch.Tensor) -> torch.Tensor:
            sizes[x.untyped_storage().data_ptr()] = x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            loss(model, tiny_tokens(1, length))
        return sum(sizes.values())

    half, whole = kept(128), kept(256)
    assert whole - kept(0 + 2) < 2.3 * half
    loss(model, tiny_tokens(1, 150)).backward()
    chunked = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    monkeypatch.setattr(kernels.chunked_attention, "__defaults__", (1000,))
    loss(model, tiny_tokens(1, 150)).backward()
    for ours, parameter in zip(chunked, model.parameters(), strict=True):
        assert_close(ours, parameter.grad)
    assert kept(256) > 1.5 * whole  # the check fails if all weights are kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shift", [-300.0, -1.0, 0.0, 30.0, 300.0])
def test_softpick_does_not_overflow(shift: float, dtype: torch.dtype) -> None:
    """The formula of Zuhri et al., multiplied above and below by e^-m, in float64, where e^300 is finite."""
    drawn = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + shift
    seen = torch.ones(5, 7, dtype=torch.bool).tril(2)
    seen[0] = False  # a padding query
    logits = drawn.masked_fill(~seen, torch.finfo(dtype).min).to(dtype).requires_grad_(True)
    exact = logits.detach().double().requires_grad_(True)
    most = exact.detach().masked_fill(~seen, 0.0).amax(-1, keepdim=True)
    change = torch.where(seen, (exact - most).exp() - (-most).exp(), 0.0)
    expected = change.relu() / (change.abs().sum(-1, keepdim=True) + 1e-8 * (-most).exp())
    weights, _ = OPERATION_KINDS["softpick"][1].weights(logits)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-9
    torch.testing.assert_close(weights.double(), expected, rtol=tolerance, atol=tolerance)
    assert (weights.count_nonzero(-1) == (change > 0).sum(-1)).all()
    factors = torch.randn(weights.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (weights * factors.to(dtype)).sum().backward()
    (expected * factors).sum().backward()
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=100 * tolerance, atol=100 * tolerance)


def test_the_gradient_of_softpick_is_that_of_finite_differences() -> None:
    logits = torch.randn(1, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    seen = torch.ones(4, 4, dtype=torch.bool).tril()
    masked = torch.finfo(torch.float64).min

    def weights(x: torch.Tensor) -> torch.Tensor:
        return OPERATION_KINDS["softpick"][1].weights(x.masked_fill(~seen, masked))[0]

    assert torch.autograd.gradcheck(weights, logits)


@pytest.mark.parametrize("kind", OPERATION_KINDS)
def test_logits_stay_float32_under_autocast(kind: str) -> None:
    operation = OPERATION_KINDS[kind][1]
    drawn = torch.randn(3, 2, 4, 30, 8, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    call = kernels.AttentionCall(mask=None, scaling=0.3, operation=operation)
    mix, lse = kernels.chunked_attention(*drawn, call)
    with torch.autocast("cpu", torch.bfloat16):
        mix_of_training, lse_of_training = kernels.chunked_attention(*drawn, call)
    assert lse_of_training.dtype == torch.float32
    assert torch.equal(lse_of_training, lse)
    torch.testing.assert_close(mix_of_training, mix, rtol=0, atol=0, equal_nan=True)  # a sum of weights may be 0

"""The fused kernels, forward and backward, compared with chunks in float64; tests of GPUs check without one, too."""

from typing import Any

import pytest
import torch
from support.attention_reads import causal_mask
from support.naming import naming
from tiny import tiny_model
from torch._subclasses.fake_tensor import FakeTensorMode

from sinkscope.attention import kernels
from sinkscope.attention.kernels import EFFICIENT, FLASH, AttentionCall, chunked_attention, fused_attention, upcast
from sinkscope.measuring.tracer import open_tracer
from sinkscope.models.families import find_family

HEADS, CALL = 6, AttentionCall(mask=None, scaling=0.3)
LENGTHS = (1, 33, 200)
# head width → number of key heads; 36 is not a multiple of 8, and a GPU may use a different kernel for each width
WIDTHS = {64: 2, 36: HEADS} | ({80: 2, 128: 2, 192: 2, 256: 2} if torch.cuda.is_available() else {})
CALLS = ("causal", "padded", "window", "bias", "sinks", "sinks by query", "narrow values", "wide values", "softcap")
# relative to the largest entry
ERRORS = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_the_flash_kernel_takes_grouped_heads(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors have no data, so no GPU is needed."""
    monkeypatch.setattr(torch.backends.cuda, "SDPAParams", lambda *arguments: arguments)
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda asked: True)
    with FakeTensorMode():
        query, key, value = (
            torch.empty(2, heads, 33, 64, device="cuda", dtype=torch.bfloat16) for heads in (HEADS, kv_heads, kv_heads)
        )
        mix, lse = fused_attention(query, key, value, CALL)
    assert (mix.shape, mix.dtype) == (query.shape, query.dtype)
    assert (lse.shape, lse.dtype) == ((2, HEADS, 33), torch.float32)


def drawn(case: str, length: int, width: int, dtype: torch.dtype, device: str) -> tuple[list[torch.Tensor], dict]:
    """Return query, key and value, and the options of a call; of sequence 0 the first third is padding, if any is."""
    generator = torch.Generator().manual_seed(length + width)
    inner = {"narrow values": width - 12, "wide values": width + 20}.get(case, width)
    shapes = ((2, HEADS, length, width), (2, WIDTHS[width], length, width), (2, WIDTHS[width], length, inner))
    tensors = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    seen = causal_mask(length).expand(2, 1, length, length).clone()
    seen[0, :, :, : length // 3] = False
    logits = torch.randn(HEADS, generator=generator, dtype=torch.float64)
    options: dict[str, Any] = {
        "padded": {"mask": seen},
        "window": {"mask": seen & causal_mask(length, window=5)},
        "bias": {"mask": torch.randn(length, generator=generator).to(dtype).where(seen, torch.finfo(dtype).min)},
        "sinks": {"sink_logits": logits},
        "sinks by query": {
            "mask": seen & causal_mask(length, window=5),
            "sink_logits": logits[:, None] + torch.randn(2, 1, length, generator=generator),
        },
        "softcap": {"softcap": 1.5},
    }.get(case, {})
    return tensors, {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}


def outcome(attention: Any, tensors: list[torch.Tensor], options: dict) -> dict[str, torch.Tensor]:
    """Return the mix and log-sum-exp of queries that see a key, and gradients that depend on both."""
    options = {"mask": None, "scaling": 0.3} | options
    leaves = {name: x.detach().requires_grad_() for name, x in zip(("query", "key", "value"), tensors, strict=True)}
    if "sink_logits" in options:
        leaves["sinks"] = options["sink_logits"] = options["sink_logits"].detach().requires_grad_()
    mix, lse = attention(*list(leaves.values())[:3], AttentionCall(**options))
    mask = options["mask"]
    real = torch.ones_like(lse, dtype=torch.bool)
    if mask is not None:
        real = (mask if mask.dtype == torch.bool else mask > kernels.MASKED).any(-1).expand_as(lse)
    mix, lse = mix.masked_fill(~real[..., None], 0.0), lse.masked_fill(~real, 0.0)
    loss = upcast(mix).square().sum()
    if "sinks" in leaves:  # a key bias with a value reads the log-sum-exp
        loss = loss + lse.sin().sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    return {"mix": mix.detach(), "lse": lse.detach()} | dict(zip(leaves, gradients, strict=True))


def furthest(computed: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest difference ÷ the largest entry, or 1."""
    return float((computed.double().cpu() - exact).abs().max() / exact.abs().max().clamp(min=1))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("dtype", ERRORS)
@pytest.mark.parametrize("case", CALLS)
def test_mix_log_sum_exp_and_gradients(case: str, dtype: torch.dtype, device: str) -> None:
    check_outcome(case, dtype, device)


def check_outcome(case: str, dtype: torch.dtype, device: str, lengths: tuple[int, ...] = LENGTHS) -> None:
    for width in WIDTHS:
        for length in lengths:
            tensors, options = drawn(case, length, width, dtype, device)
            fused = outcome(fused_attention, tensors, options)
            copies = {name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
            exact = outcome(chunked_attention, [x.double().cpu() for x in tensors], copies)
            for name, wanted in exact.items():
                with naming(width, length, name):
                    assert furthest(fused[name], wanted) < ERRORS[dtype] * (1 if name in ("mix", "lse") else 4)


@pytest.mark.cuda
def test_which_kernel_serves_which_case() -> None:
    check_kernels("cuda")


def check_kernels(device: str) -> None:
    """Only a softcap and float64 are left to chunks."""
    masked = ("padded", "window", "bias", "sinks by query")
    for case in CALLS:
        for dtype in ERRORS:
            kind = EFFICIENT if case in masked or dtype == torch.float32 else FLASH
            with naming(case, dtype):
                expected = None if case == "softcap" or dtype == torch.float64 else kind
                assert kernel_of(case, dtype, device) == expected


def kernel_of(case: str, dtype: torch.dtype, device: str) -> str | None:
    """Return the fused kernel that computes this case; None if it is computed in chunks."""
    served = []
    with pytest.MonkeyPatch.context() as patch:
        own, chunks = kernels.FUSED[device.partition(":")[0]], kernels.chunked_attention
        patch.setitem(kernels.FUSED, device.partition(":")[0], lambda *asked: served.append(own(*asked)) or served[-1])
        patch.setattr(kernels, "chunked_attention", lambda *tensors: served.append(None) or chunks(*tensors))
        tensors, options = drawn(case, 33, 64, dtype, device)
        fused_attention(*tensors, AttentionCall(**{"mask": None, "scaling": 0.3} | options))
    return None if served[-1] is None else served[-1][0]


def test_a_mask_becomes_a_bias_once_for_all_layers() -> None:
    tensors, options = drawn("padded", 33, 64, torch.float32, "cpu")
    call = AttentionCall(scaling=0.3, **options)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for _ in range(3):
            fused_attention(*tensors, call)
    names = [event.name for event in profile.events()]
    assert names.count("aten::masked_fill_") == 1
    assert names.count("aten::_scaled_dot_product_flash_attention_for_cpu") == 3


@pytest.mark.parametrize(("free", "most"), [(80 * 2**30, kernels.ON_ACCELERATOR), (2**30, 2**24)])
def test_fewer_weights_at_once_on_a_gpu_with_little_memory(
    free: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight tensors of float32 take at most half of the free memory, in which PyTorch's cache is included."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free // 2, free))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: free)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: free // 2)
    kernels.numbers_that_fit.cache_clear()
    assert kernels.numbers_at_once(torch.device("cuda"), 10**10) == most
    free = 0  # read once
    assert kernels.numbers_at_once(torch.device("cuda"), 10**10) == most
    with open_tracer(model := tiny_model("llama"), find_family(model)):  # and again in the next run
        assert kernels.numbers_at_once(torch.device("cuda"), 10**10) == 2**18

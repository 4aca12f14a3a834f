"""The fused kernels: on a GPU compared with chunks in float64, and without one checked by their signatures."""

import itertools

import pytest
import torch
from support.naming import naming
from torch._subclasses.fake_tensor import FakeTensorMode

from sinkscope.attention.kernels import AttentionCall, chunked_attention, fused_attention, upcast

HEADS, CALL = 6, AttentionCall(mask=None, scaling=0.3)
WIDTHS, LENGTHS = (64, 36), (1, 33, 200)  # 36 is not a multiple of 8, which the flash kernel needs
ERRORS = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}  # relative to the largest entry


@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_the_flash_kernel_takes_grouped_heads(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors have no data, so no GPU is needed."""
    monkeypatch.setattr(torch.backends.cuda, "SDPAParams", lambda *given: given)
    monkeypatch.setattr(torch.backends.cuda, "can_use_flash_attention", lambda asked: True)
    with FakeTensorMode():
        query, key, value = (
            torch.empty(2, heads, 33, 64, device="cuda", dtype=torch.bfloat16) for heads in (HEADS, kv_heads, kv_heads)
        )
        mix, lse = fused_attention(query, key, value, CALL)
    assert (mix.shape, mix.dtype) == (query.shape, query.dtype)
    assert (lse.shape, lse.dtype) == ((2, HEADS, 33), torch.float32)


def drawn(length: int, width: int, kv_heads: int, dtype: torch.dtype, device: str = "cuda") -> list[torch.Tensor]:
    """Return query, key and value on the GPU."""
    generator = torch.Generator().manual_seed(length + width)
    shapes = ((2, heads, length, width) for heads in (HEADS, kv_heads, kv_heads))
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def furthest(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest difference ÷ the largest entry."""
    return float((found.double().cpu() - exact).abs().max() / exact.abs().max())


@pytest.mark.cuda
def test_mix_and_log_sum_exp_on_cuda() -> None:
    check_mix_and_log_sum_exp("cuda")


def check_mix_and_log_sum_exp(device: str) -> None:
    for length, width, kv_heads, dtype in itertools.product(LENGTHS, WIDTHS, (HEADS, 2), ERRORS):
        with naming(length, width, kv_heads, dtype):
            given = drawn(length, width, kv_heads, dtype, device)
            exact = chunked_attention(*(x.double().cpu() for x in given), CALL)
            for found, wanted in zip(fused_attention(*given, CALL), exact, strict=True):
                assert furthest(found, wanted) < ERRORS[dtype]


@pytest.mark.cuda
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", ERRORS)
def test_gradients_on_cuda(dtype: torch.dtype, width: int) -> None:
    check_gradients("cuda", dtype, width)


def check_gradients(device: str, dtype: torch.dtype, width: int) -> None:
    given = [x.requires_grad_() for x in drawn(33, width, 2, dtype, device)]
    copies = [x.detach().double().cpu().requires_grad_() for x in given]
    found = torch.autograd.grad(upcast(fused_attention(*given, CALL)[0]).square().sum(), given)
    exact = torch.autograd.grad(chunked_attention(*copies, CALL)[0].square().sum(), copies)
    for own, wanted in zip(found, exact, strict=True):
        assert furthest(own, wanted) < 4 * ERRORS[dtype]

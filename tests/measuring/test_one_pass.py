"""Reductions in one pass over a tensor equal those in float64, also by Triton's kernels in its interpreter."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import padded, ragged_tokens

from sinkscope.measuring import one_pass
from sinkscope.measuring.observables.activation import kurtosis, powers, powers_of
from sinkscope.measuring.observables.massive import row_medians
from sinkscope.measuring.one_pass import TokenSums, digit_counts, token_norms, token_peaks, token_sums

# without support.accelerators: with the simulated devices a process that has used autograd cannot be forked
DEVICE = "cuda" if os.environ.get("SINKSCOPE_TEST_DEVICE") == "cuda" else "cpu"
TRITON = Path(__file__).parents[2] / ".models" / "triton"
HALVES = (torch.bfloat16, torch.float16)


def states(dtype: torch.dtype, width: int, offset: float = 0.0) -> torch.Tensor:
    """Make residual-stream states (3,2,17,D) with massive activations."""
    x = torch.randn(3, 2, 17, width, generator=torch.Generator().manual_seed(width), dtype=torch.float64) + offset
    x[:, 1, 0, width // 2] = -2500.0
    return x.to(dtype)


def expected_sums(x: torch.Tensor) -> TokenSums:
    x = x.double()
    mean = x.mean(-1, keepdim=True)
    central = [(x - mean).pow(power).sum(-1) for power in (2, 3, 4)]
    return TokenSums(mean[..., 0], *central)


def check_sums(x: torch.Tensor, sums: TokenSums, peak: torch.Tensor) -> None:
    assert torch.equal(peak.cpu().double(), x.double().abs().amax(-1))
    tolerance = 1e-12 if x.dtype == torch.float64 else 2e-5
    for name, actual, expected in zip(TokenSums._fields, (each.cpu() for each in sums), expected_sums(x), strict=True):
        size = expected.abs() if name != "third" else expected_sums(x).second ** 1.5  # which may cancel out
        assert ((actual.double() - expected).abs() <= tolerance * size.clamp(min=1)).all(), name


def check_counts(x: torch.Tensor) -> None:
    """The counts of the first digit, and of the second among numbers with a prefix, are those of numpy's integers."""
    bits = x.abs().view(one_pass.INTEGERS[x.itemsize]).to(torch.int64)
    top = 8 * x.itemsize - 16
    there = x.to(DEVICE)
    counts = digit_counts(there, torch.zeros(len(x), 1, dtype=torch.int64, device=DEVICE), top).cpu()
    for row, numbers in enumerate(bits >> top):
        assert torch.equal(counts[row].long(), numbers.bincount(minlength=one_pass.DIGITS))
    if top:
        prefix = (bits >> top)[:, :1]
        counts = digit_counts(there, prefix.to(DEVICE), top - 16).cpu()
        for row, numbers in enumerate(bits):
            alike = numbers[numbers >> top == prefix[row]]
            assert torch.equal(counts[row].long(), (alike >> top - 16 & 0xFFFF).bincount(minlength=one_pass.DIGITS))


CASES = [(dtype, width) for dtype in (*HALVES, torch.float32, torch.float64) for width in (1, 48, 576)]


@pytest.mark.parametrize(("dtype", "width"), CASES)
def test_sums_and_counts(dtype: torch.dtype, width: int) -> None:
    x = states(dtype, width)
    check_sums(x, *token_sums(x.to(DEVICE)))
    check_counts(x.flatten(0, 2))


@pytest.mark.parametrize("offset", [0.0, 30.0])
@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
def test_one_pass_has_the_norms_and_the_kurtosis_of_several(dtype: torch.dtype, offset: float) -> None:
    """Also if the mean over a sequence is far from 0, and with padding."""
    x, batch = states(dtype, 96, offset), padded(ragged_tokens((17, 9, 13)))
    sums, peak = token_sums(x)
    torch.testing.assert_close(sums.norms(96), token_norms(x), rtol=1e-5, atol=0)
    assert torch.equal(peak, token_peaks(x))
    actual, expected = (kurtosis(each, 96, batch) for each in (powers_of(sums, 96, batch), powers(x, batch)))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
@pytest.mark.parametrize("entries", [1, 2, 999])
def test_medians(dtype: torch.dtype, entries: int) -> None:
    x = states(dtype, 999).flatten(0, -2)[:, :entries]
    assert torch.equal(row_medians(x.to(DEVICE)).cpu().double(), x.double().abs().median(-1).values)


def test_kernels_that_do_not_run_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton needs a C compiler, for example, which many images for serving do not have."""

    def failing(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("Failed to find C compiler")

    module = SimpleNamespace(token_sums=failing)
    monkeypatch.setattr(one_pass, "import_module", lambda name: module)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: torch.ones(shape))  # there may be no GPU
    with pytest.warns(UserWarning, match="Failed to find C compiler"):
        assert one_pass._kernels.__wrapped__() is None
    module.token_sums = lambda x: x
    assert one_pass._kernels.__wrapped__() is module


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda" or not TRITON.is_dir(), reason="needs `make triton`")
def test_kernels_of_triton() -> None:
    """In its interpreter, since there is no GPU. tests/gpu.sh runs the tests above with the compiled kernels."""
    places = [str(TRITON), str(Path(one_pass.__file__).parents[2]), str(Path(__file__).parents[1])]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(places)}
    subprocess.run([sys.executable, __file__], env=environment, check=True)


if __name__ == "__main__":  # of the test above
    from sinkscope.measuring import triton_kernels

    one_pass._digit_counts.register_kernel("cpu")(triton_kernels.digit_counts)
    for dtype, width in CASES:
        x = states(dtype, width)
        *sums, peak = triton_kernels.token_sums(x)
        check_sums(x, TokenSums(*sums), peak)
        check_counts(x.flatten(0, 2))

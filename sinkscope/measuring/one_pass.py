"""Reductions that read a tensor once: kernels of Triton on GPUs that torch calls `cuda`, elsewhere operations of torch.

They are operators of torch: a simulated device counts each as one launch that reads its input once.
"""

import warnings
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

import torch

from sinkscope.attention.kernels import upcast
from sinkscope.errors import described

DIGITS = 2**16  # values of 16 bits
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@cache
def _kernels() -> Any:
    """Return the module of Triton's kernels if they run; None without Triton, which torch's builds for GPUs bring.

    Triton compiles at their first use, for which it needs a C compiler, and may not know the GPU.
    """
    try:
        kernels = import_module("sinkscope.measuring.triton_kernels")
    except ImportError:
        return None
    try:
        kernels.token_sums(torch.zeros(1, 1, device="cuda"))
    except Exception as error:
        warnings.warn(
            f"operations of torch replace Triton's kernels, which do not run: {described(error)}", stacklevel=2
        )
        return None
    return kernels


def token_norms(x: torch.Tensor, dim: int | tuple[int, ...] = -1) -> torch.Tensor:
    """Return the L2 norm of each token, (…,D) → (…), in float32 or better, without a copy in that precision."""
    return torch.linalg.vector_norm(x, dim=dim, dtype=torch.promote_types(x.dtype, torch.float32))


def token_peaks(x: torch.Tensor) -> torch.Tensor:
    """Return each token's largest absolute entry, (…,D) → (…), in float32 or better."""
    return upcast(torch.maximum(x.amax(-1), -x.amin(-1)))  # faster than a copy of all absolute entries


class TokenSums(NamedTuple):
    """Sums over the entries of each token, (…,D) → (…), in float32 or better."""

    mean: torch.Tensor
    second: torch.Tensor  # Σ(x - mean)²
    third: torch.Tensor
    fourth: torch.Tensor

    def norms(self, width: int) -> torch.Tensor:
        """Return the L2 norms of tokens with D = `width` entries."""
        return (self.second + width * self.mean.square()).sqrt()

    def about(self, center: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return Σ(x - center)² and Σ(x - center)⁴ in float64."""
        shift, second, third, fourth = self.mean - center, self.second.double(), self.third, self.fourth
        square = shift.square()
        return second + width * square, fourth + 4 * shift * third + 6 * square * second + width * square.square()


def token_sums(x: torch.Tensor) -> tuple[TokenSums, torch.Tensor]:
    """Return the sums over the entries of each token and its largest magnitude, (…,D) → (…)."""
    *sums, peak = _token_sums(x.detach()).unbind()
    return TokenSums(*sums), peak


@torch.library.custom_op("sinkscope::token_sums", mutates_args=())
def _token_sums(x: torch.Tensor) -> torch.Tensor:
    if x.device.type == "cuda" and (kernels := _kernels()) is not None:
        return kernels.token_sums(x)
    x = upcast(x)
    mean = x.mean(-1, keepdim=True)
    centered = x - mean
    squares = centered.square()
    sums = squares.sum(-1), (squares * centered).sum(-1), squares.square().sum(-1)
    return torch.stack([mean[..., 0], *sums, x.abs().amax(-1)])


@_token_sums.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((5, *x.shape[:-1]), dtype=torch.promote_types(x.dtype, torch.float32))


def digit_counts(x: torch.Tensor, prefix: torch.Tensor, shift: int) -> torch.Tensor:
    """Count each value of the 16 bits of |x| from bit `shift` on, (N,E) → (N,65536).

    Only numbers count whose higher bits are `prefix` (N,1); the highest digit has none.
    """
    return _digit_counts(x.detach().contiguous().view(INTEGERS[x.itemsize]), prefix, shift)


@torch.library.custom_op("sinkscope::digit_counts", mutates_args=())
def _digit_counts(bits: torch.Tensor, prefix: torch.Tensor, shift: int) -> torch.Tensor:
    if bits.device.type == "cuda" and (kernels := _kernels()) is not None:
        return kernels.digit_counts(bits, prefix, shift)
    bits = bits & torch.iinfo(bits.dtype).max  # without the sign
    alike = bits >> (shift + 16) == prefix if shift + 16 < 8 * bits.itemsize else torch.ones_like(bits)
    digits = (bits >> shift).to(torch.int64) & (DIGITS - 1)
    counts = torch.zeros(len(bits), DIGITS, dtype=torch.int32, device=bits.device)
    return counts.scatter_add_(-1, digits, alike.to(torch.int32))


@_digit_counts.register_fake
def _(bits: torch.Tensor, prefix: torch.Tensor, shift: int) -> torch.Tensor:
    return bits.new_empty((len(bits), DIGITS), dtype=torch.int32)

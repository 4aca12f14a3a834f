"""Reductions that read a tensor once: kernels of Triton on GPUs that torch calls `cuda`, elsewhere operations of torch.

They are operators of torch: a simulated device counts each as one launch that reads its input once.
"""

from typing import Any, NamedTuple

import torch

from sinkscope.attention.kernels import upcast

try:  # torch's builds for GPUs bring it
    import triton
    import triton.language as tl
except ImportError:
    triton = None

DIGITS = 2**16  # values of 16 bits
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
ENTRIES_OF_PROGRAM = 4096  # of a program of Triton that counts digits


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
    peak: torch.Tensor  # max |x|

    def norms(self, width: int) -> torch.Tensor:
        """Return the L2 norms of tokens with D = `width` entries."""
        return (self.second + width * self.mean.square()).sqrt()

    def about(self, center: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return Σ(x - center)² and Σ(x - center)⁴ in float64."""
        shift, second, third, fourth = self.mean - center, self.second.double(), self.third, self.fourth
        square = shift.square()
        return second + width * square, fourth + 4 * shift * third + 6 * square * second + width * square.square()


def token_sums(x: torch.Tensor) -> TokenSums:
    """Reduce the entries of each token, (…,D) → (…)."""
    return TokenSums(*_token_sums(x.detach()).unbind())


@torch.library.custom_op("sinkscope::token_sums", mutates_args=())
def _token_sums(x: torch.Tensor) -> torch.Tensor:
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
    bits = bits & torch.iinfo(bits.dtype).max  # without the sign
    alike = bits >> (shift + 16) == prefix if shift + 16 < 8 * bits.itemsize else torch.ones_like(bits)
    digits = (bits >> shift).to(torch.int64) & (DIGITS - 1)
    counts = torch.zeros(len(bits), DIGITS, dtype=torch.int32, device=bits.device)
    return counts.scatter_add_(-1, digits, alike.to(torch.int32))


@_digit_counts.register_fake
def _(bits: torch.Tensor, prefix: torch.Tensor, shift: int) -> torch.Tensor:
    return bits.new_empty((len(bits), DIGITS), dtype=torch.int32)


# --- on GPUs

if triton is not None:

    @triton.jit
    def _reduce_token(x: Any, sums: Any, tokens: Any, width: Any, BLOCK: tl.constexpr) -> None:
        token = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        entries = tl.load(x + token * width + column, mask=column < width, other=0.0).to(sums.dtype.element_ty)
        mean = tl.sum(entries, 0) / width
        centered = tl.where(column < width, entries - mean, 0.0)
        squares = centered * centered
        tl.store(sums + token, mean)
        tl.store(sums + tokens + token, tl.sum(squares, 0))
        tl.store(sums + 2 * tokens + token, tl.sum(squares * centered, 0))
        tl.store(sums + 3 * tokens + token, tl.sum(squares * squares, 0))
        tl.store(sums + 4 * tokens + token, tl.max(tl.abs(entries), 0))

    @_token_sums.register_kernel("cuda")
    def token_sums_by_triton(x: torch.Tensor) -> torch.Tensor:
        sums = x.new_empty((5, *x.shape[:-1]), dtype=torch.promote_types(x.dtype, torch.float32))
        block = triton.next_power_of_2(x.shape[-1])
        warps = min(16, max(1, block // 512))
        if tokens := sums[0].numel():
            _reduce_token[(tokens,)](x.contiguous(), sums, tokens, x.shape[-1], BLOCK=block, num_warps=warps)
        return sums

    @triton.jit
    def _count_digits(
        bits: Any, prefix: Any, counts: Any, entries: Any, shift: Any, magnitude: tl.constexpr,
        is_first: tl.constexpr, digits: tl.constexpr, BLOCK: tl.constexpr,
    ) -> None:  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        counted = column < entries
        numbers = tl.load(bits + row * entries + column, mask=counted, other=0).to(tl.int64) & magnitude
        if not is_first:
            counted = counted & (numbers >> (shift + 16) == tl.load(prefix + row))
        digit = (numbers >> shift) & (digits - 1)
        tl.atomic_add(counts + row * digits + digit, 1, mask=counted)

    @_digit_counts.register_kernel("cuda")
    def digit_counts_by_triton(bits: torch.Tensor, prefix: torch.Tensor, shift: int) -> torch.Tensor:
        counts = torch.zeros(len(bits), DIGITS, dtype=torch.int32, device=bits.device)
        programs = len(bits), triton.cdiv(bits.shape[1], ENTRIES_OF_PROGRAM)
        _count_digits[programs](
            bits, prefix.expand(len(bits), 1).contiguous(), counts, bits.shape[1], shift, torch.iinfo(bits.dtype).max,
            shift + 16 == 8 * bits.itemsize, DIGITS, BLOCK=ENTRIES_OF_PROGRAM,
        )  # fmt: skip
        return counts

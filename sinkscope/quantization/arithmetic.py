"""Uniform fake quantization: to a grid of 2^bits numbers and back (Bondarenko et al. 2023; definitions §9).

    x̂ = step · clamp(round(x ÷ step), lowest, highest)        round: half to even

The integers are counted from 0, so that 0 itself is on every grid and stays 0 exactly. This is the arithmetic of
torch.fake_quantize_per_tensor_affine, which the tests hold it against; that takes three times as long on a CPU, and
makes a number of NaN. Its MinMaxObserver has the same ranges, but for symmetric weights a step by which the largest
entry is clipped (± 127.5 steps, and 128 is not there).
"""

import math
from dataclasses import dataclass

import torch

from sinkscope.attention.kernels import upcast
from sinkscope.errors import InputError

FEWEST_BITS, MOST_BITS = 2, 16
TINY = torch.finfo(torch.float32).tiny  # a smaller step has no reciprocal


@dataclass(frozen=True)
class Grid:
    """step · k for the whole numbers k from `lowest` ≤ 0 to `highest` ≥ 0. A step of 0: nothing but 0."""

    step: float
    lowest: int
    highest: int

    def snap(self, x: torch.Tensor) -> torch.Tensor:
        """x (any shape) → the nearest number of the grid, in x's dtype. What lies beyond an end, infinite too, goes to
        that end; NaN stays NaN. Computed in float32 or better.
        """
        if self.step == 0:
            return x.new_zeros(x.shape).masked_fill(x.isnan(), math.nan)
        wholes = (upcast(x) / self.step).round_().clamp_(self.lowest, self.highest)
        return wholes.mul_(self.step).to(x.dtype)


def symmetric_grid(largest: float, bits: int) -> Grid:
    """For −largest … largest: 2^(bits−1) − 1 steps to either side. Errors: InputError for what is no such range."""
    check_bits(bits)
    if not (math.isfinite(largest) and largest >= 0):
        raise InputError(f"a tensor whose largest entry is {largest} cannot be quantized")
    most = 2 ** (bits - 1) - 1
    return Grid(_step(largest, most), -most, most)


def asymmetric_grid(low: float, high: float, bits: int) -> Grid:
    """For low … high, widened to hold 0: 2^bits − 1 steps, of which −low ÷ step, rounded, lie below 0.

    Errors: InputError for what is no such range.
    """
    check_bits(bits)
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise InputError(f"{low} … {high} is not a range that can be quantized")
    low, high = min(low, 0.0), max(high, 0.0)
    most = 2**bits - 1
    step = _step(high - low, most)
    below = round(-low / step) if step else 0
    return Grid(step, -below, most - below)


def quantize_symmetric(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x (any shape) on the grid of its own largest entry, one for the whole tensor: weights."""
    return symmetric_grid(float(x.abs().max()) if x.numel() else 0.0, bits).snap(x)


def quantize_asymmetric(x: torch.Tensor, low: float, high: float, bits: int) -> torch.Tensor:
    """x (any shape) on the grid of a range that was known before: activations."""
    return asymmetric_grid(low, high, bits).snap(x)


def check_bits(bits: int, what: str = "bits") -> None:
    if isinstance(bits, bool) or not isinstance(bits, int) or not FEWEST_BITS <= bits <= MOST_BITS:
        raise InputError(f"{what} {bits}: it must be a whole number from {FEWEST_BITS} to {MOST_BITS}")


def _step(width: float, steps: int) -> float:
    return max(width / steps, TINY) if width > 0 else 0.0

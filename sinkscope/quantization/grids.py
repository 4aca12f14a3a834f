"""Uniform fake quantization to grids of 2^bits numbers (Bondarenko et al. 2023), and the grids of sites.

    x̂ = step · clamp(round(x ÷ step), lowest, highest)        round: half to even

The integers are counted from 0, so 0 is on every grid and stays exact. There is one grid for the whole tensor, for each
of its rows (the last dimension: a token's features, or the inputs of an output channel), or for each of its channels.
This is the arithmetic of torch.fake_quantize_per_tensor_affine, which takes three times as long on a CPU and turns NaN
into a number; the tests compare the two. torch's MinMaxObserver has the same ranges but clips the largest symmetric
weight, at 127.5 steps.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from sinkscope.attention.kernels import upcast
from sinkscope.errors import InputError
from sinkscope.quantization.formats import Precision
from sinkscope.quantization.sites import CACHED, SCORES, SOFTMAX, WEIGHT, Site

FEWEST_BITS, MOST_BITS = 2, 16
SMALLEST_STEP = torch.finfo(torch.float32).tiny  # a smaller step has no reciprocal; it is that of zeros


@dataclass(frozen=True)
class Grid:
    """The numbers step · k for the integers k from `lowest` ≤ 0 to `highest` ≥ 0.

    Tensors instead of numbers hold many grids, and broadcast to the input of `snap`.
    """

    step: float | torch.Tensor
    lowest: int | torch.Tensor
    highest: int | torch.Tensor

    def of(self, x: torch.Tensor) -> "Grid":
        return self  # it is static

    def snap(self, x: torch.Tensor) -> torch.Tensor:
        """Round x (any shape) to the nearest numbers of the grid, in float32 or better; returns x's dtype.

        Numbers beyond an end of the grid, including infinities, are clamped to that end; NaN stays NaN.
        """
        ends: Any = (self.lowest, self.highest)  # torch has separate signatures for numbers and tensors
        wholes = (upcast(x) / self.step).round_().clamp_(*ends)
        return wholes.mul_(self.step).to(x.dtype)


@dataclass(frozen=True)
class RowGrids:
    """Dynamic grids without calibration, one for every row (…,D) of the input of `snap`."""

    bits: int | torch.Tensor  # of all rows, or of each, which broadcasts to (…,1)
    is_symmetric: bool

    def of(self, x: torch.Tensor) -> Grid:
        """Return the grids (…,1) of x (…,D)."""
        low, high = upcast(x).aminmax(dim=-1, keepdim=True)
        if self.is_symmetric:
            return symmetric_grid(torch.maximum(-low, high), self.bits)
        return asymmetric_grid(low, high, self.bits)

    def snap(self, x: torch.Tensor) -> torch.Tensor:
        """Round each row of x (…,D) to its own grid, in x's dtype. A row with NaN or infinity becomes NaN."""
        return self.of(x).snap(x)


def symmetric_grid(largest: float | torch.Tensor, bits: int | torch.Tensor) -> Grid:
    """Return the grid for -largest … largest, with 2^(bits-1) - 1 steps to either side; for a tensor, one per entry."""
    check_bits(bits)
    if not isinstance(largest, torch.Tensor) and not (math.isfinite(largest) and largest >= 0):
        raise InputError(f"a tensor whose largest entry is {largest} cannot be quantized")
    most = 2 ** (bits - 1) - 1
    return Grid(_step_of(largest, most), -most, most)


def asymmetric_grid(low: Any, high: Any, bits: int | torch.Tensor) -> Grid:
    """Return the grid for low … high, widened to hold 0, with 2^bits - 1 steps from round(low ÷ step) on.

    For two tensors instead of numbers, there is a grid for each entry. A tensor of bits broadcasts to these.
    """
    check_bits(bits)
    most = 2**bits - 1
    if isinstance(low, torch.Tensor):
        low, high = low.clamp_max(0), high.clamp_min(0)
        step: Any = _step_of(high - low, most)
        lowest = (low / step).round_()
    else:
        if not (math.isfinite(low) and math.isfinite(high) and low <= high):
            raise InputError(f"{low} … {high} is not a range that can be quantized")
        low, high = min(low, 0.0), max(high, 0.0)
        step = _step_of(high - low, most)
        lowest = round(low / step)
    return Grid(step, lowest, lowest + most)


def _step_of(width: Any, steps: Any) -> Any:
    if isinstance(width, torch.Tensor):
        return (width / steps).clamp_min(SMALLEST_STEP)
    return max(width / steps, SMALLEST_STEP)


def check_bits(bits: int | torch.Tensor) -> None:
    """Raise InputError unless bits are a possible number. Those of a tensor are not read, which would wait for it."""
    if isinstance(bits, torch.Tensor):
        return
    if isinstance(bits, bool) or not isinstance(bits, int) or not FEWEST_BITS <= bits <= MOST_BITS:
        raise InputError(f"bits {bits}: it must be a whole number from {FEWEST_BITS} to {MOST_BITS}")


@dataclass(frozen=True)
class Range:
    """The range of the entries of one site over all calibration sequences."""

    low: float
    high: float
    median_abs: float  # median of the magnitudes of a sequence, mean over sequences
    is_massive: bool  # whether a sequence has a massive activation by Sun et al.'s rule; hidden states only
    channels: tuple[torch.Tensor, torch.Tensor] | None = None  # low and high (1,Hkv,1,D) of keys and values

    @property
    def max_abs(self) -> float:
        return max(-self.low, self.high)


def site_grid(precision: Precision, site: Site, known: Range) -> Grid | RowGrids:
    """Return the grid or grids of a site."""
    if site.part == WEIGHT:
        bits = precision.bits_weights
        return symmetric_grid(known.max_abs, bits) if precision.weights_per == "tensor" else RowGrids(bits, True)
    is_cached = site.part in CACHED
    bits = precision.bits_kv_cache if is_cached else precision.bits_activations
    per = precision.kv_cache_per if is_cached else precision.activations_per
    if per == "token" and site.part not in (SCORES, SOFTMAX):
        return RowGrids(bits, False)
    if per == "channel" and known.channels is not None:
        return asymmetric_grid(*known.channels, bits)
    return asymmetric_grid(known.low, known.high, bits)


@dataclass(frozen=True)
class Rounding:
    """The effect of a site's grid on its entries."""

    zeroed: float  # share of the nonzero entries that become 0
    sqnr: float  # signal to quantization noise, 10 log₁₀ Σx² ÷ Σ(x−x̂)², in dB; infinite without noise
    step: float  # step of the grid; the mean of several grids

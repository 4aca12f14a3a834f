"""Uniform fake quantization: to a grid of 2^bits numbers and back (Bondarenko et al. 2023).

    x̂ = step · clamp(round(x ÷ step), lowest, highest)        round: half to even

The integers are counted from 0, so that 0 itself is on every grid and stays exact. A grid is one for the whole tensor,
one for each of its rows (the last dimension: a token's features, or the inputs of an output channel), or one for each
of its channels. This is the arithmetic of
torch.fake_quantize_per_tensor_affine, which takes three times as long on a CPU and turns NaN into a number; the tests
compare the two. torch's MinMaxObserver has the same ranges but clips the largest symmetric weight, at 127.5 steps.
"""

import math
from dataclasses import dataclass
from typing import Any, get_args

import torch

from sinkscope.attention.kernels import upcast
from sinkscope.errors import InputError, unknown
from sinkscope.options.measuring import PerActivation, PerCache, PerWeight
from sinkscope.quantization.sites import CACHED, SCORES, SOFTMAX, WEIGHT, Site

FEWEST_BITS, MOST_BITS = 2, 16
TINY = torch.finfo(torch.float32).tiny  # a smaller step has no reciprocal


@dataclass(frozen=True)
class Grid:
    """step · k for the whole numbers k from `lowest` ≤ 0 to `highest` ≥ 0; with a step of 0 only the number 0.

    Tensors in place of numbers hold many grids, and broadcast to what is snapped.
    """

    step: float | torch.Tensor
    lowest: int | torch.Tensor
    highest: int | torch.Tensor

    def of(self, x: torch.Tensor) -> "Grid":
        """Itself: it is static, whatever is snapped."""
        return self

    def snap(self, x: torch.Tensor) -> torch.Tensor:
        """x (any shape) → the nearest numbers of the grid, in x's dtype, computed in float32 or better.

        Numbers beyond an end of the grid, infinities too, go to that end; NaN stays NaN.
        """
        divisor = self.step.where(self.step != 0, 1) if isinstance(self.step, torch.Tensor) else self.step or 1.0
        ends: Any = (self.lowest, self.highest)  # torch has one signature for numbers, and one for tensors
        wholes = (upcast(x) / divisor).round_().clamp_(*ends)
        return wholes.mul_(self.step).to(x.dtype)


@dataclass(frozen=True)
class RowGrids:
    """For every row (…,D) of what is snapped a grid made for that row alone: dynamic, without calibration."""

    bits: int
    is_symmetric: bool

    def of(self, x: torch.Tensor) -> Grid:
        """The grids (…,1) of x (…,D)."""
        low, high = upcast(x).aminmax(dim=-1, keepdim=True)
        if self.is_symmetric:
            return symmetric_grids(torch.maximum(-low, high), self.bits)
        return asymmetric_grids(low, high, self.bits)

    def snap(self, x: torch.Tensor) -> torch.Tensor:
        """x (…,D) → each row on its own grid, in x's dtype. A row that holds NaN or infinity becomes NaN."""
        return self.of(x).snap(x)


def symmetric_grid(largest: float, bits: int) -> Grid:
    """The grid for -largest … largest, with 2^(bits-1) - 1 steps to either side.

    Raises:
        InputError: `largest` is negative or not finite, or there are no grids of so many bits.
    """
    check_bits(bits)
    if not (math.isfinite(largest) and largest >= 0):
        raise InputError(f"a tensor whose largest entry is {largest} cannot be quantized")
    most = 2 ** (bits - 1) - 1
    return Grid(_step(largest, most), -most, most)


def asymmetric_grid(low: float, high: float, bits: int) -> Grid:
    """The grid for low … high, widened to hold 0: 2^bits - 1 steps, of which -low ÷ step, rounded, lie below 0.

    Raises:
        InputError: low … high is no finite range, or there are no grids of so many bits.
    """
    check_bits(bits)
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise InputError(f"{low} … {high} is not a range that can be quantized")
    low, high = min(low, 0.0), max(high, 0.0)
    most = 2**bits - 1
    step = _step(high - low, most)
    below = round(-low / step) if step else 0
    return Grid(step, -below, most - below)


def symmetric_grids(largest: torch.Tensor, bits: int) -> Grid:
    """As `symmetric_grid`, a grid for every entry of `largest` ≥ 0."""
    check_bits(bits)
    most = 2 ** (bits - 1) - 1
    return Grid(_steps(largest, most), -most, most)


def asymmetric_grids(low: torch.Tensor, high: torch.Tensor, bits: int) -> Grid:
    """As `asymmetric_grid`, a grid for every entry of `low` and `high`."""
    check_bits(bits)
    low, high = low.clamp_max(0), high.clamp_min(0)
    most = 2**bits - 1
    step = _steps(high - low, most)
    below = (-low / step.where(step != 0, 1)).round()
    return Grid(step, -below, most - below)


def quantize_symmetric(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x (any shape) on one grid, made for its own largest entry: for weights."""
    return symmetric_grid(float(x.abs().max()) if x.numel() else 0.0, bits).snap(x)


def check_bits(bits: int, what: str = "bits") -> None:
    if isinstance(bits, bool) or not isinstance(bits, int) or not FEWEST_BITS <= bits <= MOST_BITS:
        raise InputError(f"{what} {bits}: it must be a whole number from {FEWEST_BITS} to {MOST_BITS}")


def _step(width: float, steps: int) -> float:
    return max(width / steps, TINY) if width > 0 else 0.0


def _steps(widths: torch.Tensor, steps: int) -> torch.Tensor:
    return (widths / steps).clamp_min(TINY).where(widths > 0, widths)


TENSOR, CHANNEL, TOKEN = "tensor", "channel", "token"  # what has a grid of its own


@dataclass(frozen=True)
class Range:
    """The entries of one site, over all calibration sequences."""

    low: float
    high: float
    median_abs: float  # of the magnitudes of a sequence, mean over sequences
    is_massive: bool  # a sequence has a massive activation by Sun et al.'s rule; only of hidden states
    channels: tuple[torch.Tensor, torch.Tensor] | None = None  # of keys and values: low and high (1,Hkv,1,D)

    @property
    def max_abs(self) -> float:
        return max(-self.low, self.high)


@dataclass(frozen=True)
class Precision:
    """In how many bits, and by which grids.

    weights      symmetric; one grid a tensor, or one an output channel
    activations  asymmetric; one static grid a tensor, or one a token, made for that token as it comes. Attention scores
                 and softmax outputs always have a static grid: a row of scores is over all keys, padding included.
    kv_cache     keys and values as attention reads them, asymmetric; one static grid for all, one static grid a channel
                 of a key-value head, or one a token and head, made for it as it comes
    """

    weights: int = 8
    activations: int = 8
    kv_cache: int = 8
    weights_per: PerWeight = "tensor"
    activations_per: PerActivation = "tensor"
    kv_cache_per: PerCache | None = None  # None: it is not quantized

    def __post_init__(self) -> None:
        for name, choices in (("weights", PerWeight), ("activations", PerActivation), ("kv_cache", PerCache)):
            per = getattr(self, f"{name}_per")
            if per is not None and per not in get_args(choices):
                raise InputError(f"{name}_per {unknown(per, get_args(choices))}")

    def __str__(self) -> str:
        cache = "" if self.kv_cache_per is None else f"KV{self.kv_cache}"
        return f"W{self.weights}A{self.activations}{cache}"

    def grid(self, site: Site, known: Range) -> Grid | RowGrids:
        """The grid or grids of what a site holds."""
        if site.part == WEIGHT:
            is_whole = self.weights_per == TENSOR
            return symmetric_grid(known.max_abs, self.weights) if is_whole else RowGrids(self.weights, True)
        bits = self.kv_cache if site.part in CACHED else self.activations
        per = self._per(site.part)
        if per == TOKEN:
            return RowGrids(bits, False)
        if per == CHANNEL and known.channels is not None:
            return asymmetric_grids(*known.channels, bits)
        return asymmetric_grid(known.low, known.high, bits)

    def _per(self, part: str) -> str | None:
        if part in CACHED:
            return self.kv_cache_per
        return TENSOR if part in (SCORES, SOFTMAX) else self.activations_per


@dataclass(frozen=True)
class Rounding:
    """What a site's grid does to what it holds."""

    zeroed: float  # share of the entries other than 0 that become 0
    sqnr: float  # signal to quantization noise, 10 log₁₀ Σx² ÷ Σ(x−x̂)², in dB; infinite without noise
    step: float  # of the grid; of several grids the mean

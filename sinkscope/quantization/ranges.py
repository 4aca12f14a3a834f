"""What a site holds, and the grid that is made for it."""

from dataclasses import dataclass

from sinkscope.quantization.arithmetic import Grid, asymmetric_grid, symmetric_grid
from sinkscope.quantization.sites import WEIGHT, Site


@dataclass(frozen=True)
class Range:
    """The entries of one site, over all calibration sequences."""

    low: float
    high: float
    median_abs: float  # of the magnitudes of a sequence, mean over sequences
    is_massive: bool  # a sequence has a massive activation by Sun et al.'s rule; only of hidden states

    @property
    def max_abs(self) -> float:
        return max(-self.low, self.high)


@dataclass(frozen=True)
class Bits:
    weights: int = 8
    activations: int = 8

    def __str__(self) -> str:
        return f"W{self.weights}A{self.activations}"

    def grid(self, site: Site, known: Range) -> Grid:
        if site.part == WEIGHT:
            return symmetric_grid(known.max_abs, self.weights)
        return asymmetric_grid(known.low, known.high, self.activations)


@dataclass(frozen=True)
class Rounding:
    """What a site's grid does to what it holds."""

    zeroed: float  # share of the entries other than 0 that become 0
    sqnr: float  # signal to quantization noise, 10 log₁₀ Σx² ÷ Σ(x−x̂)², in dB; infinite without noise

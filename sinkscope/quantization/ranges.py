"""What a site holds, and the grid that is made for it."""

from dataclasses import dataclass
from typing import get_args

import torch

from sinkscope.errors import InputError, unknown
from sinkscope.options.measuring import PerActivation, PerCache, PerWeight
from sinkscope.quantization.arithmetic import Grid, RowGrids, asymmetric_grid, asymmetric_grids, symmetric_grid
from sinkscope.quantization.attention import CACHED, SCORES, SOFTMAX
from sinkscope.quantization.sites import WEIGHT, Site

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

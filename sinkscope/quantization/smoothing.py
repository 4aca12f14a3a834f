"""Factors for the channels of a norm's output that make a number format lose less: SmoothQuant's and AWQ's.

The norm's output is divided by them and the weights that read it are multiplied (`models.norms.scaled_inputs`), so that
the model stays the same in full precision.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from sinkscope.attention.kernels import upcast
from sinkscope.models.projections import by_output
from sinkscope.quantization.formats import Encoding
from sinkscope.quantization.rounding import snap

AWQ_TOKENS = 512  # tokens of a norm's output on which AWQ's exponent is chosen
AWQ_STEPS = 20  # exponents that are tried, from 0 on
LEAST = 1e-5  # smallest magnitude of a channel


class NormOutputs:
    """Records the outputs of norms while a text is read, one sequence after the other."""

    def __init__(self, norms: Collection[nn.Module], sequences: int) -> None:
        self.norms, self.each = norms, math.ceil(AWQ_TOKENS / sequences)
        self.largest: dict[nn.Module, torch.Tensor] = {}  # (D,) of each channel
        self.sums: dict[nn.Module, torch.Tensor] = {}  # of magnitudes
        self.tokens: dict[nn.Module, int] = {}
        self.rows: dict[nn.Module, list[torch.Tensor]] = {}  # evenly spaced tokens of each sequence, in main memory

    @contextmanager
    def recorded(self) -> Iterator[None]:
        with ExitStack() as hooks:
            for norm in self.norms:
                hooks.enter_context(norm.register_forward_hook(self._see))
            yield

    def _see(self, norm: nn.Module, args: Any, output: torch.Tensor) -> None:
        rows = upcast(output.detach()).flatten(0, -2)
        magnitudes = rows.abs()
        largest = magnitudes.amax(0)
        self.largest[norm] = torch.maximum(self.largest.get(norm, largest), largest)
        self.sums[norm] = self.sums.get(norm, torch.zeros_like(largest)) + magnitudes.sum(0)
        self.tokens[norm] = self.tokens.get(norm, 0) + len(rows)
        self.rows.setdefault(norm, []).append(rows[:: math.ceil(len(rows) / self.each)].cpu())

    def mean(self, norm: nn.Module) -> torch.Tensor:
        return self.sums[norm] / self.tokens[norm]


def smoothing_factors(largest: torch.Tensor, readers: Iterable[Any], alpha: float) -> torch.Tensor:
    """Return SmoothQuant's factors (D,): max|x_j|^α ÷ max|w_j|^(1-α) (Xiao et al. 2023, equation 4).

    Args:
        largest: The largest magnitudes of a norm's output (D,).
        readers: Linear layers that read it; the maximum over w_j is that of all of them.
    """
    weights = torch.stack([upcast(by_output(each, each.weight)).abs().amax(0) for each in readers]).amax(0)
    return (largest.clamp_min(LEAST) ** alpha / weights.clamp_min(LEAST) ** (1 - alpha)).clamp_min(LEAST)


def awq_factors(mean: torch.Tensor, rows: torch.Tensor, readers: Iterable[Any], encoding: Encoding) -> torch.Tensor:
    """Return AWQ's factors (D,): mean|x_j|^r, with the exponent r for which outputs change least (Lin et al. 2024).

    Args:
        mean: The mean magnitudes of a norm's output (D,).
        rows: Some of its tokens (n,D).
        readers: Linear layers that read it, whose weights are rounded.
    """
    weights = [upcast(by_output(each, each.weight)).detach() for each in readers]
    best, least = torch.ones_like(mean), math.inf
    for step in range(AWQ_STEPS):
        factors = mean.clamp_min(LEAST) ** (step / AWQ_STEPS)
        factors /= (factors.max() * factors.min()).sqrt()
        errors = (rows @ (snap(encoding, weight * factors) / factors - weight).T for weight in weights)
        total = sum(float(error.square().sum()) for error in errors)
        if total < least:
            best, least = factors, total
    return best


def shuffled(factors: Mapping[Any, torch.Tensor], seed: int) -> dict[Any, torch.Tensor]:
    """Return the same factors at random channels, the control of chosen ones."""
    generator = torch.Generator().manual_seed(seed)
    return {
        norm: factor[torch.randperm(len(factor), generator=generator).to(factor.device)]
        for norm, factor in factors.items()
    }

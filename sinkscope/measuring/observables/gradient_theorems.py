"""The two theorems of GS, held against the measured gradients: what bounds ∇v (1), and a norm's Jacobian (2)."""

from dataclasses import dataclass
from typing import Self

import pandas as pd
import torch
from torch import nn

from sinkscope.attention.kernels import upcast
from sinkscope.attention.weights import AttentionRead, row_chunks
from sinkscope.measuring.accumulators import Accumulator
from sinkscope.measuring.observables.observable import long_form
from sinkscope.text.batch import Batch

GRAM_QUERIES = 64  # queries, evenly spaced, on which theorem 1's μ, σ² and ρ are measured


ROUND_OFF = 1e-5  # relative, allowed to theorem 1: equal g make its bounds equalities


@dataclass(frozen=True)
class NormGain:
    """The bound of a norm's Jacobian: ‖J‖ ≤ ‖γ‖∞ ÷ rms(x) for RMSNorm (GS theorem 2), ÷ std(x) for LayerNorm."""

    largest: float  # ‖γ‖∞
    centered: bool  # LayerNorm
    epsilon: float

    def divisor(self, x: torch.Tensor) -> torch.Tensor:
        """(B,T,D) → (B,T): √(mean square + ε), of the centered entries for LayerNorm."""
        if self.centered:
            x = x - x.mean(-1, keepdim=True)
        return (x.square().mean(-1) + self.epsilon).sqrt()


@torch.no_grad()
def norm_gain(module: nn.Module, width: int) -> NormGain:
    """A norm's gain, found by probing it: families store γ in several ways (Gemma's is 1 + weight).

    Entries of ±1 have mean 0 and mean square 1: half the difference of the norm's outputs for them and for their
    negative is γ without any bias. LayerNorm maps a constant input to its bias; RMSNorm does not.
    """
    weight = next(module.parameters(), torch.zeros(1))
    device = "cpu" if weight.is_meta else weight.device  # offloaded: accelerate moves its input
    signs = torch.ones(1, 1, width, dtype=weight.dtype, device=device)
    centered = torch.equal(module(signs.clone()), module(-signs))
    signs[..., 1::2] = -1
    gain = float(upcast(module(signs) - module(-signs)).abs().max()) / 2
    epsilon = next((value for name in ("variance_epsilon", "eps") if (value := getattr(module, name, None))), 0.0)
    return NormGain(gain * (1 + epsilon) ** 0.5, centered, epsilon)


class TheoremOne(Accumulator):
    """∇v_s = Σ_t a[t,s] g_t, and the bounds that follow from g_t = μ + ε_t (GS theorem 1), per layer and query head.

    With grouped queries ∇v_s is the sum over a group's heads; the bounds are those of one query head's part of it.
    μ is the mean of g over sequences and queries, σ² the largest mean ‖g_t - μ‖² of any query t, ρ the largest
    |mean (g_t - μ)·(g_t' - μ)| of any two. All are of the run's longest sequences: a shorter one has no g at some t.
    """

    def __init__(self, positions: int) -> None:
        self.positions = positions
        self.sums: dict[int, dict[str, torch.Tensor]] = {}
        self.moments: dict[int, dict[str, torch.Tensor]] = {}  # those of the bounds, by layer
        self.longest: dict[int, int] = {}  # the length of the sequences in `moments`
        self.groups: dict[int, int] = {}

    def add_upstream(self, layer: int, read: AttentionRead, upstream: torch.Tensor) -> torch.Tensor:
        """g (B,H,T,d) of one batch → each query head's Σ_t a[t,s] g_t, (B,H,P,d)."""
        batch, columns = read.batch, read.batch.columns(self.positions)
        shape = (*upstream.shape[:2], columns)
        routed = upstream.new_zeros(*shape, upstream.shape[-1])
        mass, second = upstream.new_zeros(shape), upstream.new_zeros(shape)
        for rows in row_chunks(read.length):
            cols = read.keys(rows, columns)
            weights = read.mix_weights(rows, cols).to(upstream.dtype)
            routed[:, :, cols] += weights.transpose(-1, -2) @ upstream[:, :, rows]
            mass[..., cols] += weights.sum(2)
            second[..., cols] += (weights * weights).sum(2)
        routed = batch.tokens_at(routed.transpose(1, 2), self.positions).transpose(1, 2)
        self.groups[layer] = read.query.shape[1] // read.key.shape[1]
        if read.length > self.longest.get(layer, 0):
            self.longest[layer], self.moments[layer] = read.length, {}
        if read.length == self.longest[layer]:
            self._add_moments(layer, batch, upstream, mass, second, routed)
        return routed

    def _add_moments(
        self,
        layer: int,
        batch: Batch,
        upstream: torch.Tensor,
        mass: torch.Tensor,
        second: torch.Tensor,
        routed: torch.Tensor,
    ) -> None:
        """Of the batch's sequences without padding: g (B,H,T,d), M and S (B,H,C), Σ_t a[t,s] g_t (B,H,P,d)."""
        if batch.valid is not None:
            full = batch.valid.all(1).to(upstream.device)
            upstream, mass, second, routed = upstream[full], mass[full], second[full], routed[full]
        length = upstream.shape[2]
        queries = torch.linspace(0, length - 1, min(GRAM_QUERIES, length)).round().long()
        chosen = upstream[:, :, queries.to(upstream.device)].double()
        _accumulate(
            self.moments[layer],
            sequences=torch.tensor(float(len(upstream)), dtype=torch.float64),
            mean=chosen.sum(0),
            gram=(chosen @ chosen.transpose(-1, -2)).sum(0),
            mass_squared=mass[..., : self.positions].double().square().sum(0),
            second=second[..., : self.positions].double().sum(0),
            measured=routed.double().square().sum((0, 3)),
        )

    def add_value_gradient(self, layer: int, gradient: torch.Tensor, routed: torch.Tensor, batch: Batch) -> None:
        """Compare autograd's ∇v (B,K,P,d) with the sum over each group of what its heads route there."""
        summed = routed.unflatten(1, (gradient.shape[1], -1)).sum(2)
        present = batch.present(self.positions)
        error, size = (gradient - summed).double().square().sum(-1), gradient.double().square().sum(-1)
        if present is not None:
            absent = ~present[:, None].to(error.device)
            error, size = error.masked_fill(absent, 0.0), size.masked_fill(absent, 0.0)
        _accumulate(self.sums.setdefault(layer, {}), identity_error=error.sum(0), identity_size=size.sum(0))

    def merge(self, other: Self) -> None:
        self.groups |= other.groups
        for layer, sums in other.sums.items():
            _accumulate(self.sums.setdefault(layer, {}), **sums)
        for layer, longest in other.longest.items():
            if longest > self.longest.get(layer, 0):
                self.longest[layer], self.moments[layer] = longest, {}
            if longest == self.longest[layer]:
                _accumulate(self.moments[layer], **other.moments[layer])

    def table(self) -> pd.DataFrame:
        frames = []
        for layer, sums in sorted(self.sums.items()):
            residual = (sums["identity_error"] / sums["identity_size"]).sqrt()
            residual = residual.repeat_interleave(self.groups[layer], dim=0)
            columns = {"identity_residual": residual} | _bounds(self.moments[layer])
            heads, positions = residual.shape
            frames.append(
                long_form(
                    {"layer": layer, "head": range(heads), "position": range(positions)},
                    {name: value.cpu().numpy() for name, value in columns.items()},
                )
            )
        table = pd.concat(frames, ignore_index=True)
        lower, measured, upper = table["lower_bound"], table["measured"], table["upper_bound"]
        slack = ROUND_OFF * upper
        return table.assign(holds=(lower - slack <= measured) & (measured <= upper + slack))


def _accumulate(sums: dict[str, torch.Tensor], **terms: torch.Tensor) -> None:
    for name, term in terms.items():
        sums[name] = sums[name] + term if name in sums else term


def _bounds(sums: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """M²‖μ‖² ≤ ‖∇v_s‖² ≤ M²‖μ‖² + σ²S + ρ(M² - S), for the loss summed over the run."""
    count = sums["sequences"].item()
    mean = sums["mean"] / count  # (H,T',d)
    mu = mean.mean(1, keepdim=True)
    across = (mean @ mu.transpose(-1, -2)).squeeze(-1)  # m_t·μ
    mu_squared = mu.square().sum((1, 2))  # (H,)
    gram = sums["gram"] / count - across[:, :, None] - across[:, None, :] + mu_squared[:, None, None]
    variance = gram.diagonal(dim1=1, dim2=2).amax(1)
    covariance = (gram - torch.diag_embed(gram.diagonal(dim1=1, dim2=2))).abs().amax((1, 2))
    mass_squared, second = sums["mass_squared"] / count, sums["second"] / count
    lower = mass_squared * mu_squared[:, None]
    upper = lower + variance[:, None] * second + covariance[:, None] * (mass_squared - second)
    return {"lower_bound": lower, "measured": sums["measured"] / count, "upper_bound": upper}

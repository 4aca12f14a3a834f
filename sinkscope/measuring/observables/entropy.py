"""The entropy of a sequence's states: compression valleys (arXiv 2510.06477).

The states X (T,D) of a layer have singular values σ, and p_j = σ_j² ÷ Σσ². Their matrix-based entropy −Σ p_j log p_j
falls where one token's norm dominates. With M = ‖x_0‖², R = Σ_{i>0} ‖x_i‖², c = M/R and α = Σ_{i>0} ‖x_i‖² cos²(x_i,
x_0) ÷ R, p = (c + α)/(c + 1) is a lower bound of p_1 and gives an upper bound of the entropy. Both are algebra: only
how tight they are is a finding.
"""

from typing import ClassVar

import torch

from sinkscope.measuring.observables.observable import Observable, Reading
from sinkscope.measuring.observables.reductions import filled
from sinkscope.results.tables import SEQUENCE, Column
from sinkscope.text.batch import Batch

ENTROPIES = (
    Column("entropy", "matrix-based entropy of the layer's output ÷ log min(T, D)"),
    Column("entropy_without_first", "the same of all tokens but position 0"),
    Column("entropy_rescaled", "the same with position 0 at the median norm of the others, which keeps its direction"),
    Column("entropy_bound", "upper bound of the entropy that anisotropy_bound gives"),
    Column("anisotropy", "p_1, the largest squared singular value ÷ the sum of all"),
    Column("anisotropy_bound", "(c + α) ÷ (c + 1), which is at most p_1"),
    Column("norm_share", "c, the squared norm of position 0 ÷ those of all other tokens together"),
    Column("alignment", "α, cos² of the other tokens' states and position 0's, weighted by their squared norms"),
)


class Entropy(Observable):
    """Measures the entropy of each layer's output: `entropy` (means over sequences) and `entropy_by_sequence`."""

    name = "entropy"
    about = "entropy of the states of each layer with and without position 0, and its bounds (compression valleys)"
    sites = ("layer_out",)
    by_default = False
    columns: ClassVar = {"entropy": ENTROPIES, "entropy_by_sequence": (SEQUENCE, *ENTROPIES)}

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        states = batch.tokens_at(reading.tensor, int(batch.lengths.max())).double()  # zero past a sequence's end
        statistics = valley(states, batch.on(states.device, "lengths").to(states))
        self.statistics["entropy"].add(statistics, layer=layer)
        self.statistics["entropy_by_sequence"].add(batch, statistics, layer=layer)


def spectrum(x: torch.Tensor) -> torch.Tensor:
    """Return the squared singular values ÷ their sum, in ascending order, (…,T,D) → (…,min(T,D)).

    They are the eigenvalues of the smaller Gram matrix, whose rounding errors are relative to the largest of them: in
    float64 they change no entropy visibly.
    """
    values = torch.linalg.eigvalsh(x @ x.mT if x.shape[-2] <= x.shape[-1] else x.mT @ x).clamp(min=0.0)
    return values / values.sum(-1, keepdim=True)


def entropy(p: torch.Tensor) -> torch.Tensor:
    """Return −Σ p log p in nats, (…,N) → (…)."""
    return -torch.special.xlogy(p, p).sum(-1)


def valley(x: torch.Tensor, lengths: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the columns of `entropy` for states (B,T,D) with zeros past each sequence's length (B,), in float64."""
    norms = torch.linalg.vector_norm(x, dim=-1)
    first, present = norms[:, 0], torch.arange(1, x.shape[1], device=x.device) < lengths[:, None]
    rescaled = x.clone()
    rescaled[:, 0] *= (filled(norms[:, 1:], present, torch.nan).nanmedian(-1).values / first)[:, None]
    energy = norms[:, 1:].square().sum(-1)
    share = first.square() / energy
    alignment = ((x[:, 1:] @ x[:, 0, :, None])[..., 0] / first[:, None]).square().sum(-1) / energy
    bound, rank = (share + alignment) / (share + 1), lengths.clamp(max=x.shape[-1])
    two = torch.stack([bound, 1 - bound], dim=-1).clamp(0, 1)
    most = entropy(two) + two[..., 1] * (rank - 1).log()
    p = spectrum(x)
    largest = [tokens.clamp(min=2, max=x.shape[-1]).log() for tokens in (lengths, lengths - 1)]  # one token has 0
    return {
        "entropy": entropy(p) / largest[0],
        "entropy_without_first": entropy(spectrum(x[:, 1:])) / largest[1],
        "entropy_rescaled": entropy(spectrum(rescaled)) / largest[0],
        "entropy_bound": torch.where(bound * rank >= 1, most / largest[0], 1.0),  # p ≥ 1/r, else it says nothing
        "anisotropy": p[:, -1],
        "anisotropy_bound": bound,
        "norm_share": share,
        "alignment": alignment,
    }

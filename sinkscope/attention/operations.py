"""Attention operations beside softmax (WSE §7): how a row of logits s becomes the weights of the values.

    mix[t] = Σ_s sim(l[t,s]) v[s] / Z[t]        l[t,s] = scaling · φ(q_t)·φ(k_s)

What is measured reads |sim| ÷ Σ|sim| = exp(ℓ - lse) in place of softmax weights, the paper's proxy, with ℓ = log|sim|
and lse = log Σ|sim|; the mix alone needs sim ÷ Z. φ acts in front of the taps (retrofits/operation.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

Elementwise = Callable[[torch.Tensor], torch.Tensor]
Divisor = Literal["none", "sum", "at-least-1"]  # Z: 1, Σ sim, or max(|Σ sim|, 1)

MASKED = torch.finfo(torch.float16).min / 2  # a logit below this was put there by a mask

# similarity → log|sim| of logits
LOG_SIMILARITIES: dict[str, Elementwise] = {
    "exp": lambda s: s,
    "sigmoid": F.logsigmoid,
    "elu": lambda s: torch.where(s > 0, s.clamp(min=0).log1p(), s),
    "identity": lambda s: s.abs().clamp(min=torch.finfo(s.dtype).tiny).log(),
}
# and sim itself, 0 with a gradient of 0 where a mask was, but of "exp", which may overflow
SIMILARITIES: dict[str, Elementwise] = {
    "sigmoid": torch.sigmoid,
    "elu": lambda s: F.elu(s) + 1,
    "identity": lambda s: s.masked_fill(s <= MASKED, 0.0),
}


@dataclass(frozen=True)
class Operation:
    """One row of WSE's table of attention operations.

    Attributes:
        similarity: a name of LOG_SIMILARITIES.
        divisor: Z.
        factor: α of Z = Σ/α, which the sum divides (WSE table 14); 1 is the usual sum.
        power: p of Z = (Σ simᵖ)^(1/p); 1 is the usual sum.
    """

    similarity: str
    divisor: Divisor
    factor: float = 1.0
    power: float = 1.0

    def log_similarity(self, logits: torch.Tensor) -> torch.Tensor:
        """ℓ = log|sim|, finite."""
        return LOG_SIMILARITIES[self.similarity](logits)

    def weights(self, logits: torch.Tensor, with_lse: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of logits (B,H,R,T) over all keys, MASKED or less where the query may not see → sim ÷ Z of the same
        shape, 0 where it may not, and lse = log Σ|sim| (B,H,R), the dtype's minimum for a row that sees nothing; NaN
        where it is not asked for and sim ÷ Z does not need it.
        """
        if self.similarity == "exp":
            return self._exponential(logits)
        sim = SIMILARITIES[self.similarity](logits)
        lse = logits.new_full(logits.shape[:-1], torch.nan)
        if with_lse:
            with torch.no_grad():
                lse = _log_sum(self.log_similarity(logits), logits > MASKED)
        return sim if self.divisor == "none" else sim / self._divisor_of(sim), lse

    def _exponential(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """As `weights`, in logarithms: e^s may overflow."""
        seen = logits > MASKED
        logits = logits.masked_fill(~seen, 0.0)  # of which the gradient is finite
        lse = _log_sum(logits, seen)
        log_divisor = lse if self.power == 1 else _log_sum(logits * self.power, seen) / self.power
        weights = (logits - log_divisor[..., None]).masked_fill(~seen, -torch.inf).exp()
        return weights * self.factor, lse

    def _divisor_of(self, sim: torch.Tensor) -> torch.Tensor:
        """Z (…,1), which is not 1 everywhere."""
        total = sim.sum(-1, keepdim=True)
        if self.divisor == "at-least-1":
            return total.abs().clamp(min=1.0)
        return total.clamp(min=torch.finfo(sim.dtype).tiny)  # 0 in a row that sees nothing


def _log_sum(log: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    return log.masked_fill(~seen, torch.finfo(log.dtype).min).logsumexp(-1)

"""Gradient sinks: what backpropagation sees at each token (GS §2, eq. 3; §3 and §4).

The loss is the causal-LM loss exactly as in training: cross-entropy summed over the predicted tokens of the whole run
÷ their number, so that the batch size changes nothing. Every gradient is reduced the moment it appears.
"""

from functools import partial

import numpy as np
import pandas as pd
import torch

from sinkscope.attention_weights import AttentionRead, row_chunks
from sinkscope.batch import Batch
from sinkscope.observables.observable import GradientObservable, Mean, Settings, long_form
from sinkscope.seam import grouped_matmul, upcast

ALL_HEADS = -1
GRAM_QUERIES = 64  # queries, evenly spaced, on which theorem 1's μ, σ² and ρ are measured
RATIOS = ("input_norm", "bloat", "compress", "change")


class Gradient(GradientObservable):
    """Tables `gradient`, `gradient_ratio` and `gradient_check`.

    Ratios are taken per sequence and token; a row is their mean over sequences. Tokens without any gradient (the last
    ones predict nothing) have no ratio.
    """

    name = "gradient"
    about = "gradients of query, key and value by token; bloat, compress and change; GS's theorem 1"
    sites = (
        "layer_in", "attn_norm", "attention", "attn_mix", "attn_out", "mid", "mlp_norm", "mlp_out", "layer_out",
    )  # fmt: skip

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.pathways: dict[tuple[int, str], torch.Tensor] = {}  # Σ over all sequences of the gradient, (heads,P,d)
        self.ratios = {name: Mean() for name in RATIOS}
        self.theorem = TheoremOne(settings.positions)
        self._seen: dict[tuple[int, str], torch.Tensor] = {}  # gradients of this batch that a later one is held against
        self._norms: dict[tuple[int, str], torch.Tensor] = {}  # forward norms of the branches' inputs
        self._routed: dict[int, torch.Tensor] = {}  # Σ_t a[t,s] g_t by layer, until ∇v_s comes

    # ------------------------------------------------------------------ the forward pass: hang up the hooks

    def watch(self, layer: int, site: str, tensor: torch.Tensor, batch: Batch) -> None:
        if site in ("layer_in", "mid"):
            self._norms[layer, site] = torch.linalg.vector_norm(upcast(tensor.detach()), dim=-1)
        tensor.register_hook(partial(self._on_stream, layer, site, batch))

    def watch_attention(self, layer: int, read: AttentionRead, mix: torch.Tensor, batch: Batch) -> None:
        for pathway in ("query", "key", "value"):
            getattr(read, pathway).register_hook(partial(self._on_pathway, layer, pathway, batch))
        mix.register_hook(partial(self._on_mix, layer, read.detached()))

    # -------------------------------------------------------------- the backward pass: last layer first

    def _on_pathway(self, layer: int, pathway: str, batch: Batch, gradient: torch.Tensor) -> None:
        """∇ of query (B,H,T,d), key or value (B,K,T,d): summed over the batch as an optimiser step would see it."""
        gradient = batch.tokens_at(upcast(gradient).transpose(1, 2), self.settings.positions)
        total = gradient.sum(0, dtype=torch.float64).transpose(0, 1)  # (heads,P,d)
        known = self.pathways.get((layer, pathway))
        self.pathways[layer, pathway] = total if known is None else known + total
        if pathway == "value":
            self.theorem.add_value_gradient(layer, gradient.transpose(1, 2), self._routed.pop(layer), batch)

    def _on_mix(self, layer: int, read: AttentionRead, gradient: torch.Tensor) -> None:
        """g = ∇y (B,T,H,d), the gradient of each head's mix."""
        upstream = upcast(gradient).transpose(1, 2)
        self._routed[layer] = self.theorem.add_upstream(layer, read, upstream)

    def _on_stream(self, layer: int, site: str, batch: Batch, gradient: torch.Tensor) -> None:
        """∇ at a site of the residual stream, (B,T,D)."""
        gradient = upcast(gradient).view(*batch.token_ids.shape, -1)
        self._seen[layer, site] = gradient
        if site == "mid":
            self._add_ratios(layer, "mlp", ("mid", "mlp_norm", "mlp_out", "layer_out"), batch)
        if site == "layer_in":
            self._add_ratios(layer, "attn", ("layer_in", "attn_norm", "attn_out", "mid"), batch)
            for key in [key for key in self._seen if key[0] == layer]:
                del self._seen[key]

    def _add_ratios(self, layer: int, branch: str, sites: tuple[str, str, str, str], batch: Batch) -> None:
        """GS eq. 3 for one branch: its input x, its norm's output y, its own output r, the stream behind it z."""
        x, y, r, z = (self._seen.get((layer, site)) for site in sites)
        nothing = torch.full_like(self._norms[layer, sites[0]].view(*batch.token_ids.shape), torch.nan)
        norm = partial(torch.linalg.vector_norm, dim=-1)
        behind = None if z is None else norm(z)
        of_norm = None if y is None else norm(y)
        statistics = {
            "input_norm": self._norms[layer, sites[0]].view(*batch.token_ids.shape),
            "bloat": nothing if of_norm is None or r is None else of_norm / norm(r),
            "compress": nothing if of_norm is None or x is None or z is None else norm(x - z) / of_norm,
            "change": nothing if x is None or behind is None else norm(x) / behind,
        }
        positions = self.settings.positions
        for name, statistic in statistics.items():
            statistic = batch.at_positions(statistic, positions)
            present = batch.present(positions)
            measured = statistic.isfinite() if present is None else statistic.isfinite() & present.to(statistic.device)
            self.ratios[name].add((layer, branch), statistic, measured)

    # ------------------------------------------------------------------------------------------ the tables

    def tables(self) -> dict[str, pd.DataFrame]:
        return {"gradient": self._pathway_table(), "gradient_ratio": self._ratio_table(), "gradient_check": self.theorem.table()}

    def _pathway_table(self) -> pd.DataFrame:
        frames = []
        for (layer, pathway), total in sorted(self.pathways.items()):
            norms = torch.linalg.vector_norm(total, dim=-1) * self.loss_scale
            together = norms.square().sum(0, keepdim=True).sqrt()
            heads = [ALL_HEADS, *range(len(norms))]
            frames.append(
                long_form(
                    {"layer": layer, "pathway": pathway, "head": heads, "position": range(norms.shape[1])},
                    {"grad_norm": torch.cat([together, norms]).cpu().numpy()},
                )
            )
        return pd.concat(frames, ignore_index=True)

    def _ratio_table(self) -> pd.DataFrame:
        frames = [
            long_form(
                {"layer": layer, "branch": branch, "position": range(self.settings.positions)},
                {name: mean[layer, branch] for name, mean in self.ratios.items()},
            )
            for layer, branch in self.ratios["change"].keys()  # noqa: SIM118 (not a dict)
        ]
        return pd.concat(frames, ignore_index=True)


class TheoremOne:
    """∇v_s = Σ_t a[t,s] g_t, and the bounds that follow from g_t = μ + ε_t (GS theorem 1), per layer and query head.

    Under grouped queries ∇v_s sums the heads of a group; the bounds are those of one query head's share of it.
    μ is the mean of g over sequences and queries, σ² the largest mean ‖g_t - μ‖² of any query t, ρ the largest
    |mean (g_t - μ)·(g_t' - μ)| of any two: means over the run's sequences. Padded sequences are left out of these.
    """

    def __init__(self, positions: int) -> None:
        self.positions = positions
        self.sums: dict[int, dict[str, torch.Tensor]] = {}
        self.groups: dict[int, int] = {}

    def add_upstream(self, layer: int, read: AttentionRead, upstream: torch.Tensor) -> torch.Tensor:
        """g (B,H,T,d) of one batch → each query head's Σ_t a[t,s] g_t, (B,H,P,d)."""
        batch, columns = read.batch, read.batch.columns(self.positions)
        shape = (*upstream.shape[:2], columns)
        routed = upstream.new_zeros(*shape, upstream.shape[-1])
        mass, second = upstream.new_zeros(shape), upstream.new_zeros(shape)
        for rows in row_chunks(read.length):
            cols = slice(0, min(columns, rows.stop))
            weights, _ = read.weights(rows, cols)
            weights = weights.to(upstream.dtype)
            routed[:, :, cols] += weights.transpose(-1, -2) @ upstream[:, :, rows]
            mass[..., cols] += weights.sum(2)
            second[..., cols] += (weights * weights).sum(2)
        routed = batch.tokens_at(routed.transpose(1, 2), self.positions).transpose(1, 2)
        self.groups[layer] = read.query.shape[1] // read.key.shape[1]
        if batch.valid is None:
            queries = torch.linspace(0, read.length - 1, min(GRAM_QUERIES, read.length)).round().long()
            chosen = upstream[:, :, queries.to(upstream.device)].double()
            self._add(
                layer,
                sequences=torch.tensor(float(len(upstream)), dtype=torch.float64),
                mean=chosen.sum(0),
                gram=(chosen @ chosen.transpose(-1, -2)).sum(0),
                mass_squared=mass[..., : self.positions].double().square().sum(0),
                second=second[..., : self.positions].double().sum(0),
                measured=routed.double().square().sum((0, 3)),
            )
        return routed

    def add_value_gradient(self, layer: int, gradient: torch.Tensor, routed: torch.Tensor, batch: Batch) -> None:
        """∇v (B,K,P,d), as autograd has it, against the sum over its group of what the heads route there."""
        summed = routed.unflatten(1, (gradient.shape[1], -1)).sum(2)
        present = batch.present(self.positions)
        error, size = (gradient - summed).double().square().sum(-1), gradient.double().square().sum(-1)
        if present is not None:
            absent = ~present[:, None].to(error.device)
            error, size = error.masked_fill(absent, 0.0), size.masked_fill(absent, 0.0)
        self._add(layer, identity_error=error.sum(0), identity_size=size.sum(0))

    def _add(self, layer: int, **sums: torch.Tensor) -> None:
        known = self.sums.setdefault(layer, {})
        for name, value in sums.items():
            known[name] = known[name] + value if name in known else value

    def table(self) -> pd.DataFrame:
        frames = []
        for layer, sums in sorted(self.sums.items()):
            residual = (sums["identity_error"] / sums["identity_size"]).sqrt()
            residual = residual.repeat_interleave(self.groups[layer], dim=0)
            columns = {"identity_residual": residual} | self._bounds(sums, residual)
            heads, positions = residual.shape
            frames.append(
                long_form(
                    {"layer": layer, "head": range(heads), "position": range(positions)},
                    {name: value.cpu().numpy() for name, value in columns.items()},
                )
            )
        table = pd.concat(frames, ignore_index=True)
        inside = (table["lower_bound"] <= table["measured"]) & (table["measured"] <= table["upper_bound"])
        return table.assign(holds=inside)

    def _bounds(self, sums: dict[str, torch.Tensor], like: torch.Tensor) -> dict[str, torch.Tensor]:
        """M²‖μ‖² ≤ ‖∇v_s‖² ≤ M²‖μ‖² + σ²S + ρ(M² - S), of the loss summed over the run (lengths squared)."""
        if "gram" not in sums:
            return {name: torch.full_like(like, torch.nan) for name in ("lower_bound", "measured", "upper_bound")}
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

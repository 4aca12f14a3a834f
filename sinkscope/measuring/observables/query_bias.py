"""The query bias as the cause of a sink: Δ, γ and the keys of the positions alone (NU §3.2 and §4).

A query is W_q x + b_Q, so that each logit holds a term of the key's token alone, Δ_j = b_Qᵀ W_k x_j: it raises token j
for all queries alike. γ = W_kᵀ b_Q says which coordinates of x_j it reads, and EPE_i (positions.py) what a learned
position adds to them.

Computed from the projections alone: without the key's bias, before any rotation and without the logits' 1/√d. With
rotary positions Δ is therefore the un-rotated product, which is part of the logits at distance 0 only.
"""

import re
from typing import Any, ClassVar, Self

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from sinkscope.attention.kernels import upcast
from sinkscope.errors import InputError
from sinkscope.measuring.accumulators import Accumulator, Lists
from sinkscope.measuring.observables.observable import (
    NO_ATTENTION,
    BySequence,
    Observable,
    Reading,
    Settings,
    long_form,
)
from sinkscope.models.family import Family
from sinkscope.models.positions import effective_positions, massive_coordinates
from sinkscope.models.projections import check_plain, projections
from sinkscope.results.tables import COORDINATE, POSITION, SEQUENCE, Column
from sinkscope.text.batch import Batch

ALL_HEADS = -1
NO_QUERY_BIAS = "its queries have no bias"
BINS = 60  # of Δ's histogram, a layer
# q_norm, q_layernorm, query_layernorm, k_norm, qk_norm, …: in front of the logits, unlike a norm of the heads' mix
QUERY_OR_KEY_NORM = re.compile(r"(^|[._])(q|k|qk|query|key)_\w*(norm|ln)\w*$")


class QueryBias(Observable):
    """Tables `query_bias` (also by sequence), `gamma` and `delta_distribution`, of layers whose queries have a bias.

    Head -1 is all heads together: the sum of their Δ, and the alignment of their concatenated vectors.
    """

    name = "query-bias"
    about = "what the query bias adds to each key's logits, by layer and position, and the coordinates it rests on"
    sites = ("layer_in", "attn_norm")
    columns: ClassVar = {
        "query_bias": (
            Column("head", "query head, from 0 on; -1: all heads together", kind="whole"),
            POSITION,
            Column("delta_mean", "Δ = b_Qᵀ W_k x of this position's token, mean over sequences"),
            Column("delta_std", "its standard deviation over sequences"),
            Column("key_alignment", "cos(W_k EPE, b_Q) of this position; NaN without learned positions (NU §4.2.2)"),
        ),
        "query_bias_by_sequence": (
            SEQUENCE,
            Column("delta", "Δ of position 0, all heads together"),
            Column("delta_later", "mean over all later positions"),
            Column("delta_later_std", "standard deviation over them"),
        ),
        "gamma": (
            COORDINATE,
            Column("gamma", "entry of γ = W_kᵀ b_Q, sum over heads (NU §4.2.3)"),
            Column("epe_0", "entry of position 0's effective positional encoding; NaN without learned positions"),
            Column("is_massive_epe", "whether that entry is massive", kind="truth"),
        ),
        "delta_distribution": (
            Column("group", "tokens: position 0 or later", kind="text"),
            Column("delta", "middle of the histogram's bin of Δ, all heads together"),
            Column("count", "tokens in the bin", kind="whole"),
        ),
    }

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.site = "attn_norm"
        self.directions: dict[int, torch.Tensor] = {}  # u (H,D), Δ_j^h = u_h · x_j
        self.moments: dict[int, Moments] = {}
        self.by_sequence = BySequence()
        self.deltas: Lists[int, torch.Tensor] = Lists(list)  # of all heads together, (B,P); NaN past a sequence's end

    @classmethod
    def inapplicable(cls, model: PreTrainedModel, family: Family) -> str | None:
        if not family.has_attention:
            return NO_ATTENTION
        if any(family.block(layer).wiring == "unknown" for layer in family.attentions(model)):
            return "what its attention reads is not known: the sums of its layers are not"
        if not family.qkv:
            return f"how '{family.name}' keeps its query projection is not known"
        attentions = list(family.attentions(model).values())
        modules: list[Any] = [attention.get_submodule(family.qkv[0]) for attention in attentions]
        if all(getattr(module, "bias", None) is None for module in modules):
            return NO_QUERY_BIAS
        norm = next((path for path, _ in attentions[0].named_modules() if QUERY_OR_KEY_NORM.search(path)), None)
        if norm is not None:
            return f"a norm ({norm}) stands between the projection of queries or keys and the logits"
        modules += [attention.get_submodule(path) for attention in attentions for path in family.qkv[1:2]]  # of keys
        try:
            for module in modules:
                check_plain(module)
        except InputError as error:
            return str(error)
        if any(module.weight.is_meta for module in modules):
            return "its weights cannot be read here: they are offloaded"
        return None

    def prepare(self, model: PreTrainedModel, family: Family, predicted: int) -> None:
        self.model, self.family = model, family
        self.site = read_by_attention(family)
        for layer in family.attentions(model):
            weight, bias = key_weight_and_query_bias(model, family, layer)
            if bias is not None:
                self.directions[layer] = bias_directions(weight, bias)

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        if site != self.site or layer not in self.directions:
            return
        x = upcast(reading.tensor)
        by_head = batch.tokens_at(x @ self.directions[layer].to(x).T, int(batch.lengths.max()))
        delta = torch.cat([by_head.sum(-1, keepdim=True), by_head], dim=-1)  # (B,P,1+H)
        present = batch.present(delta.shape[1])
        if present is None:
            present = torch.ones(delta.shape[:2], dtype=torch.bool)
        present = present.to(delta.device)
        self.moments.setdefault(layer, Moments()).add(delta, present)
        together = delta[..., 0].masked_fill(~present, torch.nan)
        self.deltas[layer].append(together)
        later = together[:, 1:]
        mean = later.nanmean(1)
        deviation = (later - mean[:, None]).square().nanmean(1).sqrt()
        statistics = {"delta": together[:, 0], "delta_later": mean, "delta_later_std": deviation}
        self.by_sequence.add(batch, statistics, layer=layer)

    @torch.no_grad()
    def tables(self) -> dict[str, pd.DataFrame]:
        longest = max(moments.mean.shape[0] for moments in self.moments.values())
        learned = bool(self.family.position_embedding)
        positions = effective_positions(self.model, self.family, longest) if learned else None
        layers = sorted(self.moments)
        return {
            "query_bias": pd.concat([self._by_position(layer, positions) for layer in layers], ignore_index=True),
            "query_bias_by_sequence": self.by_sequence.table(),
            "gamma": pd.concat([self._by_coordinate(layer, positions) for layer in layers], ignore_index=True),
            "delta_distribution": pd.concat([self._distribution(layer) for layer in layers], ignore_index=True),
        }

    def _by_position(self, layer: int, positions: torch.Tensor | None) -> pd.DataFrame:
        mean, variance = (moment.T.cpu().numpy() for moment in (self.moments[layer].mean, self.moments[layer].variance))
        aligned = np.full(mean.shape, np.nan)
        if positions is not None:
            weight, bias = key_weight_and_query_bias(self.model, self.family, layer)
            aligned = key_alignment(positions[: mean.shape[1]], weight, bias).T.cpu().numpy()
        heads = [ALL_HEADS, *range(len(mean) - 1)]
        return long_form(
            {"layer": layer, "head": heads, "position": range(mean.shape[1])},
            {"delta_mean": mean, "delta_std": np.sqrt(variance), "key_alignment": aligned},
        )

    def _by_coordinate(self, layer: int, positions: torch.Tensor | None) -> pd.DataFrame:
        gamma = self.directions[layer].sum(0).cpu().numpy()
        first = np.full(gamma.shape, np.nan)
        massive: list[int] = []
        if positions is not None:
            first = positions[0].double().cpu().numpy()
            massive = massive_coordinates(positions[0])
        coordinates = np.arange(len(gamma))
        columns = {"gamma": gamma, "epe_0": first, "is_massive_epe": np.isin(coordinates, massive)}
        return long_form({"layer": layer, "coordinate": coordinates}, columns)

    def _distribution(self, layer: int) -> pd.DataFrame:
        parts = self.deltas[layer]
        groups = {
            "position 0": torch.cat([part[:, 0] for part in parts]),
            "later": torch.cat([part[:, 1:].flatten() for part in parts]),
        }
        found = {name: values[~values.isnan()].cpu().numpy() for name, values in groups.items()}
        edges = np.histogram_bin_edges(np.concatenate(list(found.values())), BINS)
        counts = np.stack([np.histogram(values, edges)[0] for values in found.values()])
        table = long_form({"layer": layer, "group": list(found), "bin": range(BINS)}, {"count": counts})
        return table.assign(delta=np.tile((edges[1:] + edges[:-1]) / 2, len(found))).drop(columns="bin")


def read_by_attention(family: Family) -> str:
    """The site that attention projects its queries and keys from."""
    return "attn_norm" if "attn_norm" in family.sites else "layer_in"


class Moments(Accumulator):
    """Running mean and population variance over sequences, (P,…) for the positions P seen so far, in float64.

    Batches are merged by their deviations (Chan et al. 1979), so that a small variance beside a large mean is not lost.
    """

    def __init__(self) -> None:
        self.count = self.mean = self._squares = torch.zeros(0, 0)

    @property
    def variance(self) -> torch.Tensor:
        return self._squares / self.count

    def add(self, x: torch.Tensor, present: torch.Tensor) -> None:
        """Add x (B,P,H); `present` (B,P) says which sequences have which position."""
        x, present = x.double(), present[..., None]
        count = present.sum(0)  # (P,1)
        mean = x.masked_fill(~present, 0.0).sum(0) / count
        squares = (x - mean).square().masked_fill(~present, 0.0).sum(0)
        self._add(count, mean, squares)

    def merge(self, other: Self) -> None:
        self._add(other.count, other.mean, other._squares)

    def _add(self, count: torch.Tensor, mean: torch.Tensor, squares: torch.Tensor) -> None:
        if not self.mean.numel():
            self.count, self.mean, self._squares = count, mean, squares
            return
        longest = max(len(mean), len(self.mean))
        old, new = (
            [F.pad(part, (0, 0, 0, longest - len(part))) for part in parts]
            for parts in ((self.count, self.mean, self._squares), (count, mean, squares))
        )
        self.count = old[0] + new[0]
        apart = new[1] - old[1]
        self.mean = old[1] + apart * new[0] / self.count
        self._squares = old[2] + new[2] + apart.square() * old[0] * new[0] / self.count


def key_weight_and_query_bias(model: PreTrainedModel, family: Family, layer: int) -> tuple[torch.Tensor, Any]:
    """W_k (K,d,D) and b_Q (H,d) of one layer, copied; None where it has no query bias."""
    projected = projections(model, family, layer)
    bias = projected["query"].bias
    return projected["key"].weight.detach(), None if bias is None else bias.detach()


def bias_directions(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """u_h = W_k^{g(h)}ᵀ b_Q^h of every query head, (H,D) in float64: Δ_j^h = u_h · x_j, and Σ_h u_h is γ (NU §4.2.3).

    W_k (K,d,D), b_Q (H,d); query head h reads the keys of head g(h) = h ÷ (H/K).
    """
    grouped = bias.double().view(len(weight), -1, bias.shape[-1])  # (K,H/K,d)
    return torch.einsum("kgd,kdc->kgc", grouped, weight.double()).flatten(0, 1)


def key_alignment(vectors: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """cos(W_k x, b_Q) for vectors x (P,D): of all heads' vectors concatenated and of each query head, (P,1+H) float64.

    A key head that serves several query heads is compared with each (NU §4.2.2, for the EPE).
    """
    keys = torch.einsum("kdc,pc->pkd", weight.double(), vectors.to(weight.device).double())
    keys = keys.repeat_interleave(len(bias) // len(weight), dim=1)  # (P,H,d)
    bias = bias.double()
    together = torch.cosine_similarity(keys.flatten(1), bias.flatten()[None], dim=-1, eps=0.0)
    return torch.cat([together[:, None], torch.cosine_similarity(keys, bias[None], dim=-1, eps=0.0)], dim=1)

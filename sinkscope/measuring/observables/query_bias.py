"""The query bias as the cause of a sink (NU §3.2 and §4): three observables.

A query is W_q x + b_Q, so each logit has a term that depends only on the key's token, Δ_j = b_Qᵀ W_k x_j: it raises
token j equally for all queries. γ = W_kᵀ b_Q gives the coordinates of x_j that it reads, and EPE_i (positions.py) what
a learned position adds to them. Δ is computed from the projections: without the key's bias, before any rotation and
without the logits' 1/√d. With rotary positions Δ is therefore the product before rotation, which is part of the logits
only at distance 0.
"""

import re
from typing import Any, ClassVar, Self

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from sinkscope.attention.kernels import repeat_heads, upcast
from sinkscope.attention.weights import AttentionRead, keys_seen
from sinkscope.errors import InputError
from sinkscope.measuring.observables.observable import (
    Accumulator,
    Accumulators,
    Lists,
    Observable,
    Reading,
    Settings,
    Sums,
)
from sinkscope.measuring.observables.reductions import ALL_HEADS, GROUPS, long_table, mean_over
from sinkscope.models.family import Family
from sinkscope.models.projections import (
    Projection,
    check_plain,
    effective_positions,
    massive_coordinates,
    projections,
    without_effective_positions,
)
from sinkscope.results.tables import COORDINATE, POSITION, SEQUENCE, Column
from sinkscope.text.batch import Batch

NO_QUERY_BIAS = "its queries have no bias"
BINS = 60  # bins of Δ's histogram in each layer
# q_norm, q_layernorm, query_layernorm, k_norm, qk_norm, …: norms before the logits, unlike a norm of the heads' mix
QUERY_OR_KEY_NORM = re.compile(r"(^|[._])(q|k|qk|query|key)_\w*(norm|ln)\w*$")


class QueryBias(Observable):
    """Measures Δ and γ in layers whose queries have a bias; Δ of all heads together is the sum over the heads."""

    name = "query-bias"
    about = "the term of each key's logits from the query bias, by layer and position, and coordinates that it reads"
    sites = ("layer_in", "attn_norm")
    columns: ClassVar = {
        "query_bias": (
            Column("head", "query head, from 0 on; -1: all heads together", kind="whole"), POSITION,
            Column("delta_mean", "Δ = b_Qᵀ W_k x of this position's token, mean over sequences"),
            Column("delta_std", "its standard deviation over sequences"),
            Column("key_alignment", "cos(W_k EPE, b_Q) of this position; NaN without learned positions (NU §4.2.2)"),
        ),
        "query_bias_by_sequence": (
            SEQUENCE,
            Column("delta", "Δ of position 0, all heads together"),
            Column("delta_later", "mean over all later positions"),
            Column("delta_later_std", "standard deviation over all later positions"),
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
    }  # fmt: skip

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.directions: dict[int, torch.Tensor] = {}  # u (H,D), Δ_j^h = u_h · x_j
        self.moments: Accumulators[int] = Accumulators()  # by layer
        self.deltas: Lists[int, torch.Tensor] = Lists(list)  # all heads together, (B,P); NaN past a sequence's end

    @classmethod
    def inapplicable(cls, model: PreTrainedModel, family: Family) -> str | None:
        if family.without_attention:
            return family.without_attention
        if any(family.block(layer).wiring == "unknown" for layer in family.attentions(model)):
            return "the input of its attention is not known, because the sums of its layers are unknown"
        if not family.qkv:
            return f"the query projection of '{family.name}' is not known"
        attentions = list(family.attentions(model).values())
        modules: list[Any] = [attention.get_submodule(family.qkv[0]) for attention in attentions]
        if all(getattr(module, "bias", None) is None for module in modules):
            return NO_QUERY_BIAS
        norm = next((path for path, _ in attentions[0].named_modules() if QUERY_OR_KEY_NORM.search(path)), None)
        if norm is not None:
            return f"a norm ({norm}) is between the projection of queries or keys and the logits"
        modules += [attention.get_submodule(path) for attention in attentions for path in family.qkv[1:2]]  # keys
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
        self.site = projected_site(family)
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
        present = torch.arange(delta.shape[1], device=delta.device) < batch.on(delta.device, "lengths")[:, None]
        self.moments.setdefault(layer, Moments()).add(delta, present)
        together = delta[..., 0].masked_fill(~present, torch.nan)
        self.deltas[layer].append(together)
        later = together[:, 1:]
        mean = later.nanmean(1)
        deviation = (later - mean[:, None]).square().nanmean(1).sqrt()
        statistics = {"delta": together[:, 0], "delta_later": mean, "delta_later_std": deviation}
        self.statistics["query_bias_by_sequence"].add(batch, statistics, layer=layer)

    @torch.no_grad()
    def tables(self) -> dict[str, pd.DataFrame]:
        longest = max(moments.sums.shape[1] for moments in self.moments.values())
        has_epe = Epe.inapplicable(self.model, self.family) is None
        epe = effective_positions(self.model, self.family, longest) if has_epe else None
        by_position, by_coordinate, distributions = [], [], []
        for layer, moments in sorted(self.moments.items()):
            count, mean, squares = moments.sums.mT.cpu().numpy()  # (1+H,P) each
            gamma = self.directions[layer].sum(0).cpu().numpy()
            alignment, epe_0, massive = np.full(mean.shape, np.nan), np.full(gamma.shape, np.nan), []
            if epe is not None:
                weight, bias = key_weight_and_query_bias(self.model, self.family, layer)
                alignment = key_alignment(epe[: mean.shape[1]], weight, bias).T.cpu().numpy()
                epe_0, massive = epe[0].double().cpu().numpy(), massive_coordinates(epe[0])
            axes = {"layer": layer, "head": [ALL_HEADS, *range(len(mean) - 1)], "position": range(mean.shape[1])}
            columns = {"delta_mean": mean, "delta_std": np.sqrt(squares / count), "key_alignment": alignment}
            by_position.append((axes, columns))
            coordinates = np.arange(len(gamma))
            columns = {"gamma": gamma, "epe_0": epe_0, "is_massive_epe": np.isin(coordinates, massive)}
            by_coordinate.append(({"layer": layer, "coordinate": coordinates}, columns))
            deltas = self.deltas[layer]
            groups = {
                "position 0": torch.cat([part[:, 0] for part in deltas]),
                "later": torch.cat([part[:, 1:].flatten() for part in deltas]),
            }
            known = [values[~values.isnan()].cpu().numpy() for values in groups.values()]
            edges = np.histogram_bin_edges(np.concatenate(known), BINS)
            counts = np.concatenate([np.histogram(values, edges)[0] for values in known])
            columns = {"delta": np.tile((edges[1:] + edges[:-1]) / 2, len(known)), "count": counts}
            distributions.append(({"layer": layer, "group": np.repeat(list(groups), BINS)}, columns))
        parts = {"query_bias": by_position, "gamma": by_coordinate, "delta_distribution": distributions}
        return super().tables() | {name: long_table(of_layers) for name, of_layers in parts.items()}


class Moments(Accumulator):
    """Running mean and population variance over sequences, (P,…) for the positions seen so far, in float64.

    Batches are merged by their deviations (Chan et al. 1979), so a small variance with a large mean is not lost.
    """

    def __init__(self) -> None:
        self.sums = torch.zeros(3, 0, 0)  # by position: number of sequences, mean, and sum of squared deviations

    def add(self, x: torch.Tensor, present: torch.Tensor) -> None:
        """Add x (B,P,H); `present` (B,P) is True where a sequence has the position."""
        x, absent = x.double(), ~present[..., None]
        count = present.sum(0)[:, None].expand(x.shape[1:])
        mean = x.masked_fill(absent, 0.0).sum(0) / count
        self._add(torch.stack([count, mean, (x - mean).square().masked_fill(absent, 0.0).sum(0)]))

    def merge(self, other: Self) -> None:
        self._add(other.sums)

    def _add(self, sums: torch.Tensor) -> None:
        if not self.sums.numel():
            self.sums = sums
            return
        longest = max(self.sums.shape[1], sums.shape[1])
        (count, mean, squares), (added, mean_added, squares_added) = (
            F.pad(part, (0, 0, 0, longest - part.shape[1])) for part in (self.sums, sums)
        )
        total, apart = count + added, mean_added - mean
        squares = squares + squares_added + apart.square() * count * added / total
        self.sums = torch.stack([total, mean + apart * added / total, squares])


def projected_site(family: Family) -> str:
    """Return the site that is the input of the projections of queries and keys."""
    return "attn_norm" if "attn_norm" in family.sites else "layer_in"


def key_weight_and_query_bias(model: PreTrainedModel, family: Family, layer: int) -> tuple[torch.Tensor, Any]:
    """Return W_k (K,d,D) and b_Q (H,d) of one layer; b_Q is None if there is no query bias."""
    projected = projections(model, family, layer)
    bias = projected["query"].bias
    return projected["key"].weight.detach(), None if bias is None else bias.detach()


def bias_directions(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return u_h = W_kᵀ b_Q^h of each query head, (H,D) in float64: Δ_j^h = u_h · x_j, Σ_h u_h = γ (NU §4.2.3)."""
    # `weight` is W_k (K,d,D), `bias` b_Q (H,d), and query head h reads the keys of head h ÷ (H/K)
    grouped = bias.double().view(len(weight), -1, bias.shape[-1])  # (K,H/K,d)
    return torch.einsum("kgd,kdc->kgc", grouped, weight.double()).flatten(0, 1)


def key_alignment(vectors: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Return cos(W_k x, b_Q) for vectors x (P,D), of all heads concatenated and of each query head, (P,1+H) float64."""
    keys = torch.einsum("kdc,pc->pkd", weight.double(), vectors.to(weight.device).double())
    keys = keys.repeat_interleave(len(bias) // len(weight), dim=1)  # (P,H,d)
    bias = bias.double()
    together = torch.cosine_similarity(keys.flatten(1), bias.flatten()[None], dim=-1, eps=0.0)
    return torch.cat([together[:, None], torch.cosine_similarity(keys, bias[None], dim=-1, eps=0.0)], dim=1)


WHOLE_RUN = -1  # the group of all sequences


class Epe(Observable):
    """Compares effective positional encodings EPE_i = MLP⁽¹⁾(p_i) + p_i (positions.py) with states and keys.

    NU calls EPE_i the first-order effect of position i after the first layer (§3.2.1), and W_k EPE_0 the reason why the
    sink's key is aligned with the query bias (§4.2.2). The paper checks neither.
    """

    name = "epe"
    about = "cosine of EPE with the states after the first layer, and of b_Q with keys without EPE_0"
    sites = ("layer_in", "layer_out")
    expected = False
    columns: ClassVar = {
        "epe_by_group": (
            Column("group", "-1: all sequences; else all except those whose text has this number modulo 20",
                kind="whole"),
            POSITION,
            Column("cosine", "cosine of EPE with the mean over sequences of the layer's output at this position"),
        ),
        "epe_rest_by_sequence": (
            SEQUENCE,
            Column("cosine", "cos(W_k (h_0 − EPE_0), b_Q), h_0 the layer's input at position 0; all heads together"),
            Column("cosine_whole", "cos(W_k h_0, b_Q)"),
        ),
    }  # fmt: skip

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.sums: Sums[int] = Sums()  # group → (P,D) in float64
        self.counts: Sums[int] = Sums()  # group → (P,)

    @classmethod
    def inapplicable(cls, model: PreTrainedModel, family: Family) -> str | None:
        if not family.position_embedding:
            return f"its positions are not learned vectors (they are {family.positions})"
        if reason := without_effective_positions(model, family):
            return reason
        return QueryBias.inapplicable(model, family)

    def prepare(self, model: PreTrainedModel, family: Family, predicted: int) -> None:
        self.model, self.family = model, family
        self.attending = set(family.attentions(model))
        self.epe = effective_positions(model, family, self.settings.positions)

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        if site == "layer_out" and layer == 0:
            states = batch.tokens_at(upcast(reading.tensor), self.settings.positions)  # (B,P,D)
            present = torch.arange(states.shape[1]) < batch.lengths[:, None]
            for text, state, counted in zip(batch.numbers, states.double(), present.float(), strict=True):
                self.sums.add(text % GROUPS, state)
                self.counts.add(text % GROUPS, counted)
        if site == "layer_in" and layer in self.attending:
            weight, bias = key_weight_and_query_bias(self.model, self.family, layer)
            if bias is None:
                return
            first = batch.tokens_at(upcast(reading.tensor), 1)[:, 0]  # (B,D)
            vectors = {"cosine": first - self.epe[0].to(first), "cosine_whole": first}
            cosines = {name: key_alignment(x, weight, bias)[:, 0] for name, x in vectors.items()}
            self.statistics["epe_rest_by_sequence"].add(batch, cosines, layer=layer)

    def tables(self) -> dict[str, pd.DataFrame]:
        groups = sorted(self.sums)
        total = torch.stack([self.sums[group] for group in groups]).sum(0)
        count = torch.stack([self.counts[group] for group in groups]).sum(0).to(total)
        means = {WHOLE_RUN: total / count[:, None]}
        if len(groups) > 1:
            for group in groups:
                without = total - self.sums[group], count - self.counts[group].to(count)
                means[group] = without[0] / without[1][:, None]
        cosines = [torch.cosine_similarity(mean, self.epe.to(total), dim=-1, eps=0.0) for mean in means.values()]
        axes = {"layer": 0, "group": list(means), "position": range(len(self.epe))}
        table = long_table([(axes, {"cosine": torch.stack(cosines)})])
        return super().tables() | {"epe_by_group": table}


CONTENT, KEY_BIAS, DELTA, BIASES = "content", "key bias", "delta", "biases"
MULTIPLE_TOLERANCE = 1e-2  # relative tolerance for queries and keys as multiples of their projections (half precision)


class LogitTerms(Observable):
    """Measures the four terms of logits with biases, at position 0 and at other keys.

        s_{t→j} = (W_q x_t)ᵀ W_k x_j + (W_q x_t)ᵀ b_K + b_Qᵀ W_k x_j + b_Qᵀ b_K        (NU §4.1)

    The terms' gaps between position 0 and other keys add up to `sink_logit_gap` (VGA §4.1), and Δ's part shows how much
    of the sink is due to the query bias. Terms without x_j are the same for all keys. Only layers are measured whose
    queries and keys are multiples of their projections, and whose queries see all earlier tokens.
    """

    name = "logit-terms"
    about = "the four terms of the logits, with and without the biases, at position 0 and at other keys (NU §4.1)"
    sites = ("layer_in", "attn_norm", "attention")
    expected = False
    columns: ClassVar = {
        "logit_terms_by_sequence": (
            SEQUENCE,
            Column("term", "content: (W_q x_t)ᵀ W_k x_j; key bias: (W_q x_t)ᵀ b_K; delta: b_Qᵀ W_k x_j; "
                "biases: b_Qᵀ b_K", kind="text"),
            Column("at_first", "the term in the scaled logits of position 0's key, mean over later queries and heads"),
            Column("at_others", "mean of the term over each query's other keys, then over queries and heads"),
        ),
    }  # fmt: skip

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.input = torch.empty(0)  # (T,D), the input of the projections for the batch's first sequence

    @classmethod
    def inapplicable(cls, model: PreTrainedModel, family: Family) -> str | None:
        if not family.position_embedding or family.kinds_of_positions != {"learned"}:
            return f"its positions are {family.positions}, not only learned vectors"
        if not family.causal:
            return "it attends both ways"
        return QueryBias.inapplicable(model, family)

    def prepare(self, model: PreTrainedModel, family: Family, predicted: int) -> None:
        self.model, self.family = model, family
        self.site = projected_site(family)

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        if site == self.site:
            self.input = upcast(reading.tensor[0])

    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        # whether logits are scaled products of queries and keys, and every query sees all tokens up to its own
        real, seen = batch.attention_mask.bool().to(read.lse.device), keys_seen(read)[:, 0]
        expected = batch.attention_mask.cumsum(1).to(read.lse.device)
        if read.call.softcap is not None or not bool((seen.expand_as(expected) == expected)[real].all()):
            return
        projected = projections(self.model, self.family, layer)
        heads, longest = read.query.shape[1], int(batch.lengths.max())
        tokens, biases = [], []
        for projection, state in ((projected["query"], read.query), (projected["key"], read.key)):
            bias = effective_bias(projection, self.input, upcast(state[0]))
            if bias is None:
                return
            bias = repeat_heads(bias[None, :, None], heads)  # (1,H,1,d)
            without_bias = repeat_heads(upcast(state), heads) - bias
            tokens.append(batch.tokens_at(without_bias.transpose(1, 2), longest).transpose(1, 2))
            biases.append(bias)
        present = batch.present(longest)
        counted = None if present is None else present[:, 1:]
        for term, (first, others) in terms(*tokens, *biases).items():
            scaled = {"at_first": read.call.scaling * first, "at_others": read.call.scaling * others}
            statistics = {name: mean_over(x.mean(1), counted) for name, x in scaled.items()}
            self.statistics["logit_terms_by_sequence"].add(batch, statistics, layer=layer, term=term)


def effective_bias(projection: Projection, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor | None:
    """Return the bias's part of queries or keys, (heads,d): the bias times a factor that some models apply to them.

    `x` (T,D) is the input of the projection, `state` (heads,T,d) the queries or keys that attention reads. Returns None
    if they are not a multiple of the projection's output, for example after a rotation.
    """
    weight, bias = projection.weight.detach(), projection.bias
    bias = weight.new_zeros(weight.shape[:2]) if bias is None else bias.detach()
    weight, bias = (part.to(x) for part in (weight, bias))
    made = torch.einsum("hdc,tc->htd", weight, x) + bias[:, None]
    factor = (made * state).sum() / made.square().sum()
    distance = torch.linalg.vector_norm(state - factor * made)
    return factor * bias if distance <= MULTIPLE_TOLERANCE * torch.linalg.vector_norm(state) else None


def terms(
    query: torch.Tensor, key: torch.Tensor, query_bias: torch.Tensor, key_bias: torch.Tensor
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Compute the four terms of q·k of every query from position 1 on, under the causal mask.

    `query` and `key` (B,H,T,d) are without their biases (1,H,1,d). Each term is two tensors (B,H,T−1): its value at
    position 0's key, and its mean over the query's other keys.
    """
    first = key[:, :, :1]
    count = torch.arange(1, key.shape[2], device=key.device, dtype=key.dtype)
    others = (key[:, :, 1:].cumsum(2)) / count[:, None]
    query = query[:, :, 1:]
    dot = torch.linalg.vecdot
    alike = dot(query, key_bias.expand_as(query))
    biases = dot(query_bias, key_bias).expand_as(alike)
    return {
        CONTENT: (dot(query, first.expand_as(query)), dot(query, others)),
        KEY_BIAS: (alike, alike),
        DELTA: (dot(query_bias, first).expand_as(alike), dot(query_bias.expand_as(others), others)),
        BIASES: (biases, biases),
    }

"""The four terms of a logit with query and key biases, at position 0 and at other keys (NU §4.1).

    s_{t→j} = (W_q x_t)ᵀ W_k x_j + (W_q x_t)ᵀ b_K + b_Qᵀ W_k x_j + b_Qᵀ b_K

By them position 0's logit stands above those of the other keys: the terms' gaps add up to `sink_logit_gap` (VGA §4.1),
and Δ's part of it says how much of the sink is the query bias's doing. Terms without x_j are the same for all keys.
"""

from typing import ClassVar

import pandas as pd
import torch
from transformers import PreTrainedModel

from sinkscope.attention.kernels import repeat_heads, upcast
from sinkscope.attention.weights import AttentionRead, keys_seen
from sinkscope.measuring.observables.observable import BySequence, Observable, Reading, Settings
from sinkscope.measuring.observables.query_bias import QueryBias, read_by_attention
from sinkscope.models.family import Family
from sinkscope.models.projections import Projection, projections
from sinkscope.results.tables import SEQUENCE, Column
from sinkscope.text.batch import Batch

CONTENT, KEY_BIAS, DELTA, BIASES = "content", "key bias", "delta", "biases"
CLOSE = 1e-2  # queries and keys are multiples of what is projected up to this relative difference (half precision)


class LogitTerms(Observable):
    """Table `logit_terms_by_sequence`: a row for each sequence and term of the layers whose queries and keys are what
    is projected, and whose queries see all earlier tokens.
    """

    name = "logit-terms"
    about = "the four terms of the logits, with and without the biases, at position 0 and at other keys (NU §4.1)"
    sites = ("layer_in", "attn_norm", "attention")
    expected = False
    columns: ClassVar = {
        "logit_terms_by_sequence": (
            SEQUENCE,
            Column(
                "term",
                "content: (W_q x_t)ᵀ W_k x_j; key bias: (W_q x_t)ᵀ b_K; delta: b_Qᵀ W_k x_j; biases: b_Qᵀ b_K",
                kind="text",
            ),
            Column("at_first", "the term in the scaled logits of position 0's key, mean over later queries and heads"),
            Column("at_others", "the same, mean over each query's other keys first"),
        ),
    }

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.by_sequence = BySequence()
        self.input = torch.empty(0)  # (T,D), what attention projects of the batch's first sequence

    @classmethod
    def inapplicable(cls, model: PreTrainedModel, family: Family) -> str | None:
        if not family.position_embedding or family.kinds_of_positions != {"learned"}:
            return f"its positions are {family.positions}, not learned vectors alone"
        if not family.causal:
            return "it attends both ways"
        return QueryBias.inapplicable(model, family)

    def prepare(self, model: PreTrainedModel, family: Family, predicted: int) -> None:
        self.model, self.family = model, family
        self.site = read_by_attention(family)

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        if site == self.site:
            self.input = upcast(reading.tensor[0])

    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        if not sees_all_earlier(read, batch):
            return
        projected = projections(self.model, self.family, layer)
        heads, longest = read.query.shape[1], int(batch.lengths.max())
        tokens, biases = [], []
        for projection, state in ((projected["query"], read.query), (projected["key"], read.key)):
            bias = effective_bias(projection, self.input, upcast(state[0]))
            if bias is None:
                return
            bias = repeat_heads(bias[None, :, None], heads)  # (1,H,1,d)
            own = repeat_heads(upcast(state), heads) - bias
            tokens.append(batch.tokens_at(own.transpose(1, 2), longest).transpose(1, 2))
            biases.append(bias)
        for term, (first, others) in terms(*tokens, *biases).items():
            statistics = {
                name: mean_over_later_queries(read.call.scaling * x, batch)
                for name, x in (("at_first", first), ("at_others", others))
            }
            self.by_sequence.add(batch, statistics, layer=layer, term=term)

    def tables(self) -> dict[str, pd.DataFrame]:
        return {"logit_terms_by_sequence": self.by_sequence.table()} if self.by_sequence else {}


def sees_all_earlier(read: AttentionRead, batch: Batch) -> bool:
    """Whether logits are scaled products of queries and keys, and every query sees all tokens up to its own."""
    if read.call.softcap is not None:
        return False
    expected = batch.attention_mask.cumsum(1).to(read.lse.device)
    seen = keys_seen(read).expand(len(expected), -1, -1)[:, 0]
    real = batch.attention_mask.bool().to(read.lse.device)
    return bool((seen == expected)[real].all())


def effective_bias(projection: Projection, x: torch.Tensor, state: torch.Tensor) -> torch.Tensor | None:
    """The bias's part of queries or keys, (heads,d): the bias times the factor that some models multiply them by.

    Args:
        projection: Of queries or keys.
        x: (T,D), what it reads.
        state: (heads,T,d), what attention is given.

    Returns:
        None where that is no multiple of what is projected, as behind a rotation.
    """
    weight, bias = projection.weight.detach(), projection.bias
    bias = weight.new_zeros(weight.shape[:2]) if bias is None else bias.detach()
    weight, bias = (part.to(x) for part in (weight, bias))
    made = torch.einsum("hdc,tc->htd", weight, x) + bias[:, None]
    factor = (made * state).sum() / made.square().sum()
    distance = torch.linalg.vector_norm(state - factor * made)
    return factor * bias if distance <= CLOSE * torch.linalg.vector_norm(state) else None


def terms(
    query: torch.Tensor, key: torch.Tensor, query_bias: torch.Tensor, key_bias: torch.Tensor
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The four terms of q·k of every query from position 1 on, under the causal mask: at position 0, and the mean of
    the query's other keys.

    Args:
        query, key: (B,H,T,d), without their biases.
        query_bias, key_bias: (1,H,1,d).

    Returns:
        term → two tensors (B,H,T−1).
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


def mean_over_later_queries(x: torch.Tensor, batch: Batch) -> torch.Tensor:
    """(B,H,T−1), of queries from position 1 on → (B,): mean over those that a sequence has, and over heads."""
    by_query = x.mean(1)
    present = batch.present(x.shape[-1] + 1)
    if present is None:
        return by_query.mean(-1)
    present = present[:, 1:].to(x.device)
    return by_query.masked_fill(~present, 0.0).sum(-1) / present.sum(-1)

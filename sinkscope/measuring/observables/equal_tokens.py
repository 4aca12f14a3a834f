"""Repeated tokens: differences of their states, and attention and its closed forms (WSE propositions 1 to 4).

If positions enter only relatively, equal tokens stay equal in every layer, because each sees only copies of itself. All
logits of a head are then one number plus a term of the position, so attention has a closed form:

    no positions   a[t,s] = 1 ÷ (keys that query t sees)                     proposition 1
    relative       a[t,s] = e^{g(t-s)} ÷ Σ_j e^{g(t-j)}, g any bias          proposition 2
    ALiBi          a[t,s] = e^{g(t-s)} ÷ Σ_j e^{g(t-j)}, g linear            proposition 3
    rotary         a[t,0] ≤ e^{2ξ} ÷ (e^{2ξ} + t), ξ = scaling · ‖q‖‖k‖       proposition 4, t from 0 on

g is read from the logits of the last query, which sees all distances that any other query sees.

An extra term in the softmax's denominator (a learned sink logit, a key bias) breaks all three: it takes more weight
from queries that see few keys, so states differ after the first layer.
"""

from typing import ClassVar

import torch
from transformers import PreTrainedModel

from sinkscope.attention.kernels import repeat_heads, upcast
from sinkscope.attention.weights import AttentionRead, keys_seen, row_chunks
from sinkscope.measuring.observables.attention import weights_on_first
from sinkscope.measuring.observables.observable import Observable, Reading, Settings
from sinkscope.measuring.observables.reductions import filled
from sinkscope.models.family import NO_POSITIONS, Family
from sinkscope.results.tables import SEQUENCE, Column
from sinkscope.retrofits.retrofit import registers_before
from sinkscope.text.batch import Batch

CLOSED_FORMS = (NO_POSITIONS, "relative", "alibi")  # kinds of positions for which attention depends on no query
ROUNDING = 1e-5  # relative tolerance of the bound on weights


class EqualTokens(Observable):
    """Compares repeated tokens: table `equal_tokens`, one row per layer and sequence."""

    name = "equal-tokens"
    about = "repeated tokens: differences of their states, and attention compared with WSE's closed forms and bound"
    sites = ("layer_out", "attention")
    expected = False
    of_equal_tokens = True
    columns: ClassVar = {
        "equal_tokens": (
            SEQUENCE,
            Column("positions", "the kind of positions that this layer's attention has; '': no attention", kind="text"),
            Column("state_difference", "largest ‖h_t − h_0‖ ÷ ‖h_0‖ of the layer's output"),
            Column("weight_difference", "largest |attention weight − its closed form| over heads, queries and keys; "
                "NaN without closed form"),
            Column("bound_share", "rotary: share of heads and queries from 1 on within WSE's bound (prop. 4); "
                "NaN without bound"),
            Column("bound_ratio", "rotary: largest a[t,0] ÷ that bound"),
        ),
    }  # fmt: skip

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.attention: dict[str, torch.Tensor] = {}  # statistics of the current layer

    @classmethod
    def inapplicable(cls, model: PreTrainedModel, family: Family) -> str | None:
        return "register tokens are before its text" if registers_before(model) else None

    def prepare(self, model: PreTrainedModel, family: Family, predicted: int) -> None:
        self.family = family

    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        kind = self.family.positions_at(layer)
        if read.call.sink_logits is not None or read.call.operation is not None:
            return  # not a softmax over the keys only
        if kind == "relative" and read.call.looks_ahead:
            return  # the last query sees no distance to later keys
        if kind in CLOSED_FORMS:
            self.attention["weight_difference"] = closed_form_difference(read, bias_of_distance(read, batch, kind))
        if kind == "rotary":
            ratios = bound_ratios(read, batch)  # NaN for queries that see no other key
            known = ratios.isfinite()
            within = (ratios <= 1 + ROUNDING) & known
            self.attention["bound_share"] = within.sum((1, 2)) / known.sum((1, 2))
            self.attention["bound_ratio"] = ratios.nan_to_num(nan=-torch.inf).amax((1, 2))

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        difference = state_difference(reading.tensor, batch)
        nothing = torch.full_like(difference, torch.nan)
        statistics = {"state_difference": difference}
        for name in ("weight_difference", "bound_share", "bound_ratio"):
            statistics[name] = self.attention.pop(name, nothing)
        kind = self.family.positions_at(layer) if self.family.block(layer).attention else ""
        self.statistics["equal_tokens"].add(batch, statistics, layer=layer, positions=kind)


def state_difference(hidden: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return max_t ‖h_t − h_0‖ ÷ ‖h_0‖ of every sequence: (B,T,D) → (B,)."""
    longest = int(batch.lengths.max())
    states = batch.tokens_at(upcast(hidden), longest)
    first = states[:, :1]
    distance = torch.linalg.vector_norm(states - first, dim=-1)
    largest = filled(distance, batch.on(hidden.device, "present", longest)).amax(1)
    return largest / torch.linalg.vector_norm(first, dim=-1)[:, 0]


def bias_of_distance(read: AttentionRead, batch: Batch, kind: str) -> torch.Tensor:
    """Return g, (B,H,T): the bias of each distance |t − s| of query and key, up to a constant; 0 without positions."""
    # for equal tokens, from the logits of the last query, because models differ in their biases, and some compute
    # logits in their own code
    bias = read.lse.new_zeros(*read.lse.shape[:2], read.length)
    distances = torch.arange(read.length, device=bias.device)
    for index, column in enumerate((batch.start + batch.lengths - 1).tolist() if kind != NO_POSITIONS else ()):
        row = slice(column, column + 1)
        cols = read.keys(row)
        logits, allowed = read.logits(row, cols)[index, :, 0], read.allowed(row, cols)  # (H,C)
        seen = distances[: logits.shape[-1]]
        if allowed is not None:
            seen = seen[allowed[min(index, len(allowed) - 1)].flatten(0, -2)[0]]
        if kind == "alibi":  # linear
            near, far = int(seen[-1]), int(seen[0])
            slope = (logits[:, near] - logits[:, far]) / max(1, near - far)
            bias[index] = -slope[:, None] * distances
        else:
            bias[index] = bias[index].index_copy(-1, column - seen, logits[:, seen].to(bias.dtype))
    return bias


def closed_form_difference(read: AttentionRead, bias: torch.Tensor) -> torch.Tensor:
    """Return the largest |a[t,s] − e^{g(|t−s|)} ÷ Σ_j e^{g(|t−j|)}| over heads, queries and keys, (B,); g (B,H,T)."""
    largest = read.lse.new_zeros(len(read.lse))
    for rows in row_chunks(read.length):
        cols = read.keys(rows)
        weights, _ = read.weights(rows, cols)
        row, column = (torch.arange(part.start, part.stop, device=bias.device) for part in (rows, cols))
        logits = bias[..., (row[:, None] - column).abs()]
        allowed = read.allowed(rows, cols)
        if allowed is not None:
            logits = logits.masked_fill(~allowed, -torch.inf)
        expected = logits.softmax(-1).nan_to_num(nan=0.0)  # padding queries see nothing
        largest = torch.maximum(largest, (weights - expected).abs().amax((1, 2, 3)))
    return largest


def bound_ratios(read: AttentionRead, batch: Batch) -> torch.Tensor:
    """Return a[t,0] ÷ (e^{2ξ} ÷ (e^{2ξ} + n)) of every head and query, (B,H,T)."""
    # n is the number of other keys that the query sees; NaN for n = 0. ξ = scaling · ‖q_t‖‖k_0‖, since norms are the
    # same for all tokens.
    query_norm = torch.linalg.vector_norm(upcast(read.query), dim=-1)
    key_norm = repeat_heads(torch.linalg.vector_norm(upcast(read.key), dim=-1, keepdim=True), query_norm.shape[1])
    xi = read.call.scaling * query_norm * batch.at_positions(key_norm[..., 0], 1)
    others = keys_seen(read) - 1
    ratios = weights_on_first(read, batch) * (1 + others * (-2 * xi).exp())
    return ratios.masked_fill(others < 1, torch.nan)

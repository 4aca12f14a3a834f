"""Reasons why a key is a sink: norms and angles of q, k, v (WSE fig. 2), the logit gap (VGA §4.1), and gates."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import ClassVar

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from sinkscope.attention.kernels import grouped_matmul, repeat_heads, upcast
from sinkscope.attention.weights import AttentionRead, row_chunks
from sinkscope.measuring.observables.observable import Maxima, Observable, Settings, Sums
from sinkscope.measuring.observables.reductions import LATER, filled, later_mean, long_table, with_kv_head
from sinkscope.measuring.one_pass import token_norms
from sinkscope.models.family import Family
from sinkscope.results.findings import CLOSED
from sinkscope.results.tables import HEAD, KV_HEAD, POSITION, SEQUENCE, Column
from sinkscope.retrofits import has_gates
from sinkscope.text.batch import Batch


class Geometry(Observable):
    """Measures q, k (after rotary embedding), v and their logits: tables `geometry` and `geometry_by_sequence`."""

    name = "geometry"
    about = "norms of query, key and value, query–key cosine and the sink's logit gap per head and position"
    sites = ("attention",)
    columns: ClassVar = {
        "geometry": (
            HEAD, KV_HEAD, POSITION,
            Column("query_norm", "L2 norm of the query at this position"),
            Column("key_norm", "L2 norm of its key"),
            Column("value_norm", "L2 norm of its value as it is attended to"),
            Column("qk_cosine", "cosine between the key and the queries that see it, mean over queries"),
            Column("qk_norm_product", "‖q‖‖k‖, mean over the same queries"),
            Column("sink_logit_gap", "logit of the key minus the mean logit of the query's other keys (VGA §4.1)"),
        ),
        "geometry_by_sequence": (
            HEAD, KV_HEAD, SEQUENCE,
            Column("key_norm", "key norm of position 0 on this sequence"),
            Column("key_norm_later", "mean over positions 5 to 15"),
            Column("value_norm", "value norm of position 0"),
            Column("value_norm_later", "mean over positions 5 to 15"),
            Column("qk_cosine", "cosine of position 0's key, as in `geometry`"),
            Column("qk_cosine_later", "mean over positions 5 to 15"),
            Column("qk_norm_product", "norm product of position 0's key, as in `geometry`"),
            Column("qk_norm_product_later", "mean over positions 5 to 15"),
            Column("sink_logit_gap", "logit gap of position 0's key, as in `geometry`"),
        ),
    }  # fmt: skip

    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        heads = read.query.shape[1]
        group = heads // read.key.shape[1]
        norms = {
            f"{name}_norm": repeat_heads(token_norms(x)[..., None], heads).squeeze(-1)
            for name, x in (("query", read.query), ("key", read.key), ("value", read.value))
        }
        columns = batch.columns(max(self.settings.positions, LATER.stop))
        sums_of = causal_pair_sums if read.is_plain else masked_pair_means
        pairs = sums_of(read, norms["query_norm"], norms["key_norm"], columns)
        self.pending.add(norms | pairs, read.call.scaling, layer=layer, group=group)

    def finish(self, batch: Batch) -> None:
        positions = self.settings.positions
        columns = max(positions, LATER.stop)
        for (scaling,), rows, by_column in self.pending.take():
            device = by_column["key_norm"].device
            present = batch.on(device, "present", columns)
            if "dots" in by_column:
                by_column |= causal_pair_means(by_column.pop("dots"), by_column.pop("row_sum"), by_column, scaling)
            at_positions = {name: batch.at_positions(statistic, columns) for name, statistic in by_column.items()}
            first = {name: statistic[..., :positions] for name, statistic in at_positions.items()}
            self.statistics["geometry"].add_layers(rows, first, batch.on(device, "present", positions))
            by_sequence = {}
            for name in ("key_norm", "value_norm", "qk_cosine", "qk_norm_product"):
                by_sequence[name] = at_positions[name][..., 0]
                by_sequence[f"{name}_later"] = later_mean(at_positions[name], present)
            by_sequence["sink_logit_gap"] = at_positions["sink_logit_gap"][..., 0]
            self.statistics["geometry_by_sequence"].add_layers(batch, rows, by_sequence)


class LargestLogit(Observable):
    """Finds the largest logit of each head: logits that grow in training overflow half precision, and end it."""

    name = "largest-logit"
    about = "largest |logit| of each head, over all queries and the keys that they see"
    sites = ("attention",)
    by_default = False
    columns: ClassVar = {
        "largest_logit": (
            HEAD, KV_HEAD,
            Column("largest", "largest |logit| before the softmax, |scaling · q·k| if nothing else is added to it"),
        ),
    }  # fmt: skip

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.largest: Maxima[tuple[int, int]] = Maxima()  # (layer, query heads of a key head) → (H,)

    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        largest = torch.zeros_like(read.lse[0, :, 0])
        for rows in row_chunks(read.length):
            keys = read.keys(rows)
            allowed, logits = read.allowed(rows, keys), read.logits(rows, keys).abs()
            seen = logits if allowed is None else logits.masked_fill(~allowed, 0.0)
            largest = torch.maximum(largest, seen.amax((0, 2, 3)))
        group = read.query.shape[1] // read.key.shape[1]
        self.largest.receive(partial(self.largest.add, (layer, group)), largest)

    def tables(self) -> dict[str, pd.DataFrame]:
        heads = [
            ({"layer": layer, "group": group, "head": range(len(largest))}, {"largest": largest.numpy()})
            for (layer, group), largest in sorted(self.largest.items())
        ]
        return {"largest_logit": with_kv_head(long_table(heads))}


class Gate(Observable):
    """Averages gates, which may close at the sink (VGA §3.2, GS §5), and norms of the values before them."""

    name = "gate"
    about = "gates of a retrofit or of the model's own, and norms of the values before them, per head and position"
    sites = ("gate",)
    expected = False  # few models have gates
    columns: ClassVar = {
        "gate": (
            Column("head", "key/value head if values are gated, query head if heads' outputs are", kind="whole"),
            KV_HEAD, POSITION,
            Column("gate", "the factor: scale · σ(·) of VGA and IGA, φ(‖v‖²) of V-scale; for a model's own gate on the "
                "channels of a head's output, its mean over channels, weighted by the squares of the gated entries"),
            Column("raw_value_norm", "L2 norm of the value as it is projected, before any gate"),
        ),
        "gate_heads": (
            Column("head", "as in the table gate", kind="whole"),
            KV_HEAD,
            Column("mean", "mean gate over all tokens"),
            Column("closed", f"share of tokens whose gate is below {CLOSED:g}", "share"),
            Column("deviation", "standard deviation of the gate over tokens; 0 if it does not depend on them"),
        ),
    }  # fmt: skip

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.moments: Sums[tuple[int, int]] = Sums()  # number of tokens, sum, sum of squares and closed gates by head

    @classmethod
    def inapplicable(cls, model: PreTrainedModel, family: Family) -> str | None:
        return None if has_gates(model) or family.gated else "it has no gates, such as those of vga, iga and vscale"

    def see_gate(self, layer: int, gate: torch.Tensor, value: torch.Tensor, batch: Batch) -> None:
        positions = self.settings.positions
        heads, group = gate.shape[-1], gate.shape[-1] // value.shape[2]
        norms = torch.linalg.vector_norm(upcast(value), dim=-1).transpose(1, 2)
        by_column = {"gate": upcast(gate).transpose(1, 2), "raw_value_norm": repeat_heads(norms, heads)}
        at_positions = {name: batch.at_positions(x, positions) for name, x in by_column.items()}
        self.statistics["gate"].add(at_positions, batch.present(positions), layer=layer, group=group)
        gates = by_column["gate"].double()
        moments = torch.stack([torch.ones_like(gates), gates, gates.square(), (gates < CLOSED).double()])
        sums = filled(moments.movedim(0, 1), batch.valid).sum((0, 3))  # (4, heads)
        self.moments.receive(partial(self.moments.add, (layer, group)), sums)

    def tables(self) -> dict[str, pd.DataFrame]:
        parts = []
        for (layer, group), sums in sorted(self.moments.items()):
            count, total, squares, closed = sums.numpy()
            mean = total / count
            spread = np.sqrt(np.maximum(0.0, squares / count - mean**2))
            columns = {"mean": mean, "closed": closed / count, "deviation": spread}
            parts.append(({"layer": layer, "group": group, "head": range(len(mean))}, columns))
        return super().tables() | {"gate_heads": with_kv_head(long_table(parts))}


def causal_pair_sums(
    read: AttentionRead, query_norm: torch.Tensor, key_norm: torch.Tensor, columns: int
) -> dict[str, torch.Tensor]:
    """Return the sums from which `causal_pair_means` is computed, in O(T·d): Σ_{t≥s} q_t·k_s = k_s · Σ_{t≥s} q_t.

    `dots` (B,H,2,C) has Σ_{t≥s} w_t q_t·k_s for the weights of the cosine and of the gap, `row_sum` (B,H,T) the sum of
    each query's logits before their scaling.
    """
    read = replace(read, query=upcast(read.query), key=upcast(read.key))
    tiny = torch.finfo(query_norm.dtype).tiny
    seen, per_other = keys_seen_by(read.length, query_norm.device, query_norm.dtype)
    # the weights of q_t·k_s in the cosine and in the gap:
    # logit - (row sum - logit) / others = logit · seen / others - row sum / others
    weights = torch.stack([1 / query_norm.clamp(min=tiny), (seen * per_other).expand_as(query_norm)], dim=2)
    key_sum = read.key.cumsum(2)[:, :, None]  # (B,K,1,T,d)
    row_sum = (read.query.unflatten(1, (read.key.shape[1], -1)) * key_sum).sum(-1).flatten(1, 2)
    # from the last chunk of keys to the first, so that no sum is a small difference of large numbers
    dots = []
    later = weights[..., columns:] @ read.query[:, :, columns:]  # (B,H,2,d): Σ w_t q_t after the chunk
    for rows in reversed(list(row_chunks(columns))):
        within = query_dot_key(read, rows, rows).tril_()
        dots.append(weights[..., rows] @ within + grouped_matmul(later, read.key[:, :, rows].transpose(-1, -2)))
        if rows.start:
            later = later + weights[..., rows] @ read.query[:, :, rows]
    return {"dots": torch.cat(dots[::-1], dim=-1) if len(dots) > 1 else dots[0], "row_sum": row_sum}


def causal_pair_means(
    dots: torch.Tensor, row_sum: torch.Tensor, norms: Mapping[str, torch.Tensor], scaling: float
) -> dict[str, torch.Tensor]:
    """Return means over queries of qk_cosine, qk_norm_product and sink_logit_gap, (…,C), under the plain causal mask.

    The mean for key s is over the queries that see it. The gap is the logit of s minus the mean logit of the query's
    other keys. A query that sees only s has no gap and is left out; without any gap, the mean is NaN.
    """
    columns, tiny = dots.shape[-1], torch.finfo(dots.dtype).tiny
    seen, per_other = keys_seen_by(row_sum.shape[-1], dots.device, dots.dtype)
    cosine, gap = dots.unbind(-2)
    key_norm = norms["key_norm"][..., :columns]
    cosine = cosine / key_norm.clamp(min=tiny)
    product = key_norm * sum_from(norms["query_norm"], columns)
    gap = (gap - sum_from(row_sum * per_other, columns)) * scaling
    pairs = seen.flip(0)[:columns]
    return {
        "qk_cosine": cosine / pairs,
        "qk_norm_product": product / pairs,
        "sink_logit_gap": gap / sum_from((per_other > 0).to(gap.dtype), columns),
    }


@lru_cache(maxsize=4)  # the same for all layers
def keys_seen_by(length: int, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number n of keys that each query sees under the causal mask, and 1 ÷ (n - 1), 0 for n = 1; (T,)."""
    seen = torch.arange(1, length + 1, device=device, dtype=dtype)
    return seen, torch.where(seen > 1, 1 / (seen - 1).clamp(min=1), 0.0)


def sum_from(x: torch.Tensor, columns: int) -> torch.Tensor:
    """Return Σ_{t≥s} x_t for the first `columns` s, (…,T) → (…,C)."""
    # summed backward in float64, because otherwise the last sums would be small differences of large numbers
    first, rest = x[..., :columns].double(), x[..., columns:].sum(-1, keepdim=True, dtype=torch.float64)
    return (first.flip(-1).cumsum(-1).flip(-1) + rest).to(x.dtype)


def masked_pair_means(
    read: AttentionRead, query_norm: torch.Tensor, key_norm: torch.Tensor, columns: int
) -> dict[str, torch.Tensor]:
    """Compute `causal_pair_means` under any mask, softcap or bias, in row chunks."""
    row_sum, row_count = torch.zeros_like(read.lse), torch.zeros_like(read.lse)  # over each query's allowed keys
    for rows in row_chunks(read.length):
        cols = read.keys(rows)
        allowed, logits = read.allowed(rows, cols), read.logits(rows, cols)
        row_sum[..., rows] = (logits if allowed is None else logits.masked_fill(~allowed, 0.0)).sum(-1)
        row_count[..., rows] = cols.stop if allowed is None else allowed.sum(-1).to(row_count.dtype)
    cosine, product, gap, pairs, gaps = read.lse.new_zeros(5, *read.lse.shape[:2], columns)
    for rows in row_chunks(read.length):
        cols = read.keys(rows, columns)
        logits = read.logits(rows, cols)
        norms = query_norm[:, :, rows, None] * key_norm[:, :, None, cols]
        allowed = read.allowed(rows, cols)
        seen = torch.ones_like(logits[:1, :1]) if allowed is None else allowed.to(logits.dtype)
        dots = logits / read.call.scaling if read.is_linear else query_dot_key(read, rows, cols)
        cosine[..., cols] += (dots / norms.clamp(min=torch.finfo(norms.dtype).tiny) * seen).sum(2)
        product[..., cols] += (norms * seen).sum(2)
        pairs[..., cols] += seen.sum(2)
        others = row_count[..., rows, None] - 1
        rest = (row_sum[..., rows, None] - logits) / others.clamp(min=1)
        with_others = seen * (others > 0)
        gap[..., cols] += ((logits - rest) * with_others).sum(2)
        gaps[..., cols] += with_others.sum(2)
    pairs = pairs.clamp(min=1)
    return {"qk_cosine": cosine / pairs, "qk_norm_product": product / pairs, "sink_logit_gap": gap / gaps}


def query_dot_key(read: AttentionRead, rows: slice, cols: slice) -> torch.Tensor:
    return grouped_matmul(upcast(read.query[:, :, rows]), upcast(read.key[:, :, cols]).transpose(-1, -2))

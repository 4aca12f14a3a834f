"""Attention sinks: the attention that each key position receives (GS eq. 1 and 2; WSE §3); and dormant heads."""

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pandas as pd
import torch
from transformers import PreTrainedModel

from sinkscope.attention.kernels import upcast
from sinkscope.attention.weights import AttentionRead, column_sums, row_chunks
from sinkscope.measuring.observables.observable import Observable, Rows, Settings
from sinkscope.measuring.observables.reductions import filled, mean_over
from sinkscope.models.family import Family
from sinkscope.results.metrics import is_sink, lacks_rate
from sinkscope.results.tables import HEAD, KV_HEAD, POSITION, SEQUENCE, TOKEN, TOKEN_ID, Column
from sinkscope.text.batch import Batch

UNIFORM = Column("uniform_mass", "window mass under uniform attention; above ε, there is no sink rate")


class Attention(Observable):
    """Measures attention sinks.

    window_mass is the mean over the existing queries at most W - 1 tokens away from the key: with T = W = 64 this is
    WSE's α, the mean over all queries t ≥ s. In an encoder, which attends in both directions, queries before the key
    count like later queries, so with T ≤ W the mean is over all queries of the sequence; the same holds for keys in the
    prefix of a prefix LM. The sink indicator is computed per sequence, layer and head, before any averaging; a position
    that uniform attention would make a sink has none (`lacks_rate`).
    """

    name = "attention"
    about = "sink rate, window mass, sink mass and second moment per head and position; positions of sinks"
    sites = ("attention",)
    columns: ClassVar = {
        "attention": (
            HEAD, KV_HEAD, POSITION,
            Column("window_mass", "mean attention weight from the next W queries (GS eq. 1); encoder: from both sides"),
            Column("sink_rate", "share of sequences in which the position is a sink (`sinkscope list metrics`)"),
            Column("sink_mass", "mean attention weight from all later queries and itself; encoder: from all queries"),
            Column("sink_second_moment", "mean squared attention weight from the same queries"),
            UNIFORM,
        ),
        "attention_heads": (
            HEAD, KV_HEAD,
            Column("attention_entropy", "entropy of a query's weights, mean over queries; NaN past 256 tokens", "nats"),
            Column("missing_mass", "weight that goes to no key (sink logits), mean over queries"),
        ),
        "attention_outside": (
            HEAD, KV_HEAD,
            Column("outside_mass", "weight that goes to no token of the text, mean over queries (WSE §7)"),
            Column("sink_rate_outside", "share of sequences in which that weight is a sink (`sinkscope list metrics`)"),
            UNIFORM,
        ),
        "attention_by_sequence": (
            SEQUENCE, POSITION,
            Column("window_mass", "as in `attention`, on this sequence; mean over heads"),
            Column("sink_rate", "share of heads in which the position is a sink"),
            Column("sink_mass", "as in `attention`, on this sequence; mean over heads"),
            UNIFORM,
        ),
        "attention_heads_by_sequence": (
            HEAD, KV_HEAD, SEQUENCE,
            Column("window_mass", "window mass of position 0 on this sequence"),
            Column("sink_mass", "sink mass of position 0 on this sequence"),
            UNIFORM,
        ),
        "sink_positions": (
            HEAD, SEQUENCE, POSITION, TOKEN_ID, TOKEN,
            Column("queries", "queries of the key: its own and all later queries; encoder: all", kind="whole"),
            Column("window_mass", "window mass of this key"),
            UNIFORM,
        ),
    }  # fmt: skip

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.sinks = Rows(list)

    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        sums = column_sums(read, batch.columns(self.settings.positions), self.settings.window)
        statistics = {"mass": sums.mass, "second": sums.second, "window": sums.window}
        if sums.entropy is not None:
            statistics["entropy"] = sums.entropy
        if read.call.sink_logits is not None:
            statistics["missing"] = read.missing_mass
        if (outside := outside_mass(read, batch)) is not None:
            statistics["outside"] = outside
        group = read.query.shape[1] // read.key.shape[1]
        self.pending.add(statistics, read.call.causal, read.call.prefix, layer=layer, group=group)

    def finish(self, batch: Batch) -> None:
        positions, window = self.settings.positions, self.settings.window
        for seen, rows, sums in self.pending.take():  # `seen`: causal, prefix
            device, size = sums["window"].device, max(positions, sums["window"].shape[-1])
            present, valid = batch.on(device, "present", positions), batch.on(device, "valid")
            queries_in_window = batch.on(device, "queries", size, window, *seen)
            every = batch.at_positions(sums["window"], size) / queries_in_window[:, None, None]  # GS eq. 1
            uniform = batch.uniform(size, window, *seen)
            self._list_sinks([row["layer"] for row in rows], every, uniform, batch, seen)
            queries = batch.on(device, "queries", positions, None, *seen)[:, None, None]
            window_mass, uniform = every[..., :positions], uniform[:, :positions]  # (B,L,H,P), (B,P)
            uniform_there = batch.on(device, "uniform", size, window, *seen)[:, :positions].to(every)
            sinks = is_sink(window_mass, self.settings.epsilon).to(every)
            statistics = {
                "window_mass": window_mass,
                "sink_mass": batch.at_positions(sums["mass"], positions) / queries,
                "sink_second_moment": batch.at_positions(sums["second"], positions) / queries,
                "uniform_mass": uniform_there[:, None, None].expand_as(window_mass),
            }
            self.statistics["attention"].add_layers(rows, statistics, present)
            with_rate = self._with_rate(uniform, batch.present(positions))
            with_rate = None if with_rate is None else with_rate.to(device)  # once: each copy waits for the device
            self.statistics["attention"].add_layers(rows, {"sink_rate": sinks}, with_rate)
            statistics["sink_rate"] = filled(sinks, with_rate, torch.nan)
            names = ("window_mass", "sink_rate", "sink_mass", "uniform_mass")
            over_heads = {name: statistics[name].mean(2, dtype=torch.float64) for name in names}
            layers = [{"layer": row["layer"]} for row in rows]
            self.statistics["attention_by_sequence"].add_layers(batch, layers, over_heads, present)
            at_first = {name: statistics[name][..., 0] for name in ("window_mass", "sink_mass", "uniform_mass")}
            self.statistics["attention_heads_by_sequence"].add_layers(batch, rows, at_first)
            # NaN if a sequence is too long to read all columns, and then for the mean over sequences
            without = {"entropy": torch.nan, "missing": 0.0}
            entropy, missing = (
                mean_over(sums[name], valid) if name in sums else torch.full_like(window_mass[..., 0], number)
                for name, number in without.items()
            )
            heads = {"attention_entropy": entropy, "missing_mass": missing}
            self.statistics["attention_heads"].add_layers(rows, heads)
            if "outside" in sums:
                mass = mean_over(sums["outside"], batch.of_text)
                # if all keys and a learned term had equal weights, mean over the text's queries, (B,1)
                registers = 0 if batch.registers is None else int(batch.registers[0].sum())
                query, keys, has_term = torch.arange(batch.token_ids.shape[1]), batch.keys(*seen), "missing" in sums
                of_text = (query >= registers) & (query < batch.lengths[:, None])
                uniform = ((registers + has_term) / (keys.double() + has_term) * of_text).sum(1) / of_text.sum(1)
                uniform = uniform[:, None]
                statistics = {"outside_mass": mass, "uniform_mass": uniform[:, None].to(mass).expand_as(mass)}
                self.statistics["attention_outside"].add_layers(rows, statistics)
                rates = {"sink_rate_outside": is_sink(mass, self.settings.epsilon)}
                self.statistics["attention_outside"].add_layers(rows, rates, self._with_rate(uniform, None))

    def _with_rate(self, uniform: torch.Tensor, present: torch.Tensor | None) -> torch.Tensor | None:
        """Return which positions have a sink rate, (B,P); None if all do."""
        with_rate = ~lacks_rate(uniform, self.settings.epsilon)
        if present is not None:
            return with_rate & present.to(with_rate.device)
        return None if bool(with_rate.all()) else with_rate

    def _list_sinks(
        self, layers: Sequence[int], window_mass: torch.Tensor, uniform: torch.Tensor, batch: Batch, seen: tuple
    ) -> None:
        """List the sinks among the window masses (B,L,H,T) of some layers."""
        sinks = is_sink(window_mass, self.settings.epsilon)
        with_rate = self._with_rate(uniform, batch.present(window_mass.shape[-1]))
        if with_rate is not None:
            sinks &= with_rate[:, None, None].to(sinks.device)
        queries = batch.queries(window_mass.shape[-1], None, *seen)
        where = sinks.nonzero()

        def add(where: torch.Tensor, window_mass: torch.Tensor) -> None:
            sequence, layer, head, position = where.unbind(1)
            self.sinks.add({
                "layer": np.array(layers)[layer.numpy()],
                "head": head,
                "sequence": sequence + batch.first,
                "position": position,
                "token_id": batch.token_ids[sequence, position + batch.start[sequence]],
                "queries": queries[sequence, position],
                "window_mass": window_mass,
                "uniform_mass": uniform[sequence, position],
            })  # fmt: skip

        self.sinks.receive(add, where, window_mass[where.unbind(1)])

    def tables(self) -> dict[str, pd.DataFrame]:
        tables = super().tables()
        # without the positions that a sequence does not have
        present = tables["attention_by_sequence"].dropna(subset="window_mass", ignore_index=True)
        sinks = self.sinks.table("layer", "head", "sequence", "position")
        return tables | {"attention_by_sequence": present, "sink_positions": sinks}


def weights_on_first(read: AttentionRead, batch: Batch) -> torch.Tensor:
    """Return each query's weight on position 0, (B,H,T)."""
    columns = slice(0, batch.columns(1))
    weights = torch.cat([read.weights(rows, columns)[0] for rows in row_chunks(read.length)], dim=2)
    return batch.at_positions(weights, 1)[..., 0]


def outside_mass(read: AttentionRead, batch: Batch) -> torch.Tensor | None:
    """Return each query's weight (B,H,T) on sink logits and register tokens (WSE §7, table 4); None without any."""
    registers = batch.registers
    if registers is None:
        return None if read.call.sink_logits is None else read.missing_mass
    keys = slice(0, int(registers.nonzero()[:, 1].max()) + 1)
    is_register = registers[:, None, None, keys].to(read.lse)
    to_registers = [(read.weights(rows, keys)[0] * is_register).sum(-1) for rows in row_chunks(read.length)]
    return read.missing_mass + torch.cat(to_registers, dim=-1)


class WindowEdge(Observable):
    """Measures the weight on the first token of a sliding window (WSE §6, figure 6): table `window_edge_by_sequence`.

    This is a[t, t−w+1], mean over heads and over the queries whose window does not reach the sequence's first token.
    Layers in which every query sees that token have no rows.
    """

    name = "window-edge"
    about = "weight on a sliding window's first token, from queries that do not see the text's first token (WSE §6)"
    sites = ("attention",)
    expected = False
    columns: ClassVar = {
        "window_edge_by_sequence": (
            SEQUENCE,
            Column("edge_mass", "weight on the window's first token, mean over heads and over `edge_queries`"),
            Column("edge_queries", "queries whose window does not reach the sequence's first token"),
        ),
    }

    @classmethod
    def inapplicable(cls, model: PreTrainedModel, family: Family) -> str | None:
        if getattr(model.config.get_text_config(), "sliding_window", None) is None:
            return "it has no sliding window"
        return super().inapplicable(model, family)

    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        start = batch.on(read.lse.device, "start")[:, None, None]
        mass, queries = read.lse.new_zeros(read.lse.shape[:2]), read.lse.new_zeros(len(start))
        for rows in row_chunks(read.length):
            keys = read.keys(rows)
            allowed = read.allowed(rows, keys)
            if allowed is None:
                continue
            weights = read.weights(rows, keys)[0]
            first = allowed.int().argmax(-1).expand(weights.shape[:3])  # 0 for padding queries
            edge = (first > start).to(weights.dtype)
            mass += (weights.gather(-1, first[..., None])[..., 0] * edge).sum(-1)
            queries += edge[:, 0].sum(-1)
        if bool(queries.any()):
            mean = mass.mean(1) / queries  # NaN for sequences without such queries
            statistics = {"edge_mass": mean, "edge_queries": queries}
            self.statistics["window_edge_by_sequence"].add(batch, statistics, layer=layer)

    def tables(self) -> dict[str, pd.DataFrame]:
        return {name: table.dropna(ignore_index=True) for name, table in super().tables().items()}


class HeadScores(Observable):
    """Measures the two scores of inactive heads that Sandoval-Segura et al. (2025) call AHON and AWFT.

    The relative norm is their LN variant: on each sequence, the norm ÷ its mean over the heads of the layer.
    """

    name = "head-scores"
    about = "scores of dormant heads: norm of each head's output, alone and in its layer, and mass on the first token"
    sites = ("attention",)
    reads_mix = True
    by_default = False
    columns: ClassVar = {
        "head_scores": (
            HEAD, KV_HEAD,
            Column("output_norm", "norm of the head's output y, mean over tokens (AHON)"),
            Column("relative_norm", "on each sequence, this ÷ its mean over the layer's heads (AHON, LN variant)",
                "ratio"),
            Column("first_mass", "attention to position 0, mean over queries (AWFT)"),
        ),
    }  # fmt: skip

    def see_mix(self, layer: int, read: AttentionRead, mix: torch.Tensor, batch: Batch) -> None:
        valid = batch.on(mix.device, "valid")
        norm = mean_over(torch.linalg.vector_norm(upcast(mix), dim=-1).transpose(1, 2), valid)  # (B,H)
        statistics = {
            "output_norm": norm,
            "relative_norm": norm / norm.mean(1, keepdim=True),
            "first_mass": mean_over(weights_on_first(read, batch), valid),
        }
        group = read.query.shape[1] // read.key.shape[1]
        self.statistics["head_scores"].add(statistics, layer=layer, group=group)

"""Sink tokens: tokens whose state joins the direction of the first sink, and for how many layers (arXiv 2512.22213).

The norm of the first sink jumps in one layer and falls in another: its life. The paper calls a token a sink in a layer
of this life if its state is parallel to the first sink's. In a model with residual sinks (residual_sinks.py) all tokens
are parallel: here a sink's norm has to be large, too. Tokens that join for a part of the life are secondary sinks: the
paper counts layers (more than 4, less than all but 15), here both bounds are shares of the depth.
"""

from typing import ClassVar

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from sinkscope.attention.kernels import upcast
from sinkscope.attention.weights import AttentionRead, keys_seen, row_chunks
from sinkscope.measuring.observables.activation import token_norms
from sinkscope.measuring.observables.observable import BySequence, Observable, Reading, Rows, Settings, Sums
from sinkscope.models.family import Family
from sinkscope.results.tables import POSITION, SEQUENCE, TOKEN, TOKEN_ID, Column
from sinkscope.text.batch import Batch

FIRST = 3  # the first sink is one of this many first tokens, the one with the largest norm
PARALLEL = 0.9  # |cosine| with the first sink above which a token is parallel to it
SPIKE = 3.0  # a norm is a sink's from this many times the median of the sequence's tokens on (ours)
FEWEST = 1 / 8  # share of the depth that a secondary sink lives for more than: 4 of 32 layers
MOST = 17 / 32  # and that it does not reach: 32 - 15 of 32 layers
FIRST_SINK, LASTING, SECONDARY = KINDS = ("first", "lasting", "secondary")
PARALLEL_COLUMNS = (
    Column("parallel", "share of the tokens but the first sink that are parallel to it: |cosine| > 0.9, in its life",
        "share"),
    Column("sinks", "share of the tokens but the first sink that are sinks: parallel, and with 3 × the median norm",
        "share"),
)  # fmt: skip


class SinkTokens(Observable):
    """Lists the sink tokens of every sequence: table `sink_tokens`, by the `layer` in which each joins."""

    name = "sink-tokens"
    about = "tokens that join the direction of the first sink: since which layer, for how many, and their attention"
    sites = ("layer_in", "mlp_out", "layer_out", "attention")
    by_default = False
    columns: ClassVar = {
        "sink_tokens": (
            SEQUENCE, POSITION, TOKEN_ID, TOKEN,
            Column("kind", "first: the first sink; lasting: as long as it or half of the depth; secondary: shorter",
                kind="text"),
            Column("last_layer", "the last layer in which it is a sink; the column layer is the first", kind="whole"),
            Column("lifetime", "number of layers in which it is a sink", "layers"),
            Column("norm", "L2 norm of its state where it joins"),
            Column("norm_ratio", "the same ÷ the median of the sequence's tokens there", "ratio"),
            Column("cosine", "|cosine| of its state and the first sink's, mean over these layers"),
            Column("written", "cosine of the MLP's output and the first sink's state where it joins; NaN without MLP"),
            Column("attention", "attention that later queries give it in the layers that read these states, mean over "
                "heads, ÷ that of uniform attention", "ratio"),
            Column("attention_elsewhere", "the same of equal tokens that are no sinks; NaN if there are none", "ratio"),
        ),
        "parallel_tokens": PARALLEL_COLUMNS,
        "parallel_tokens_by_sequence": (SEQUENCE, *PARALLEL_COLUMNS),
    }  # fmt: skip

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.rows = Rows(list)
        self.by_sequence = BySequence()
        self.elsewhere: Sums[int] = Sums()  # token id → (L,) sums of the attention of tokens that are no sinks
        self.counts: Sums[int] = Sums()
        self.states: dict[int, dict[str, torch.Tensor]] = {}  # of the current batch, by layer
        self.received: dict[int, torch.Tensor] = {}
        self.written: torch.Tensor | None = None

    def prepare(self, model: PreTrainedModel, family: Family, predicted: int) -> None:
        self.depth = len(family.layer_modules(model))

    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        self.received[layer] = attention_received(read).cpu()

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        if site == "layer_in":
            if not self.states:
                self.states[-1] = {"norm": token_norms(reading.tensor, batch).cpu()}
            return
        if site == "mlp_out":
            self.written = reading.tensor.clone()  # because models may change the tensor in place
            return
        hidden = upcast(reading.tensor)
        first = F.normalize(batch.tokens_at(hidden, FIRST), dim=-1).mT  # (B,D,FIRST)
        cosine = F.normalize(hidden, dim=-1) @ first  # (B,T,FIRST)
        mlp, self.written = self.written, None
        written = torch.full_like(cosine, torch.nan) if mlp is None else F.normalize(upcast(mlp), dim=-1) @ first
        found = {"norm": token_norms(hidden, batch), "cosine": cosine, "written": written}
        self.states[layer] = {name: x.cpu() for name, x in found.items()}

    def finish(self, batch: Batch) -> None:
        if self.depth - 1 not in self.states:  # other observables cannot wait for the last layer
            return
        before, *layers = (self.states[layer] for layer in sorted(self.states))
        nothing = torch.full_like(before["norm"], torch.nan)
        received = [self.received.get(layer, nothing) for layer in range(len(layers))]
        self.states, self.received = {}, {}
        norms = torch.stack([before["norm"], *(each["norm"] for each in layers)], -1)  # (B,T,1+L)
        cosines, written = (torch.stack([each[name] for each in layers], -1) for name in ("cosine", "written"))
        read = torch.stack([*received[1:], nothing], -1)  # the next layer attends to a layer's output
        shares = torch.zeros(len(before["norm"]), len(layers), 2)
        for at, (start, length) in enumerate(zip(batch.start.tolist(), batch.lengths.tolist(), strict=True)):
            own = slice(start, start + length)
            first = int(norms[at, own, 1:][:FIRST].amax(-1).argmax())
            cosine = cosines[at, own, first]
            is_parallel, is_sink = sinks(norms[at, own], cosine, first)
            others = (torch.stack([x.sum(0) - x[first].int() for x in (is_parallel, is_sink)], -1)).float()
            shares[at] = others / max(1, length - 1)
            kinds = kinds_of(is_sink, first)
            ids, attention = batch.token_ids[at, own].numpy(), read[at, own].double().numpy()
            for token in np.flatnonzero(kinds == ""):
                self.elsewhere.add(int(ids[token]), attention[token])
                self.counts.add(int(ids[token]), 1)
            position = np.flatnonzero(kinds != "")
            flags = is_sink.numpy()[position]
            layer, last = flags.argmax(1), flags.shape[1] - 1 - flags[:, ::-1].argmax(1)
            norm, median = norms[at, own, 1:].numpy(), norms[at, own, 1:].median(0).values.numpy()
            lives = list(zip(position, layer, last, strict=True))
            self.rows.add({
                "layer": layer,
                "sequence": np.full(len(position), batch.first + at),
                "position": position,
                "token_id": ids[position],
                "kind": kinds[position],
                "last_layer": last,
                "lifetime": flags.sum(1),
                "norm": norm[position, layer],
                "norm_ratio": norm[position, layer] / median[layer],
                "cosine": (cosine[position].numpy() * flags).sum(1) / flags.sum(1),
                "written": written[at, own, first].numpy()[position, layer],
                "attention": np.array([known_mean(attention[token], *life) for token, *life in lives]),
            })  # fmt: skip
        names = [column.name for column in PARALLEL_COLUMNS]
        rows = [{"layer": layer} for layer in range(len(layers))]
        self.by_sequence.add_layers(batch, rows, dict(zip(names, shares.unbind(-1), strict=True)))

    def tables(self) -> dict[str, pd.DataFrame]:
        table = self.rows.table("sequence", "position")
        found = []
        for token, *life in zip(table["token_id"], table["layer"], table["last_layer"], strict=True):
            known = token in self.counts
            found.append(known_mean(self.elsewhere[token] / self.counts[token], *life) if known else np.nan)
        by_sequence = self.by_sequence.table()
        return {
            # in single precision, so that the order in which float64 sums were added has no effect
            "sink_tokens": table.assign(attention_elsewhere=np.array(found, np.float32)),
            "parallel_tokens": by_sequence.drop(columns="sequence").groupby("layer", as_index=False).mean(),
            "parallel_tokens_by_sequence": by_sequence,
        }


def known_mean(by_layer: np.ndarray, first: int, last: int) -> float:
    """Return the mean over the layers from `first` to `last` that have a value; NaN if none has."""
    known = by_layer[first : last + 1]
    known = known[np.isfinite(known)]
    return float(known.mean()) if len(known) else np.nan


def life(norms: torch.Tensor) -> tuple[int, int]:
    """Return the layers with the largest rise of a norm and with its largest later fall; the depth if it never falls.

    `norms` (1+L,) are those of the first layer's input and of each layer's output. The outputs from the first layer up
    to, but not with, the second have the large norm.
    """
    steps = norms.diff()
    start = int(steps.argmax())
    later = steps[start + 1 :]
    falls = len(later) > 0 and bool(later.min() < 0)
    return start, start + 1 + int(later.argmin()) if falls else len(steps)


def sinks(norms: torch.Tensor, cosine: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which tokens are parallel to the first sink in which layers of its life, and which are sinks, (T,L) bool.

    Args:
        norms: (T,1+L), of the first layer's input and of each layer's output.
        cosine: (T,L), of each layer's output and the first sink's.
        first: the position of the first sink; if its norm is no spike, no token is a sink.
    """
    start, end = life(norms[first])
    layers = torch.arange(cosine.shape[1])
    is_parallel = (cosine.abs() > PARALLEL) & (layers >= start) & (layers < end)
    is_large = norms[:, 1:] >= SPIKE * norms[:, 1:].median(0).values
    return is_parallel, is_parallel & is_large & is_large[first, start]


def kinds_of(is_sink: torch.Tensor, first: int) -> np.ndarray:
    """Return the kind of each token, (T,), from the layers in which it is a sink, (T,L); "" for no sink.

    A sink that lives for at most FEWEST of the depth is left out, as in the paper, and one that lives for MOST of it or
    as long as the first sink is no secondary one.
    """
    lifetime, depth = is_sink.sum(1).numpy(), is_sink.shape[1]
    kinds = np.full(len(is_sink), "", dtype=object)
    kinds[lifetime > FEWEST * depth] = SECONDARY
    kinds[(lifetime >= min(MOST * depth, lifetime[first])) & (lifetime > 0)] = LASTING
    kinds[first] = FIRST_SINK if lifetime[first] else ""
    return kinds


def attention_received(read: AttentionRead) -> torch.Tensor:
    """Return the attention that each token gets from later queries ÷ that of uniform attention, mean over heads, (B,T).

    Uniform attention gives each of the n keys that a query sees 1/n. NaN for a token that no later query sees.
    """
    batch, heads = read.query.shape[:2]
    mass = read.lse.new_zeros(batch, heads, read.length)
    uniform = torch.zeros_like(mass)
    share = 1 / keys_seen(read).clamp(min=1)
    for rows in row_chunks(read.length):
        cols = read.keys(rows)
        row, column = (torch.arange(part.start, part.stop, device=mass.device) for part in (rows, cols))
        later = row[:, None] > column
        weights, allowed = read.weights(rows, cols)[0], read.allowed(rows, cols)
        real = read.batch.attention_mask[:, None, rows, None].bool().to(mass.device) & later
        seen = real if allowed is None else real & allowed
        mass[..., cols] += (weights * later).sum(2)
        uniform[..., cols] += (seen * share[..., rows, None]).sum(2)
    return mass.mean(1) / uniform.mean(1).masked_fill(uniform.mean(1) == 0, torch.nan)

"""What stands out in the residual stream: tokens that join the first sink, residual sinks, and spikes.

The norm of the first sink jumps in one layer and falls in another: its life. The paper on secondary sinks (arXiv
2512.22213) calls a token a sink in a layer of this life if its state is parallel to the first sink's. In a model with
residual sinks all tokens are parallel: here a sink's norm has to be large, too. Tokens that join for a part of the life
are secondary sinks: the paper counts layers (more than 4, less than all but 15), here both bounds are shares of the
depth.

A residual sink is a coordinate that is large at most tokens (arXiv 2601.22966; the thresholds are ours), a spike one
that few tokens have. The null is a random rotation of the states, after which no coordinate is special. A spike's state
is nearly the same in all sequences (arXiv 2603.05498): the mean cosine of all pairs of sequences says how nearly.
"""

from typing import ClassVar

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from sinkscope.attention.kernels import upcast
from sinkscope.attention.weights import AttentionRead, keys_seen, row_chunks
from sinkscope.measuring.observables.observable import Maxima, Observable, Reading, Rows, Settings, Sums
from sinkscope.measuring.observables.reductions import filled
from sinkscope.measuring.one_pass import token_norms
from sinkscope.models.family import Family
from sinkscope.models.rotation import random_rotation
from sinkscope.results.tables import COORDINATE, POSITION, SEQUENCE, TOKEN, TOKEN_ID, Column
from sinkscope.text.batch import Batch

FIRST_SINK_WITHIN = 3  # the first sink is one of this many first tokens, the one with the largest norm
PARALLEL = 0.9  # |cosine| with the first sink above which a token is parallel to it
SINK_NORM = 3.0  # least norm of a sink ÷ median norm of the sequence's tokens (our threshold)
SHORTEST_LIFE = 1 / 8  # a secondary sink lasts for more than this share of the depth: 4 of 32 layers
LONGEST_LIFE = 17 / 32  # and for less than this share: 32 - 15 of 32 layers
FIRST_SINK, LASTING, SECONDARY = "first", "lasting", "secondary"
LARGE_ENTRY = 20.0  # a large entry is above this many times the median of its token
RESIDUAL_SHARE = 0.9  # least share of tokens at which the coordinate of a residual sink is large
SPIKE_SHARE = 0.1  # largest share of tokens at which the coordinate of a spike is large
LISTED = 16  # most coordinates listed for a layer, those that are large at the most tokens first
RESIDUAL_SINK, SPIKE, BETWEEN = "residual sink", "spike", "between"
NORM_RATIO = Column("norm_ratio", "L2 norm of a sequence's largest token ÷ the median norm of its tokens", "ratio")
SHARE_COLUMNS = (
    Column("largest_share", "largest share of the tokens at which one coordinate is large", "share"),
    Column("rotated_share", "the same after a random rotation of the states", "share"),
)


class SinkTokens(Observable):
    """Lists the sink tokens of every sequence by the `layer` in which each joins, and counts parallel tokens."""

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
            Column("written", "cosine of the MLP's output and the first sink's state where it joins; NaN without MLP"),
            Column("attention", "attention that later queries give it in the layers that read these states, mean over "
                "heads, ÷ that of uniform attention", "ratio"),
            Column("attention_elsewhere", "the same of equal tokens that are no sinks; NaN if there are none", "ratio"),
        ),
        "parallel_tokens": (
            SEQUENCE,
            Column("parallel", "share of other tokens that are parallel to the first sink: |cosine| > 0.9", "share"),
            Column("sinks", "the same, with 3 × the median norm", "share"),
        ),
    }  # fmt: skip

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.rows = Rows(list)
        self.elsewhere: Sums[int] = Sums()  # token id → (L+1,): attention to non-sink tokens, and their number
        self.states: dict[int, dict[str, torch.Tensor]] = {}  # of the current batch, by layer
        self.received: dict[int, torch.Tensor] = {}
        self.written: torch.Tensor | None = None

    def prepare(self, model: PreTrainedModel, family: Family, predicted: int) -> None:
        self.depth = len(family.layer_modules(model))

    def see_attention(self, layer: int, read: AttentionRead, batch: Batch) -> None:
        self.received[layer] = attention_received(read).cpu()

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        if site == "layer_in":
            self.states.setdefault(-1, {"norm": token_norms(reading.tensor).cpu()})
        elif site == "mlp_out":
            self.written = reading.tensor.clone()  # because models may change the tensor in place
        else:
            hidden = upcast(reading.tensor)
            first = F.normalize(batch.tokens_at(hidden, FIRST_SINK_WITHIN), dim=-1).mT  # (B,D,FIRST_SINK_WITHIN)
            written, self.written = hidden * torch.nan if self.written is None else upcast(self.written), None
            cosines = [F.normalize(x, dim=-1) @ first for x in (hidden, written)]  # (B,T,FIRST_SINK_WITHIN)
            states = {"norm": token_norms(hidden), "cosine": cosines[0], "written": cosines[1]}
            self.states[layer] = {name: x.cpu() for name, x in states.items()}

    def finish(self, batch: Batch) -> None:
        if self.depth - 1 not in self.states:  # other observables cannot wait for the last layer
            return
        before, *layers = (self.states[layer] for layer in sorted(self.states))
        nothing = torch.full_like(before["norm"], torch.nan)
        # the next layer attends to a layer's output
        read = torch.stack([self.received.get(layer, nothing) for layer in range(1, self.depth + 1)], -1).double()
        norms = torch.stack([before["norm"], *(each["norm"] for each in layers)], -1)  # (B,T,1+L)
        cosines, written = (torch.stack([each[name] for each in layers], -1) for name in ("cosine", "written"))
        self.states, self.received = {}, {}
        shares = torch.zeros(2, len(norms), self.depth)
        for index, (start, length) in enumerate(zip(batch.start.tolist(), batch.lengths.tolist(), strict=True)):
            text = index, slice(start, start + length)
            first = int(norms[text][:FIRST_SINK_WITHIN, 1:].amax(-1).argmax())
            flags = sink_layers(norms[text], cosines[text][:, first], first)  # parallel, and sinks
            shares[:, index] = torch.stack([x.sum(0) - x[first].int() for x in flags]) / max(1, length - 1)
            ids, attention, kinds = batch.token_ids[text].numpy(), read[text].numpy(), kinds_of(flags[1], first)
            for token in np.flatnonzero(kinds == ""):
                self.elsewhere.add(int(ids[token]), np.append(attention[token], 1.0))
            position = np.flatnonzero(kinds != "")
            lives = flags[1].numpy()[position]
            layer, last = lives.argmax(1), self.depth - 1 - lives[:, ::-1].argmax(1)
            norm = norms[text][:, 1:].numpy()
            self.rows.add({
                "layer": layer, "sequence": batch.first + index, "position": position,
                "token_id": ids[position], "kind": kinds[position], "last_layer": last, "lifetime": lives.sum(1),
                "norm": norm[position, layer],
                "norm_ratio": norm[position, layer] / np.median(norm, axis=0)[layer],
                "written": written[text][:, first].numpy()[position, layer],
                "attention": np.array([*map(mean_of_life, attention[position], layer, last)]),
            })  # fmt: skip
        by_layer = [{"layer": layer} for layer in range(self.depth)]
        statistics = {"parallel": shares[0], "sinks": shares[1]}
        self.statistics["parallel_tokens"].add_layers(batch, by_layer, statistics)

    def tables(self) -> dict[str, pd.DataFrame]:
        table = self.rows.table("sequence", "position")
        sums = [self.elsewhere.get(token, np.full(self.depth + 1, np.nan)) for token in table["token_id"]]
        means = [*map(mean_of_life, (x[:-1] / x[-1] for x in sums), table["layer"], table["last_layer"])]
        # in single precision, so that the order in which float64 sums were added has no effect
        table["attention_elsewhere"] = np.array(means, np.float32)
        return super().tables() | {"sink_tokens": table}


class ResidualSinks(Observable):
    """Finds coordinates that are large at many tokens or few, and compares the largest tokens of all sequences."""

    name = "residual-sinks"
    about = "coordinates that are large at most tokens (residual sinks) or at few (spikes), and the spike's direction"
    sites = ("layer_in", "layer_out")
    by_default = False
    columns: ClassVar = {
        "residual_sinks": (
            COORDINATE,
            Column("kind", "residual sink: large at 90 % of the tokens or more; spike: at 10 % or less; or between",
                kind="text"),
            Column("share", "share of the tokens at which |entry| > 20 × the median of the token's |entries|", "share"),
            Column("ratio_mean", "|entry| ÷ this median, mean over tokens", "ratio"),
            Column("ratio_max", "its largest value", "ratio"),
        ),
        "spikes": (
            Column("norm", "L2 norm of the largest token of each sequence, mean over sequences"),
            NORM_RATIO,
            Column("cosine", "cosine of the largest tokens of two sequences, mean over all pairs"),
            Column("cosine_of_others", "the same of the tokens with the median norm"),
            Column("step", "up: the layer with the norm's largest rise; down: its largest later fall", kind="text"),
            *SHARE_COLUMNS,
        ),
        "spikes_by_sequence": (SEQUENCE, NORM_RATIO, *SHARE_COLUMNS),
    }  # fmt: skip

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.sums: Sums[tuple[int, str]] = Sums()  # layer, -1 for the first one's input, and statistic
        self.largest: Maxima[int] = Maxima()
        self.rotation = torch.empty(0)  # (D,D), made when D is known

    def see(self, layer: int, site: str, reading: Reading, batch: Batch) -> None:
        if site == "layer_in" and layer > 0:
            return
        hidden = upcast(reading.tensor)
        norms = filled(torch.linalg.vector_norm(hidden, dim=-1), batch.valid, torch.nan)
        medians, middle = norms.nanmedian(-1)
        largest, top = norms.nan_to_num(nan=-1.0).max(-1)
        if site == "layer_in":
            self._add(-1, norm=largest.sum())
            return
        if not self.rotation.numel():
            self.rotation = random_rotation(hidden.shape[-1], seed=0)
        ratios, rotated = (  # (B,D,T), zero at padding
            filled((x.abs() / x.abs().median(-1, keepdim=True).values).movedim(-1, 1), batch.valid)
            for x in (hidden, hidden @ self.rotation.to(hidden))
        )
        lengths = batch.lengths.to(hidden.device)
        by_sequence = {"norm_ratio": largest / medians}
        for name, x in (("largest_share", ratios), ("rotated_share", rotated)):
            by_sequence[name] = ((x > LARGE_ENTRY).sum(-1) / lengths[:, None]).amax(-1)
        self.statistics["spikes_by_sequence"].add(batch, by_sequence, layer=layer)
        rows = torch.arange(len(hidden), device=hidden.device)
        self._add(
            layer, norm=largest.sum(), sequences=torch.tensor(len(hidden)), tokens=lengths.sum(),
            share=(ratios > LARGE_ENTRY).sum((0, 2)), ratio_mean=ratios.sum((0, 2)),
            cosine=F.normalize(hidden[rows, top], dim=-1).sum(0),
            cosine_of_others=F.normalize(hidden[rows, middle], dim=-1).sum(0),
        )  # fmt: skip
        self.largest.add(layer, ratios.amax((0, 2)).cpu())

    def _add(self, layer: int, **statistics: torch.Tensor) -> None:
        for name, x in statistics.items():
            self.sums.add((layer, name), x.double().cpu())

    def tables(self) -> dict[str, pd.DataFrame]:
        by_sequence = self.statistics["spikes_by_sequence"].table()
        spikes = by_sequence.drop(columns="sequence").groupby("layer", as_index=False).mean()
        sequences, tokens = (float(self.sums[0, name]) for name in ("sequences", "tokens"))
        spikes["norm"] = [float(self.sums[layer, "norm"]) / sequences for layer in spikes["layer"]]
        for name in ("cosine", "cosine_of_others"):
            spikes[name] = [mean_cosine(self.sums[layer, name], sequences) for layer in spikes["layer"]]
        up, down = life(torch.tensor([float(self.sums[-1, "norm"]) / sequences, *spikes["norm"]]))
        spikes["step"] = np.select([spikes["layer"] == up, spikes["layer"] == down], ["up", "down"], "")
        listed = []
        for layer, largest in sorted(self.largest.items()):
            means = {name: self.sums[layer, name].numpy() / tokens for name in ("share", "ratio_mean")}
            table = pd.DataFrame({"layer": layer, "coordinate": range(len(largest)), **means, "ratio_max": largest})
            table = table.sort_values(["share", "ratio_max"], ascending=False, kind="stable").head(LISTED)
            listed.append(table[table["ratio_max"] > LARGE_ENTRY])
        coordinates = pd.concat(listed, ignore_index=True)
        is_sink, is_spike = coordinates["share"] >= RESIDUAL_SHARE, coordinates["share"] <= SPIKE_SHARE
        coordinates["kind"] = np.select([is_sink, is_spike], [RESIDUAL_SINK, SPIKE], BETWEEN)
        return {"residual_sinks": coordinates, "spikes": spikes, "spikes_by_sequence": by_sequence}


def mean_of_life(by_layer: np.ndarray, first: int, last: int) -> float:
    return float(pd.Series(by_layer[first : last + 1]).mean())


def life(norms: torch.Tensor) -> tuple[int, int]:
    """Return the layers with the largest rise of a norm and with its largest later fall; the depth if it never falls.

    `norms` (1+L,) are those of the first layer's input and of each layer's output.
    """
    steps = norms.diff()
    start = int(steps.argmax())
    later = F.pad(steps[start + 1 :], (0, 1))  # as if it stayed the same after the last layer
    return start, start + 1 + int(later.argmin())


def sink_layers(norms: torch.Tensor, cosine: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which tokens are parallel to the first sink in which layers of its life, and which are sinks, (T,L) bool.

    `norms` (T,1+L) are as in `life`; `cosine` (T,L) compares each token's state with that of the first sink, at
    position `first`. If the first sink's norm is not large, no token is a sink.
    """
    start, end = life(norms[first])
    layers = torch.arange(cosine.shape[1])
    is_parallel = (cosine.abs() > PARALLEL) & (layers >= start) & (layers < end)
    is_large = norms[:, 1:] >= SINK_NORM * norms[:, 1:].median(0).values
    return is_parallel, is_parallel & is_large & is_large[first, start]


def kinds_of(is_sink: torch.Tensor, first: int) -> np.ndarray:
    """Return the kind of each token, (T,), from the layers in which it is a sink, (T,L); "" for none or few layers."""
    lifetime, depth = is_sink.sum(1).numpy(), is_sink.shape[1]
    kinds = np.full(len(is_sink), "", dtype=object)
    kinds[lifetime > SHORTEST_LIFE * depth] = SECONDARY
    kinds[(lifetime >= min(LONGEST_LIFE * depth, lifetime[first])) & (lifetime > 0)] = LASTING
    kinds[first] = FIRST_SINK if lifetime[first] else ""
    return kinds


def attention_received(read: AttentionRead) -> torch.Tensor:
    """Return the attention that each token gets from later queries ÷ that of uniform attention, mean over heads, (B,T).

    NaN for a token that no later query sees.
    """
    mass = read.lse.new_zeros(*read.query.shape[:2], read.length)
    uniform, share = torch.zeros_like(mass), 1 / keys_seen(read).clamp(min=1)
    tokens = torch.arange(read.length, device=mass.device)
    real = read.batch.attention_mask.bool().to(mass.device)
    for rows in row_chunks(read.length):
        cols = read.keys(rows)
        later, allowed = tokens[rows, None] > tokens[cols], read.allowed(rows, cols)
        seen = real[:, None, rows, None] & later & (True if allowed is None else allowed)
        mass[..., cols] += (read.weights(rows, cols)[0] * later).sum(2)
        uniform[..., cols] += (seen * share[..., rows, None]).sum(2)
    return mass.mean(1) / uniform.mean(1).masked_fill(uniform.mean(1) == 0, torch.nan)


def mean_cosine(total: torch.Tensor, count: float) -> float:
    """Return the mean cosine of all pairs of unit vectors from their sum (D,); NaN for a single vector."""
    return float((total.square().sum() - count) / (count * (count - 1))) if count > 1 else np.nan

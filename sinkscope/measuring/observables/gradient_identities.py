"""Equations that the papers state for gradients, against the gradients of autograd: table `gradient_identity`.

The derivation of GS theorem 1 (GS §3.2) also gives the gradients of queries and keys, from those of the logits:

    ∇l[t,s] = a[t,s] g_t·(v_s - y_t)        y_t = Σ_s a[t,s] v_s
    ∇q_t = scaling Σ_s ∇l[t,s] k_s          of one row t
    ∇k_s = scaling Σ_t ∇l[t,s] q_t          of a column s, as ∇v_s = Σ_t a[t,s] g_t

The gradient of the values before a gate or scale follows from that after it by VGA eq. 8, eq. 5 for input gates, and
GS §5.1 (`pullback` in sinkscope/retrofits/gates.py).
"""

from functools import partial
from typing import ClassVar

import pandas as pd
import torch
from transformers import PreTrainedModel

from sinkscope.attention.kernels import repeat_heads, upcast
from sinkscope.attention.weights import AttentionRead, row_chunks
from sinkscope.measuring.observables.observable import Observable, Settings, Sums
from sinkscope.measuring.observables.reductions import filled, long_table
from sinkscope.models.family import Family
from sinkscope.models.packed import without_gradients
from sinkscope.results.tables import POSITION, Column
from sinkscope.retrofits.retrofit import RETROFIT, ValuePart
from sinkscope.text.batch import Batch


class GradientIdentities(Observable):
    name = "gradient-identities"
    about = "gradients of queries and keys, and of values before a gate or scale, against the papers' equations"
    sites = ("raw_value", "attention")
    backward = True
    expected = False
    by_default = False
    columns: ClassVar = {
        "gradient_identity": (
            Column("pathway", "query or key; raw_value: before a retrofit's gate or scale on values", kind="text"),
            Column("head", "query head, or key/value head of key and raw_value", kind="whole"),
            POSITION,
            Column("residual", "distance of the gradient from the equation's ÷ its norm, over all sequences"),
        ),
    }  # fmt: skip

    @classmethod
    def inapplicable(cls, model: PreTrainedModel, family: Family) -> str | None:
        return without_gradients(model) or super().inapplicable(model, family)

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.squares: Sums[tuple[int, str, str]] = Sums()  # by layer, pathway, `error` and `size`, (heads,P)
        self._expected: dict[tuple[int, str], torch.Tensor] = {}  # of this batch, until the gradient comes
        self._raw: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # x (B,P,D) and raw values (B,P,K,d) by layer

    def prepare(self, model: PreTrainedModel, family: Family, predicted: int) -> None:
        self.value_parts = {
            layer: part
            for layer, attention in family.attentions(model).items()
            if isinstance(part := attention._modules.get(RETROFIT), ValuePart)
        }

    def watch_attention(self, layer: int, read: AttentionRead, mix: torch.Tensor, batch: Batch) -> None:
        detached, output = read.detached(), mix.detach()

        def on_mix(gradient: torch.Tensor) -> None:
            """Compute what is expected from g = ∇y (B,T,H,d), which comes before the gradients of q, k and v."""
            upstream = upcast(gradient).transpose(1, 2)
            expected = gradients_through_logits(detached, output, upstream, self.settings.positions)
            self._expected |= {(layer, pathway): x for pathway, x in expected.items()}

        if read.call.scores is None and read.call.operation is None:  # a softmax of scaled q·k
            mix.register_hook(on_mix)
            for pathway in ("query", "key"):
                getattr(read, pathway).register_hook(partial(self._compare, layer, pathway, batch))
        if layer in self._raw:
            read.value.register_hook(partial(self._before_gate, layer, batch))

    def watch_raw_value(self, layer: int, x: torch.Tensor, value: torch.Tensor, batch: Batch) -> None:
        if layer in self.value_parts:
            states = (batch.tokens_at(upcast(each.detach()), self.settings.positions) for each in (x, value))
            self._raw[layer] = (next(states), next(states))
            value.register_hook(lambda gradient: self._compare(layer, "raw_value", batch, gradient.transpose(1, 2)))

    def _before_gate(self, layer: int, batch: Batch, gradient: torch.Tensor) -> None:
        upstream = batch.tokens_at(upcast(gradient).transpose(1, 2), self.settings.positions)
        expected = self.value_parts[layer].pullback(*self._raw.pop(layer), upstream)
        if expected is not None:
            self._expected[layer, "raw_value"] = expected.transpose(1, 2)

    def _compare(self, layer: int, pathway: str, batch: Batch, gradient: torch.Tensor) -> None:
        """Compare a gradient (B,heads,T,d) with what is expected of each query head, (B,H,P,d), summed over groups."""
        expected = self._expected.pop((layer, pathway), None)
        if expected is None:
            return
        gradient = batch.tokens_at(upcast(gradient).transpose(1, 2), self.settings.positions).transpose(1, 2)
        error = gradient - expected.unflatten(1, (gradient.shape[1], -1)).sum(2)
        for name, x in (("error", error), ("size", gradient)):
            square = filled(x.double().square().sum(-1), batch.on(x.device, "present", self.settings.positions))
            self.squares.add((layer, pathway, name), square.sum(0))

    def tables(self) -> dict[str, pd.DataFrame]:
        parts = []
        for layer, pathway, name in sorted(self.squares):
            if name == "error":
                error, size = self.squares[layer, pathway, "error"], self.squares[layer, pathway, "size"]
                residual = (error / size).sqrt()
                if pathway == "query":
                    residual[:, 0] = torch.nan  # query 0 sees one key: its gradient is 0 but for round-off
                axes = {"layer": layer, "pathway": pathway, "head": range(len(residual))}
                axes |= {"position": range(residual.shape[1])}
                parts.append((axes, {"residual": residual}))
        return {"gradient_identity": long_table(parts)} if parts else {}


def gradients_through_logits(
    read: AttentionRead, mix: torch.Tensor, upstream: torch.Tensor, positions: int
) -> dict[str, torch.Tensor]:
    """Return ∇q and ∇k of the first positions by the softmax's derivative, for each query head, (B,H,P,d).

    Args:
        read: the attention of one batch, a softmax.
        mix: y, the heads' outputs (B,T,H,d).
        upstream: g = ∇y, (B,H,T,d).
        positions: P.
    """
    query, key, value = (upcast(repeat_heads(x, upstream.shape[1])) for x in (read.query, read.key, read.value))
    outside = (upstream * upcast(mix).transpose(1, 2)).sum(-1)  # g_t·y_t, (B,H,T)

    def of_logits(rows: slice, cols: slice) -> torch.Tensor:
        through_values = upstream[:, :, rows] @ value[:, :, cols].transpose(-1, -2)
        gradient = read.mix_weights(rows, cols).to(upstream.dtype) * (through_values - outside[:, :, rows, None])
        cap = read.call.softcap
        return gradient if cap is None else gradient * (1 - (read.logits(rows, cols) / cap).square())

    columns = read.batch.columns(positions)
    of_keys = torch.zeros_like(key[:, :, :columns])
    for rows in row_chunks(read.length):
        cols = read.keys(rows, columns)
        of_keys[:, :, cols] += of_logits(rows, cols).transpose(-1, -2) @ query[:, :, rows]
    first = slice(0, min(columns, read.length))
    seen = read.keys(first)
    gradients = {"query": of_logits(first, seen) @ key[:, :, seen], "key": of_keys}
    return {
        pathway: read.batch.tokens_at(read.call.scaling * x.transpose(1, 2), positions).transpose(1, 2)
        for pathway, x in gradients.items()
    }

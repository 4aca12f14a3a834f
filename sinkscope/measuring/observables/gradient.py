"""Gradient sinks: the gradients at each token (GS §2, eq. 3; §3 and §4).

The loss is the training loss, the mean cross-entropy over the predicted tokens of the whole run, so the batch size has
no effect. Every gradient is reduced as soon as it is computed. An encoder's loss is that of masked language modeling
(text/inputs.py), and its gradients are those of the masked text.

Intervals of gradient norms are made from the norms without each group of sequences (`GroupSums`). The norm of a
gradient is that of a sum over sequences: a bootstrap would draw some sequences twice and count the square of their
noise four times, while the delete-a-group jackknife counts each sequence once.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar, Self, TypeVar

import pandas as pd
import psutil
import torch
from torch import nn
from transformers import PreTrainedModel

from sinkscope.attention.kernels import upcast
from sinkscope.attention.weights import AttentionRead, row_chunks
from sinkscope.errors import SinkscopeError
from sinkscope.measuring.observables.observable import Accumulator, Accumulators, Observable, Settings, Sums
from sinkscope.measuring.observables.reductions import ALL_HEADS, GROUPS, filled, long_table
from sinkscope.measuring.one_pass import token_norms
from sinkscope.models.family import RESIDUAL_SITES, Block, Family
from sinkscope.models.packed import without_gradients
from sinkscope.results.tables import HEAD, POSITION, SEQUENCE, Column, names_of
from sinkscope.text.batch import IGNORED, Batch, on_cpu, sent

Key = TypeVar("Key")
GRAM_QUERIES = 64  # evenly spaced queries on which theorem 1's μ, σ² and ρ are measured
ON_DEVICE = 2**30  # bytes of an accelerator's memory for sums of gradients by group
BOUND_TOLERANCE = 1e-5  # relative tolerance of theorem 1: its bounds are equalities if all g are equal


class GroupSums(Accumulator):
    """Sums of gradients over groups of sequences. Text i of a run, with all its copies, is in group i modulo GROUPS.

    They are GROUPS · positions · (H + 2K) · d numbers per layer, which in float32 is 37 MB for SmolLM2-135M and 0.5 GB
    for Llama-2-7B (16 positions). On an accelerator the first ON_DEVICE bytes stay there, and further ones on the CPU.
    """

    def __init__(self) -> None:
        self.sums: Sums[tuple[int, str]] = Sums()  # by layer and pathway, (GROUPS,P,heads,d)
        # sequence, number of its text → number of its tokens in the loss
        self.predicted: Sums[tuple[int, int]] = Sums()

    def near(self, key: tuple[int, str], gradient: torch.Tensor) -> torch.Tensor:
        """Return gradients (B,P,heads,d) on the device of their sums. Raises SinkscopeError if memory is too small."""
        if key in self.sums:
            return gradient.to(self.sums[key].device)
        size = GROUPS * gradient[0].nbytes
        on_device = sum(sums.nbytes for sums in self.sums.values() if sums.device.type != "cpu")
        if gradient.device.type != "cpu" and on_device + size <= ON_DEVICE:
            return gradient
        if size > psutil.virtual_memory().available:
            raise SinkscopeError("the sums of gradients by group do not fit into memory: take fewer --positions")
        return gradient.cpu()

    def add(self, key: tuple[int, str], gradient: torch.Tensor, batch: Batch) -> None:
        """Add the gradients (B,P,heads,d) of one batch's sequences at one layer and pathway."""
        numbers = batch.numbers
        if (batch.first, numbers[0]) not in self.predicted:
            predicts = batch.targets != IGNORED
            if batch.registers is not None:  # a register token predicts nothing
                predicts = predicts & ~batch.registers
            sequences = enumerate(numbers, batch.first)
            self.predicted.update(zip(sequences, predicts.sum(1).tolist(), strict=True))
        if key not in self.sums:
            self.sums[key] = gradient.new_zeros(GROUPS, *gradient.shape[1:])
        self.sums[key].index_add_(0, batch.on(gradient.device, "groups", GROUPS), gradient)

    def table(self, totals: Mapping[tuple[int, str], torch.Tensor]) -> pd.DataFrame:
        """Return the norms of the run's gradient without each group, from its sums over all sequences, (heads,P,d)."""
        groups = min(GROUPS, len({text for _, text in self.predicted}))
        whole = sum(self.predicted.values())
        of_group = [sum(n for (_, text), n in self.predicted.items() if text % GROUPS == g) for g in range(groups)]
        others = [whole - count for count in of_group]
        scales = torch.tensor([1 / count if count else math.nan for count in others], dtype=torch.float64).view(
            -1, 1, 1
        )
        parts = []
        for key, sums in sorted(self.sums.items()):
            without = totals[key] - sums[:groups].transpose(1, 2)
            norms = torch.linalg.vector_norm(without, dim=-1) * sent(scales, without.device)
            parts.append(_rows_of_norms(key, norms, sums.dtype, by_head=key[1] == "value", group=range(groups)))
        return long_table(parts)


def _rows_of_norms(
    key: tuple[int, str], norms: torch.Tensor, dtype: torch.dtype, by_head: bool = True, **axes: Any
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return a layer's and pathway's rows for `long_table`: of all heads together, and of each; norms (…,heads,P)."""
    columns = norms.square().sum(-2, keepdim=True).sqrt()
    if by_head:
        columns = torch.cat([columns, norms], dim=-2)
    axes |= {"head": [ALL_HEADS, *range(columns.shape[-2] - 1)], "position": range(columns.shape[-1])}
    return dict(zip(("layer", "pathway"), key, strict=True)) | axes, {"grad_norm": columns.to(dtype)}


@dataclass(frozen=True)
class NormGain:
    """The bound of a norm layer's Jacobian: ‖J‖ ≤ ‖γ‖∞ ÷ rms(x) for RMSNorm (GS theorem 2), ÷ std(x) for LayerNorm."""

    largest: float  # ‖γ‖∞
    epsilon: float
    centered: bool  # as LayerNorm is

    def bound(self, x: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
        """Return ‖γ‖∞ ÷ √(mean square + ε) of tokens x (B,T,D) with `norms` (B,T); for LayerNorm, they are centered."""
        if self.centered:
            entries = upcast(x)
            norms = token_norms(entries - entries.mean(-1, keepdim=True))
        return self.largest / (norms.square() / x.shape[-1] + self.epsilon).sqrt()


@torch.no_grad()
def norm_gains(norms: Mapping[Key, tuple[nn.Module, int]]) -> dict[Key, NormGain]:
    """Return the gains of norms, each given with its width.

    The norms are probed, because families store γ differently (Gemma as 1 + weight). Alternating ±1 has mean 0 and mean
    square 1: half the difference of the outputs for it and for its negative is γ without bias. LayerNorm maps a
    constant input to its bias; RMSNorm does not.
    """
    differences = []  # of the outputs for an input and its negative, the largest: for ones and for alternating signs
    for module, width in norms.values():
        weight = next(module.parameters(), torch.zeros(1))
        device = "cpu" if weight.is_meta else weight.device  # if offloaded, accelerate moves the input
        ones = torch.ones(1, 1, width, dtype=weight.dtype, device=device)
        alternating = ones.clone()
        alternating[..., 1::2].neg_()
        pairs = [upcast(module(x.clone()) - module(-x)).abs().max() for x in (ones, alternating)]
        differences.append(torch.stack(pairs))
    gains = {}
    for (key, (module, _)), both in zip(norms.items(), on_cpu(differences), strict=True):
        constant, largest = both.tolist()
        epsilon = getattr(module, "variance_epsilon", None) or getattr(module, "eps", None) or 0.0
        gains[key] = NormGain(largest / 2 * (1 + epsilon) ** 0.5, epsilon, centered=constant == 0)
    return gains


class TheoremOne(Accumulator):
    """Checks ∇v_s = Σ_t a[t,s] g_t and its bounds for g_t = μ + ε_t (GS theorem 1), per layer and query head.

    With grouped queries, ∇v_s is the sum over a group's heads; the bounds are those of one query head's part of it.
    μ is the mean of g over sequences and queries, σ² the largest mean ‖g_t - μ‖² of any query t, and ρ the largest
    |mean (g_t - μ)·(g_t' - μ)| of any two. They use only the run's longest sequences, because shorter ones have no g at
    some t.
    """

    def __init__(self, positions: int) -> None:
        self.positions = positions
        self.identity: Sums[tuple[int, str]] = Sums()  # by layer, `error` and `size`, (K,P)
        self.moments: Accumulators[int] = Accumulators()  # sums for the bounds, by layer
        self.longest: dict[int, int] = {}  # the length of the sequences in `moments`

    def add_upstream(self, layer: int, read: AttentionRead, upstream: torch.Tensor) -> torch.Tensor:
        """Add g (B,H,T,d) of one batch. Returns Σ_t a[t,s] g_t of each query head, (B,H,P,d)."""
        batch, columns = read.batch, read.batch.columns(self.positions)
        shape = (*upstream.shape[:2], columns)
        routed = upstream.new_zeros(*shape, upstream.shape[-1])
        mass, second = upstream.new_zeros(shape), upstream.new_zeros(shape)  # M and S of the bounds
        for rows in row_chunks(read.length):
            cols = read.keys(rows, columns)
            weights = read.mix_weights(rows, cols).to(upstream.dtype)
            routed[:, :, cols] += weights.transpose(-1, -2) @ upstream[:, :, rows]
            mass[..., cols] += weights.sum(2)
            second[..., cols] += (weights * weights).sum(2)
        routed = batch.tokens_at(routed.transpose(1, 2), self.positions).transpose(1, 2)
        if self._keep_longest(layer, read.length):
            measured = routed
            if batch.valid is not None:
                full = batch.on(upstream.device, "without_padding")
                upstream, mass, second, measured = (x[full] for x in (upstream, mass, second, routed))
            chosen = upstream[:, :, _gram_queries(read.length, upstream.device)].double()
            moments = self.moments[layer]
            moments.add("sequences", len(chosen))
            moments.add("mean", chosen.sum(0))
            moments.add("gram", (chosen @ chosen.transpose(-1, -2)).sum(0))
            moments.add("mass_squared", mass[..., : self.positions].double().square().sum(0))
            moments.add("second", second[..., : self.positions].double().sum(0))
            moments.add("measured", measured.double().square().sum((0, 3)))
        return routed

    def _keep_longest(self, layer: int, length: int) -> bool:
        """Drop the moments of shorter sequences; return whether sequences of this length are used."""
        if length > self.longest.get(layer, 0):
            self.longest[layer], self.moments[layer] = length, Sums()
        return length == self.longest[layer]

    def add_value_gradient(self, layer: int, gradient: torch.Tensor, routed: torch.Tensor, batch: Batch) -> None:
        """Compare autograd's ∇v (B,K,P,d) with the sum of `routed` over the query heads of each group."""
        summed = routed.unflatten(1, (gradient.shape[1], -1)).sum(2)
        for name, x in (("error", gradient - summed), ("size", gradient)):
            square = filled(x.double().square().sum(-1), batch.on(x.device, "present", self.positions))
            self.identity.add((layer, name), square.sum(0))

    def merge(self, other: Self) -> None:
        self.identity.merge(other.identity)
        for layer, longest in other.longest.items():
            if self._keep_longest(layer, longest):
                self.moments[layer].merge(other.moments[layer])

    def table(self) -> pd.DataFrame:
        parts = []
        for layer, sums in sorted(self.moments.items()):
            bounds = _bounds(sums)
            heads, positions = bounds["measured"].shape
            residual = (self.identity[layer, "error"] / self.identity[layer, "size"]).sqrt()
            columns = {"identity_residual": residual.repeat_interleave(heads // len(residual), dim=0)} | bounds
            axes = {"layer": layer, "head": range(heads), "position": range(positions)}
            parts.append((axes, columns))
        table = long_table(parts)
        lower, measured, upper = table["lower_bound"], table["measured"], table["upper_bound"]
        low, high = (1 - BOUND_TOLERANCE) * lower, (1 + BOUND_TOLERANCE) * upper
        return table.assign(holds=(low <= measured) & (measured <= high))


@cache  # because each copy waits for the device
def _gram_queries(length: int, device: torch.device) -> torch.Tensor:
    return torch.linspace(0, length - 1, min(GRAM_QUERIES, length)).round().long().to(device)


def _bounds(sums: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Compute M²‖μ‖² ≤ ‖∇v_s‖² ≤ M²‖μ‖² + σ²S + ρ(M² - S), for the loss summed over the run."""
    count = sums["sequences"]
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


@dataclass(frozen=True)
class Branch:
    """The sites of a branch in the roles of GS eq. 3; None if this wiring has no such site."""

    x: str  # its input
    y: str | None  # its norm's output, if only this branch reads it
    r: str  # its own output
    z: str | None  # the residual stream after it, z = x + r


# wiring → branch → its input, and the residual stream after it
_STREAMS: dict[str, dict[str, tuple[str, str | None]]] = {
    "single": {"attn": ("layer_in", "layer_out"), "mlp": ("layer_in", "layer_out")},
    "sequential": {"attn": ("layer_in", "mid"), "mlp": ("mid", "layer_out")},
    "parallel": {"attn": ("layer_in", None), "mlp": ("layer_in", None)},
    "post-norm": {"attn": ("layer_in", "mid")},  # the MLP's sum is inside the layer
    "unknown": {},
}


def branches_of(block: Family | Block) -> dict[str, Branch]:
    """Return the branches of this wiring by name (attn, mlp)."""
    norms = {branch: f"{branch}_norm" if f"{branch}_norm" in block.sites else None for branch in ("attn", "mlp")}
    shares_norm = block.wiring == "parallel" and norms["mlp"] is None  # its gradient is the sum of both gradients
    if shares_norm or block.wiring == "post-norm":
        norms["attn"] = None
    streams = _STREAMS[block.wiring].items()
    return {name: Branch(x, norms[name], r, z) for name, (x, z) in streams if (r := f"{name}_out") in block.sites}


def undefined_ratios(family: Family) -> dict[str, str]:
    """Map the ratios of GS eq. 3 that this wiring does not define to the reason."""
    if family.wiring == "unknown":
        return {"bloat, compress and change": "the sum that a layer adds to the residual stream is not known"}
    reasons = {}
    branches = branches_of(family)
    if family.wiring == "single":
        has_norms = all(branch.y for branch in branches.values())
        return {} if has_norms else {"bloat and compress": "there is no norm before a branch"}
    if family.wiring == "parallel":
        reasons["compress and change"] = "attention and MLP read the same input, so there is no h+½ between them"
        if branches["attn"].y is None:
            reasons["bloat"] = "attention and MLP read one norm, whose gradient is the sum of both gradients"
    elif branches["attn"].y is None:
        reasons["bloat and compress"] = "there is no norm before the branches"
    if "mlp" not in branches:
        reasons["the MLP's ratios"] = "the layer normalizes after its residual sums"
    return reasons


BRANCH_COLUMN = Column("branch", "attn or mlp", kind="text")
PATHWAY = Column(
    "pathway",
    "query, key, value (as attended to); raw_value: before a retrofit's gate or scale on values; query_measured: "
    "position 0 as autograd computes it, where `query` is 0 by construction",
    kind="text",
)
GRAD_HEAD = Column("head", "query head, or key/value head of key and value; -1: all heads together", kind="whole")
RATIO_COLUMNS = (
    Column("input_norm", "‖x‖, L2 norm of the branch's input"),
    Column("bloat", "‖∇y‖ ÷ ‖∇r‖: y the branch's normed input, r its output (GS eq. 3)"),
    Column("compress", "‖∇x - ∇z‖ ÷ ‖∇y‖: z the stream after the branch (GS eq. 3)"),
    Column("change", "‖∇x‖ ÷ ‖∇z‖ (GS eq. 3)"),
)


class Gradient(Observable):
    """Measures gradients: tables `gradient`, `gradient_ratio`, `gradient_check` (theorem 1), `norm_bound` (theorem 2).

    The tables `gradient_by_group` and `gradient_ratio_by_sequence` give the intervals of the first two. Ratios are
    computed per sequence and token; a row is their mean over sequences. The last tokens, which predict nothing, have
    neither gradient nor ratio.
    """

    name = "gradient"
    about = "gradients of query, key and value by token; bloat, compress and change; GS's two theorems checked"
    sites = (*RESIDUAL_SITES, "raw_value", "attention")
    backward = True
    columns: ClassVar = {
        "gradient": (PATHWAY, GRAD_HEAD, POSITION, Column("grad_norm", "L2 norm of the run's gradient of the loss")),
        "gradient_by_group": (
            Column("group", "group of sequences: the number of a sequence's text modulo 20", kind="whole"),
            PATHWAY, GRAD_HEAD, POSITION,
            Column("grad_norm", "L2 norm of the run's gradient of the loss without this group's sequences"),
        ),
        "gradient_ratio": (BRANCH_COLUMN, POSITION, *RATIO_COLUMNS),
        "gradient_ratio_by_sequence": (BRANCH_COLUMN, SEQUENCE, POSITION, *RATIO_COLUMNS),
        "gradient_check": (
            HEAD, POSITION,
            Column("identity_residual", "relative distance of ∇v_s from Σ_t a[t,s] g_t"),
            Column("lower_bound", "of the squared gradient (GS theorem 1)"),
            Column("measured", "the head's squared gradient, mean over sequences"),
            Column("upper_bound", "of the squared gradient (GS theorem 1)"),
            Column("holds", "whether it lies between the bounds", kind="truth"),
        ),
        "norm_bound": (
            BRANCH_COLUMN, POSITION,
            Column("measured", "compress, mean over sequences"),
            Column("bound", "‖γ‖∞ ÷ rms(x) (GS theorem 2)"),
            Column("holds", "share of sequences in which compress is within the bound"),
            Column("tightness", "compress ÷ bound"),
        ),
    }  # fmt: skip

    @classmethod
    def inapplicable(cls, model: PreTrainedModel, family: Family) -> str | None:
        if reason := without_gradients(model):
            return reason
        layers = range(len(family.layer_modules(model)))
        if family.has_attention or any(branches_of(family.block(layer)) for layer in layers):
            return None
        return "it has neither attention nor a branch whose sum is known"

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.pathways: Sums[tuple[int, str]] = Sums()  # the gradient summed over all sequences, (heads,P,d)
        self.groups = GroupSums()
        self.gains: dict[tuple[int, str], NormGain] = {}
        self.branches: dict[int, dict[str, Branch]] = {}  # by layer
        # gradients at layers' inputs: numbers of zero ones of the predicting tokens, of all of these tokens, and of
        # overflowed ones of any token, (3,)
        self.counts: Sums[str] = Sums()
        self.theorem = TheoremOne(settings.positions)
        # of this batch, until they have been used
        self._seen: dict[tuple[int, str], torch.Tensor] = {}  # gradients by layer and site
        self._norms: dict[tuple[int, str], torch.Tensor] = {}  # ‖x‖ of the branches' inputs, (B,T)
        self._bounds: dict[tuple[int, str], torch.Tensor] = {}  # theorem 2's bounds, (B,T)
        self._routed: dict[int, torch.Tensor] = {}  # Σ_t a[t,s] g_t by layer

    def prepare(self, model: PreTrainedModel, family: Family, predicted: int) -> None:
        self.loss_scale = 1.0 / predicted
        self.copies = family.copies
        norms: dict[tuple[int, str], tuple[nn.Module, int]] = {}
        for layer, module in enumerate(family.layer_modules(model)):
            block = family.block(layer)
            self.branches[layer] = branches_of(block)
            for name, branch in self.branches[layer].items():
                if branch.y is not None and branch.z is not None:
                    norm = module.get_submodule(block.sites[branch.y].removesuffix(".output"))
                    norms[layer, name] = norm, model.config.get_text_config().hidden_size
        self.gains = norm_gains(norms)

    # --- the forward pass: register hooks

    def watch(self, layer: int, site: str, tensor: torch.Tensor, batch: Batch, scale: float) -> None:
        for name, branch in self.branches[layer].items():
            if site == branch.x:
                entries = tensor.detach().view(*batch.token_ids.shape, -1)
                self._norms[layer, name] = norms = token_norms(entries)
                if (layer, name) in self.gains:
                    self._bounds[layer, name] = self.gains[layer, name].bound(entries, norms)
        _hook(tensor, partial(self._on_stream, layer, site, batch, scale))

    def watch_attention(self, layer: int, read: AttentionRead, mix: torch.Tensor, batch: Batch) -> None:
        for pathway in ("query", "key", "value"):
            # A softmax over one key is constant, so query 0's gradient is 0 under the causal mask; the fused kernel
            # gives round-off instead.
            constant = pathway == "query" and read.call.one_key_has_weight_one and not read.call.looks_ahead
            _hook(getattr(read, pathway), partial(self._on_pathway, layer, pathway, batch, constant))
        detached = read.detached()

        def on_mix(gradient: torch.Tensor) -> None:
            """Add g = ∇y (B,T,H,d), the gradient of each head's mix."""
            self._routed[layer] = self.theorem.add_upstream(layer, detached, upcast(gradient).transpose(1, 2))

        _hook(mix, on_mix)

    def watch_raw_value(self, layer: int, x: torch.Tensor, value: torch.Tensor, batch: Batch) -> None:
        value.register_hook(lambda grad: self._on_pathway(layer, "raw_value", batch, False, grad.transpose(1, 2)))

    # --- the backward pass: last layer first

    def _on_pathway(self, layer: int, pathway: str, batch: Batch, first_is_zero: bool, gradient: torch.Tensor) -> None:
        """Add the gradients of queries (B,H,T,d), keys or values (B,K,T,d), summed over the batch as in training."""
        gradient = upcast(batch.tokens_at(gradient.transpose(1, 2), self.settings.positions))
        if pathway == "query":
            self._add_pathway(layer, "query_measured", gradient[:, :1])
        if first_is_zero:
            gradient = torch.cat([torch.zeros_like(gradient[:, :1]), gradient[:, 1:]], dim=1)
        beside_sums = self.groups.near((layer, pathway), gradient)
        self._add_pathway(layer, pathway, beside_sums)
        self.groups.add((layer, pathway), beside_sums, batch)
        if pathway == "value":
            self.theorem.add_value_gradient(layer, gradient.transpose(1, 2), self._routed.pop(layer), batch)

    def _add_pathway(self, layer: int, pathway: str, gradient: torch.Tensor) -> None:
        """Add the gradients (B,P,heads,d) of one batch."""
        self.pathways.add((layer, pathway), gradient.sum(0, dtype=torch.float64).transpose(0, 1))  # (heads,P,d)

    def _on_stream(self, layer: int, site: str, batch: Batch, scale: float, gradient: torch.Tensor) -> None:
        """Store the gradient at a residual-stream site (B,T,D) of the sum's term, which is `scale` · tensor."""
        gradient = gradient if self.copies is None else self.copies.split(gradient)
        gradient = gradient.reshape(*batch.token_ids.shape, -1)
        self._seen[layer, site] = gradient if scale == 1.0 else upcast(gradient) / scale
        for name, branch in self.branches[layer].items():
            # x is the last of a branch's gradients; without r, the branch's output does not depend on the tokens
            if site != branch.x or (layer, branch.r) not in self._seen:
                continue
            r = self._seen[layer, branch.r]
            # accelerate moves the input of a layer on another device only after it has been read
            x = self._seen[layer, branch.x].to(r.device)
            y, z = (None if site is None else self._seen[layer, site].to(r.device) for site in (branch.y, branch.z))
            input_norm = self._norms.pop((layer, name)).to(r.device)
            undefined = torch.full_like(input_norm, torch.nan)  # for ratios that the wiring does not define
            ratios = {  # GS eq. 3
                "input_norm": input_norm,
                "bloat": undefined if y is None else token_norms(y) / token_norms(r),
                "compress": undefined if y is None or z is None else token_norms(upcast(x) - z) / token_norms(y),
                "change": undefined if z is None else token_norms(x) / token_norms(z),
            }
            if (layer, name) in self.gains:
                ratios["bound"] = self._bounds.pop((layer, name)).to(r.device)
            self.pending.add(ratios, layer=layer, branch=name)
        if site == "layer_in":
            norms = token_norms(self._seen[layer, site])
            in_loss = batch.on(norms.device, "in_loss")
            counts = torch.stack([(norms == 0) & in_loss, in_loss, ~norms.isfinite()]).sum((1, 2))
            self.counts.receive(partial(self.counts.add, "tokens"), counts)
            for key in [key for key in self._seen if key[0] == layer]:
                del self._seen[key]

    def finish(self, batch: Batch) -> None:
        for _, rows, by_token in self.pending.take():
            bound, compress = by_token.pop("bound", None), by_token["compress"]
            present = batch.on(compress.device, "present", self.settings.positions)
            tables = {"gradient_ratio": by_token}
            if bound is not None:
                # half a percent for the round-off of the two gradients' difference
                within = (compress <= 1.005 * bound).to(bound.dtype)
                holds = torch.where(compress.isfinite(), within, torch.nan)
                checks = {"measured": compress, "bound": bound, "holds": holds, "tightness": compress / bound}
                tables["norm_bound"] = checks
            for table, statistics in tables.items():  # (B,L,T), means where they are finite
                finite = {}
                for name, statistic in statistics.items():
                    at_positions = batch.at_positions(statistic, self.settings.positions)
                    defined = at_positions.isfinite()
                    finite[name] = at_positions.masked_fill(~defined, torch.nan)
                    counted = defined if present is None else defined & present[:, None]
                    self.statistics[table].add_layers(rows, {name: at_positions}, counted)
                if table == "gradient_ratio":
                    self.statistics["gradient_ratio_by_sequence"].add_layers(batch, rows, finite, present)

    def notices(self) -> list[str]:
        vanished, every, overflowed = self.counts.get("tokens", torch.zeros(3)).tolist()
        if overflowed:
            raise SinkscopeError("a gradient overflowed: take --dtype bfloat16 or float32")
        if vanished:
            share = vanished / every
            return [f"{share:.1%} of the tokens' gradients underflowed to zero: take --dtype bfloat16 or float32"]
        return []

    def tables(self) -> dict[str, pd.DataFrame]:
        # without rows if the loss depends on no branch; the ratios by sequence then are no table
        expected = ("norm_bound", "gradient_ratio") if any(self.branches.values()) else ("norm_bound",)
        tables = {name: pd.DataFrame(columns=["layer", *names_of(self.columns[name])]) for name in expected}
        tables |= super().tables()
        if self.pathways:
            norms = {key: torch.linalg.vector_norm(total, dim=-1) for key, total in sorted(self.pathways.items())}
            parts = [_rows_of_norms(key, norm * self.loss_scale, norm.dtype) for key, norm in norms.items()]
            tables |= {"gradient": long_table(parts), "gradient_by_group": self.groups.table(self.pathways)}
            tables["gradient_check"] = self.theorem.table()
        return tables


def _hook(tensor: torch.Tensor, reduce: Callable[[torch.Tensor], None]) -> None:
    """Call `reduce` with a tensor's gradient, also if it was made from no other tensor, such as zeros."""
    if not tensor.requires_grad:
        tensor.requires_grad_()
    tensor.register_hook(reduce)

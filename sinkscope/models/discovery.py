"""Finds numerically what a layer adds to the residual stream, and where each summand can be read.

A few tokens are run through the model, and inputs and outputs of every module of a layer are kept. A branch is then a
module whose output r, times a constant s, is the difference between two states of the residual stream (or two parallel
modules, such as attention and a state-space model, or shared and routed experts):

    sequential   mid = h + s·r_attn          h' = mid + s·r_mlp
    post-norm    mid = h + s·r_attn          h' = norm(norm(mid) + s·r_mlp)
    parallel     h' = h + s·r_attn + t·r_mlp
    single       h' = h + s·r                with only one branch

Sums are compared entry by entry up to round-off of the model's dtype, so that only the true sum passes.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import nn

from sinkscope.models.family import FEED_FORWARD, RESIDUAL_SITES, Block, Term
from sinkscope.models.wiring import record_ends

ULPS = 8  # of the larger term: a sum of three, each rounded


@dataclass(frozen=True)
class Event:
    """The input or output of a module of a layer, (B,T,D) in float64."""

    order: int
    path: str
    end: str  # input or output
    x: torch.Tensor

    @property
    def address(self) -> str:
        return f"{self.path}.{self.end}" if self.path else self.end

    @property
    def depth(self) -> int:
        return self.path.count(".")


@dataclass(frozen=True)
class Branch:
    """One or two modules whose outputs, times their scales, are added to the residual stream."""

    events: tuple[Event, ...]  # in the order in which they ran
    scales: tuple[float, ...]

    @property
    def last(self) -> Event:
        return self.events[-1]

    @property
    def rank(self) -> tuple:
        """Return a sort key, smaller is better: unscaled outputs first, then outer modules, then early ones."""
        scaled = any(scale != 1.0 for scale in self.scales)
        return (scaled, sum(event.depth for event in self.events), self.last.order)

    def covers(self, path: str) -> bool:
        """Return whether the module at this path is one of the branch's modules or part of one."""
        return any(_within(path, event.path) for event in self.events)


class Found(NamedTuple):
    """The sums that make up a layer."""

    wiring: str
    attention: Branch | None
    mid: Event | None
    mlp: Branch | None


class Layer:
    """The inputs and outputs of the modules of one layer, and the search for the sums between them."""

    def __init__(self, module: nn.Module, events: Sequence[Event], attention: str, kind: str, eps: float) -> None:
        self.module = module
        self.attention = attention  # path of the attention module; "" if the layer has none
        self.kind = kind  # see Block
        self.eps = eps
        self.h = next(event for event in events if event.address == "input")
        self.out = next(event for event in reversed(events) if event.address == "output")
        self.inner = [event for event in events if event.path]
        runs = Counter(event.address for event in self.inner)
        # a hook would read only the first of several runs
        inner = [event for event in self.inner if runs[event.address] == 1]
        self.inputs = [event for event in inner if event.end == "input"]
        self.outputs = [event for event in inner if event.end == "output"]

    def block(self) -> Block | None:
        """Return how this layer is built; None if none of the known sums fits."""
        found = self._sequential()
        if found is None and (single := self._module(self.h.x, self.out.x, self.outputs)) is not None:
            is_mlp = self.kind in FEED_FORWARD
            found = Found("single", None if is_mlp else single, None, single if is_mlp else None)
        found = found or self._parallel()
        if found is None:
            return None
        wiring, attention, mid, mlp = found
        # a single branch needs no check: only it can contain the attention module
        if self.attention and wiring != "single" and not self._carries_attention(attention):
            return None
        branches = {"attn_out": attention, "mlp_out": mlp}
        addresses = {
            "layer_in": "input",
            "attn_norm": self._norm_before(self.h, attention) if attention else None,
            "attn_out": attention and attention.last.address,
            "mid": mid and mid.address,
            "mlp_norm": self._norm_before(mid or self.h, mlp) if mlp and wiring != "post-norm" else None,
            "mlp_out": mlp and mlp.last.address,
            "layer_out": "output",
        }
        if wiring == "parallel" and addresses["mlp_norm"] == addresses["attn_norm"]:
            addresses["mlp_norm"] = None
        sites = {site: address for site, address in addresses.items() if address}
        for site, branch in branches.items():
            if branch and len(branch.events) > 1:
                sites[f"{site}, first term"] = branch.events[0].address
        orders = {event.address: event.order for event in reversed([*self.inputs, *self.outputs])}
        orders |= {"input": -1, "output": 1 << 62}
        return Block(
            attention=self.attention,
            sites=dict(sorted(sites.items(), key=lambda site: orders[site[1]])),
            wiring=wiring,
            kind=self.kind,
            sums={
                site: tuple(map(Term, (event.address for event in branch.events), branch.scales))
                for site, branch in branches.items()
                if branch and branch.scales != (1.0,)
            },
        )

    def sites(self, block: Block) -> dict[str, torch.Tensor]:
        """Return the tensors at the sites of a block, possibly another layer's; missing sites are left out."""
        known = {event.address: event.x for event in [*self.outputs, *self.inputs]}
        known |= {"input": self.h.x, "output": self.out.x}
        terms = {site: block.terms(site) for site in block.sites if site in RESIDUAL_SITES}
        return {
            site: torch.stack([term.scale * known[term.address] for term in parts]).sum(0)
            for site, parts in terms.items()
            if all(term.address in known for term in parts)
        }

    def _sequential(self) -> Found | None:
        """Find two sequential branches, where a norm that ends the layer may follow the second."""
        for mid in self.inputs:
            if self._is(mid.x, self.h.x):
                continue
            attention = self._branch(self.h.x, mid.x, before=mid.order)
            if attention is None:
                continue
            mlp = self._branch(mid.x, self.out.x, after=mid.order)
            if mlp is not None:
                return Found("sequential", attention, mid, mlp)
            mlp = self._normed_branch(mid)
            if mlp is not None:
                return Found("post-norm", attention, mid, mlp)
        return None

    def _normed_branch(self, mid: Event) -> Branch | None:
        """Find the second branch of a post-norm layer: the modules whose output is added to norm(mid)."""
        normed = [given for taken in self.inputs if self._is(taken.x, mid.x) and (given := self._given(taken))]
        for end in (event for event in self.inner if event.end == "input"):
            if end.order < mid.order or self._is(end.x, mid.x):
                continue
            given = self._given(end)
            if given is None or not self._is(given.x, self.out.x):  # the norm does not end the layer
                continue
            for stream in normed:
                branch = self._branch(stream.x, end.x, after=stream.order, before=end.order)
                if branch is not None:
                    return branch
        return None

    def _given(self, taken: Event) -> Event | None:
        """Return the output of the module that reads this input."""
        later = (event for event in self.inner if event.path == taken.path and event.order > taken.order)
        return next(later, None)

    def _parallel(self) -> Found | None:
        """Find two parallel branches; attention's is the one with the attention module, or else the first."""
        both = self._pair(self.h.x, self.out.x, self.outputs)
        if both is None:
            return None
        attention, mlp = (Branch((event,), (scale,)) for event, scale in zip(both.events, both.scales, strict=True))
        if not attention.covers(self.attention) and mlp.covers(self.attention):
            attention, mlp = mlp, attention
        return Found("parallel", attention, None, mlp)

    def _branch(
        self, start: torch.Tensor, end: torch.Tensor, after: int = -1, before: float = float("inf")
    ) -> Branch | None:
        """Find the branch that makes the step from `start` to `end`: one module, or two children of the layer."""
        between = [event for event in self.outputs if after < event.order < before]
        single = self._module(start, end, between)
        return single or self._pair(start, end, [event for event in between if event.depth == 0])

    def _module(self, start: torch.Tensor, end: torch.Tensor, events: Sequence[Event]) -> Branch | None:
        """Find the one module that makes the step."""
        found = []
        for event in events:
            for scale in (1.0, _one_scale(end - start, event.x)):
                if scale and self._makes(end, (start, scale * event.x)):
                    found.append(Branch((event,), (scale,)))
                    break
        return min(found, key=lambda branch: branch.rank, default=None)

    def _pair(self, start: torch.Tensor, end: torch.Tensor, events: Sequence[Event]) -> Branch | None:
        """Find two modules that together make the step; neither contains the other."""
        found = []
        others = [event for event in events if not self._is(event.x, start)]  # else end - start makes any step
        for first, second in combinations(others, 2):
            if _within(first.path, second.path) or _within(second.path, first.path):
                continue
            s, t = _two_scales(end - start, first.x, second.x)
            if s and t and self._makes(end, (start, s * first.x, t * second.x)):
                found.append(Branch((first, second), (s, t)))
        return min(found, key=lambda pair: pair.rank, default=None)

    def _makes(self, total: torch.Tensor, terms: Sequence[torch.Tensor]) -> bool:
        """Return whether the terms sum to the total up to round-off, and no term is itself only round-off."""
        size = torch.stack([term.abs() for term in terms]).sum(0)
        allowed = ULPS * self.eps * (size + total.abs())
        distance = (total - torch.stack(list(terms)).sum(0)).abs()
        return bool((distance <= allowed).all()) and all(bool((term.abs() > allowed).any()) for term in terms[1:])

    def _is(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        return bool(((a - b).abs() <= ULPS * self.eps * b.abs()).all())

    def _carries_attention(self, branch: Branch | None) -> bool:
        """Return whether a branch contains the attention module, or reads its output."""
        if branch is None:
            return False
        if branch.covers(self.attention) or any(_within(event.path, self.attention) for event in branch.events):
            return True
        holders = [event for event in self.outputs if _within(self.attention, event.path)]
        takers = [event for event in self.inputs if branch.covers(event.path)]
        return any(torch.equal(holder.x, taker.x) for holder in holders for taker in takers)

    def _norm_before(self, stream: Event, branch: Branch) -> str | None:
        """Find the norm that reads the stream for a branch: a module without a matrix that runs before the branch."""
        elsewhere = None
        taken_by = {event.path: event for event in self.inputs}
        top = branch.last.path.split(".")[0]
        for norm in self.outputs:
            taken = taken_by.get(norm.path)
            if norm.order >= branch.last.order or taken is None or taken.order < stream.order:
                continue
            if not torch.equal(taken.x, stream.x) or self._is(norm.x, stream.x):
                continue
            if any(parameter.dim() > 1 for parameter in self.module.get_submodule(norm.path).parameters()):
                continue
            takers = [event for event in self.inputs if norm.order < event.order and torch.equal(event.x, norm.x)]
            readers = {taker.path.split(".")[0] for taker in takers}
            if top in readers:
                return norm.address
            if elsewhere is None and readers - {norm.path.split(".")[0]}:
                elsewhere = norm.address  # modules outside the branch also read the norm
        return elsewhere


def _within(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}.")


def _one_scale(step: torch.Tensor, x: torch.Tensor) -> float:
    """Return the constant s for which s·x is closest to the step."""
    size = float((x * x).sum())
    return round(float((step * x).sum()) / size, 6) if size else 0.0


def _two_scales(step: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    """Return the constants for which s·x + t·y is closest to the step; 1 if they are close to 1."""
    pair = torch.stack([x.flatten(), y.flatten()], 1)
    if not torch.isfinite(pair).all() or torch.linalg.matrix_rank(pair) < 2:
        return (0.0, 0.0)
    s, t = torch.linalg.lstsq(pair, step.flatten()[:, None]).solution.flatten().tolist()
    return (1.0 if abs(s - 1) < 1e-3 else round(s, 6), 1.0 if abs(t - 1) < 1e-3 else round(t, 6))


def record(model: nn.Module, layers: Sequence[nn.Module], inputs: Mapping[str, Any]) -> list[list[Event]]:
    """Run the model, and return the inputs and outputs of every layer's modules that have the residual stream's size.

    They are in float64 and in the shape of the layer's input. The list of a layer that does not run is empty.
    """
    ends = record_ends(model, {module for layer in layers for module in layer.modules()}, inputs)
    records: list[list[Event]] = []
    for layer in layers:
        own = next((end.x for end in ends.get(layer, ()) if end.end == "input"), None)
        events = [
            Event(order, path, end, x.double().view(own.shape))
            for path, module in layer.named_modules()
            for order, end, x in ends.get(module, ())
            if own is not None and x.numel() == own.numel() and x.shape[-1] == own.shape[-1]
        ]
        records.append(sorted(events, key=lambda event: event.order))
    return records

"""Finds numerically what a layer adds to the residual stream, and where that can be read.

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
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import combinations, count
from typing import Any

import torch
from torch import nn

from sinkscope.models.family import FEED_FORWARD, RESIDUAL_SITES, Block, Term

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
    """The modules, one or two, whose outputs times their scales are added to the residual stream."""

    events: tuple[Event, ...]  # in the order in which they ran
    scales: tuple[float, ...]

    @property
    def last(self) -> Event:
        return self.events[-1]

    @property
    def rank(self) -> tuple:
        """A sort key, smaller is better: unscaled outputs first, then outer modules, then early ones."""
        scaled = any(scale != 1.0 for scale in self.scales)
        return (scaled, sum(event.depth for event in self.events), self.last.order)

    @property
    def terms(self) -> list[torch.Tensor]:
        return [scale * event.x for scale, event in zip(self.scales, self.events, strict=True)]

    def covers(self, path: str) -> bool:
        """Return whether a module is one of these or part of one."""
        return any(_within(path, event.path) for event in self.events)


@dataclass(frozen=True)
class Found:
    """The sums that make up a layer."""

    wiring: str
    attention: Branch | None
    mid: Event | None = None
    mlp: Branch | None = None


class Layer:
    """The inputs and outputs of the modules of one layer, and the search for its sums."""

    def __init__(self, module: nn.Module, events: Sequence[Event], attention: str, kind: str, eps: float) -> None:
        self.module = module
        self.attention = attention  # path of the attention module; "" if the layer has none
        self.kind = kind  # see Block
        self.eps = eps
        self.h = next(event for event in events if event.address == "input")
        self.out = next(event for event in reversed(events) if event.address == "output")
        self.inner = [event for event in events if event.path]
        runs = Counter(event.address for event in self.inner)
        inner = [
            event for event in self.inner if runs[event.address] == 1
        ]  # of several runs a hook would read the first
        self.inputs = [event for event in inner if event.end == "input"]
        self.outputs = [event for event in inner if event.end == "output"]

    def block(self) -> Block | None:
        """Return how this layer is built; None if none of the known sums fits."""
        found = self._sequential()
        if found is None and (single := self._module(self.h.x, self.out.x)) is not None:
            found = Found("single", None, mlp=single) if self.kind in FEED_FORWARD else Found("single", single)
        found = found or self._parallel()
        if found is None:
            return None
        # a single branch needs no check: only it can contain the attention module
        if self.attention and found.wiring != "single" and not self._carries_attention(found.attention):
            return None
        branches = {"attn_out": found.attention, "mlp_out": found.mlp}
        mid, attention, mlp = found.mid, found.attention, found.mlp
        addresses = {
            "layer_in": "input",
            "attn_norm": self._norm_before(self.h, attention) if attention else None,
            "attn_out": attention and attention.last.address,
            "mid": mid and mid.address,
            "mlp_norm": self._norm_before(mid or self.h, mlp) if mlp and found.wiring != "post-norm" else None,
            "mlp_out": mlp and mlp.last.address,
            "layer_out": "output",
        }
        if found.wiring == "parallel" and addresses["mlp_norm"] == addresses["attn_norm"]:
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
            wiring=found.wiring,
            kind=self.kind,
            sums={
                site: tuple(
                    Term(event.address, scale) for event, scale in zip(branch.events, branch.scales, strict=True)
                )
                for site, branch in branches.items()
                if branch and branch.scales != (1.0,)
            },
        )

    def ends(self) -> Block:
        """Return a block of unknown wiring, with only the layer's input and output."""
        return Block(self.attention, {"layer_in": "input", "layer_out": "output"}, "unknown", self.kind)

    def sites(self, block: Block) -> dict[str, torch.Tensor]:
        """Return the tensors at the sites of a block, possibly another layer's; sites missing here are left out."""
        known = {event.address: event.x for event in [*self.outputs, *self.inputs]}
        known |= {"input": self.h.x, "output": self.out.x}
        terms = {site: block.terms(site) for site in block.sites if site in RESIDUAL_SITES}
        return {
            site: torch.stack([term.scale * known[term.address] for term in parts]).sum(0)
            for site, parts in terms.items()
            if all(term.address in known for term in parts)
        }

    # --- sums

    def _sequential(self) -> Found | None:
        """Find a branch followed by another, or by one inside a norm that ends the layer."""
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
        """Find the second branch of a post-norm layer: what is added to norm(mid)."""
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
        """Return a module's output for an input."""
        later = (event for event in self.inner if event.path == taken.path and event.order > taken.order)
        return next(later, None)

    def _parallel(self) -> Found | None:
        """Find two parallel branches. Attention's is the one with the attention module, or else the first."""
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
        single = self._module(start, end, after, before)
        return single or self._pair(start, end, [event for event in between if event.depth == 0])

    def _module(
        self, start: torch.Tensor, end: torch.Tensor, after: int = -1, before: float = float("inf")
    ) -> Branch | None:
        """Find the single module that makes the step."""
        between = [event for event in self.outputs if after < event.order < before]
        found = []
        for event in between:
            for scale in (1.0, _one_scale(end - start, event.x)):
                if scale and self._makes(end, (start, scale * event.x)):
                    found.append(Branch((event,), (scale,)))
                    break
        return min(found, key=lambda branch: branch.rank, default=None)

    def _pair(self, start: torch.Tensor, end: torch.Tensor, events: Sequence[Event]) -> Branch | None:
        """Find two modules, neither part of the other, that together make the step."""
        found = []
        others = [event for event in events if not self._is(event.x, start)]  # end - start makes any step
        for first, second in combinations(others, 2):
            if _within(first.path, second.path) or _within(second.path, first.path):
                continue
            pair = Branch((first, second), _two_scales(end - start, first.x, second.x))
            if 0.0 not in pair.scales and self._makes(end, (start, *pair.terms)):
                found.append(pair)
        return min(found, key=lambda pair: pair.rank, default=None)

    def _makes(self, total: torch.Tensor, terms: Iterable[torch.Tensor]) -> bool:
        """Return whether the terms sum to the total up to round-off, and no term is itself only round-off."""
        terms = tuple(terms)
        size = torch.stack([term.abs() for term in terms]).sum(0)
        allowed = ULPS * self.eps * (size + total.abs())
        distance = (total - torch.stack(terms).sum(0)).abs()
        return bool((distance <= allowed).all()) and all(bool((term.abs() > allowed).any()) for term in terms[1:])

    def _is(self, a: torch.Tensor, b: torch.Tensor) -> bool:
        return bool(((a - b).abs() <= ULPS * self.eps * b.abs()).all())

    def _carries_attention(self, branch: Branch | None) -> bool:
        """Return whether the attention module is in a branch, or its output is the input of the branch's modules."""
        if branch is None:
            return False
        holders = [event for event in self.outputs if _within(self.attention, event.path)]
        takers = [event for event in self.inputs if branch.covers(event.path)]
        is_part = any(_within(event.path, self.attention) for event in branch.events)
        return (
            is_part
            or branch.covers(self.attention)
            or any(torch.equal(holder.x, taker.x) for holder in holders for taker in takers)
        )

    # --- norms

    def _norm_before(self, stream: Event, branch: Branch) -> str | None:
        """Find the norm that reads the stream for a branch: a module before the branch that has no matrix."""
        elsewhere = None
        for norm in self.outputs:
            if norm.order >= branch.last.order or not self._is_norm_of(norm, stream):
                continue
            takers = [event for event in self.inputs if norm.order < event.order and torch.equal(event.x, norm.x)]
            if any(_top(taker.path) == _top(branch.last.path) for taker in takers):
                return norm.address
            if elsewhere is None and any(_top(taker.path) != _top(norm.path) for taker in takers):
                elsewhere = norm.address  # other modules than the branch's read the norm
        return elsewhere

    def _is_norm_of(self, event: Event, stream: Event) -> bool:
        taken = next((given for given in self.inputs if given.path == event.path), None)
        if taken is None or taken.order < stream.order or not torch.equal(taken.x, stream.x):
            return False
        has_no_matrix = all(parameter.dim() < 2 for parameter in self.module.get_submodule(event.path).parameters())
        return has_no_matrix and not self._is(event.x, stream.x)


def _top(path: str) -> str:
    return path.split(".")[0]


def _within(path: str, other: str) -> bool:
    """Return whether a module is another one or part of it."""
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


@torch.no_grad()
def record(model: nn.Module, layers: Sequence[nn.Module], inputs: Mapping[str, Any]) -> list[list[Event]]:
    """Run the model, and return inputs and outputs of every layer's modules that have the residual stream's size."""
    records: list[list[Event]] = [[] for _ in layers]
    order = count()

    def keep(events: list[Event], path: str, module: nn.Module, args: tuple, kwargs: dict, *output: Any) -> None:
        x = first_floats(output[0] if output else (*args, *kwargs.values()))
        if x is not None:
            events.append(Event(next(order), path, "output" if output else "input", x.detach().clone()))

    with ExitStack() as hooks:
        for layer, events in zip(layers, records, strict=True):
            for path, module in layer.named_modules():
                hooks.enter_context(module.register_forward_pre_hook(partial(keep, events, path), with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(partial(keep, events, path), with_kwargs=True))
        model(**inputs)
    return [_stream_sized(events) for events in records]


def first_floats(values: Any) -> torch.Tensor | None:
    """Return the first floating-point tensor of several values, or of one; None if there is none."""
    several = values if isinstance(values, tuple | list) else (values,)
    return next((value for value in several if isinstance(value, torch.Tensor) and value.is_floating_point()), None)


def _stream_sized(events: Sequence[Event]) -> list[Event]:
    """Return the events of the size of the layer's input, in its shape and in float64; none if it did not run."""
    own = next((event.x for event in events if event.address == "input"), None)
    if own is None:
        return []
    alike = [event for event in events if event.x.numel() == own.numel() and event.x.shape[-1] == own.shape[-1]]
    return [Event(event.order, event.path, event.end, event.x.double().view(own.shape)) for event in alike]

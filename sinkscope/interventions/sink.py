"""Interventions on the contribution of the sink to other tokens: its key is masked or outside a window (S2M §1,
StreamingLLM), or its value state is changed and its key kept (VGA §1: does the sink's contribution matter?); and one
that makes a sink: a token that sees only itself (2605.06611).
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial, reduce
from itertools import product
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, PrivateAttr
from torch import nn

from sinkscope.attention.kernels import ForbiddenKeys, head_mask
from sinkscope.attention.streaming import inapplicable, streaming
from sinkscope.errors import InputError
from sinkscope.interventions.intervention import (
    Intervention,
    Known,
    Requirement,
    Target,
    draw_others,
    edited_positions,
    must_change,
)
from sinkscope.interventions.massive import sink_massive
from sinkscope.interventions.parameters import Chosen, ChosenPlaces, Indices, Places, Real, Reals, chosen


def without_equal_heads(target: Target) -> str | None:
    queries = [roles["query"] for roles in target.family.projections.values() if "query" in roles]
    is_equal = all(len(query.places) == target.query_heads for query in queries)
    return None if is_equal else "its layers differ in their numbers of heads"


class HiddenKeys(Intervention):
    """Hides keys from queries in chosen layers and heads; no token is hidden from itself."""

    requires = (without_equal_heads,)
    whole_columns: ClassVar[bool] = False  # whether the keys at `positions` are hidden from all other tokens

    layers: Chosen = None
    heads: Chosen = None
    positions: Any

    @abstractmethod
    def hides(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Return which keys are hidden, (B,R,C), from the tokens' positions in their sequences, (B,R,1) and (B,1,C)."""

    @contextmanager
    def applied(self, target: Target) -> Iterator[None]:
        layout = target.layout
        heads = chosen(self.heads, target.query_heads)
        without_effect = self.whole_columns and target.family.causal  # at the last token, which no later query sees

        def start(device: torch.device) -> torch.Tensor:
            starts = layout.start(device)
            if bool((starts + min(self.positions) < layout.length - without_effect).any()):
                touch()
            return starts[:, None]

        starts = partial(layout.once, start)

        def columns(device: torch.device) -> torch.Tensor:
            return starts(device) + torch.tensor(self.positions, device=device)

        def pairs(rows: slice, cols: slice, device: torch.device) -> torch.Tensor:
            """Return (B,H,R,C), True where a key is hidden from a query of a chosen head."""
            row, col = (torch.arange(part.start, part.stop, device=device) for part in (rows, cols))
            # The kernel counts columns from the first key that a sliding window's cache still holds, or up to the last
            # one that a static cache has room for; positions count from the sequence's first token.
            shift = layout.length - cols.stop if layout.past or cols.stop > layout.length else 0
            query, key = (row + shift - starts(device))[:, :, None], (col + max(shift, 0) - starts(device))[:, None]
            is_hidden = self.hides(query, key) & (query != key)
            return is_hidden[:, None] & head_mask(tuple(heads), target.query_heads, device)

        forbidden = ForbiddenKeys(pairs, partial(layout.once, columns) if self.whole_columns else None, tuple(heads))
        missing = f"{'a token after ' if without_effect else ''}position {', '.join(map(str, self.positions))}"
        with must_change(self.name, missing) as touch, ExitStack() as stack:
            for layer in target.attending(self.layers):
                seam = target.seams[layer]
                stack.callback(setattr, seam, "forbidden", seam.forbidden)
                seam.forbidden = (*seam.forbidden, forbidden)
            yield


def among(positions: torch.Tensor, numbers: tuple[int, ...]) -> torch.Tensor:
    """Return which positions are among the numbers, without a copy to the device, for which it would be waited."""
    matches = [positions == number for number in numbers]
    return reduce(torch.logical_or, matches) if matches else torch.zeros_like(positions, dtype=torch.bool)


class MaskSink(HiddenKeys):
    """Masks the sink's key.

    With position 0 masked in every layer, position 1 is the first token that the others see, and may become the sink in
    its place. With begin=massive, only the layers after the first massive activation are masked, so that no other token
    gets a massive activation.
    """

    name = "mask-sink"
    about = (
        "no other token attends to the sink, which still sees itself (layers, query heads, positions; begin=massive: "
        "in the layers after its first massive activation)"
    )
    paper = "S2M §1"
    control_about = "another position"
    redraws = "positions"
    whole_columns = True

    positions: Places = (0,)
    begin: Literal["first", "massive"] = "first"

    @property
    def watched(self) -> tuple[int, ...]:
        return (*self.positions, max(self.positions) + 1)  # the position to which the sink may move

    def resolved(self, known: Known) -> Self:
        if self.begin == "first" or self.layers is not None:
            return self
        (first, *_), _ = sink_massive(self.name, known, self.positions[0], to_name="layers")
        later = tuple(layer for layer in known.target.attending() if layer > first)
        if not later:
            raise InputError(f"{self.name}: no layer with attention follows layer {first}, the first massive one")
        return self.model_copy(update={"layers": later})

    def hides(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return among(key, self.positions)


class Isolate(HiddenKeys):
    """Hides all other tokens from a token, as position 0 sees none (2605.06611); or only some of them.

    Its row of the attention weights is 1 at itself in the chosen layers, and all other rows are as they are.
    """

    name = "isolate"
    about = (
        "a token sees only itself (positions: 10; layers, query heads), or besides itself the positions `beside`, or "
        "the last tokens (last: 2 for itself and the one before); hidden: the positions that it does not see"
    )
    paper = "2605.06611"
    control_about = "it also sees one random earlier token"

    positions: Places = (10,)  # as in the paper
    hidden: ChosenPlaces = None  # None: all other tokens
    beside: ChosenPlaces = None  # None: no other token is seen
    last: Annotated[int, Field(ge=1)] = 1  # it sees this many tokens, up to itself

    def check(self, target: Target, length: int | None = None) -> None:
        super().check(target, length)
        if self.hidden is not None and (self.beside, self.last) != (None, 1):
            raise InputError(f"{self.name}: name either the positions that are hidden or those that it sees")

    def hides(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        is_seen = among(key, self.beside or ()) | (query - key < self.last)
        return among(query, self.positions) & (~is_seen if self.hidden is None else among(key, self.hidden))

    def control(self, known: Known, draw: torch.Generator) -> Intervention | None:
        """Return that the token also sees a random earlier one, except for 0; None if it does not see only itself."""
        if (self.hidden, self.beside, self.last) != (None, None, 1) or min(self.positions) < 2:
            return None
        return self.model_copy(update={"beside": draw_others(1, min(self.positions), draw, {0}, "earlier token")})


class StreamingWindow(Intervention):
    """Limits attention to the last `window` tokens and the first `keep`; register tokens count as first tokens.

    It is measured only by perplexity, against dense attention, for every pair of the two lists.
    """

    name = "streaming-window"
    about = "attend only to the last and the first tokens (window, keep: lists); not combinable"
    paper = "S2M §1"
    measured_by = "streaming"
    opens = ("window",)
    asks_for = "one window and one number of tokens to keep"
    requires = (lambda target: inapplicable(target.model, target.family),)

    window: Indices | None = None  # None: a quarter of the sequence
    keep: Indices = (0, 1, 2, 4)

    def measured(self, known: Known) -> dict[str, Any]:
        return {"window": (max(1, known.length // 4),)}

    @property
    def watched(self) -> tuple[int, ...]:
        return ()  # its measurement reads no attention

    def applied(self, target: Target) -> AbstractContextManager[None]:
        if self.window is None or len(self.window) > 1 or len(self.keep) > 1:
            raise InputError(f"{self.name}: name {self.asks_for}")
        return streaming(target.model, target.family, target.seams, keep=self.keep[0], window=self.window[0])


DECIDED = "is decided by measuring the observable attention, as `sinkscope intervene` does: name layers and heads"
# (layer, position, value states (n, heads · d)) → the new value states
ValueEdit = Callable[[int, int, torch.Tensor], torch.Tensor]


class ChangedValues(Intervention):
    """Changes the value states of chosen layers and heads at chosen positions.

    With where=sinks, only key/value heads change that are read by a query head with a sink at one of the positions (in
    at least half of the sequences).
    """

    paper = "VGA §1"
    control_about = "another position"
    redraws = "positions"
    heads_of = "value"
    requires: ClassVar[tuple[Requirement, ...]] = (lambda target: target.without_projection("value"),)

    layers: Chosen = None
    heads: Chosen = None
    positions: Places = (0,)
    where: Literal["all", "sinks"] = "all"
    _sinks: frozenset[tuple[int, int]] | None = PrivateAttr(None)  # measured (layer, key/value head) pairs

    def resolved(self, known: Known) -> Self:
        if self.where == "all" or self._sinks is not None:  # a control changes the same heads as the intervention
            return self
        table, decided = known.table("attention", f"{self.name}: where=sinks {DECIDED}"), self.model_copy()
        # a head has a sink if it does in at least half of the sequences
        sinks = table[table["position"].isin(self.positions) & (table["sink_rate"] >= 0.5)]
        decided._sinks = frozenset(zip(sinks["layer"].astype(int), sinks["kv_head"].astype(int), strict=True))
        if not decided._sinks:
            raise InputError(f"{self.name}: no head has a sink at position {' or '.join(map(str, self.positions))}")
        return decided

    def heads_in(self, target: Target, layer: int) -> list[int]:
        """Return the key/value heads of a layer to change; raise InputError if the sinks have not been measured."""
        heads = chosen(self.heads, target.projection(layer, "value").heads)
        if self.where == "all":
            return heads
        if self._sinks is None:
            raise InputError(f"{self.name}: where=sinks {DECIDED}")
        return [head for head in heads if (layer, head) in self._sinks]

    @abstractmethod
    def edit(self, target: Target) -> ValueEdit:
        """Return the function that changes values; raise InputError if it would change nothing or needs means."""

    @contextmanager
    def applied(self, target: Target) -> Iterator[None]:
        changed = self.edit(target)
        places: dict[nn.Module, tuple[int, torch.Tensor]] = {}
        for layer in target.attending(self.layers):
            projection = target.projection(layer, "value")
            if heads := self.heads_in(target, layer):
                places[projection.module] = layer, projection.places[heads].flatten()

        copied = cache(torch.Tensor.to)  # once to each device: a copy waits for it

        def edit(module: nn.Module, position: int, x: torch.Tensor) -> torch.Tensor:
            layer, columns = places[module]
            columns = copied(columns, x.device)
            x[:, columns] = changed(layer, position, x[:, columns]).to(x)
            return x

        with edited_positions(self.name, target, places, self.positions, edit):
            yield


class ScaleSinkValue(ChangedValues):
    name = "scale-sink-value"
    about = "value states at the sink × a factor (layers, key/value heads, positions, where: all or sinks, factor: 0)"

    factor: Real = 0.0

    def edit(self, target: Target) -> ValueEdit:
        if self.factor == 1.0:
            raise InputError(f"{self.name} would change nothing: its factor is 1")
        return lambda layer, position, x: x * self.factor


def without_own_values(target: Target) -> str | None:
    modules = [target.projection(layer, "value").module for layer in target.attending()]
    return None if len(set(modules)) == len(modules) else "its layers share a value projection"


class MeanSinkValue(ChangedValues):
    """Replaces the sink's value state by its mean over sequences, so that it adds a constant bias.

    If zero values harm a model but mean values do not, its sink serves as a bias: it is not a no-op, but carries no
    information about the text.
    """

    name = "mean-sink-value"
    about = "value states at the sink = their mean over sequences (layers, key/value heads, positions, where; means)"
    requires = (*ChangedValues.requires, without_own_values)

    # by layer, position, head and dimension, or one for all; None: measured, and too large to be saved in run.json
    means: Reals | None = None
    _measured: dict[tuple[int, int], torch.Tensor] | None = PrivateAttr(None)

    def resolved(self, known: Known) -> Self:
        decided = super().resolved(known)
        if self.means is not None:
            return decided
        if known.means is None:
            raise InputError(f"{self.name}: name the means, one for every layer, position, head and dimension")
        decided = decided.model_copy()
        places = product(known.target.attending(self.layers), self.positions)  # measured now, in the unchanged model
        decided._measured = {place: known.means(*place, of_values=True) for place in places}
        return decided

    def edit(self, target: Target) -> ValueEdit:
        values = {
            (layer, position): (target.projection(layer, "value").places.shape, self.heads_in(target, layer))
            for layer, position in product(target.attending(self.layers), self.positions)
        }
        if self._measured is not None:
            constants = [self._measured[place].view(shape)[heads].flatten() for place, (shape, heads) in values.items()]
        else:
            sizes, means = [len(heads) * shape[1] for shape, heads in values.values()], self.means or ()
            total = sum(sizes)
            if len(means) not in (1, total):
                raise InputError(f"{self.name}: {total} means are needed, one by layer, position, head and dimension")
            constants = list(torch.tensor(means, dtype=torch.float64).expand(total).split(sizes))
        by_place = dict(zip(values, constants, strict=True))
        return lambda layer, position, x: by_place[layer, position].expand_as(x)


class ReadValues(ChangedValues):
    """Passes the outputs of the value projections at the positions to a callback, without a change."""

    name = "read-values"
    about = "measures the means of mean-sink-value"

    seen: Callable[[int, torch.Tensor], None]  # layer, (n, heads · d)

    def edit(self, target: Target) -> ValueEdit:
        def read(layer: int, position: int, x: torch.Tensor) -> torch.Tensor:
            self.seen(layer, x)
            return x

        return read

"""Masking of attention to the sink (S2M §1: a window without the first tokens)."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch

from sinkscope.attention.kernels import ForbiddenKeys
from sinkscope.interventions.intervention import Chosen, Indices, Intervention, Known, Target, chosen, must_touch


class MaskSink(Intervention):
    name: ClassVar[str] = "mask-sink"
    about: ClassVar[str] = (
        "no other token attends to the sink, which still sees itself (layers, query heads, positions)"
    )
    paper: ClassVar[str] = "S2M §1"
    control_about: ClassVar[str] = "another position"

    layers: Chosen = None
    heads: Chosen = None
    positions: Indices = (0,)

    @classmethod
    def inapplicable(cls, target: Target) -> str | None:
        config: Any = target.model.config.get_text_config()
        found = [roles["query"] for roles in target.family.projections.values() if "query" in roles]
        if any(len(query.places) != config.num_attention_heads for query in found):
            return "its layers differ in their numbers of heads"
        return None

    def begins_at(self, target: Target) -> int:
        return min(target.attending(self.layers))

    @contextmanager
    def applied(self, target: Target) -> Iterator[None]:
        count = int(target.model.config.get_text_config().num_attention_heads)
        heads = chosen(self.heads, count)
        missing = f"a token after position {', '.join(map(str, self.positions))}"
        with must_touch(self.name, missing) as touch, ExitStack() as stack:
            mine = self._forbidden(target, heads, count, touch)
            for layer in target.attending(self.layers):
                seam = target.seams[layer]
                stack.callback(setattr, seam, "forbidden", seam.forbidden)
                seam.forbidden = (*seam.forbidden, mine)
            yield

    def _forbidden(self, target: Target, heads: list[int], count: int, touch: Callable[[], None]) -> ForbiddenKeys:
        layout = target.layout

        def columns(device: torch.device) -> torch.Tensor:
            found = layout.start(device)[:, None] + torch.tensor(self.positions, device=device)
            if bool((found < layout.length - target.family.causal).any()):  # the last token has no later query
                touch()
            return found

        def pairs(rows: slice, cols: slice, device: torch.device) -> torch.Tensor:
            """Return (B,H,R,C), True where a query of a chosen head attends to a sink other than itself."""
            row, col = (torch.arange(at.start, at.stop, device=device) for at in (rows, cols))
            # The kernel counts columns from the first key that a sliding window's cache still holds, or up to the last
            # one that a static cache has room for; here columns count from the first token.
            shift = layout.length - cols.stop if layout.past or cols.stop > layout.length else 0
            row, col = row + shift, col + max(shift, 0)
            is_sink = (col == columns(device)[:, :, None]).any(1)  # (B,C)
            hidden = torch.zeros(count, dtype=torch.bool, device=device)
            hidden[heads] = True
            return (is_sink[:, None] & (row[:, None] != col))[:, None] & hidden[:, None, None]

        return ForbiddenKeys(pairs, columns, tuple(heads))

    def control(self, known: Known, draw: torch.Generator) -> Intervention:
        return self.at_other_positions(known, draw)

"""Attention to the sink forbidden (S2M §1: a window whose first tokens are gone)."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import ClassVar

import torch

from sinkscope.attention.kernels import ForbiddenKeys
from sinkscope.errors import SinkscopeError
from sinkscope.interventions.intervention import (
    Chosen,
    Count,
    Indices,
    Intervention,
    Known,
    Target,
    chosen,
    random_positions,
)


class MaskSink(Intervention):
    name: ClassVar[str] = "mask-sink"
    about: ClassVar[str] = (
        "no later token attends to the sink, which still sees itself (layers, query heads, positions)"
    )
    paper: ClassVar[str] = "S2M §1"

    layers: Chosen = None
    heads: Chosen = None
    positions: Indices = (0,)

    @property
    def watched(self) -> tuple[int, ...]:
        return self.positions

    @contextmanager
    def applied(self, target: Target) -> Iterator[None]:
        count = int(target.model.config.get_text_config().num_attention_heads)
        heads = chosen(self.heads, count)
        touched = Count()
        mine = self._forbidden(target, heads, count, touched)
        with ExitStack() as stack:
            for layer in chosen(self.layers, len(target.layers)):
                seam = target.seams[layer]
                stack.callback(setattr, seam, "forbidden", seam.forbidden)
                seam.forbidden = (*seam.forbidden, mine)
            yield
        if not touched.touched:
            where = ", ".join(map(str, self.positions))
            raise SinkscopeError(f"{self.name} changed nothing: no forward pass held a token behind position {where}")

    def _forbidden(self, target: Target, heads: list[int], count: int, touched: Count) -> ForbiddenKeys:
        places = target.places

        def columns(device: torch.device) -> torch.Tensor:
            found = places.start(device)[:, None] + torch.tensor(self.positions, device=device)
            touched.touched += int((found < places.length - 1).any())
            return found

        def pairs(rows: slice, cols: slice, device: torch.device) -> torch.Tensor:
            """(B,H,R,C): a later token's attention to one of the positions, in one of the heads."""
            row, col = (torch.arange(at.start, at.stop, device=device) for at in (rows, cols))
            # The kernel counts from the first key that its cache still holds (a sliding window) has room for (a static
            # cache); here columns count from the first token of all.
            shift = places.length - cols.stop if places.past or cols.stop > places.length else 0
            row, col = row + shift, col + max(shift, 0)
            is_sink = (col == columns(device)[:, :, None]).any(1)  # (B,C)
            hidden = torch.zeros(count, dtype=torch.bool, device=device)
            hidden[heads] = True
            return (is_sink[:, None] & (row[:, None] > col))[:, None] & hidden[:, None, None]

        return ForbiddenKeys(pairs, columns, tuple(heads))

    def control(self, known: Known, draw: torch.Generator) -> Intervention:
        """Attention to other positions forbidden."""
        others = random_positions(len(self.positions), known, draw, self.positions)
        return self.model_copy(update={"positions": others})

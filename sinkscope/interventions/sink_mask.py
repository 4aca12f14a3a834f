"""Limits of attention: masking of the sink, and a window with and without the first tokens (S2M §1, StreamingLLM)."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Self

import torch

from sinkscope.attention.kernels import ForbiddenKeys
from sinkscope.attention.streaming import inapplicable, streaming
from sinkscope.errors import InputError
from sinkscope.interventions.intervention import Chosen, Indices, Intervention, Known, Target, chosen, must_touch


class MaskSink(Intervention):
    name = "mask-sink"
    about = "no other token attends to the sink, which still sees itself (layers, query heads, positions)"
    paper = "S2M §1"
    control_about = "another position"
    redraws = "positions"

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

    @contextmanager
    def applied(self, target: Target) -> Iterator[None]:
        layout = target.layout
        count = int(target.model.config.get_text_config().num_attention_heads)
        heads = chosen(self.heads, count)

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

        missing = f"a token after position {', '.join(map(str, self.positions))}"
        with must_touch(self.name, missing) as touch, ExitStack() as stack:
            for layer in target.attending(self.layers):
                seam = target.seams[layer]
                stack.callback(setattr, seam, "forbidden", seam.forbidden)
                seam.forbidden = (*seam.forbidden, ForbiddenKeys(pairs, columns, tuple(heads)))
            yield


class StreamingWindow(Intervention):
    """Limits attention to the last `window` tokens and the first `keep`; register tokens count as first tokens.

    It is measured only by perplexity, against dense attention, for every pair of the two lists.
    """

    name = "streaming-window"
    about = "attend only to the last and the first tokens (window, keep: lists); not combinable"
    paper = "S2M §1"
    measured_by = "streaming"

    window: Indices | None = None  # None: a quarter of the sequence
    keep: Indices = (0, 1, 2, 4)

    @classmethod
    def inapplicable(cls, target: Target) -> str | None:
        return inapplicable(target.model, target.family)

    def resolved(self, known: Known) -> Self:
        return self if self.window else self.model_copy(update={"window": (max(1, known.length // 4),)})

    @property
    def watched(self) -> tuple[int, ...]:
        return ()  # its measurement reads no attention

    def applied(self, target: Target) -> AbstractContextManager[None]:
        if self.window is None or len(self.window) > 1 or len(self.keep) > 1:
            raise InputError(f"{self.name}: name one window and one number of tokens to keep")
        return streaming(target.model, target.family, target.seams, keep=self.keep[0], window=self.window[0])

"""Attention to a cache of the last tokens, with and without the first ones (S2M §1, StreamingLLM)."""

from contextlib import AbstractContextManager
from typing import ClassVar, Self

from sinkscope.attention.streaming import inapplicable, streaming
from sinkscope.errors import InputError
from sinkscope.interventions.intervention import Indices, Intervention, Known, Target


class StreamingWindow(Intervention):
    """Limits attention to the last `window` tokens and the first `keep`; register tokens count as first tokens.

    It is measured only by perplexity, against dense attention, for every pair of the two lists.
    """

    name: ClassVar[str] = "streaming-window"
    about: ClassVar[str] = "attend only to the last and the first tokens (window, keep: lists); not combinable"
    paper: ClassVar[str] = "S2M §1"
    measured_by: ClassVar[str] = "streaming"

    window: Indices | None = None  # None: a quarter of the sequence
    keep: Indices = (0, 1, 2, 4)

    @classmethod
    def inapplicable(cls, target: Target) -> str | None:
        return inapplicable(target.model, target.family)

    def resolved(self, known: Known) -> Self:
        return self if self.window else self.model_copy(update={"window": (max(1, known.length // 4),)})

    @property
    def watched(self) -> tuple[int, ...]:
        return ()  # no attention is read

    def applied(self, target: Target) -> AbstractContextManager[None]:
        if self.window is None or len(self.window) > 1 or len(self.keep) > 1:
            raise InputError(f"{self.name}: name one window and one number of tokens to keep")
        return streaming(target.model, target.family, target.seams, keep=self.keep[0], window=self.window[0])

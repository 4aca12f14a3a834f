"""Plans for the KV cache: which heads keep all tokens, which keep sinks and a window, with how many bits, and the cost.

A plan is made in four steps. Sinks are predicted: tokens with a massive activation at the layer where these appear
(KVSink, 2025). A ranking scores every key/value head on calibration texts. The best heads keep all tokens, and the
others the sinks and a window (DuoAttention, 2024). Keys and values of each layer get as many bits as the budget
permits, more where the output loses most. Calibration texts decide how many tokens are kept, and with how many bits.
Other texts then show the plan's cost, next to controls of equal memory.

There are two tasks: perplexity on the text, and retrieval: the text's first tokens are repeated at its end, when a
window has evicted them, or a key and its value are. A loss of retrieval hardly changes perplexity.

No engine runs such a plan, so it is a bound for what engines could do. `SERVED` has what vLLM runs.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from sinkscope.attention.kernels import AttentionCall, raw_logits, upcast
from sinkscope.commands.kv_plan.texts import CopiedText
from sinkscope.measuring.sink_rule import FIRST_TOKENS
from sinkscope.models.rotation import random_rotation
from sinkscope.quantization.formats import Encoding
from sinkscope.quantization.grids import RowGrids
from sinkscope.quantization.rounding import E4M3, snap
from sinkscope.results.tables import KV_HEAD, SEQUENCE, Column, Columns

FULL_BITS = 16
GRID_BITS = 32  # step and zero of a token's grid, for the keys and for the values of each head
CACHE_BITS = (8, 4, 2)
ALL_TOKENS = 2**31 - 1  # a window that holds all tokens
PREDICTED, FIRST_FOUR, AS_MANY, NO_SINKS = "predicted sinks", "first 4", "as many first", "none"
DENSE, FIRST_AND_LAST, COMBINED, RANDOM = "dense", "first-and-last", "combined", "random"
RANDOM_COMBINED = f"{RANDOM} {COMBINED}"
SPARED = 0.1  # share of the layers that a format may leave unquantized
COSTLIEST_SPARED, RANDOM_SPARED = "costliest layers spared", "random layers spared"
ABLE = 0.5  # share that the dense cache has to retrieve, or else a task says nothing about plans

RETRIEVED = (
    Column("retrieval", "share of the repeated tokens that are predicted"),
    Column("guessed", "share of the same tokens that are predicted where they occur first"),
    Column("kept", f"retrieval ÷ that of the dense cache; NaN if that is below {ABLE}"),
    Column("kept_low", "lower end of its 95 % interval over texts"),
    Column("kept_high", "upper end"),
)
KV_PLAN_TABLES: dict[str, Columns] = {
    "kv_plan": (
        Column("budget", "the wanted share of the dense cache's memory; 1 for comparisons without a budget"),
        Column("plan", "the ranking of heads, a format or a control: see `sinkscope list rankings`", kind="text"),
        Column("bits", "of keys and values, mean over layers and both; 16: not rounded"),
        Column("sinks", "what all heads keep in full precision: predicted sinks, first tokens or none", kind="text"),
        Column("whole_heads", "number of key/value heads that keep all tokens", kind="whole"),
        Column("window", "last tokens that the other heads keep, median", "tokens", kind="whole"),
        Column("memory", "share of the dense cache's bytes at the end of the text, if each head frees what it evicts"),
        Column("paged_memory", "the same if a layer's heads share blocks: what some of them keep is masked, not freed"),
        Column("loss", "mean cross-entropy on the text", "nats per token"),
        Column("perplexity", "exp(loss)"),
        Column("ratio", "perplexity ÷ that of the dense cache"),
        Column("ratio_low", "lower end of its 95 % interval over texts"),
        Column("ratio_high", "upper end"),
        *RETRIEVED,
    ),
    "kv_plan_by_sequence": (
        Column("budget", "as in kv_plan"),
        Column("plan", "as in kv_plan", kind="text"),
        Column("sinks", "as in kv_plan", kind="text"),
        SEQUENCE,
        Column("loss", "mean cross-entropy on the text", "nats per token"),
        Column("retrieval", "share of the copy's tokens that are predicted"),
    ),
    "kv_tasks": (
        Column("budget", "as in kv_plan"),
        Column("plan", "as in kv_plan, or an eviction after the prompt", kind="text"),
        Column("task", "what is retrieved: the copy, a needle's value, or that of one of several keys", kind="text"),
        Column("memory", "as in kv_plan"),
        Column("loss", "mean cross-entropy on what is retrieved", "nats per token"),
        *RETRIEVED,
    ),
    "kv_heads": (
        Column("budget", "as in kv_plan"),
        Column("plan", "as in kv_plan, without controls", kind="text"),
        KV_HEAD,
        Column("score", "by the plan's ranking: the largest of the query heads that read this head"),
        Column("window", "last tokens that the head keeps; -1: all", "tokens", kind="whole"),
        Column("key_bits", "of keys; 16: not rounded", kind="whole"),
        Column("value_bits", "of values", kind="whole"),
    ),
    "kv_layers": (
        Column("format", "of keys or values: that of plans, on 4 bits, or one that is served", kind="text"),
        Column("key_loss", "‖y − y with keys in this format‖ ÷ ‖y‖, mean over heads and texts"),
        Column("value_loss", "the same with values in this format"),
    ),
}


# --- rankings


Attended = tuple[torch.Tensor, torch.Tensor]  # mix (1,H,T,d) and lse (1,H,T)


class HeadsOnText(NamedTuple):
    """One layer's attention on one text, over all tokens and over sinks and a window."""

    query: torch.Tensor
    key: torch.Tensor
    call: AttentionCall
    mix: torch.Tensor  # (1,H,T,d)
    lse: torch.Tensor  # (1,H,T)
    streamed_mix: torch.Tensor
    streamed_lse: torch.Tensor
    text: CopiedText


class Ranking(ABC):
    """Scores the query heads of a layer on one text: those with high scores need all tokens."""

    about: ClassVar[str]

    @abstractmethod
    def score(self, read: HeadsOnText) -> torch.Tensor:
        """Return the score of each query head, (H,)."""


class BeyondWindow(Ranking):
    about = "attention beyond sinks and window, mean over queries"

    def score(self, read: HeadsOnText) -> torch.Tensor:
        return 1 - (read.streamed_lse - read.lse).exp()[0].mean(-1)


class OutputLoss(Ranking):
    about = "what the output loses: ‖y − y over sinks and window‖ ÷ ‖y‖ over all tokens"

    def score(self, read: HeadsOnText) -> torch.Tensor:
        return lost_output(read.mix, read.streamed_mix)[0]


class Retrieval(Ranking):
    about = "attention from the copy to the token after the query's own first occurrence"

    def score(self, read: HeadsOnText) -> torch.Tensor:
        length, copied = read.query.shape[2], read.text.copied
        rows = slice(length - copied, length - 1)
        first = length - len(read.text.ids) + 2  # start of the answers: the copy begins at position 1 of the text
        logits = raw_logits(read.query[:, :, rows], read.key[:, :, first : first + copied - 1], read.call)
        return (logits.diagonal(dim1=-2, dim2=-1) - read.lse[..., rows]).exp()[0].mean(-1)


def lost_output(mix: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return ‖mix − other‖ ÷ ‖mix‖ of each head, (B,H), for mix (1,H,T,d) and other (B,H,T,d)."""
    return (mix - other).float().flatten(2).norm(dim=2) / mix.float().flatten(2).norm(dim=2)


RANKINGS: dict[str, type[Ranking]] = {
    "beyond-window": BeyondWindow,
    "output-loss": OutputLoss,
    "retrieval": Retrieval,
}


# --- formats


@cache
def _rotation(width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return random_rotation(width, 0).to(device, dtype)


def snap_rotated(bits: int | torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Round each row of x (…,d) to a grid of its own, after a rotation that spreads channels that are large in all."""
    rotation = _rotation(x.shape[-1], upcast(x).dtype, x.device)
    return RowGrids(bits, is_symmetric=False).snap(upcast(x) @ rotation) @ rotation.T


class Served(NamedTuple):
    """A format in which vLLM stores keys and values: a value of its `--kv-cache-dtype`."""

    about: str
    bits: int
    grid_bits: int  # of a token's scale, for the keys and for the values of each head
    snap: Callable[[torch.Tensor], torch.Tensor]  # rounds keys or values (B,K,T,d)


# Scales, grids and the Hadamard rotation (but for its signs) are those of vLLM's kernels; rounding is to the nearest.
SERVED = {
    "fp8": Served("e4m3 with scales of 1", 8, 0, partial(snap, Encoding("float", 8, "tensor"), largest=E4M3)),
    "int8_per_token_head": Served("symmetric", 8, 32, RowGrids(8, is_symmetric=True).snap),
    "int4_per_token_head": Served("with a zero point, after a Hadamard rotation", 4, 32, partial(snap_rotated, 4)),
}


# --- plans


@dataclass(frozen=True)
class Plan:
    """The tokens that each head's cache keeps, and their bits."""

    name: str
    windows: np.ndarray  # (L,K): last tokens, at most all that the layer sees
    bits: np.ndarray  # (L,2): of keys and of values
    sinks: str = PREDICTED  # which tokens all heads keep
    tokens: float = 1.0  # share of all tokens that is kept
    share: float = 0.0  # share of the kept tokens in heads that keep all
    served: str = ""  # the format of keys and values; "": `snap_rotated`, after their mean is subtracted
    evicts: str = ""  # the eviction after the prompt by which windows' numbers of tokens are kept; "": the last ones

    @property
    def grid_bits(self) -> int:
        return SERVED[self.served].grid_bits if self.served else GRID_BITS

    def sinks_of(self, text: CopiedText) -> tuple[int, ...]:
        """Return the positions of the tokens that all heads keep."""
        counts = {FIRST_FOUR: FIRST_TOKENS, AS_MANY: len(text.sinks), NO_SINKS: 0}
        return tuple(range(counts[self.sinks])) if self.sinks in counts else text.sinks


def share_of_bytes(plan: Plan, width: int) -> np.ndarray:
    """Return the share (L,) of a token's 16-bit keys and values of `width` that it takes with the bits of a plan."""
    return np.where(plan.bits < FULL_BITS, (plan.bits * width + plan.grid_bits) / (FULL_BITS * width), 1.0).mean(-1)


@dataclass(frozen=True)
class Sizes:
    """The dense cache at the end of a text, before the copy."""

    tokens: np.ndarray  # (L,): all that the layer sees, at most its own sliding window
    kv_heads: int
    width: int  # width of a head
    sinks: int  # most of a text

    def memory(self, plan: Plan) -> float:
        """Return the share of the dense cache's bytes; sinks are in full precision."""
        sinks = {FIRST_FOUR: FIRST_TOKENS, NO_SINKS: 0}.get(plan.sinks, self.sinks)
        each = share_of_bytes(plan, self.width)[:, None]
        tokens = np.minimum(plan.windows + sinks, self.tokens[:, None])
        taken = tokens * each + np.minimum(sinks, tokens) * (1 - each)
        return float(taken.sum() / (self.tokens.sum() * self.kv_heads))

    def fitting_bits(self, losses: np.ndarray, budget: float, windows: np.ndarray) -> np.ndarray | None:
        """Return bits (L,2) of keys and values that use up the budget; None if the budget is too small.

        One bit more halves a loss (L,2), so the next bit always goes to the largest loss that is left.
        """
        bits = np.full(losses.shape, CACHE_BITS[-1])
        if self.memory(Plan("", windows, bits)) > budget:
            return None
        while True:
            left = np.where(bits < FULL_BITS, losses * 2.0**-bits, -1)
            for index in np.argsort(-left, axis=None, kind="stable"):
                raised = bits.copy()
                raised.flat[index] = FULL_BITS if bits.flat[index] >= CACHE_BITS[0] else bits.flat[index] + 1
                if bits.flat[index] < FULL_BITS and self.memory(Plan("", windows, raised)) <= budget:
                    bits = raised
                    break
            else:
                return bits

    @property
    def dense(self) -> np.ndarray:
        """The windows (L,K) of the dense cache."""
        return np.full((len(self.tokens), self.kv_heads), ALL_TOKENS)

    def split(self, scores: np.ndarray, budget: float, share: float, sinks: int | None = None) -> np.ndarray | None:
        """Return windows (L,K) that keep `budget` of all tokens; the heads with the highest scores (L,K) keep all.

        These take `share` of the budget. The others get equal windows and `sinks` (None: the predicted ones); None if
        no token is left for a window.
        """
        sinks = self.sinks if sinks is None else sinks
        whole = np.repeat(self.tokens, self.kv_heads)
        room = budget * whole.sum()
        order = np.argsort(-scores.ravel(), kind="stable")
        count = int(np.searchsorted(whole[order].cumsum(), share * room, side="right"))
        windows, rest = self.dense.ravel(), order[count:]
        left, sizes = room - whole[order[:count]].sum(), range(int(whole.max()) + 1)
        window = bisect_right(sizes, left, key=lambda size: np.minimum(size + sinks, whole[rest]).sum()) - 1
        if window < 1 and len(rest):
            return None
        windows[rest] = np.where(window < whole[rest], window, ALL_TOKENS)
        return windows.reshape(self.dense.shape)

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

import itertools
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import pandas as pd
import torch
from rich.console import Console
from torch import nn

from sinkscope.attention.kernels import AttentionCall, fused_attention, raw_logits, upcast
from sinkscope.attention.seam import attending_by_kernels
from sinkscope.attention.streaming import query_at
from sinkscope.attention.taps import Seam
from sinkscope.attention.weights import AttentionRead
from sinkscope.commands.kv_plan.eviction import (
    EVICTIONS,
    EXPECTED,
    PromptRead,
    after_eviction,
    evicting_attention,
    mean_rotation,
    numbers_on,
    of_sequences,
)
from sinkscope.commands.kv_plan.options import SHORTEST_TEXT
from sinkscope.errors import InputError, SinkscopeError
from sinkscope.measuring.console import print_line
from sinkscope.measuring.engine import Setting, logits_on, resampled_cost, run_settings
from sinkscope.measuring.losses import perplexity
from sinkscope.measuring.memory import sequences_that_fit
from sinkscope.measuring.observables.massive import Massive
from sinkscope.measuring.observables.observable import Accumulator, Observable, Settings, deliver
from sinkscope.measuring.parity import Parity
from sinkscope.measuring.processes import team
from sinkscope.measuring.sink_rule import FIRST_TOKENS, SinkRule
from sinkscope.measuring.streaming import token_losses
from sinkscope.measuring.subject import Subject, position_limit
from sinkscope.measuring.tracer import Tracer, open_tracer
from sinkscope.models.rotation import random_rotation
from sinkscope.quantization.formats import Encoding
from sinkscope.quantization.grids import RowGrids
from sinkscope.quantization.rounding import E4M3, snap
from sinkscope.results.statistics import bootstrap, resamplings_of, weighted_means
from sinkscope.results.tables import KV_HEAD, SEQUENCE, Column, Columns
from sinkscope.text.batch import Batch, sent
from sinkscope.text.inputs import TokenInputs

FULL_BITS = 16
GRID_BITS = 32  # step and zero of a token's grid, for the keys and for the values of each head
CACHE_BITS = (8, 4, 2)
KEPT_SHARES = (1.0, 0.8, 0.6)  # shares of all tokens that are kept, with fewer bits
WHOLE_SHARES = (0.0, 0.5, 0.9)  # shares of the kept tokens that belong to heads that keep all tokens
TEXTS_PER_COPY = 8  # the copy is an eighth of the text
ALL_TOKENS = 2**31 - 1  # a window that holds all tokens
UNKNOWN_COPIES = 8  # first tokens of the copy, from which the model cannot yet tell what is copied
RANDOM_PLANS = 3  # random rankings
PREDICTED, FIRST_FOUR, AS_MANY, NO_SINKS = "predicted sinks", "first 4", "as many first", "none"
DENSE, FIRST_AND_LAST, COMBINED, RANDOM = "dense", "first-and-last", "combined", "random"
RANDOM_COMBINED = f"{RANDOM} {COMBINED}"
SPARED = 0.1  # share of the layers that a format may leave unquantized
COSTLIEST_SPARED, RANDOM_SPARED = "costliest layers spared", "random layers spared"
COPY = "copy"
PAIRS = {"needle": 1, "keys": 8}  # task → number of pairs of a key and a value in the first half of a text
KEY = VALUE = 4  # tokens
PLANS_AT_ONCE = 12  # plans with which the model reads a text in one batch, if they fit into memory
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


# --- texts


@dataclass(frozen=True)
class CopiedText:
    """A prompt that is followed by some of its first tokens once more, with its predicted sinks."""

    ids: np.ndarray
    copied: int  # number of last tokens, those after the prompt
    sinks: tuple[int, ...] = ()  # positions
    first: int = 1  # position from which on they are in the prompt
    unknown: int = UNKNOWN_COPIES  # first of them that are not counted

    @classmethod
    def of(cls, ids: np.ndarray) -> Self:
        copied = len(ids) // TEXTS_PER_COPY
        return cls(np.concatenate([ids, ids[1 : 1 + copied]]), copied)

    @classmethod
    def asking(cls, ids: np.ndarray, pairs: np.ndarray, random: np.random.Generator) -> Self:
        """Write pairs (n,8) into ids (T,), and the first one's key at their end, which its value follows."""
        places = FIRST_TOKENS + pairs.shape[1] * random.permutation(len(ids) // (2 * pairs.shape[1]))[: len(pairs)]
        asking = np.append(ids, pairs[0, KEY:])
        asking[places[:, None] + np.arange(pairs.shape[1])] = pairs
        asking[len(ids) - KEY : len(ids)] = pairs[0, :KEY]
        return cls(asking, VALUE, first=int(places[0]) + KEY, unknown=0)

    @property
    def parts(self) -> tuple[slice, slice, slice]:
        """The predictions of the prompt, of the tokens after it that count, and of the same tokens before."""
        end = len(self.ids) - self.copied - 1
        before = slice(self.first - 1 + self.unknown, self.first - 1 + self.copied)
        return slice(0, end), slice(end + self.unknown, None), before


def questions_of(sequences: Sequence[np.ndarray], seed: int) -> list[CopiedText]:
    """Return a question in each text, for one task after the other; pairs are random tokens of the texts."""
    random, tokens = np.random.default_rng(seed), np.unique(np.concatenate([ids[1:] for ids in sequences]))
    drawn = ((random.choice(tokens, (n, KEY + VALUE)), ids) for n in PAIRS.values() for ids in sequences)
    return [CopiedText.asking(ids, pairs, random) for pairs, ids in drawn]


def predicted_sinks(
    subject: Subject, texts: Sequence[CopiedText], calibration: int, parity: Parity | None = None
) -> tuple[SinkRule, list[CopiedText]]:
    """Find the rule for sinks on the last `calibration` texts, and apply it to all, in one pass of the dense model."""
    inputs = replace(subject.inputs, sequences=tuple(text.ids for text in texts))

    def observables() -> list[Observable]:
        return [Massive(Settings()), *(parity.fresh() if parity else [])]

    dense = Setting(
        lambda _: open_tracer(subject.loaded.model, subject.family), Tracer.forward, observables=observables
    )
    (done,) = run_settings(replace(subject, inputs=inputs), [dense], batch_size=1)
    entries = done.observables[0].tables()["massive"]
    rule = SinkRule.of(entries[entries["is_massive"] & (entries["sequence"] >= len(texts) - calibration)])
    sinks = rule.of_each(entries, range(len(texts)))
    return rule, [replace(text, sinks=positions) for text, positions in zip(texts, sinks, strict=True)]


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


# --- measuring


Format = tuple[str, int]  # one of SERVED, or "" for `snap_rotated`, and the bits; FULL_BITS: not rounded


def rounded_cache(
    x: torch.Tensor, formats: Sequence[Format], exact: torch.Tensor, center: torch.Tensor
) -> torch.Tensor:
    """Round the keys or values (B,K,T,d) of each row to its format, except those of exact tokens (B,1,T,1).

    `center` (B,K,1,d), which is subtracted from what is rotated, is the same for all tokens and texts, so the cache
    does not store it.
    """
    rounded = x
    for served in sorted({name for name, bits in formats if bits < FULL_BITS}):
        rows = [row for row, (name, bits) in enumerate(formats) if name == served and bits < FULL_BITS]
        chosen = numbers_on(x.device, tuple(rows))
        part = x[chosen]
        if served:
            snapped = SERVED[served].snap(part)
        else:
            bits_of_rows = numbers_on(x.device, tuple(formats[row][1] for row in rows))[:, None, None, None]
            shift = center[chosen]
            snapped = snap_rotated(bits_of_rows, upcast(part) - shift) + shift
        rounded = rounded.index_copy(0, chosen, torch.where(exact[chosen], part, snapped.to(x.dtype)))
    return rounded


def rounded_pair(
    pair: tuple[torch.Tensor, torch.Tensor],
    formats: Sequence[Sequence[Format]],
    exact: torch.Tensor,
    centers: Sequence[torch.Tensor],
) -> Sequence[torch.Tensor]:
    """Round keys and values, each as `rounded_cache` does, in one step if they are equally wide.

    Formats are of keys and of values, and centers, too, (K,1,d).
    """
    of_rows = [center.expand(len(exact), -1, -1, -1) for center in centers]
    if pair[0].shape != pair[1].shape:
        return [rounded_cache(x, kinds, exact, each) for x, kinds, each in zip(pair, formats, of_rows, strict=True)]
    kinds = [*formats[0], *formats[1]]
    if all(bits == FULL_BITS for _, bits in kinds):
        return pair
    return rounded_cache(torch.cat(pair), kinds, exact.repeat(2, 1, 1, 1), torch.cat(of_rows)).chunk(2)


@lru_cache(maxsize=64)  # the same in all layers
def exact_tokens(device: torch.device, length: int, sinks: tuple[tuple[int, ...], ...]) -> torch.Tensor:
    """Return whether a token is one of a row's sinks, (B,1,T,1)."""
    exact = torch.zeros(len(sinks), 1, length, 1, dtype=torch.bool)
    for row, positions in enumerate(sinks):
        exact[row, :, list(positions)] = True
    return sent(exact, device)


Centers = Mapping[int, Sequence[torch.Tensor]]  # layer → means of keys and of values, (K,1,d)


def attending_with_plans(
    seams: Mapping[int, Seam],
    plans: Sequence[Plan],
    sinks: Sequence[Sequence[int]],
    centers: Centers | None = None,
) -> AbstractContextManager[None]:
    """Let the model read one text once for each plan, in a batch, with the cache of this plan.

    Args:
        sinks: Of each plan, the positions of the tokens that stay in full precision.
    """

    def attend(
        index: int, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> Attended:
        exact = exact_tokens(key.device, key.shape[2], kept)
        center = centers[layer] if centers else [x.new_zeros(x.shape[1], 1, x.shape[3]) for x in (key, value)]
        formats = [[(plan.served, int(plan.bits[index, part])) for plan in plans] for part in range(2)]
        key, value = rounded_pair((key, value), formats, exact, center)
        return evicting_attention(query, key, value, call, [plan.windows[index].tolist() for plan in plans], kept)

    kept = tuple(tuple(positions) for positions in sinks)
    kernels = {layer: partial(attend, index, layer) for index, layer in enumerate(sorted(seams))}
    return attending_by_kernels(seams, kernels)


@contextmanager
def attending_after_evictions(
    modules: Mapping[int, nn.Module],
    seams: Mapping[int, Seam],
    plans: Sequence[Plan],
    batch: Batch,
    prompt: int,
    sizes: Sizes,
) -> Iterator[None]:
    """Let the model read the text of a batch once for each plan, in the last rows of a larger batch.

    The heads of each layer keep the tokens of the prompt that the eviction of the plan scores highest. The other rows
    attend as they would outside the block.
    """
    ahead: dict[int, torch.Tensor] = {}

    def look_ahead(layer: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if (tables := kwargs.get("position_embeddings")) is not None:
            ahead[layer] = query_at(mean_rotation(tables, prompt), seams[layer], module, args, kwargs).query

    def attend(
        index: int, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> Attended:
        count = len(query) - len(plans)
        others, rows = slice(0, count), slice(count, None)
        before = outside[layer](query[others], key[others], value[others], of_sequences(call, others)) if count else ()
        query, key, value, queries = (x[rows] for x in (query, key, value, ahead.pop(layer, query)))
        call = of_sequences(call, rows)
        mix, lse = fused_attention(query, key, value, call)
        sizes_kept, scores = [int(plan.windows[index, 0]) for plan in plans], []
        for row, plan in enumerate(plans):
            each = slice(row, row + 1)
            tensors = query[each], key[each], value[each], lse[each]
            attention = AttentionRead(*tensors, of_sequences(call, each), batch)
            scores.append(EVICTIONS[plan.evicts](PromptRead(attention, prompt, sizes_kept[row], queries[each])))
        read, reach = AttentionRead(query, key, value, lse, call, batch), int(sizes.tokens[index])
        after = after_eviction(read, torch.stack(scores), sizes_kept, reach)
        attended = torch.cat([mix[:, :, :prompt], after], dim=2), lse
        return (torch.cat([before[0], attended[0]]), torch.cat([before[1], attended[1]])) if before else attended

    outside = {layer: seam.kernel for layer, seam in seams.items()}  # the kernels of other rows
    looks_ahead = any(plan.evicts == EXPECTED for plan in plans)
    with ExitStack() as stack:
        for layer, module in modules.items() if looks_ahead else ():
            stack.callback(module.register_forward_pre_hook(partial(look_ahead, layer), with_kwargs=True).remove)
        kernels = {layer: partial(attend, index, layer) for index, layer in enumerate(sorted(seams))}
        stack.enter_context(attending_by_kernels(seams, kernels))
        yield


class PlanCost(NamedTuple):
    """The losses and the retrieval of a plan on some sequences."""

    loss: np.ndarray  # (N,): mean over the text's tokens, in nats
    copy_loss: np.ndarray  # (N,): mean over the copy's tokens
    retrieval: np.ndarray  # (N,): share of the copy's tokens that are predicted
    guessed: np.ndarray  # (N,): share of the same tokens that are predicted where they occur first


def retrieved(cost: PlanCost, dense: PlanCost, weights: np.ndarray) -> dict[str, float]:
    """Return the columns RETRIEVED of a plan; `weights` (1 + draws,N) are those of resampled texts."""
    of_dense = weighted_means(dense.retrieval, weights)
    share = bootstrap(weighted_means(cost.retrieval, weights) / np.where(of_dense[0] < ABLE, np.nan, of_dense))
    return {"retrieval": cost.retrieval.mean(), "guessed": cost.guessed.mean(), **share.as_columns("kept")}


def number_spared(layers: int) -> int:
    """Return how many of this number of layers a format leaves unquantized."""
    return max(1, round(SPARED * layers))


def plan_does_not_apply(subject: Subject, reason: str) -> InputError:
    return InputError(f"kv-plan does not apply to {subject.loaded.name}, because {reason}")


def check_plan_applies(subject: Subject) -> None:
    """Raise InputError if the model has no KV cache to plan, or the texts differ in length or are too short."""
    family, inputs = subject.family, subject.inputs
    if not family.has_attention:
        raise plan_does_not_apply(subject, "it has no attention, and no cache of keys and values")
    if not family.causal or family.prefix:
        raise plan_does_not_apply(subject, "its tokens see later ones, so that it has no cache of earlier ones")
    if getattr(subject.loaded.model.config.get_text_config(), "kv_lora_rank", None):
        reason = "engines cache one latent of each token for all heads (MLA), and a plan is of keys and values by heads"
        raise plan_does_not_apply(subject, f"{reason}: take a model without latent attention")
    subject.need_loss()
    if inputs.shortest != inputs.longest:
        raise InputError(
            f"kv-plan reads sequences of one length: these have {inputs.shortest} to {inputs.longest} tokens"
        )
    if inputs.longest < SHORTEST_TEXT:
        raise InputError(f"--seq-len {inputs.longest}: a plan needs texts of at least {SHORTEST_TEXT} tokens")
    copied, limit = inputs.longest // TEXTS_PER_COPY, position_limit(subject.loaded.model, family)
    if limit is not None and inputs.longest + copied > limit:
        most = f"take a --seq-len of at most {limit * TEXTS_PER_COPY // (TEXTS_PER_COPY + 1)}"
        what = f"a text of {inputs.longest} tokens and the {copied} that follow it once more"
        raise InputError(f"{what} are beyond the model's {limit} positions: {most}")


class PlanStudy:
    """Makes plans for each budget on calibration texts, and measures them on the others."""

    def __init__(
        self,
        subject: Subject,
        seams: Mapping[int, Seam],
        texts: Sequence[CopiedText],
        calibration: int,
        console: Console,
        seed: int,
    ) -> None:
        """The last `calibration` texts are not measured, those before are by task, and the seams are in place."""
        self.subject, self.seams, self.console, self.seed = subject, seams, console, seed
        size, self.calibration = (len(texts) - calibration) // (1 + len(PAIRS)), texts[-calibration:]
        self.tasks = {task: texts[nth * size : (nth + 1) * size] for nth, task in enumerate((COPY, *PAIRS))}
        self.measured = self.tasks[COPY]
        self.layers = sorted(seams)
        self.centers: dict[int, list[torch.Tensor]] = {}  # layer → means of keys and values (K,1,d), without sinks
        self.sizes = self._sizes(max(len(text.sinks) for text in texts))
        self.costs: dict[tuple, PlanCost] = {}  # (plan, texts) → cost
        self.dense = self._plan(DENSE, self.sizes.dense, sinks=NO_SINKS)
        self.rows: list[dict[str, Any]] = []
        self.sequences: list[dict[str, Any]] = []
        self.retrievals: list[dict[str, Any]] = []
        self.heads: list[dict[str, Any]] = []

    def tables(self, budgets: Sequence[float]) -> dict[str, pd.DataFrame]:
        equal = {budget: self._equal_windows(budget) for budget in budgets}
        self._note(1.0, [self.dense])
        plain = f"{CACHE_BITS[1]} bits"
        formats = {plain: ("", CACHE_BITS[1])} | {name: (name, kind.bits) for name, kind in SERVED.items()}
        scores, losses = self.calibrate({name: kind() for name, kind in RANKINGS.items()}, budgets, formats)
        for budget in budgets:
            print_line(self.console, f"planning for {budget:.0%} of the memory")
            self._plan_for(budget, scores[budget], losses[plain], equal[budget])
        print_line(self.console, f"rounding to {', '.join(map(str, CACHE_BITS))} bits, and as vLLM does")
        self._note(1.0, [*self._rounded_plans(), *self._served_plans(losses)])
        layers = [
            pd.DataFrame({"layer": self.layers, "format": name, "key_loss": lost[:, 0], "value_loss": lost[:, 1]})
            for name, lost in losses.items()
        ]
        tables = {"kv_plan": self.rows, "kv_plan_by_sequence": self.sequences, "kv_heads": self.heads}
        tables["kv_tasks"] = self.retrievals
        of_layers = pd.concat(layers, ignore_index=True)
        return {name: pd.DataFrame(rows) for name, rows in tables.items()} | {"kv_layers": of_layers}

    # --- what the calibration texts show

    def _attend(self, see: Callable[..., None]) -> None:
        """Read the calibration texts, and call `see` with text, index of the layer, attention call, mix and lse."""

        def attend(text: CopiedText, index: int, *call: Any) -> Attended:
            whole = fused_attention(*call)
            see(text, index, *call, whole)
            return whole

        for batch, text in zip(self._inputs(self.calibration).batches(1), self.calibration, strict=True):
            kernels = {layer: partial(attend, text, index) for index, layer in enumerate(self.layers)}
            with attending_by_kernels(self.seams, kernels):
                logits_on(self.subject, batch)

    def _sizes(self, sinks: int) -> Sizes:
        """Read the dense cache's sizes and centers. Raises InputError where the model's own code has no kernel."""
        shapes: dict[int, torch.Size] = {}

        def see(text: CopiedText, index: int, query: Any, key: torch.Tensor, value: torch.Tensor, *_: Any) -> None:
            shapes[index] = key.shape
            others = numbers_on(key.device, tuple(sorted({*range(key.shape[2])} - {*text.sinks})))
            means = [upcast(x)[0, :, others].mean(1, keepdim=True) / len(self.calibration) for x in (key, value)]
            layer = self.layers[index]
            known = self.centers.get(layer)
            self.centers[layer] = [a + b for a, b in zip(means, known, strict=True)] if known else means

        self._attend(see)
        if len(shapes) < len(self.layers):
            reason = "it has attention code of its own, whose cache cannot be simulated"
            raise plan_does_not_apply(self.subject, reason)
        if len({shape[1::2] for shape in shapes.values()}) > 1:
            raise plan_does_not_apply(self.subject, "its layers differ in key/value heads or their width")
        config = self.subject.loaded.model.config.get_text_config()
        kinds = getattr(config, "layer_types", None) or ()
        sliding = getattr(config, "sliding_window", None)
        if sliding is not None and not kinds:
            kinds = ["sliding_attention"] * (1 + max(self.layers))
        limits = {"sliding_attention": sliding, "chunked_attention": getattr(config, "attention_chunk_size", None)}
        seen = [limits.get(kinds[layer]) if kinds else None for layer in self.layers]
        _, heads, length, width = shapes[0]
        end = length - self.calibration[0].copied
        return Sizes(np.array([min(end, limit or end) for limit in seen]), heads, width, sinks)

    def calibrate(
        self, rankings: Mapping[str, Ranking], budgets: Sequence[float], formats: Mapping[str, Format]
    ) -> tuple[dict[float, dict[str, np.ndarray]], dict[str, np.ndarray]]:
        """Return the scores (L,K) by budget and ranking, and the losses (L,2) of each format, means over texts.

        A head is scored with sinks and a window, as if half of the budget were for heads with all tokens; a key/value
        head gets its query heads' largest score. A layer loses output with keys or values in a format, mean over heads.
        Sinks are in full precision, except in a format that is served.
        """
        windows = {budget: max(1, int(budget / 2 * self.sizes.tokens.max())) for budget in budgets}
        scores = {budget: {name: np.zeros(self.sizes.dense.shape) for name in rankings} for budget in budgets}
        losses, waiting = np.zeros((len(self.layers), 2, len(formats))), Accumulator()

        def see(text: CopiedText, index: int, query: Any, key: Any, value: Any, call: Any, whole: Attended) -> None:
            for budget, window in windows.items():
                streamed = evicting_attention(query, key, value, call, [[window] * key.shape[1]], [text.sinks])
                read = HeadsOnText(query, key, call, *whole, *streamed, text)
                for name, ranking in rankings.items():
                    of_heads = ranking.score(read).unflatten(0, (key.shape[1], -1)).amax(-1)
                    waiting.receive(partial(add, scores[budget][name], index), of_heads)
            kinds = list(formats.values())
            exact = exact_tokens(key.device, key.shape[2], tuple(() if served else text.sinks for served, _ in kinds))
            dense = key.expand(len(kinds), *key.shape[1:]), value.expand(len(kinds), *value.shape[1:])
            keys, values = rounded_pair(dense, [kinds, kinds], exact, self.centers[self.layers[index]])
            pairs = torch.cat([keys, dense[0]]), torch.cat([dense[1], values])
            mix, _ = fused_attention(query.expand(2 * len(kinds), *query.shape[1:]), *pairs, call)
            waiting.receive(partial(add, losses, index), lost_output(whole[0], mix).mean(1).unflatten(0, (2, -1)))

        def add(sums: np.ndarray, index: int, of_text: torch.Tensor) -> None:
            sums[index] += of_text.double().numpy() / len(self.calibration)

        self._attend(see)
        deliver([waiting])
        by_format = dict(zip(formats, np.moveaxis(losses, -1, 0), strict=True))
        return team().of_the_first(lambda: (scores, by_format))  # equal plans in all processes

    # --- plans

    def _plan(self, name: str, windows: np.ndarray, bits: int = FULL_BITS, sinks: str = PREDICTED) -> Plan:
        return Plan(name, windows, np.full((len(windows), 2), bits), sinks)

    def _equal_windows(self, budget: float) -> np.ndarray:
        """Return windows (L,K) next to the first tokens in all heads. Raises InputError if sinks leave none."""
        equal = np.zeros(self.sizes.dense.shape)
        first_and_last = self.sizes.split(equal, budget, 0.0, sinks=FIRST_TOKENS)
        if first_and_last is None or self.sizes.split(equal, budget, 0.0) is None:
            raise InputError(f"--budget {budget:g} leaves no token for a window: take a larger one, or longer texts")
        return first_and_last

    def _plan_for(
        self, budget: float, scores: Mapping[str, np.ndarray], losses: np.ndarray, first_and_last: np.ndarray
    ) -> None:
        """Measure each ranking's best plan without quantization, the best with it, and the controls.

        `scores` (L,K) are of each ranking, `losses` (L,2) those of each layer's output with keys or values on fewer
        bits; `first_and_last` (L,K) are windows next to the first tokens.
        """
        sizes = self.sizes

        def made(
            name: str, scores: np.ndarray, losses: np.ndarray, tokens: Iterable[float], shares: Iterable[float]
        ) -> list[Plan]:
            """Return the plans that keep a share of all tokens, with as many bits as the budget permits."""
            plans = []
            for tokens_kept, share in itertools.product(tokens, shares):
                windows = sizes.split(scores, tokens_kept, share)
                bits = None if windows is None else sizes.fitting_bits(losses, budget, windows)
                if windows is not None and bits is not None:
                    plans.append(Plan(name, windows, bits, tokens=tokens_kept, share=share))
            return plans

        by_ranking = {name: made(name, scores[name], losses, [budget], WHOLE_SHARES) for name in RANKINGS}
        self._read([self.dense, *itertools.chain(*by_ranking.values())], self.calibration)
        best = {name: min(plans, key=self._added) for name, plans in by_ranking.items()}
        ranking = min(best, key=lambda name: self._added(best[name]))
        shares_kept = [budget, *(share for share in KEPT_SHARES if share > budget)]
        combining = made(COMBINED, scores[ranking], losses, shares_kept, WHOLE_SHARES)
        self._read(combining, self.calibration)
        combined = min(combining, key=self._added)
        plans = [*best.values(), combined]
        for name, plan in [*best.items(), (ranking, combined)]:
            whole = plan.windows == ALL_TOKENS
            for (index, head), score in np.ndenumerate(scores[name]):
                self.heads.append(
                    {
                        "layer": self.layers[index],
                        "budget": budget,
                        "plan": plan.name,
                        "kv_head": head,
                        "score": score,
                        "window": -1 if whole[index, head] else int(plan.windows[index, head]),
                        "key_bits": int(plan.bits[index, 0]),
                        "value_bits": int(plan.bits[index, 1]),
                    }
                )
        shuffled = np.random.default_rng(self.seed).permutation
        for draw in range(1, 1 + RANDOM_PLANS):
            heads, layers = (shuffled(each.ravel()).reshape(each.shape) for each in (scores[ranking], losses))
            for name, plan in ((RANDOM, best[ranking]), (RANDOM_COMBINED, combined)):
                # heads whose layers see more tokens may leave none for windows
                plans += made(f"{name} {draw}", heads, layers, [plan.tokens], [plan.share, 0.0])[:1]
        self._note(budget, [*plans, control := self._plan(FIRST_AND_LAST, first_and_last, sinks=FIRST_FOUR)])
        self._note_tasks(budget, [self.dense, *self._evictions(budget), *best.values(), combined, control])

    def _evictions(self, budget: float) -> list[Plan]:
        """Return plans that keep a share of all tokens after the prompt, for the scores that the model has."""
        windows = np.maximum(1, budget * self.sizes.tokens).astype(int)[:, None].repeat(self.sizes.kv_heads, 1)
        family = self.subject.family
        has_tables = family.door == "interface" or "rotary" not in family.kinds_of_positions
        names = [name for name in EVICTIONS if name != EXPECTED or has_tables]
        return [replace(self._plan(name, windows, sinks=NO_SINKS), evicts=name) for name in names]

    def _rounded_plans(self) -> list[Plan]:
        """Return keys and values on fewer bits, with predicted sinks, first tokens or none in full precision."""
        names = itertools.product(CACHE_BITS, (PREDICTED, AS_MANY, NO_SINKS))
        return [self._plan(f"{bits} bits", self.dense.windows, bits, sinks) for bits, sinks in names]

    def _served_plans(self, losses: Mapping[str, np.ndarray]) -> list[Plan]:
        """Return the formats that are served: alone, without the costliest or random layers, and without first tokens.

        `losses` (L,2) are those of each layer's output with keys or values in a format.
        """
        plans, count = list[Plan](), number_spared(len(self.layers))
        drawn = np.random.default_rng(self.seed).permutation(len(self.layers))[:count]
        for name, kind in SERVED.items():
            costliest = np.argsort(-losses[name].sum(1), kind="stable")[:count]
            for label, layers, sinks in (
                (name, [], NO_SINKS), (f"{name}, {COSTLIEST_SPARED}", costliest, NO_SINKS),
                (f"{name}, {RANDOM_SPARED}", drawn, NO_SINKS), (name, [], FIRST_FOUR),
            ):  # fmt: skip
                plan = replace(self._plan(label, self.dense.windows, kind.bits, sinks), served=name)
                plan.bits[layers] = FULL_BITS
                plans.append(plan)
        return plans

    # --- costs

    def _inputs(self, texts: Sequence[CopiedText]) -> TokenInputs:
        return replace(self.subject.inputs, sequences=tuple(text.ids for text in texts))

    def _read(self, plans: Sequence[Plan], texts: Sequence[CopiedText]) -> list[PlanCost]:
        """Return the cost of each plan. Raises SinkscopeError if a loss is not finite."""
        model = self.subject.loaded.model
        modules = self.subject.family.attentions(model)

        def read_batch(plans: Sequence[Plan], opened: None, batch: Batch, observables: Any) -> torch.Tensor:
            text = texts[batch.first]
            plain, evicting = ([plan for plan in plans if bool(plan.evicts) is evicts] for evicts in (False, True))
            sinks, prompt = [plan.sinks_of(text) for plan in plain], len(text.ids) - text.copied
            rows = batch.repeated(len(plans))
            pruned = attending_after_evictions(modules, self.seams, evicting, batch, prompt, self.sizes)
            with attending_with_plans(self.seams, plain, sinks, self.centers), pruned if evicting else nullcontext():
                logits = logits_on(self.subject, rows)
            ids = rows.on(logits.device, "token_ids")
            losses, hits = token_losses(logits, ids), logits[:, :-1].argmax(-1) == ids[:, 1:]
            of_text, of_copy, before = text.parts
            parts = (losses[:, of_text], losses[:, of_copy], hits[:, of_copy], hits[:, before])
            return torch.stack([part.double().mean(1) for part in parts], dim=1)[None]

        keys = []
        for plan in plans:
            sinks = tuple(plan.sinks_of(text) for text in texts)
            sizes = plan.windows.tobytes(), plan.bits.tobytes()
            keys.append((id(texts), *sizes, plan.served, plan.evicts, sinks))
        unread = {key: plan for key, plan in zip(keys, plans, strict=True) if key not in self.costs}
        subject = replace(self.subject, inputs=self._inputs(texts))
        fitting = sequences_that_fit(model, len(texts[0].ids), False, on_cpu=model.device.type == "cpu")
        size, order = min(PLANS_AT_ONCE, fitting), sorted(unread, key=lambda key: bool(unread[key].evicts))
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        settings = [Setting(nullcontext, partial(read_batch, [unread[key] for key in each])) for each in batches]
        passes = run_settings(subject, settings, batch_size=1, console=self.console, by_batch=False)
        for each, done in zip(batches, passes, strict=True):
            if not done.losses.isfinite().all():
                raise SinkscopeError("the model gives NaN or infinite losses; try --dtype float32")
            by_plan = zip(each, done.losses.numpy().transpose(1, 2, 0), strict=True)  # (N,plans,4)
            self.costs |= {key: PlanCost(*numbers) for key, numbers in by_plan}
        return [self.costs[key] for key in keys]

    def _added(self, plan: Plan) -> float:
        """Return how much a plan adds to the losses of calibration texts and of their copies, in nats."""
        cost, dense = self._read([plan, self.dense], self.calibration)
        return float((cost.loss - dense.loss).mean() + (cost.copy_loss - dense.copy_loss).mean())

    def _note(self, budget: float, plans: Sequence[Plan]) -> None:
        """Measure plans and record them."""
        dense, *costs = self._read([self.dense, *plans], self.measured)
        texts = self._inputs(self.measured).texts
        weights = resamplings_of(texts)
        for plan, cost in zip(plans, costs, strict=True):
            ratio = bootstrap(np.exp(resampled_cost(cost.loss, dense.loss, np.ones(len(texts)), texts)))
            measured = f"perplexity × {ratio.value:.3f}, {cost.retrieval.mean():.0%} of the copy predicted"
            print_line(self.console, f"{plan.name} ({plan.sinks} kept): {measured}")
            whole, loss = plan.windows == ALL_TOKENS, float(cost.loss.mean())
            shared = np.broadcast_to(plan.windows.max(1, keepdims=True), plan.windows.shape)
            row = {"layer": -1, "budget": budget, "plan": plan.name, "sinks": plan.sinks}
            self.rows.append(
                row
                | {
                    "bits": float(plan.bits.mean()),
                    "whole_heads": int(whole.sum()),
                    "window": -1 if whole.all() else int(np.median(plan.windows[~whole])),
                    "memory": self.sizes.memory(plan),
                    "paged_memory": self.sizes.memory(replace(plan, windows=shared)),
                    "loss": loss,
                    "perplexity": perplexity(loss),
                    **ratio.as_columns("ratio"),
                    **retrieved(cost, dense, weights),
                }
            )
            for sequence, numbers in enumerate(zip(cost.loss, cost.retrieval, strict=True)):
                self.sequences.append(
                    row | {"sequence": sequence} | dict(zip(("loss", "retrieval"), numbers, strict=True))
                )

    def _note_tasks(self, budget: float, plans: Sequence[Plan]) -> None:
        """Measure and record retrieval with plans; the first plan is the dense cache."""
        weights = resamplings_of(self._inputs(self.measured).texts)
        for task, texts in self.tasks.items():
            costs = self._read(plans, texts)
            for plan, cost in zip(plans, costs, strict=True):
                row = {"layer": -1, "budget": budget, "plan": plan.name, "task": task, "loss": cost.copy_loss.mean()}
                self.retrievals.append(row | {"memory": self.sizes.memory(plan)} | retrieved(cost, costs[0], weights))

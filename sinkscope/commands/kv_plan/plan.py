"""Plans for the KV cache: which heads keep all tokens, which keep sinks and a window, on how many bits, and the cost.

A plan is made in four steps. Sinks are predicted: tokens with a massive activation at the layer where these appear
(KVSink, 2025). A ranking scores every key/value head on calibration texts. The best heads keep all tokens, and the
others the sinks and a window (DuoAttention, 2024). Keys and values of each layer get as many bits as the budget
permits, more where the output loses most. Calibration texts decide how many tokens are kept, on how many bits. Other
texts then show the plan's cost, next to controls of equal memory.

There are two tasks: perplexity on the text, and retrieval: the text's first tokens follow it once more, and a window
hides where they can be read. Perplexity hardly shows this.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import pandas as pd
import torch
from rich.console import Console

from sinkscope.attention.kernels import AttentionCall, fused_attention, raw_logits, upcast
from sinkscope.attention.seam import attending_by_kernels
from sinkscope.attention.taps import Seam
from sinkscope.commands.kv_plan.eviction import evicting_attention
from sinkscope.errors import InputError, SinkscopeError
from sinkscope.measuring.console import print_line
from sinkscope.measuring.losses import perplexity
from sinkscope.measuring.observables.massive import Massive
from sinkscope.measuring.observables.observable import Observable, Settings
from sinkscope.measuring.parity import Parity
from sinkscope.measuring.passes import Change, whole_pass
from sinkscope.measuring.streaming import token_losses
from sinkscope.measuring.subject import Subject, position_limit
from sinkscope.measuring.tracer import Tracer, logits_of, open_tracer
from sinkscope.models.family import input_device
from sinkscope.quantization.grids import RowGrids
from sinkscope.quantization.rotation import random_rotation
from sinkscope.results.statistics import Estimate, bootstrap, resamplings_of, weighted_means
from sinkscope.results.tables import KV_HEAD, SEQUENCE, Column, Columns
from sinkscope.text.inputs import numbered

FULL_BITS = 16
GRID_BITS = 32  # step and zero of a token's grid, for the keys and for the values of each head
BITS = (8, 4, 2)
KEPT = (1.0, 0.8, 0.6)  # of all tokens, on fewer bits
SHARES = (0.0, 0.5, 0.9)  # of the kept tokens, for the heads that keep all
COPIED = 8  # the copy is an eighth of the text
WHOLE = 2**31 - 1  # a window that holds all tokens
UNKNOWN = 8  # first tokens of the copy, which do not show yet what is copied
FIRST = 4  # sinks of StreamingLLM
DRAWS = 3  # random rankings
SHORTEST = 128  # tokens of a text
PREDICTED, FIRST_FOUR, AS_MANY, NO_SINKS = "predicted sinks", "first 4", "as many first", "none"
DENSE, FIRST_AND_LAST, COMBINED, RANDOM = "dense", "first-and-last", "combined", "random"
RANDOM_COMBINED = f"{RANDOM} {COMBINED}"
AS_VLLM = "as in vLLM"  # without centers, and with no token in full precision
SPARED = 0.1  # share of the layers that a plan may leave unquantized

KV_PLAN_TABLES: dict[str, Columns] = {
    "kv_plan": (
        Column("budget", "the wanted share of the dense cache's memory; 1 for comparisons without a budget"),
        Column("plan", "the ranking of heads, or a control: see `sinkscope list rankings`", kind="text"),
        Column("bits", "of keys and values, mean over layers and both; 16: not quantized"),
        Column("sinks", "what all heads keep in full precision: predicted sinks, first tokens or none", kind="text"),
        Column("whole_heads", "number of key/value heads that keep all tokens", kind="whole"),
        Column("window", "last tokens that the other heads keep, median", "tokens", kind="whole"),
        Column("memory", "share of the dense cache's bytes at the end of the text"),
        Column("loss", "mean cross-entropy on the text", "nats per token"),
        Column("perplexity", "exp(loss)"),
        Column("ratio", "perplexity ÷ that of the dense cache"),
        Column("ratio_low", "lower end of its 95 % interval, over sequences"),
        Column("ratio_high", "upper end"),
        Column("retrieval", "share of the copy's tokens that are predicted"),
        Column("guessed", "share of the same tokens that are predicted where they occur first"),
        Column("kept", "retrieval ÷ that of the dense cache; NaN if that is 0"),
        Column("kept_low", "lower end of its 95 % interval, over sequences"),
        Column("kept_high", "upper end"),
    ),
    "kv_plan_by_sequence": (
        Column("budget", "as in kv_plan"),
        Column("plan", "as in kv_plan", kind="text"),
        Column("sinks", "as in kv_plan", kind="text"),
        SEQUENCE,
        Column("loss", "mean cross-entropy on the text", "nats per token"),
        Column("retrieval", "share of the copy's tokens that are predicted"),
    ),
    "kv_heads": (
        Column("budget", "as in kv_plan"),
        Column("plan", "as in kv_plan, without controls", kind="text"),
        KV_HEAD,
        Column("score", "by the plan's ranking: the largest of the query heads that read this head"),
        Column("window", "last tokens that the head keeps; -1: all", "tokens", kind="whole"),
        Column("key_bits", "of keys; 16: not quantized", kind="whole"),
        Column("value_bits", "of values", kind="whole"),
    ),
    "kv_layers": (
        Column("key_loss", "‖y − y with keys on 4 bits‖ ÷ ‖y‖, mean over heads and texts"),
        Column("value_loss", "the same with values on 4 bits"),
    ),
}


# --- texts


@dataclass(frozen=True)
class Text:
    """A sequence that is followed by a copy of its first tokens, with its predicted sinks."""

    ids: np.ndarray
    copied: int  # number of last tokens that repeat those from position 1 on
    sinks: tuple[int, ...] = ()  # positions

    @classmethod
    def of(cls, ids: np.ndarray) -> Self:
        copied = len(ids) // COPIED
        return cls(np.concatenate([ids, ids[1 : 1 + copied]]), copied)

    @property
    def parts(self) -> tuple[slice, slice, slice]:
        """The predictions of the text, of the copy without its first tokens, and of the same tokens before."""
        end = len(self.ids) - self.copied - 1
        return slice(0, end), slice(end + UNKNOWN, None), slice(UNKNOWN, self.copied)


class SinkRule(NamedTuple):
    """The rule that predicts sinks: tokens with a large entry of the residual stream at one of these coordinates."""

    layer: int  # whose output is read; -1 if no layer has massive activations, and the first tokens are taken
    coordinates: tuple[int, ...] = ()
    at_least: float = float("nan")  # magnitude: half of the smallest massive activation

    @classmethod
    def of(cls, massive: pd.DataFrame) -> Self:
        """Return the rule for massive activations (Sun et al. 2024) of some texts.

        Its layer is the first that has them in at least half as many texts as any other layer.
        """
        if massive.empty:
            return cls(-1)
        texts = massive.groupby("layer")["sequence"].nunique()
        layer = int(texts.index[texts >= texts.max() / 2][0])
        found = massive[massive["layer"] == layer]
        return cls(layer, tuple(sorted(map(int, found["coordinate"].unique()))), float(found["value"].abs().min()) / 2)

    def sinks(self, entries: pd.DataFrame) -> tuple[int, ...]:
        """Return the positions of the sinks among the largest entries of one text."""
        if self.layer < 0:
            return tuple(range(FIRST))
        is_large = (entries["value"].abs() >= self.at_least) & entries["coordinate"].isin(self.coordinates)
        return tuple(sorted(map(int, entries["position"][is_large & (entries["layer"] == self.layer)].unique())))


def predicted_sinks(
    subject: Subject, texts: Sequence[Text], calibration: int, parity: Parity | None = None
) -> tuple[SinkRule, list[Text]]:
    """Find the rule for sinks on the last `calibration` texts, and apply it to all, in one pass of the dense model."""
    inputs = replace(subject.inputs, sequences=tuple(text.ids for text in texts))

    def fresh() -> list[Observable]:
        return [Massive(Settings()), *(parity.fresh() if parity else [])]

    change = Change(0, lambda _: open_tracer(subject.loaded.model, subject.family), fresh)
    done = whole_pass(replace(subject, inputs=inputs), change, Tracer.forward, 1)
    entries = done.observables[0].tables()["massive"]
    rule = SinkRule.of(entries[entries["is_massive"] & (entries["sequence"] >= len(texts) - calibration)])
    by_text = dict(iter(entries.groupby("sequence")))
    return rule, [replace(text, sinks=rule.sinks(by_text[at])) for at, text in enumerate(texts)]


# --- rankings


class Reading(NamedTuple):
    """One layer's attention on one text, over all tokens and over sinks and a window."""

    query: torch.Tensor
    key: torch.Tensor
    call: AttentionCall
    mix: torch.Tensor  # (1,H,T,d)
    lse: torch.Tensor  # (1,H,T)
    streamed_mix: torch.Tensor
    streamed_lse: torch.Tensor
    text: Text


class Ranking(ABC):
    """Scores the query heads of a layer on one text: those with high scores need all tokens."""

    about: ClassVar[str]

    @abstractmethod
    def score(self, read: Reading) -> torch.Tensor:
        """Return the score of each query head, (H,)."""


class BeyondWindow(Ranking):
    about = "attention beyond sinks and window, mean over queries"

    def score(self, read: Reading) -> torch.Tensor:
        return 1 - (read.streamed_lse - read.lse).exp()[0].mean(-1)


class OutputLoss(Ranking):
    about = "what the output loses: ‖y − y over sinks and window‖ ÷ ‖y‖ over all tokens"

    def score(self, read: Reading) -> torch.Tensor:
        lost = (read.mix - read.streamed_mix)[0].float()
        return lost.flatten(1).norm(dim=1) / read.mix[0].float().flatten(1).norm(dim=1)


class Retrieval(Ranking):
    about = "attention from the copy to the token after the query's own first occurrence"

    def score(self, read: Reading) -> torch.Tensor:
        length, copied = read.query.shape[2], read.text.copied
        rows = slice(length - copied, length - 1)
        first = length - len(read.text.ids) + 2  # of the answers; the first copied token is at position 1 of the text
        logits = raw_logits(read.query[:, :, rows], read.key[:, :, first : first + copied - 1], read.call)
        return (logits.diagonal(dim1=-2, dim2=-1) - read.lse[..., rows]).exp()[0].mean(-1)


RANKINGS: dict[str, type[Ranking]] = {
    "beyond-window": BeyondWindow,
    "output-loss": OutputLoss,
    "retrieval": Retrieval,
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
    share: float = 0.0  # of these, for the heads that keep all
    is_centered: bool = True  # whether the mean of keys and values is subtracted before they are rounded

    def kept(self, text: Text) -> tuple[int, ...]:
        counts = {FIRST_FOUR: FIRST, AS_MANY: len(text.sinks), NO_SINKS: 0}
        return tuple(range(counts[self.sinks])) if self.sinks in counts else text.sinks


def bytes_per_token(bits: np.ndarray, width: int) -> np.ndarray:
    """Return the share (L,) of a token's 16-bit keys and values of `width` that it takes with these bits (L,2)."""
    return np.where(bits < FULL_BITS, (bits * width + GRID_BITS) / (FULL_BITS * width), 1.0).mean(-1)


@dataclass(frozen=True)
class Sizes:
    """The dense cache at the end of a text, before the copy."""

    tokens: np.ndarray  # (L,): all that the layer sees, at most its own sliding window
    kv_heads: int
    width: int  # of a head
    sinks: int  # most of a text

    def memory(self, plan: Plan) -> float:
        """Return the share of the dense cache's bytes; sinks are in full precision."""
        sinks = {FIRST_FOUR: FIRST, NO_SINKS: 0}.get(plan.sinks, self.sinks)
        each = bytes_per_token(plan.bits, self.width)[:, None]
        kept = np.minimum(plan.windows + sinks, self.tokens[:, None])
        taken = kept * each + np.minimum(sinks, kept) * (1 - each)
        return float(taken.sum() / (self.tokens.sum() * self.kv_heads))

    def fitting_bits(self, losses: np.ndarray, budget: float, windows: np.ndarray) -> np.ndarray | None:
        """Return bits (L,2) of keys and values, in all as many as the budget permits; None if it permits none.

        One bit more halves a loss (L,2), so the next bit always goes to the largest loss that is left.
        """
        bits = np.full(losses.shape, BITS[-1])
        if self.memory(Plan("", windows, bits)) > budget:
            return None
        while True:
            for at in np.argsort(-np.where(bits < FULL_BITS, losses * 2.0**-bits, -1), axis=None, kind="stable"):
                raised = bits.copy()
                raised.flat[at] = FULL_BITS if bits.flat[at] >= BITS[0] else bits.flat[at] + 1
                if bits.flat[at] < FULL_BITS and self.memory(Plan("", windows, raised)) <= budget:
                    bits = raised
                    break
            else:
                return bits

    @property
    def dense(self) -> np.ndarray:
        """The windows (L,K) of the dense cache."""
        return np.full((len(self.tokens), self.kv_heads), WHOLE)

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
        windows[rest] = np.where(window < whole[rest], window, WHOLE)
        return windows.reshape(self.dense.shape)


# --- measuring


def quantized(bits: int, sinks: Sequence[int], x: torch.Tensor, center: torch.Tensor | float = 0.0) -> torch.Tensor:
    """Round keys or values (B,K,T,d) to one grid for each token and head, except those of the sinks.

    A rotation first spreads the channels that are large in all tokens, as in vLLM's int4_per_token_head. `center`
    (K,1,d), which is subtracted before, is the same for all tokens and texts, so it takes no memory of the cache.
    """
    if bits == FULL_BITS:
        return x
    kept, rotation = torch.tensor(sinks, dtype=torch.long, device=x.device), random_rotation(x.shape[-1], 0)
    rotation = rotation.to(upcast(x))
    snapped = RowGrids(bits, is_symmetric=False).snap((upcast(x) - center) @ rotation) @ rotation.T + center
    return snapped.to(x.dtype).index_copy(2, kept, x[:, :, kept])


Centers = Mapping[int, Sequence[torch.Tensor | float]]  # layer → means of keys and values


def holding(
    seams: Mapping[int, Seam], plan: Plan, sinks: Sequence[int], centers: Centers | None = None
) -> AbstractContextManager[None]:
    """Let the model read one text with the cache of a plan, of which the tokens in `sinks` are in full precision."""

    def attend(layer: int, windows: list[int], bits: list[int], *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        query, *cached, call = given
        means = centers[layer] if centers and plan.is_centered else (0.0, 0.0)
        key, value = (quantized(b, sinks, x, mean) for b, x, mean in zip(bits, cached, means, strict=True))
        kept = torch.tensor(sinks, dtype=torch.long, device=key.device)
        return evicting_attention(query, key, value, call, windows, kept)

    rows = zip(sorted(seams), plan.windows.tolist(), plan.bits.tolist(), strict=True)
    return attending_by_kernels(seams, {row[0]: partial(attend, *row) for row in rows})


@dataclass(frozen=True)
class Cost:
    """The losses and the retrieval of a plan on some sequences."""

    loss: np.ndarray  # (N,): mean over the text's tokens, in nats
    copy_loss: np.ndarray  # (N,): mean over the copy's tokens
    retrieval: np.ndarray  # (N,): share of the copy's tokens that are predicted
    guessed: np.ndarray  # (N,): share of the same tokens that are predicted where they occur first


class Bench:
    """Reads texts with plans, in a model with its seams in place; the last `calibration` texts are not measured."""

    def __init__(self, subject: Subject, seams: Mapping[int, Seam], texts: Sequence[Text], calibration: int) -> None:
        self.subject, self.seams = subject, seams
        self.known: dict[tuple, tuple[float, ...]] = {}  # of plan and text
        self.centers: dict[int, list[torch.Tensor]] = {}  # layer → means of keys and values (K,1,d), without sinks
        self.sizes = self._sizes(texts, calibration)

    def logits(self, text: Text) -> torch.Tensor:
        """Return the model's logits (T,V)."""
        model = self.subject.loaded.model
        ids = torch.as_tensor(np.array(text.ids))[None].to(input_device(model))
        return logits_of(model(input_ids=ids, use_cache=False))[0]

    def read(self, plan: Plan, texts: Sequence[Text]) -> Cost:
        """Raises SinkscopeError if a loss is not finite."""
        found = np.array([self._read(plan, text) for text in texts])
        if not np.isfinite(found).all():
            raise SinkscopeError("the model gives NaN or infinite losses; try --dtype float32")
        return Cost(*found.T)

    def _read(self, plan: Plan, text: Text) -> tuple[float, ...]:
        """Return the fields of Cost for one text."""
        key = (text.ids.tobytes(), plan.windows.tobytes(), plan.bits.tobytes(), plan.kept(text), plan.is_centered)
        if key not in self.known:
            with holding(self.seams, plan, plan.kept(text), self.centers):
                logits = self.logits(text)
            ids = torch.as_tensor(np.array(text.ids))
            losses, hits = token_losses(logits[None], ids[None])[0], logits[:-1].argmax(-1).cpu() == ids[1:]
            of_text, of_copy, before = text.parts
            parts = (losses[of_text], losses[of_copy], hits[of_copy], hits[before])
            self.known[key] = tuple(float(part.double().mean()) for part in parts)
        return self.known[key]

    def scores(self, rankings: Mapping[str, Ranking], window: int, texts: Sequence[Text]) -> dict[str, np.ndarray]:
        """Return the scores (L,K) of each ranking, mean over texts; a key/value head has its largest query head's."""
        found = {name: np.zeros(self.sizes.dense.shape) for name in rankings}

        def attend(text: Text, at: int, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
            query, key, value, call = given
            whole = fused_attention(*given)
            sinks = torch.tensor(text.sinks, dtype=torch.long, device=key.device)
            streamed = evicting_attention(query, key, value, call, [window] * key.shape[1], sinks)
            read = Reading(query, key, call, *whole, *streamed, text)
            for name, ranking in rankings.items():
                of_heads = ranking.score(read).unflatten(0, (key.shape[1], -1)).amax(-1)
                found[name][at] += of_heads.double().cpu().numpy() / len(texts)
            return whole

        self._attend(attend, texts)
        return found

    def quantization_losses(self, bits: int, texts: Sequence[Text]) -> np.ndarray:
        """Return what each layer's output loses with keys or values on `bits`, (L,2), mean over heads and texts."""
        found = np.zeros((len(self.seams), 2))

        def attend(text: Text, at: int, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
            query, key, value, call = given
            whole = fused_attention(*given)
            means = self.centers[sorted(self.seams)[at]]
            rounded = [quantized(bits, text.sinks, x, mean) for x, mean in zip((key, value), means, strict=True)]
            for which, pair in enumerate(((rounded[0], value), (key, rounded[1]))):
                read = Reading(query, key, call, *whole, *fused_attention(query, *pair, call), text)
                found[at, which] += float(OutputLoss().score(read).mean()) / len(texts)
            return whole

        self._attend(attend, texts)
        return found

    def _attend(self, attend: Callable[..., tuple[torch.Tensor, torch.Tensor]], texts: Sequence[Text]) -> None:
        """Read texts with a kernel that also gets the text and the index of its layer."""
        for text in texts:
            kernels = {layer: partial(attend, text, at) for at, layer in enumerate(sorted(self.seams))}
            with attending_by_kernels(self.seams, kernels):
                self.logits(text)

    def _sizes(self, texts: Sequence[Text], calibration: int) -> Sizes:
        """Read the dense cache's sizes and centers. Raises InputError where the model's own code has no kernel."""
        shapes: dict[int, torch.Size] = {}

        def attend(text: Text, at: int, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
            key, value = given[1:3]
            shapes[at] = key.shape
            others = torch.ones(key.shape[2], dtype=torch.bool, device=key.device)
            others[list(text.sinks)] = False
            means = [upcast(x)[0, :, others].mean(1, keepdim=True) / calibration for x in (key, value)]
            layer = sorted(self.seams)[at]
            known = self.centers.get(layer)
            self.centers[layer] = [a + b for a, b in zip(means, known, strict=True)] if known else means
            return fused_attention(*given)

        self._attend(attend, texts[-calibration:])
        if len(shapes) < len(self.seams):
            raise does_not_apply(self.subject, "it has attention code of its own, whose cache cannot be simulated")
        if len({shape[1::2] for shape in shapes.values()}) > 1:
            raise does_not_apply(self.subject, "its layers differ in key/value heads or their width")
        config = self.subject.loaded.model.config.get_text_config()
        kinds, length = getattr(config, "layer_types", None) or (), shapes[0][2]
        sliding = getattr(config, "sliding_window", None)
        if sliding is not None and not kinds:
            kinds = ["sliding_attention"] * (1 + max(self.seams))
        limits = {"sliding_attention": sliding, "chunked_attention": getattr(config, "attention_chunk_size", None)}
        seen = [limits.get(kinds[layer]) if kinds else None for layer in sorted(self.seams)]
        end = length - texts[0].copied
        tokens = np.array([min(end, limit or end) for limit in seen])
        _, heads, _, width = shapes[0]
        return Sizes(tokens, heads, width, max(len(text.sinks) for text in texts))


def does_not_apply(subject: Subject, reason: str) -> InputError:
    return InputError(f"kv-plan does not apply to {subject.loaded.name}, because {reason}")


def check_applies(subject: Subject) -> None:
    """Raise InputError if the model has no KV cache to plan, or the texts differ in length or are too short."""
    family, inputs = subject.family, subject.inputs
    if not family.has_attention:
        raise does_not_apply(subject, "it has no attention, and no cache of keys and values")
    if not family.causal or family.prefix:
        raise does_not_apply(subject, "its tokens see later ones, so that it has no cache of earlier ones")
    subject.need_loss()
    if inputs.shortest != inputs.longest:
        raise InputError(
            f"kv-plan reads sequences of one length: these have {inputs.shortest} to {inputs.longest} tokens"
        )
    if inputs.longest < SHORTEST:
        raise InputError(f"--seq-len {inputs.longest}: a plan needs texts of at least {SHORTEST} tokens")
    copied, limit = inputs.longest // COPIED, position_limit(subject.loaded.model, family)
    if limit is not None and inputs.longest + copied > limit:
        most = f"take a --seq-len of at most {limit * COPIED // (COPIED + 1)}"
        what = f"a text of {inputs.longest} tokens and the {copied} that follow it once more"
        raise InputError(f"{what} are beyond the model's {limit} positions: {most}")


class Study:
    """Makes plans for each budget on calibration texts, and measures them on the others."""

    def __init__(self, bench: Bench, texts: Sequence[Text], calibration: int, console: Console, seed: int) -> None:
        """The last `calibration` texts are not measured."""
        self.bench, self.console, self.seed = bench, console, seed
        self.measured, self.calibration = texts[:-calibration], texts[-calibration:]
        self.layers = sorted(bench.seams)
        self.dense = self._plan(DENSE, bench.sizes.dense, sinks=NO_SINKS)
        self.rows: list[dict[str, Any]] = []
        self.sequences: list[dict[str, Any]] = []
        self.heads: list[dict[str, Any]] = []

    def tables(self, budgets: Sequence[float]) -> dict[str, pd.DataFrame]:
        self._note(1.0, self.dense)
        losses = self.bench.quantization_losses(BITS[1], self.calibration)
        for budget in budgets:
            print_line(self.console, f"planning for {budget:.0%} of the memory")
            self._plan_for(budget, losses)
        print_line(self.console, f"quantizing to {', '.join(map(str, BITS))} bits")
        self._quantize(losses)
        tables = {"kv_plan": self.rows, "kv_plan_by_sequence": self.sequences, "kv_heads": self.heads}
        return {name: pd.DataFrame(rows) for name, rows in tables.items()} | {
            "kv_layers": pd.DataFrame({"layer": self.layers, "key_loss": losses[:, 0], "value_loss": losses[:, 1]})
        }

    def _plan(self, name: str, windows: np.ndarray, bits: int = FULL_BITS, sinks: str = PREDICTED) -> Plan:
        return Plan(name, windows, np.full((len(windows), 2), bits), sinks)

    def _plan_for(self, budget: float, losses: np.ndarray) -> None:
        """Measure each ranking's best plan without quantization, the best with it, and the controls.

        `losses` (L,2) are those of each layer's output with keys or values on fewer bits.
        """
        sizes = self.bench.sizes
        equal = np.zeros(sizes.dense.shape)
        first_and_last = sizes.split(equal, budget, 0.0, sinks=FIRST)
        if first_and_last is None or sizes.split(equal, budget, 0.0) is None:
            raise InputError(f"--budget {budget:g} leaves no token for a window: take a larger one, or longer texts")
        window = max(1, int(budget / 2 * sizes.tokens.max()))  # if half of the budget is for heads with all tokens
        scores = self.bench.scores({name: kind() for name, kind in RANKINGS.items()}, window, self.calibration)

        def best_plan(name: str, scores: np.ndarray, kept: Iterable[float]) -> Plan:
            """Return the plan that adds least to the losses on the calibration texts."""
            plans = [self._made(name, scores, losses, budget, tokens, share) for tokens in kept for share in SHARES]
            return min(filter(None, plans), key=self._added)

        best = {name: best_plan(name, scores[name], [budget]) for name in RANKINGS}
        ranking = min(best, key=lambda name: self._added(best[name]))
        kept = [budget, *(tokens for tokens in KEPT if tokens > budget)]
        combined = best_plan(COMBINED, scores[ranking], kept)
        for name, plan in [*best.items(), (ranking, combined)]:
            self._note(budget, plan)
            self._note_heads(budget, plan, scores[name])
        shuffled = np.random.default_rng(self.seed).permutation
        for draw in range(1, 1 + DRAWS):
            heads, layers = (shuffled(each.ravel()).reshape(each.shape) for each in (scores[ranking], losses))
            for name, plan in ((RANDOM, best[ranking]), (RANDOM_COMBINED, combined)):
                for share in (plan.share, 0.0):  # heads whose layers see more tokens may leave none for windows
                    control = self._made(f"{name} {draw}", heads, layers, budget, plan.tokens, share)
                    if control is not None:
                        self._note(budget, control)
                        break
        self._note(budget, self._plan(FIRST_AND_LAST, first_and_last, sinks=FIRST_FOUR))

    def _made(
        self, name: str, scores: np.ndarray, losses: np.ndarray, budget: float, tokens: float, share: float
    ) -> Plan | None:
        """Return the plan that keeps a share of all tokens, on as many bits as the budget permits."""
        windows = self.bench.sizes.split(scores, tokens, share)
        if windows is None:
            return None
        bits = self.bench.sizes.fitting_bits(losses, budget, windows)
        return None if bits is None else Plan(name, windows, bits, tokens=tokens, share=share)

    def _added(self, plan: Plan) -> float:
        """Return how much a plan adds to the losses of calibration texts and of their copies, in nats."""
        cost, dense = (self.bench.read(each, self.calibration) for each in (plan, self.dense))
        return float((cost.loss - dense.loss).mean() + (cost.copy_loss - dense.copy_loss).mean())

    def _quantize(self, losses: np.ndarray) -> None:
        """Measure keys and values on fewer bits, also without the layers whose output loses most on 4 bits."""
        for bits in BITS:
            for sinks in (PREDICTED, AS_MANY, NO_SINKS):
                self._note(1.0, self._plan(f"{bits} bits", self.dense.windows, bits, sinks))
        spared = max(1, round(SPARED * len(losses)))
        drawn = np.random.default_rng(self.seed).permutation(len(losses))[:spared]
        costliest = np.argsort(-losses.sum(1))[:spared]
        for bits, name, layers in (
            (BITS[0], AS_VLLM, []), (BITS[1], AS_VLLM, []),
            (BITS[1], f"{AS_VLLM}, spared", costliest), (BITS[1], f"{AS_VLLM}, random spared", drawn),
        ):  # fmt: skip
            plan = replace(self._plan(f"{bits} bits {name}", self.dense.windows, bits, NO_SINKS), is_centered=False)
            plan.bits[layers] = FULL_BITS
            self._note(1.0, plan)

    def _note(self, budget: float, plan: Plan) -> None:
        """Measure a plan and record it."""
        cost, dense = (self.bench.read(each, self.measured) for each in (plan, self.dense))
        weights = resamplings_of(numbered(text.ids for text in self.measured))
        ratio = bootstrap(np.exp(weighted_means(cost.loss - dense.loss, weights)))
        of_dense = weighted_means(dense.retrieval, weights)
        of_dense[of_dense == 0] = np.nan  # the model itself retrieves nothing
        kept = bootstrap(weighted_means(cost.retrieval, weights) / of_dense)
        measured = f"perplexity × {ratio.value:.3f}, {cost.retrieval.mean():.0%} of the copy predicted"
        print_line(self.console, f"{plan.name} ({plan.sinks} kept): {measured}")
        whole = plan.windows == WHOLE
        loss = float(cost.loss.mean())
        self.rows.append(
            {
                "layer": -1,
                "budget": budget,
                "plan": plan.name,
                "bits": float(plan.bits.mean()),
                "sinks": plan.sinks,
                "whole_heads": int(whole.sum()),
                "window": -1 if whole.all() else int(np.median(plan.windows[~whole])),
                "memory": self.bench.sizes.memory(plan),
                "loss": loss,
                "perplexity": perplexity(loss),
                "retrieval": float(cost.retrieval.mean()),
                "guessed": float(cost.guessed.mean()),
                **_ends("ratio", ratio),
                **_ends("kept", kept),
            }
        )
        of_plan = {"layer": -1, "budget": budget, "plan": plan.name, "sinks": plan.sinks}
        for at, (each, found) in enumerate(zip(cost.loss, cost.retrieval, strict=True)):
            self.sequences.append(of_plan | {"sequence": at, "loss": each, "retrieval": found})

    def _note_heads(self, budget: float, plan: Plan, scores: np.ndarray) -> None:
        whole = plan.windows == WHOLE
        for (at, head), score in np.ndenumerate(scores):
            row = {"layer": self.layers[at], "budget": budget, "plan": plan.name, "kv_head": head, "score": score}
            window = -1 if whole[at, head] else int(plan.windows[at, head])
            bits = dict(zip(("key_bits", "value_bits"), map(int, plan.bits[at]), strict=True))
            self.heads.append(row | {"window": window} | bits)


def _ends(name: str, estimate: Estimate) -> dict[str, float]:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}

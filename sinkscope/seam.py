"""The one door into attention: small identity modules, kept in every attention module, that nnsight can read.

A model whose family is on transformers' `AttentionInterface` calls `attend` below in place of its own attention
function. Any other family keeps its own code, and `Interceptor` recognises in it either a fused SDPA call or
matmul → softmax → matmul. Both ways pass the same tensors through the same taps:

    query (B,H,T,d)   key, value (B,K,T,d)   lse (B,H,T)   mix (B,T,H,d)

after any rotary rotation. `lse` is the log-sum-exp of each row of logits, with which any rectangle of the
attention weights is exp(logit - lse) (attention_weights.py): the weights themselves are never kept.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from sinkscope.errors import SinkscopeError
from sinkscope.families import Family

NAME = "sinkscope"  # of the attention implementation, and of the seam inside each attention module
RETROFIT = "retrofit"  # of what a retrofit has added to a module, for good
MASKED = torch.finfo(torch.float16).min / 2  # a logit below this was put there by a mask
ROW_CHUNK = 64  # rows of attention weights in memory at once; more fall out of a CPU's cache


@dataclass(frozen=True)
class ForbiddenKeys:
    """Keys that an intervention hides from every later query, each still seen by its own token."""

    pairs: Callable[[slice, slice, torch.device], torch.Tensor]  # (rows, cols, device) → (B|1,H,R,C) bool
    columns: Callable[[torch.device], torch.Tensor]  # (B|1,n): where they are in whole sequences
    heads: tuple[int, ...]  # query heads from which they are hidden


@dataclass(frozen=True)
class AttentionCall:
    """How one attention call came from query and key to logits; what cannot be read off its taps."""

    mask: torch.Tensor | None  # (B,1|H,T,T), bool (True = may attend) or additive; None: causal
    scaling: float  # NaN where the model makes the logits itself and not by scaling alone
    softcap: float | None = None
    sink_logits: torch.Tensor | None = None  # (H,) or (B,H,T): a learned logit in each row's denominator (gpt-oss)
    scores: torch.Tensor | None = None  # (B,H,T,T) logits after masking, where the model makes them itself
    forbidden: tuple[ForbiddenKeys, ...] = ()  # on top of the mask
    dropout: float = 0.0  # of the weights, in training


class Tap(nn.Module):
    """An identity: a place where nnsight reads, overwrites or differentiates."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Seam(nn.Module):
    """The taps of one attention layer, and how its last call was made."""

    # The order in which the taps run: a trace must ask for them in this order.
    ORDER: ClassVar = {
        "interface": ("query", "key", "value", "lse", "mix"),
        "interceptor": ("query", "key", "lse", "value", "mix"),
    }

    def __init__(self, kernel: str, door: str) -> None:
        super().__init__()
        self.kernel = KERNELS[kernel]
        self.order = self.ORDER[door]
        self.call: AttentionCall | None = None
        self.forbidden: tuple[ForbiddenKeys, ...] = ()
        self.scaling: float | None = None  # found by the interceptor in its first call
        self.query, self.key, self.value = Tap(), Tap(), Tap()
        self.lse, self.mix = Tap(), Tap()


class Denominator(nn.Module, ABC):
    """A retrofit's own term in every row's denominator, a logit with no value; in an attention module as `RETROFIT`."""

    reads_query: ClassVar[bool] = False
    scaling: float  # of q·k, where the model's own code makes the logits,
    is_biased: bool  # and whether it adds to them by position (ALiBi)

    @abstractmethod
    def forward(self, query: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """query (B,H,T,d) → logits (B,H,T)."""

    def added_to(self, call: AttentionCall, query: torch.Tensor, own_bias: torch.Tensor | None = None) -> AttentionCall:
        """The same call with this term in it, beside the model's own where it has one (gpt-oss).

        own_bias (B|1,H,T): what ALiBi adds to the logit of the query's own key. Models give ALiBi up to a constant a
        row, which MPT counts from the last key there is; beside a logit without position it is to be 0 at distance 0.
        """
        logits = upcast(self(query, call))
        if own_bias is not None:
            logits = logits + own_bias
        if call.sink_logits is not None:
            logits = logits.logaddexp(call.sink_logits.to(logits.dtype)[:, None])
        return replace(call, sink_logits=logits)


def denominator_of(module: nn.Module) -> Denominator | None:
    found = getattr(module, RETROFIT, None)
    return found if isinstance(found, Denominator) else None


def has_denominators(model: nn.Module) -> bool:
    return any(denominator_of(module) is not None for module in model.modules())


def registers_before(model: nn.Module) -> int:
    """How many register tokens a retrofit puts before every sequence: the layers see so many tokens more."""
    return int(getattr(getattr(model, RETROFIT, None), "count", 0))


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function registered with transformers: the fused kernel between the taps.

    query (B,H,T,d), key and value (B,K,T,d) → (B,T,H,d). A module with neither a seam nor a denominator of a
    retrofit's (a vision tower beside the language model, say) gets plain SDPA.
    """
    seam: Seam | None = getattr(module, NAME, None)
    denominator = denominator_of(module)
    if seam is None and denominator is None:
        kwargs |= {"scaling": scaling, "position_bias": position_bias, "dropout": dropout}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    if position_bias is not None:
        raise SinkscopeError("attention with a learned position bias is not something that sinkscope can measure")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(attention_mask, scaling, softcap, s_aux, dropout=dropout)
    if seam is None:
        mix, _ = fused_attention(query, key, value, call if denominator is None else denominator.added_to(call, query))
        return mix.transpose(1, 2).contiguous(), None
    call = replace(call, forbidden=seam.forbidden)
    query, key, value = seam.query(query), seam.key(key), seam.value(value)
    seam.call = call if denominator is None else denominator.added_to(call, query)
    mix, lse = seam.kernel(query, key, value, seam.call)
    seam.lse(lse)
    return seam.mix(mix.transpose(1, 2).contiguous()), None


AttentionInterface.register(NAME, attend)
# Without a mask function of its own an implementation gets no mask at all: no causality, no padding.
AttentionMaskInterface.register(NAME, sdpa_mask)


def fused_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention by the kernel behind F.scaled_dot_product_attention, keeping the log-sum-exp that it computes.

    → mix (B,H,T,d), lse (B,H,T) in float32 or better. Softcap, sink logits, dropout, other devices and value heads of
    another width go the chunked way: no fused kernel serves them.
    """
    causal = call.mask is None and query.shape[2] > 1
    plain = (
        call.softcap is None and call.sink_logits is None and not call.dropout and value.shape[-1] == query.shape[-1]
    )
    whole = key.shape[2] == query.shape[2]
    if not plain or ((causal or call.forbidden) and not whole):
        return chunked_attention(query, key, value, call)
    if call.forbidden:
        mix, lse = fused_attention(*_penalised(query, key, value, call), replace(call, forbidden=()))
        return mix[..., : value.shape[-1]], lse
    if query.device.type == "cpu":
        mask = call.mask
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, is_causal=causal, attn_mask=mask, scale=call.scaling
        )
    if query.device.type == "cuda" and call.mask is None:
        # One kernel for all dtypes; the flash kernel has no float32. Its lse is padded to a multiple of 32.
        key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
        mix, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, None, True, is_causal=causal, scale=call.scaling
        )
        return mix, lse[..., : query.shape[2]]
    return chunked_attention(query, key, value, call)


PENALTY = 1e4  # on a logit: e^-10000 is 0, and half precision holds its square root


def _penalised(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A further coordinate for each forbidden key, whose product is -PENALTY for the pairs that may not be and 0 for
    all others: the fused kernel then needs no T × T mask to forbid them. Value gets zeros, to be cut off again.
    """
    place = torch.arange(query.shape[2], device=query.device)
    size = (PENALTY / call.scaling) ** 0.5
    queries, keys = [], []
    for forbidden in call.forbidden:
        columns = forbidden.columns(query.device)[:, None, None]  # (B|1,1,1,n)
        hidden = torch.zeros(query.shape[1], 1, 1, dtype=torch.bool, device=query.device)
        hidden[list(forbidden.heads)] = True
        queries.append(((place[:, None] > columns) & hidden).expand(len(query), -1, -1, -1))
        keys.append((place[:, None] == columns).expand(len(key), key.shape[1], -1, -1))
    further = [torch.cat(parts, dim=-1).to(query.dtype) * size for parts in (queries, keys)]
    width = -(-further[0].shape[-1] // 8) * 8  # kernels like multiples of 8
    more_query, more_key = (F.pad(x, (0, width - x.shape[-1])) for x in further)
    query, key = torch.cat([query, more_query], dim=-1), torch.cat([key, -more_key], dim=-1)
    return query, key, F.pad(value, (0, width))


def chunked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall, chunk: int = ROW_CHUNK
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with softcap and sink logits, `chunk` rows of weights in memory at a time. As `fused_attention`."""
    mixes, lses = [], []
    for start in range(0, query.shape[2], chunk):
        rows = slice(start, min(start + chunk, query.shape[2]))
        logits = masked_logits(query, key, call, rows)
        lse = row_lse(logits, sink_rows(call, rows))
        weights = F.dropout((logits - lse.unsqueeze(-1)).exp().to(value.dtype), call.dropout)
        mixes.append(grouped_matmul(weights, value))
        lses.append(lse)
    return torch.cat(mixes, dim=2), torch.cat(lses, dim=2)


def eager_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """The textbook way, all weights at once: a reference. As `fused_attention`."""
    return chunked_attention(query, key, value, call, chunk=query.shape[2])


Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionCall], tuple[torch.Tensor, torch.Tensor]]
KERNELS: dict[str, Kernel] = {"sdpa": fused_attention, "eager": eager_attention}


def masked_logits(query: torch.Tensor, key: torch.Tensor, call: AttentionCall, rows: slice) -> torch.Tensor:
    """Rows of pre-softmax logits over all keys, (B,H,R,T), the dtype's minimum where the query may not attend.

    Not -inf: a row that is masked everywhere (a padding query) must stay finite.
    """
    logits = raw_logits(query[:, :, rows], key, call)
    keys, offset = slice(0, key.shape[2]), key.shape[2] - query.shape[2]
    for forbidden in call.forbidden:
        pairs = forbidden.pairs(slice(rows.start + offset, rows.stop + offset), keys, query.device)
        logits = logits.masked_fill(pairs, torch.finfo(logits.dtype).min)
    if call.mask is not None and call.mask.dtype != torch.bool:
        return logits + call.mask[:, :, rows]
    # no mask, and more keys than several queries: a static cache's empty places, which come behind
    ahead = 0 if query.shape[2] > 1 else offset
    seen = causal(rows, keys, ahead, query.device) if call.mask is None else call.mask[:, :, rows]
    return logits.masked_fill(~seen, torch.finfo(logits.dtype).min)


def raw_logits(query: torch.Tensor, key: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """scaling · q·k with the softcap applied and no mask: query (B,H,R,d), key (B,K,C,d) → (B,H,R,C), float32+."""
    logits = grouped_matmul(upcast(query), upcast(key).transpose(-1, -2)).mul_(call.scaling)
    return logits if call.softcap is None else call.softcap * (logits / call.softcap).tanh()


def row_lse(logits: torch.Tensor, sink_logits: torch.Tensor | None) -> torch.Tensor:
    """Log-sum-exp of each row (B,H,R), the learned sink logits (B|1,H,R|1) included where there are any."""
    lse = logits.logsumexp(-1)
    return lse if sink_logits is None else lse.logaddexp(sink_logits.to(lse.dtype))


def sink_rows(call: AttentionCall, rows: slice) -> torch.Tensor | None:
    """The call's sink logits for these rows, (1,H,1) or (B,H,R)."""
    sinks = call.sink_logits
    if sinks is None or sinks.dim() == 3:
        return sinks if sinks is None else sinks[:, :, rows]
    return sinks[None, :, None]


def grouped_matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """(B,H,R,X) @ (B,K,X,C) → (B,H,R,C): query head h reads key/value head h // (H/K), without repeating heads."""
    batch, heads, rows, inner = left.shape
    groups = right.shape[1]
    grouped = left.reshape(batch, groups, heads // groups * rows, inner)
    return (grouped @ right).view(batch, heads, rows, right.shape[-1])


def repeat_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(B,K,T,d) → (B,H,T,d)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def causal(rows: slice, cols: slice, offset: int, device: torch.device) -> torch.Tensor:
    """(R,C) bool: query row + offset may see key column."""
    row = torch.arange(rows.start, rows.stop, device=device)[:, None] + offset
    return row >= torch.arange(cols.start, cols.stop, device=device)


def upcast(x: torch.Tensor) -> torch.Tensor:
    """Half precision to float32; float32 and float64 as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


class Interceptor(TorchFunctionMode):
    """Finds attention inside one attention module's own code, for families that are not on the interface.

    Knows F.scaled_dot_product_attention, and matmul (q, kᵀ) → softmax → matmul (weights, v). Torch runs
    `__torch_function__` with the mode switched off, so whatever an observer computes at a tap is not intercepted.
    """

    MATMULS: ClassVar = {
        torch.matmul, torch.bmm, torch.baddbmm,
        torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.bmm, torch.Tensor.baddbmm,
    }  # fmt: skip
    SOFTMAXES: ClassVar = {F.softmax, torch.softmax, torch.Tensor.softmax}

    def __init__(self) -> None:
        super().__init__()
        self.idle = Seam("sdpa", "interceptor")  # for a module that has none: a retrofit's, while nobody measures
        self.idle.scaling = math.nan  # nobody asks
        self.seam = self.idle
        self.denominator: Denominator | None = None
        self.batch = 0
        self.kv_heads: int | None = None  # where the module says so
        self.query, self.key = torch.empty(0), torch.empty(0)  # of the call under way
        self.awaited = "logits"  # then "softmax", then "mix", then nothing more in this call

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._fused(*args, **kwargs)
        if func in self.MATMULS and self.awaited == "logits" and self._batched(args, kwargs):
            return self._logits(func, args, kwargs)
        if func in self.SOFTMAXES and self.awaited == "softmax":
            return self._softmax(func, args, kwargs)
        if func in self.MATMULS and self.awaited == "mix" and self._batched(args, kwargs):
            return self._mix(func, args, kwargs)
        return func(*args, **kwargs)

    @staticmethod
    def _batched(args: tuple, kwargs: dict) -> bool:
        """Both factors vary over the batch; a projection written as x @ W.T (Falcon) does not."""
        return kwargs.get("batch2", args[-1]).dim() >= 3

    def _fused(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if attn_mask is None and not is_causal and query.shape[2] > 1:  # not causal: nothing that a tap should see
            return F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=enable_gqa)
        seam = self.seam
        scaling = query.shape[-1] ** -0.5 if scale is None else scale
        query, key, value = seam.query(query), seam.key(self._own_heads(key)), self._own_heads(value)
        seam.call = AttentionCall(attn_mask, scaling, forbidden=seam.forbidden, dropout=dropout_p)
        if self.denominator is not None:
            seam.call = self.denominator.added_to(seam.call, query, self._own_bias(attn_mask))
        # The taps run in one order whatever the model does, so lse (which needs no value) comes before value.
        mix, lse = seam.kernel(query, key, value, seam.call)
        seam.lse(lse)
        tapped = seam.value(value)
        if tapped is not value:
            mix, _ = seam.kernel(query, key, tapped, seam.call)
        return seam.mix(mix.transpose(1, 2)).transpose(1, 2)

    def _logits(self, func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
        # baddbmm has the bias (ALiBi) in front and may name its two factors
        names = ("batch1", "batch2")
        named = all(name in kwargs for name in names)
        query, key_t = (kwargs[name] for name in names) if named else args[-2:]
        key_heads = self._heads(key_t.transpose(-1, -2))
        self.query = self.seam.query(self._heads(query))
        self.key = repeat_heads(self.seam.key(self._own_heads(key_heads)), key_heads.shape[1])
        query, key_t = self.query.reshape(query.shape), self.key.transpose(-1, -2).reshape(key_t.shape)
        self.awaited = "softmax"
        if named:
            return func(*args, **kwargs | dict(zip(names, (query, key_t), strict=True)))
        return func(*args[:-2], query, key_t, **kwargs)

    def _softmax(self, func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
        scores = self._heads(args[0])
        if self.seam.scaling is None:
            self.seam.scaling = found_scaling(self.query, self.key, scores)
        for forbidden in self.seam.forbidden:
            keys, offset = slice(0, scores.shape[-1]), scores.shape[-1] - scores.shape[-2]
            pairs = forbidden.pairs(slice(offset, scores.shape[-1]), keys, scores.device)
            scores = scores.masked_fill(pairs, torch.finfo(scores.dtype).min)
            args = (scores.reshape(args[0].shape), *args[1:])
        self.seam.call = AttentionCall(mask=None, scaling=self.seam.scaling, scores=scores)
        if self.denominator is not None:
            self.seam.call = self.denominator.added_to(
                self.seam.call, self.query, self._own_bias(scores, has_dots=True)
            )
        self.query = self.key = torch.empty(0)
        self.seam.lse(row_lse(upcast(scores), self.seam.call.sink_logits))
        self.awaited = "mix"
        if self.seam.call.sink_logits is None:
            return func(*args, **kwargs)
        sinks = self.seam.call.sink_logits.to(scores.dtype)[..., None]  # a column more, whose weight nobody gets
        with_sinks = torch.cat([scores, sinks], dim=-1).reshape(*args[0].shape[:-1], -1)
        return func(with_sinks, *args[1:], **kwargs)[..., :-1]

    @torch.no_grad()
    def _own_bias(self, scores: torch.Tensor | None, has_dots: bool = False) -> torch.Tensor | None:
        """What ALiBi has added to the logit of each query's own key, (B|1,H,T); None where there is no ALiBi.

        scores (B|1,H,T,S): biases under the mask, with scaling · q·k in them where `has_dots`.
        """
        term = self.denominator
        if term is None or not term.is_biased or scores is None:
            return None
        columns = torch.arange(scores.shape[-1], device=scores.device)
        own = ((scores > MASKED) * columns).argmax(-1, keepdim=True)  # the last that the query sees
        bias = upcast(scores).gather(-1, own).squeeze(-1)
        if not has_dots:
            return bias
        keys = repeat_heads(self.key, scores.shape[1]).gather(2, own.expand(*own.shape[:3], self.key.shape[-1]))
        return bias - term.scaling * torch.linalg.vecdot(upcast(self.query), upcast(keys))

    def _mix(self, func: Any, args: tuple, kwargs: dict) -> torch.Tensor:
        weights, value = args
        value_heads = self._heads(value)
        value_heads = repeat_heads(self.seam.value(self._own_heads(value_heads)), value_heads.shape[1])
        value = value_heads.reshape(value.shape)
        mix = func(weights, value, **kwargs)
        self.awaited = "nothing"
        heads = self.seam.mix(self._heads(mix).transpose(1, 2))
        return heads.transpose(1, 2).reshape(mix.shape)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """(B·H,T,d) or (B,H,T,d) → (B,H,T,d)."""
        return x.reshape(self.batch, -1, *x.shape[-2:])

    def _own_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Key or value heads without the copies that the model's own code has made of them (Falcon 40B and on)."""
        return x if self.kv_heads is None else x[:, :: max(1, x.shape[1] // self.kv_heads)]

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Forward pre-hook of the attention module."""
        self.seam = getattr(module, NAME, self.idle)
        self.denominator = denominator_of(module)
        self.batch = (args[0] if args else kwargs["hidden_states"]).shape[0]
        names = ("num_kv_heads", "num_key_value_heads")
        self.kv_heads = next((getattr(module, name) for name in names if hasattr(module, name)), None)
        self.awaited = "logits"
        self.__enter__()

    def leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        """Forward hook of the attention module; runs also when its forward raised."""
        self.__exit__(None, None, None)
        self.seam, self.idle.call = self.idle, None  # no graph is kept that nobody reads

    def watch(self, attention: nn.Module) -> list[RemovableHandle]:
        """Be there in every forward of this module."""
        return [
            attention.register_forward_pre_hook(self.enter, with_kwargs=True),
            attention.register_forward_hook(self.leave, always_call=True),
        ]


@torch.no_grad()
def found_scaling(query: torch.Tensor, key: torch.Tensor, scores: torch.Tensor) -> float:
    """What a model's own code multiplied q·k by on the way to its scores (B,H,T,T), read off their diagonal; NaN where
    it also added something (ALiBi).
    """
    cached = key.shape[2] - query.shape[2]
    dots = torch.linalg.vecdot(upcast(query), upcast(repeat_heads(key, query.shape[1]))[:, :, cached:])
    found = upcast(scores).diagonal(cached, dim1=-2, dim2=-1)
    seen = found > MASKED  # not padding
    dots, found = dots[seen].double(), found[seen].double()
    scaling = dots @ found / dots.square().sum()
    is_exact = (found - scaling * dots).abs().max() < 1e-2 * found.abs().max()  # half precision is no more exact
    return float(scaling) if is_exact else float("nan")


@contextmanager
def open_seam(model: PreTrainedModel, family: Family, kernel: str = "sdpa") -> Iterator[list[Seam]]:
    """Put a seam into every attention layer, and take all of it out again at the end, also after an exception.

    → the seams, one a layer. `kernel` is "sdpa" (fused) or "eager" (the reference).
    """
    attentions = [layer.get_submodule(family.attention) for layer in family.layer_modules(model)]
    if any(hasattr(attention, NAME) for attention in attentions):
        raise SinkscopeError("this model has its seams in already: close the tracer that is open on it first")
    seams = [Seam(kernel, family.door) for _ in attentions]
    door = attention_implementation(model, NAME) if family.door == "interface" else nullcontext()
    handles: list[RemovableHandle] = []
    try:
        for attention, seam in zip(attentions, seams, strict=True):
            attention.add_module(NAME, seam)
            if family.door == "interceptor" and denominator_of(attention) is None:  # else a retrofit's is there
                handles += Interceptor().watch(attention)
        with door:
            yield seams
    finally:
        for handle in handles:
            handle.remove()
        for attention in attentions:
            attention._modules.pop(NAME, None)


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """The model with a registered attention function, and with its own again at the end."""
    before = _implementations(model)
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation


def _implementations(model: PreTrainedModel) -> list[tuple[PreTrainedConfig, str]]:
    """Every configuration that `set_attn_implementation` writes to, and what stands there; a whole before its parts,
    which a write to the whole reaches too.
    """
    waiting = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    found: dict[int, PreTrainedConfig] = {}
    while waiting:
        config = waiting.pop(0)
        if id(config) not in found:
            found[id(config)] = config
            parts = (getattr(config, name, None) for name in config.sub_configs)
            waiting += [part for part in parts if part is not None]
    return [(config, config._attn_implementation) for config in found.values()]

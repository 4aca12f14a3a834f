"""The modules that sinkscope adds to an attention layer, and the interceptor that runs them inside a model's own code.

An attention module may hold taps while it is measured, a further term in the softmax's denominator, and an operation
other than softmax. The interceptor is for families that do not use transformers' AttentionInterface.
"""

import math
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils.hooks import RemovableHandle

from sinkscope.attention.kernels import (
    KERNELS,
    MASKED,
    AttentionCall,
    ForbiddenKeys,
    Operation,
    repeat_heads,
    row_lse,
    upcast,
)
from sinkscope.models.edits import MATMULS, SOFTMAXES, as_product
from sinkscope.models.in_memory import outside_autocast

NAME = "sinkscope"  # name of the attention implementation, and of the seam inside each attention module


class Seam(nn.Module):
    """The taps of one attention layer (identity modules that nnsight reads, overwrites or differentiates)."""

    # The order in which the taps run: a trace must request them in this order.
    ORDER: ClassVar = {
        "interface": ("query", "key", "value", "lse", "mix"),
        "interceptor": ("query", "key", "lse", "value", "mix"),
    }

    def __init__(self, kernel: str, door: str, causal: bool = True, prefix: int = 0) -> None:
        super().__init__()
        self.kernel = KERNELS[kernel]
        self.causal = causal
        self.prefix = prefix
        self.order = self.ORDER[door]
        self.beside: int | None = None  # the thread whose calls the taps see beside the model's own computation
        self.call: AttentionCall | None = None  # the last one
        self.forbidden: tuple[ForbiddenKeys, ...] = ()
        self.scaling: float | None = None  # found by the interceptor in its first call
        self.query, self.key, self.value, self.lse, self.mix = (nn.Identity() for _ in range(5))


class Denominator(nn.Module, ABC):
    """A further term in the denominator of every row's softmax: a logit without a token, with or without a value.

    An attention module that has such a submodule, under any name, computes attention with this term.
    """

    called: ClassVar[str] = "further terms in the softmax's denominator"  # its name in messages
    reads_query: ClassVar[bool] = False
    scaling: float  # factor of q·k, if the model's own code computes the logits
    is_biased: bool  # whether the model adds a bias by position to the logits (ALiBi)

    @abstractmethod
    def forward(self, query: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """Return the logits (B,H,T) of the term for query (B,H,T,d)."""

    def values(self) -> torch.Tensor | None:
        """Return the term's value (H,d), which its weight multiplies; None if it has none."""
        return None

    def mixed(self, mix: torch.Tensor, lse: torch.Tensor, query: torch.Tensor, call: AttentionCall) -> torch.Tensor:
        """Add the term's value to the heads' mix (B,H,T,d); lse (B,H,T) includes the term."""
        values = self.values()
        if values is None:
            return mix
        weight = (upcast(self(query, call)) - lse).exp().to(mix.dtype)
        return mix + weight[..., None] * values[:, None].to(mix.dtype)

    def added_to(self, call: AttentionCall, query: torch.Tensor, own_bias: torch.Tensor | None = None) -> AttentionCall:
        """Return the call with this term added to the model's own sink logits, if it has any (gpt-oss).

        own_bias (B|1,H,T) is ALiBi's bias on the logit of the query's own key. Models define ALiBi up to a constant per
        row (MPT counts from the last key); the new logit needs the constant that gives 0 at distance 0.
        """
        logits = upcast(self(query, call))
        if own_bias is not None:
            logits = logits + own_bias
        if call.sink_logits is not None:
            logits = logits.logaddexp(call.sink_logits.to(logits.dtype)[:, None])
        return replace(call, sink_logits=logits)


class OtherOperation(nn.Module):
    """An operation other than softmax, for any attention module that has it as a submodule, under any name."""

    operation: Operation
    called: str  # its name in messages

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """Return φ of queries (B,H,T,d) or keys (B,K,T,d), in the same shape; the taps show φ."""
        return x


def operations_of(model: nn.Module) -> list[str]:
    """Return the distinct names of the operations of a model's layers; [] if all are softmax."""
    return list(dict.fromkeys(module.called for module in model.modules() if isinstance(module, OtherOperation)))


def denominator_of(attention: nn.Module) -> Denominator | None:
    """Return the further denominator term of this attention module, or None."""
    return next((part for part in _submodules(attention) if isinstance(part, Denominator)), None)


def operation_of(attention: nn.Module) -> OtherOperation | None:
    """Return the operation of this attention module; None for softmax."""
    return next((part for part in _submodules(attention) if isinstance(part, OtherOperation)), None)


def attends_by_us(module: nn.Module) -> bool:
    """Return whether this attention module has a term or an operation that transformers' functions do not compute."""
    return any(isinstance(part, Denominator | OtherOperation) for part in _submodules(module))


def _submodules(attention: nn.Module) -> Iterator[Any]:
    """Yield a module's children, without PEFT's wrappers around completely trained modules (`modules_to_save`)."""
    for child in attention.children():
        wrapper: Any = child
        if "original_module" not in child._modules:
            yield child
        elif wrapper.disable_adapters or not wrapper.active_adapters:
            yield wrapper.original_module
        else:
            yield wrapper.modules_to_save[wrapper.active_adapters[0]]


class Interceptor(TorchFunctionMode, threading.local):
    """Recognizes attention in a module's own code: F.scaled_dot_product_attention, or matmul → softmax → matmul.

    Several threads may run the module at once: attributes are thread-local, like torch's stack of modes. Torch runs
    `__torch_function__` with the mode off, so computations of an observer at a tap are not intercepted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.idle = Seam("sdpa", "interceptor")  # for a module with a denominator term that is not being measured
        self.idle.scaling = math.nan  # never read
        self.seam = self.idle
        self.denominator: Denominator | None = None
        self.batch = 0
        self.kv_heads: int | None = None  # None if the module has no such attribute
        self.query, self.key = torch.empty(0), torch.empty(0)  # in the current call
        self.weights = torch.Size()  # the shape of the softmax, once it has been seen
        self.awaited = "logits"  # then "softmax", "mix", and "nothing" for the rest of the call
        self.caller: FrameType | None = None  # the frame that calls the module's forward

    def __reduce__(self) -> tuple[type["Interceptor"], tuple[()]]:
        """Copy as a new interceptor."""
        return Interceptor, ()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self.caller:
            frame = frame.f_back
        if frame is None:  # the module's forward is not running
            return func(*args, **kwargs)
        part = self._part(func, args, kwargs)
        if part is None or self.seam.beside is None:
            return (part or func)(*args, **kwargs)
        result = func(*args, **kwargs)
        if self.seam.beside == threading.get_ident():
            with torch.no_grad(), outside_autocast():
                part(*args, **kwargs)
        return result

    def _part(self, func: Any, args: tuple, kwargs: dict) -> Callable[..., torch.Tensor] | None:
        """Return what computes a part of attention in place of this call; None for any other call."""
        if func is F.scaled_dot_product_attention:
            return self._fused
        if func in SOFTMAXES and self.awaited == "softmax":
            return partial(self._softmax, func)
        if func is torch.einsum and (product := as_product(*args)) is not None:
            if self.awaited == "logits" and product.is_stored:
                return lambda *args: self._logits(product.compute, product.x, product.y)
            if self.awaited == "mix" and product.x.shape == self.weights:
                return lambda *args: product.restore(self._mix(product.compute, product.x, product.y))
            return None
        # both factors have a batch axis, unlike in a projection written as x @ W.T (Falcon)
        if func in MATMULS and kwargs.get("batch2", args[-1]).dim() >= 3:
            return {"logits": partial(self._logits, func), "mix": partial(self._mix, func)}.get(self.awaited)
        return None

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
        seam = self.seam
        is_bare = attn_mask is None and not is_causal and query.shape[2] > 1
        if is_bare and seam.causal:  # a decoder's attention would not be bare
            return F.scaled_dot_product_attention(query, key, value, scale=scale, enable_gqa=enable_gqa)
        scaling = query.shape[-1] ** -0.5 if scale is None else scale
        query, key, value = seam.query(query), seam.key(self._own_heads(key)), self._own_heads(value)
        dropout = dropout_p if seam.beside is None else 0.0
        call = AttentionCall(attn_mask, scaling, forbidden=seam.forbidden, dropout=dropout, causal=seam.causal)
        if self.denominator is not None:
            call = self.denominator.added_to(call, query, self._own_bias(attn_mask))
        seam.call = call  # only for observers: another thread may run the same module
        # The interceptor's taps always run in the same order: lse, which does not need the value, before value.
        mix, lse = seam.kernel(query, key, value, call)
        seam.lse(lse)
        tapped = seam.value(value)
        if tapped is not value:
            mix, _ = seam.kernel(query, key, tapped, call)
        return seam.mix(mix.transpose(1, 2)).transpose(1, 2)

    def _logits(self, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        # baddbmm has the bias (ALiBi) as first argument, and its factors may be keyword arguments
        named = "batch1" in kwargs and "batch2" in kwargs
        query, key_t = (kwargs["batch1"], kwargs["batch2"]) if named else args[-2:]
        key_heads = self._heads(key_t.transpose(-1, -2))
        self.query = self.seam.query(self._heads(query))
        self.key = repeat_heads(self.seam.key(self._own_heads(key_heads)), key_heads.shape[1])
        query, key_t = self.query.reshape(query.shape), self.key.transpose(-1, -2).reshape(key_t.shape)
        self.awaited = "softmax"
        if named:
            return func(*args, **kwargs | {"batch1": query, "batch2": key_t})
        return func(*args[:-2], query, key_t, **kwargs)

    def _softmax(self, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        scores = self._heads(args[0])
        if self.seam.scaling is None:
            self.seam.scaling = found_scaling(self.query, self.key, scores)
        for forbidden in self.seam.forbidden:
            keys, offset = slice(0, scores.shape[-1]), scores.shape[-1] - scores.shape[-2]
            pairs = forbidden.pairs(slice(offset, scores.shape[-1]), keys, scores.device)
            scores = scores.masked_fill(pairs, torch.finfo(scores.dtype).min)
            args = (scores.reshape(args[0].shape), *args[1:])
        call = AttentionCall(None, self.seam.scaling, scores=scores, causal=self.seam.causal)
        if self.denominator is not None:
            call = self.denominator.added_to(call, self.query, self._own_bias(scores, has_dots=True))
        self.seam.call = call
        self.query = self.key = torch.empty(0)
        self.seam.lse(row_lse(upcast(scores), call.sink_logits))
        self.awaited, self.weights = "mix", args[0].shape
        if call.sink_logits is None:
            return func(*args, **kwargs)
        sinks = call.sink_logits.to(scores.dtype)[..., None]  # a further column without a value
        with_sinks = torch.cat([scores, sinks], dim=-1).reshape(*args[0].shape[:-1], -1)
        return func(with_sinks, *args[1:], **kwargs)[..., :-1]

    @torch.no_grad()
    def _own_bias(self, scores: torch.Tensor | None, has_dots: bool = False) -> torch.Tensor | None:
        """Return ALiBi's bias on the logit of each query's own key, (B|1,H,T); None without ALiBi."""
        # scores (B|1,H,T,S) are masked biases, plus scaling · q·k with `has_dots`
        term = self.denominator
        if term is None or not term.is_biased or scores is None:
            return None
        columns = torch.arange(scores.shape[-1], device=scores.device)
        last = ((scores > MASKED) * columns).argmax(-1, keepdim=True)  # the last key that the query sees
        bias = upcast(scores).gather(-1, last).squeeze(-1)
        if not has_dots:
            return bias
        keys = repeat_heads(self.key, scores.shape[1]).gather(2, last.expand(*last.shape[:3], self.key.shape[-1]))
        return bias - term.scaling * torch.linalg.vecdot(upcast(self.query), upcast(keys))

    def _mix(self, func: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        weights, value = args
        value_heads = self._heads(value)
        value_heads = repeat_heads(self.seam.value(self._own_heads(value_heads)), value_heads.shape[1])
        value = value_heads.reshape(value.shape)
        mix = func(weights, value, **kwargs)
        self.awaited = "nothing"
        heads = self.seam.mix(self._heads(mix).transpose(1, 2))
        tapped = heads.transpose(1, 2).reshape(mix.shape)
        return tapped.clone() if tapped.requires_grad else tapped  # the model may add to it in place

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        """Reshape (B·H,T,d) or (B,H,T,d) to (B,H,T,d)."""
        return x.reshape(self.batch, -1, *x.shape[-2:])

    def _own_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Return key or value heads without the copies that the model's own code makes (Falcon 40B)."""
        return x if self.kv_heads is None else x[:, :: max(1, x.shape[1] // self.kv_heads)]

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Start to intercept; forward pre-hook of the attention module."""
        self.seam = getattr(module, NAME, self.idle)
        self.denominator = denominator_of(module)
        self.batch = next(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)).shape[0]
        names = ("num_kv_heads", "num_key_value_heads")
        self.kv_heads = next((getattr(module, name) for name in names if hasattr(module, name)), None)
        self.awaited = "logits"
        self.caller = sys._getframe(1)
        if self not in _get_current_function_mode_stack():  # it is still there if an interrupt ended the last forward
            self.__enter__()

    def leave(self, *forward: Any) -> None:
        """Stop intercepting; forward hook of the attention module. After an interrupt, torch does not run it: the mode
        then stays on, and passes all calls through.
        """
        if _get_current_function_mode_stack()[-1:] == [self]:
            self.__exit__(None, None, None)
        self.caller = None
        self.seam, self.idle.call = self.idle, None  # keep no graph

    def watch(self, attention: nn.Module) -> list[RemovableHandle]:
        """Register the hooks that intercept every forward of this module."""
        return [
            attention.register_forward_pre_hook(self.enter, with_kwargs=True),
            attention.register_forward_hook(self.leave, always_call=True),
        ]


@torch.no_grad()
def found_scaling(query: torch.Tensor, key: torch.Tensor, scores: torch.Tensor) -> float:
    """Return the factor of q·k in a model's own scores (B,H,T,T), read from their diagonal; NaN if there is none."""
    if scores.shape != (*query.shape[:3], key.shape[2]):
        return float("nan")
    cached = key.shape[2] - query.shape[2]
    dots = torch.linalg.vecdot(upcast(query), upcast(repeat_heads(key, query.shape[1]))[:, :, cached:])
    diagonal = upcast(scores).diagonal(cached, dim1=-2, dim2=-1)
    seen = diagonal > MASKED  # not padding
    dots, diagonal = (x.where(seen, 0.0).double() for x in (dots, diagonal))
    scaling = (dots * diagonal).sum() / dots.square().sum()
    is_exact = (diagonal - scaling * dots).abs().max() < 1e-2 * diagonal.abs().max()  # tolerance for half precision
    return float(scaling.where(is_exact, torch.nan))

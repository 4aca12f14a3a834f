"""The attention of one layer from query, key and value, by three kernels with equal results: fused, chunked and eager.

Attention operations other than softmax (WSE §7) turn a row of logits l into weights of the values by

    mix[t] = Σ_s sim(l[t,s]) v[s] / Z[t]        l[t,s] = scaling · φ(q_t)·φ(k_s)

In place of softmax weights, measurements read |sim| ÷ Σ|sim| = exp(ℓ - lse), the paper's proxy, with ℓ = log|sim| and
lse = log Σ|sim|; only the mix needs sim ÷ Z. φ is applied before the taps (retrofits/operation.py).
"""

import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary

from sinkscope.models.memory import free_memory

Elementwise = Callable[[torch.Tensor], torch.Tensor]
Divisor = Literal["none", "sum", "at-least-1", "sizes"]  # Z: 1, Σ sim, max(|Σ sim|, 1), or Σ|e^l − 1| + SOFTPICK

MASKED = torch.finfo(torch.float16).min / 2  # a logit below this is masked
SOFTPICK = 1e-8  # ε of softpick


def _log_size(logits: torch.Tensor) -> torch.Tensor:
    """Return log|e^l − 1|, finite, without e^l, which may overflow."""
    return logits.clamp(min=0) + (-torch.expm1(-logits.abs())).clamp(min=torch.finfo(logits.dtype).tiny).log()


# similarity → log|sim| of logits
LOG_SIMILARITIES: dict[str, Elementwise] = {
    "exp": lambda s: s,
    "sigmoid": F.logsigmoid,
    "elu": lambda s: torch.where(s > 0, s.clamp(min=0).log1p(), s),
    "identity": lambda s: s.abs().clamp(min=torch.finfo(s.dtype).tiny).log(),
    "rectified": lambda s: _log_size(s.clamp(min=0)),  # of relu(e^l − 1)
}
# sim itself, without "exp", which may overflow; at masked logits sim and its gradient are 0
SIMILARITIES: dict[str, Elementwise] = {
    "sigmoid": torch.sigmoid,
    "elu": lambda s: F.elu(s) + 1,
    "identity": lambda s: s.masked_fill(s <= MASKED, 0.0),
}


@dataclass(frozen=True)
class Operation:
    """One row of WSE's table of attention operations."""

    similarity: str  # a key of LOG_SIMILARITIES
    divisor: Divisor  # Z
    factor: float = 1.0  # α of Z/α (WSE table 14 for softmax)
    power: float = 1.0  # p of Z = (Σ simᵖ)^(1/p); 1 for the usual sum

    def log_similarity(self, logits: torch.Tensor) -> torch.Tensor:
        """Return ℓ = log|sim|, finite."""
        return LOG_SIMILARITIES[self.similarity](logits)

    def weights(self, logits: torch.Tensor, with_lse: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """Return sim ÷ Z (B,H,R,T), 0 where the query may not attend, and lse = log Σ|sim| (B,H,R).

        The logits (B,H,R,T) are over all keys, MASKED or less where the query may not attend. For a fully masked row
        lse is the dtype's minimum; without `with_lse` it is NaN unless sim ÷ Z needs it.
        """
        if self.similarity in ("exp", "rectified"):  # in logarithms, because e^l may overflow
            seen = logits > MASKED
            logits = logits.masked_fill(~seen, 0.0)  # keeps the gradient finite
            log_sim = self.log_similarity(logits)
            lse = _log_sum(log_sim, seen)
            log_divisor = lse if self.power == 1 else _log_sum(logits * self.power, seen) / self.power
            if self.divisor == "sizes":
                log_divisor = _log_sum(_log_size(logits), seen).logaddexp(logits.new_tensor(SOFTPICK).log())
                seen = seen & (logits > 0)
            weights = (log_sim - log_divisor[..., None]).masked_fill(~seen, -torch.inf).exp()
            return weights * self.factor, lse
        sim = SIMILARITIES[self.similarity](logits)
        lse = logits.new_full(logits.shape[:-1], torch.nan)
        if with_lse:
            with torch.no_grad():
                lse = _log_sum(self.log_similarity(logits), logits > MASKED)
        if self.divisor == "none":
            return sim * self.factor, lse
        total = sim.sum(-1, keepdim=True)
        if self.divisor == "at-least-1":
            total = total.abs().clamp(min=1.0)
        # the sum of a fully masked row is 0
        return sim / total.clamp(min=torch.finfo(sim.dtype).tiny) * self.factor, lse


def _log_sum(log: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    return log.masked_fill(~seen, torch.finfo(log.dtype).min).logsumexp(-1)


ROW_CHUNK = 64  # rows of attention weights in memory at once on a CPU; more exceed its cache
ON_CPU = 400_000  # weights in memory at a time on a CPU: with their derived tensors they fit into its cache
ON_ACCELERATOR = 64_000_000  # on other devices, which are faster with more


def is_visible(mask: torch.Tensor) -> torch.Tensor:
    """Return where a mask lets a query attend, as bool; `mask` is bool itself, or additive."""
    return mask if mask.dtype == torch.bool else mask > MASKED


def numbers_at_once(device: torch.device, wanted: int) -> int:
    """Return how many of `wanted` attention weights are computed at a time, by device and its free memory."""
    if device.type == "cpu":
        return ON_CPU
    if device.type != "cuda" or wanted <= ON_ACCELERATOR // 8:
        return ON_ACCELERATOR
    return numbers_that_fit(device)


@cache
def numbers_that_fit(device: torch.device) -> int:
    """Return how many attention weights a GPU with little free memory computes at a time.

    The memory is read once a run (`open_seam` forgets it), and the number is a power of two: sums in other chunks have
    other round-off, so that repeated runs would differ in their last bits.
    """
    # up to eight tensors of float32 are derived from the weights, in half of what is free
    numbers = max(ON_CPU, free_memory(device) // 64)
    return min(ON_ACCELERATOR, 1 << numbers.bit_length() - 1)


def rows_at_once(room: int, before: int) -> int:
    """Return how many rows, each with `before` keys and these rows' own, have room: rows · (before + rows) = room."""
    return (math.isqrt(before**2 + 4 * room) - before) // 2


@dataclass(frozen=True)
class ForbiddenKeys:
    """Keys that an intervention hides from queries, but no token from itself."""

    pairs: Callable[[slice, slice, torch.device], torch.Tensor]  # (rows, cols, device) → (B|1,H,R,C) bool
    # (B|1,n): the columns of keys in complete sequences that are hidden from all queries; None: other pairs are hidden
    columns: Callable[[torch.device], torch.Tensor] | None
    heads: tuple[int, ...]  # query heads from which the keys are hidden

    def hidden(self, heads: int, device: torch.device) -> torch.Tensor:
        """Return from which of all heads the keys are hidden, (H,1,1) bool."""
        return head_mask(self.heads, heads, device)


@cache
def head_mask(chosen: tuple[int, ...], heads: int, device: torch.device) -> torch.Tensor:
    """Return which of all heads are chosen, (H,1,1) bool."""
    return torch.tensor([head in chosen for head in range(heads)], device=device)[:, None, None]


@dataclass(frozen=True)
class AttentionCall:
    """The parameters of one attention call that its taps do not show."""

    mask: torch.Tensor | None  # (B,1|H,T,T), bool (True = may attend) or additive; None: decided by `causal`
    scaling: float  # NaN if the model computes the logits itself, by more than a scaling
    softcap: float | None = None
    sink_logits: torch.Tensor | None = None  # (H,) or (B,H,T): a learned logit in each row's denominator (gpt-oss)
    scores: torch.Tensor | None = None  # (B,H,T,T) logits after masking, if the model computes them itself
    forbidden: tuple[ForbiddenKeys, ...] = ()  # in addition to the mask
    causal: bool = True  # queries see no later keys; False: an encoder's attention, to all keys that the mask allows
    prefix: int = 0  # the number of first keys that all queries see (prefix LM); the mask includes them
    dropout: float = 0.0  # probability of dropping a weight, in training
    operation: Operation | None = None  # the operation in place of softmax
    reads_lse: bool = True  # whether the log-sum-exp of another operation is needed; the mix does not need it

    @property
    def looks_ahead(self) -> bool:
        """Whether a query may see a later key."""
        return not self.causal or self.prefix > 0

    @property
    def one_key_has_weight_one(self) -> bool:
        """Whether a query that sees a single key gives it a weight that does not depend on the logit."""
        divides = self.operation is None or self.operation.divisor == "sum"
        return divides and self.sink_logits is None


def fused_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute attention by a kernel of F.scaled_dot_product_attention, with its log-sum-exp.

    query (B,H,T,d), key and value (B,K,T,d) → mix (B,H,T,d), log-sum-exp of each row of logits (B,H,T) in float32 or
    better. Values may have another width. Calls that no fused kernel supports are computed in chunks: softcap,
    operations other than softmax, dropout, gradients of the mask, several dtypes, keys hidden from some queries alone,
    and other devices.
    """
    causal = call.causal and call.mask is None and query.shape[2] > 1
    plain = (call.softcap, call.operation) == (None, None) and not call.dropout
    whole = key.shape[2] == query.shape[2]
    has_gradient = call.mask is not None and call.mask.requires_grad  # if the bias is computed from the tokens
    one_dtype = query.dtype == key.dtype == value.dtype  # not under autocast
    by_column = all(forbidden.columns for forbidden in call.forbidden)
    if not (plain and one_dtype and by_column) or has_gradient or ((causal or call.forbidden) and not whole):
        return chunked_attention(query, key, value, call)
    inner = value.shape[-1]
    if call.forbidden:
        mix, lse = fused_attention(*_penalized(query, key, value, call), replace(call, forbidden=()))
        return mix.narrow(-1, 0, inner), lse
    width = max(query.shape[-1], inner)
    if query.device.type != "cpu":  # kernels take multiples of 8 in half precision, and of 4 in float32
        width += -width % 8
    widened = [_pad_width(x, width) for x in (query, key, value)]
    bias, sinks = None if call.mask is None else _bias(call.mask, query), sink_rows(call, slice(None))
    choose = FUSED.get(query.device.type)
    chosen = None if choose is None else choose(*widened, bias, causal, sinks is not None)
    if chosen is None:
        return chunked_attention(query, key, value, call)
    kernel, query, key, value = chosen
    if sinks is None:
        mix, lse, *_ = _run_kernel(kernel, query, key, value, bias, causal, call.scaling)
    else:
        mix, lse = _WithSinks.apply(
            query, key, value, sinks.to(upcast(query).dtype), bias, kernel, causal, call.scaling
        )
    return mix.narrow(-1, 0, inner), lse


def _pad_width(x: torch.Tensor, width: int) -> torch.Tensor:
    """Fill the last axis with zeros. The kernels assume that it is contiguous, and do not check it."""
    if x.shape[-1] < width:
        return F.pad(x, (0, width - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


LOWEST = torch.finfo(torch.float16).min  # in place of -inf: the rows of padding stay finite, also backward
_biases = WeakTensorKeyDictionary()  # mask → its bias, because all layers get the same mask


def _bias(mask: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return a mask as numbers that a fused kernel adds to the logits."""
    on_cpu = mask.device.type == "cpu"
    if on_cpu and mask.dtype != torch.bool:
        return mask
    bias: torch.Tensor | None = _biases.get(mask)
    is_bool = mask.dtype == torch.bool
    if bias is None or (is_bool and bias.dtype != query.dtype):
        if is_bool:
            bias = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, LOWEST)
        else:
            bias = mask.clamp(min=LOWEST)
        if not on_cpu and bias.shape[-1] % 8:  # the memory-efficient kernel reads 8 numbers at a time
            bias = F.pad(bias, (0, -bias.shape[-1] % 8))[..., : mask.shape[-1]]
        _biases[mask] = bias
    return bias


# fused kernels of equally wide query, key and value: the ends of their names in torch.ops.aten
CPU, FLASH, EFFICIENT = "flash_attention_for_cpu", "flash_attention", "efficient_attention"
ChosenKernel = tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]  # a kernel with its query, key and value


def _run_kernel(
    kernel: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    bias: torch.Tensor | None, causal: bool, scaling: float,
) -> tuple:  # fmt: skip
    """Return the mix, its log-sum-exp, and numbers that `_kernel_gradients` needs."""
    attend = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}")
    result: tuple
    if kernel == CPU:
        result = attend(query, key, value, is_causal=causal, attn_mask=bias, scale=scaling)
    elif kernel == FLASH:
        result = attend(query, key, value, 0.0, causal, scale=scaling)
    else:
        bias = None if bias is None else bias.expand(*query.shape[:3], key.shape[2])
        mix, lse, *state = attend(query, key, value, bias, True, 0.0, causal, scale=scaling)
        result = mix, lse[..., : query.shape[2]], *state  # lse is padded to a multiple of 32
    return result


def _kernel_gradients(
    kernel: str, gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    bias: torch.Tensor | None, mix: torch.Tensor, lse: torch.Tensor, state: tuple, causal: bool, scaling: float,
) -> tuple:  # fmt: skip
    """Return the gradients of query, key and value for the gradient of the mix."""
    differentiate = getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_backward")
    tensors = gradient, query, key, value
    gradients: tuple
    if kernel == CPU:
        gradients = differentiate(*tensors, mix, lse, 0.0, causal, attn_mask=bias, scale=scaling)
    elif kernel == FLASH:
        *lengths, seed, offset, _ = state
        gradients = differentiate(*tensors, mix, lse, *lengths, 0.0, causal, seed, offset, scale=scaling)
    else:
        bias = None if bias is None else bias.expand(*query.shape[:3], key.shape[2])
        lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
        needed = [True, True, True, False]
        *gradients, _ = differentiate(*tensors, bias, mix, lse, *state, 0.0, needed, causal, scale=scaling)
    return tuple(gradients)


def _for_cuda(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, causal: bool, sinks: bool
) -> ChosenKernel | None:
    """Choose the flash kernel if possible (half precision, no mask; heads may be grouped), else the efficient one.

    Returns None if neither takes these: float64, bfloat16 on a GPU before Ampere, or a more precise bias.
    """
    if bias is not None and bias.dtype != query.dtype:
        return None
    parameters = torch.backends.cuda.SDPAParams
    grouped = key.shape[1] != query.shape[1]
    is_narrow = not sinks or query.shape[-1] + MORE <= 256  # so that `_WithSinks` can widen it
    if bias is None and is_narrow:
        asked = parameters(query, key, value, None, 0.0, causal, grouped)
        if torch.backends.cuda.can_use_flash_attention(asked):
            return FLASH, query, key, value
    key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
    asked = parameters(query, key, value, bias, 0.0, causal, False)
    return (EFFICIENT, query, key, value) if torch.backends.cuda.can_use_efficient_attention(asked) else None


# type of device → (query, key, value, bias, causal, whether there are sinks) → the kernel; None if none takes the call
FUSED: dict[str, Callable[..., ChosenKernel | None]] = {
    "cpu": lambda query, key, value, *_: (CPU, query, key, value),
    "cuda": _for_cuda,
}

MORE = 8  # coordinates by which `_WithSinks` widens the tensors


class _WithSinks(torch.autograd.Function):
    """A fused kernel with one more logit in each row's denominator, which has no value.

        mix = mix of the kernel · exp(lse of the kernel - lse)        lse = logaddexp(lse of the kernel, sink)

    A kernel's backward pass reads only the weights a[t,s] = exp(l[t,s] - lse[t]) and Δ[t] = gradient[t] · mix[t]:

        ∂l[t,s] = a[t,s] (gradient[t] · v[s] - Δ[t])

    which holds for the final mix and lse, too, because the sink's value is 0. The gradient of lse, if any, adds
    a[t,s] ∂lse[t]: therefore gradient and mix get one more coordinate, whose product −∂lse[t] is added to Δ[t].
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor,
        bias: torch.Tensor | None, kernel: str, causal: bool, scaling: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        mix, of_keys, *state = _run_kernel(kernel, query, key, value, bias, causal, scaling)
        lse = of_keys.logaddexp(sinks)
        mix = (mix * (of_keys - lse).exp()[..., None]).to(mix.dtype)
        ctx.save_for_backward(query, key, value, sinks, bias, mix, lse)
        ctx.kernel, ctx.state, ctx.causal, ctx.scaling = kernel, state, causal, scaling
        ctx.set_materialize_grads(False)
        return mix, lse

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor | None) -> tuple:
        query, key, value, sinks, bias, mix, lse = ctx.saved_tensors
        gradient, of_lse = incoming
        gradient = torch.zeros_like(mix) if gradient is None else gradient
        total = torch.linalg.vecdot(upcast(gradient), upcast(mix))
        width = query.shape[-1]
        if of_lse is not None:
            total = total - of_lse
            query, key, value = (F.pad(x, (0, MORE)) for x in (query, key, value))
            lowered = torch.cat([gradient, -of_lse[..., None].to(gradient.dtype)], dim=-1)
            gradient, mix = F.pad(lowered, (0, MORE - 1)), F.pad(mix, (0, MORE), value=1.0)
        context = bias, mix, lse, ctx.state, ctx.causal, ctx.scaling
        gradients = _kernel_gradients(ctx.kernel, gradient, query, key, value, *context)
        of_sinks = -((sinks - lse).exp() * total).sum_to_size(sinks.shape)
        return *(x[..., :width] for x in gradients), of_sinks, None, None, None, None


PENALTY = 1e4  # added to a logit: e^-10000 is 0, and half precision can represent its square root


def _penalized(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add a coordinate to query and key for each forbidden key, so that the fused kernel needs no T × T mask."""
    # The product of these coordinates is -PENALTY for forbidden pairs and 0 for all others. Value is padded with zeros,
    # which the caller cuts off.
    token = torch.arange(query.shape[2], device=query.device)
    size = (PENALTY / call.scaling) ** 0.5
    queries, keys = [], []
    for forbidden in call.forbidden:
        assert forbidden.columns is not None
        columns = forbidden.columns(query.device)[:, None, None]  # (B|1,1,1,n)
        hidden = forbidden.hidden(query.shape[1], query.device)
        queries.append(((token[:, None] != columns) & hidden).expand(len(query), -1, -1, -1))
        keys.append((token[:, None] == columns).expand(len(key), key.shape[1], -1, -1))
    further = [torch.cat(parts, dim=-1).to(query.dtype) * size for parts in (queries, keys)]
    width = -(-further[0].shape[-1] // 8) * 8  # kernels are faster with multiples of 8
    more_query, more_key = (F.pad(x, (0, width - x.shape[-1])) for x in further)
    query, key = torch.cat([query, more_query], dim=-1), torch.cat([key, -more_key], dim=-1)
    return query, key, F.pad(value, (0, width))


def chunked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall, chunk: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the same as `fused_attention`, for any call, with `chunk` rows of weights at a time, also backward.

    By default there are as many rows as the device computes at a time.
    """
    length, device = query.shape[2], query.device
    if chunk is None:
        row = query[:, :, 0, 0].numel() * key.shape[2]
        chunk = ROW_CHUNK if device.type == "cpu" else max(1, numbers_at_once(device, row * length) // row)
    chunks = [slice(start, min(start + chunk, length)) for start in range(0, length, chunk)]
    if len(chunks) == 1:
        return _attend_rows(query, key, value, call, chunks[0])
    differentiates = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    attend_rows = partial(checkpoint, _attend_rows, use_reentrant=False) if differentiates else _attend_rows
    mixes, lses = zip(*(attend_rows(query, key, value, call, rows) for rows in chunks), strict=True)
    return torch.cat(mixes, dim=2), torch.cat(lses, dim=2)


def _attend_rows(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall, rows: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mix (B,H,R,d) and the log-sum-exp (B,H,R) of a chunk of queries."""
    if call.causal and call.mask is None and not call.forbidden and key.shape[2] == query.shape[2]:
        key, value = key[:, :, : rows.stop], value[:, :, : rows.stop]  # the queries of these rows see no later keys
    logits = masked_logits(raw_logits(query[:, :, rows], key, call), call, rows, query.shape[2])
    weights, lse = row_weights(logits, call, rows)
    return grouped_matmul(F.dropout(weights.to(value.dtype), call.dropout), value), lse


Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionCall], tuple[torch.Tensor, torch.Tensor]]
# "eager", all weights at once, is the reference
KERNELS: dict[str, Kernel] = {"sdpa": fused_attention, "eager": partial(chunked_attention, chunk=sys.maxsize)}


def masked_logits(logits: torch.Tensor, call: AttentionCall, rows: slice, queries: int) -> torch.Tensor:
    """Set these rows (of `queries` in total) of logits over all keys (B,H,R,T) to the dtype's minimum where masked."""
    # not to -inf, because a fully masked row (a padding query) must stay finite
    keys, offset = slice(0, logits.shape[-1]), logits.shape[-1] - queries
    for forbidden in call.forbidden:
        pairs = forbidden.pairs(slice(rows.start + offset, rows.stop + offset), keys, logits.device)
        logits = logits.masked_fill(pairs, torch.finfo(logits.dtype).min)
    if call.mask is not None and call.mask.dtype != torch.bool:
        return logits + call.mask[:, :, rows]
    if call.mask is not None:
        return logits.masked_fill(~call.mask[:, :, rows], torch.finfo(logits.dtype).min)
    if not call.causal:
        return logits
    # If there are several queries, more keys and no mask, the additional keys are a static cache's empty slots.
    ahead = 0 if queries > 1 else offset
    return logits.masked_fill(~causal(rows, keys, ahead, logits.device), torch.finfo(logits.dtype).min)


def raw_logits(query: torch.Tensor, key: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """Return scaling · q·k with the softcap and no mask: query (B,H,R,d), key (B,K,C,d) → (B,H,R,C), float32+."""
    with without_autocast(query):
        logits = products(query, key.transpose(-1, -2)).mul_(call.scaling)
    return logits if call.softcap is None else call.softcap * (logits / call.softcap).tanh()


def row_weights(logits: torch.Tensor, call: AttentionCall, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights of the values (B,H,R,C) and the log-sum-exp (B,H,R) for masked logits of these rows."""
    if call.operation is not None:
        return call.operation.weights(logits, call.reads_lse)
    lse = row_lse(logits, sink_rows(call, rows))
    return (logits - lse.unsqueeze(-1)).exp(), lse


def row_lse(logits: torch.Tensor, sink_logits: torch.Tensor | None) -> torch.Tensor:
    """Return the log-sum-exp of each row (B,H,R), with learned sink logits (B|1,H,R|1)."""
    lse = logits.logsumexp(-1)
    return lse if sink_logits is None else lse.logaddexp(sink_logits.to(lse.dtype))


def sink_rows(call: AttentionCall, rows: slice) -> torch.Tensor | None:
    """Return the call's sink logits for these rows, (1,H,1) or (B,H,R)."""
    sinks = call.sink_logits
    if sinks is None:
        return None
    return sinks[:, :, rows] if sinks.dim() == 3 else sinks[None, :, None]


def grouped_matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply (B,H,R,X) @ (B,K,X,C) → (B,H,R,C): head h reads key/value head h // (H/K), without repeating heads."""
    batch, heads, rows, inner = left.shape
    groups = right.shape[1]
    grouped = left.reshape(batch, groups, heads // groups * rows, inner)
    return (grouped @ right).view(batch, heads, rows, right.shape[-1])


# types of devices with a product of half-precision matrices in float32, which PyTorch has since 2.8
HALF_PRODUCTS = {"cuda"} if hasattr(torch.ops.aten.bmm, "dtype") else set()


class _HalfProduct(torch.autograd.Function):
    """left @ right of half-precision matrices, in float32; the gradient is rounded, as in the fused kernels."""

    @staticmethod
    def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(left, right)
        return torch.bmm(left, right, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left, right = ctx.saved_tensors
        gradient = gradients[0].to(left.dtype)
        return gradient @ right.mT, left.mT @ gradient


def factor(x: torch.Tensor) -> torch.Tensor:
    """Return x in the dtype in which `products` multiplies it."""
    return x if x.device.type in HALF_PRODUCTS else upcast(x)


def products(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiply as `grouped_matmul` does, in float32 or better, which is exact for products of half precision."""
    is_half = left.dtype == right.dtype and left.dtype in (torch.float16, torch.bfloat16)
    if not (is_half and left.device.type in HALF_PRODUCTS):
        return grouped_matmul(upcast(left), upcast(right))
    groups = right.shape[1]
    grouped = left.unflatten(1, (groups, -1)).flatten(2, 3).flatten(0, 1)
    return _HalfProduct.apply(grouped, right.flatten(0, 1)).view(*left.shape[:-1], right.shape[-1])


def repeat_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat key/value heads (B,K,T,d) → (B,H,T,d)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def causal(rows: slice, cols: slice, offset: int, device: torch.device) -> torch.Tensor:
    """Return the causal mask (R,C) bool: whether the query in `row + offset` may see the key in `column`."""
    row = torch.arange(rows.start, rows.stop, device=device)[:, None] + offset
    return row >= torch.arange(cols.start, cols.stop, device=device)


def without_autocast(x: torch.Tensor) -> AbstractContextManager:
    """Turn autocast off within the block, so that products of float32 stay float32 in bf16 training."""
    kind = x.device.type
    is_on = kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if is_on else nullcontext()


def upcast(x: torch.Tensor) -> torch.Tensor:
    """Cast half precision to float32; leave float32 and float64 unchanged."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x

"""Access to attention: identity modules (taps) in every attention module, which nnsight can read.

A model whose family uses transformers' `AttentionInterface` calls `attend` below in place of its own attention
function. Any other family keeps its own code, in which `Interceptor` recognizes either a fused SDPA call or matmul →
softmax → matmul. Both ways pass the same tensors through the same taps:

    query (B,H,T,d)   key, value (B,K,T,d)   lse (B,H,T)   mix (B,T,H,d)

after any rotary rotation. `lse` is the log-sum-exp of each row of logits: any rectangle of the attention weights is
exp(logit - lse) (weights.py), so the weights themselves are never kept.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from sinkscope.attention.kernels import AttentionCall, Kernel, fused_attention, numbers_that_fit
from sinkscope.attention.taps import NAME, Interceptor, Seam, attends_by_us, denominator_of, operation_of
from sinkscope.errors import SinkscopeError
from sinkscope.models.edits import Attend, attending_by, edited_input, unknown_code
from sinkscope.models.family import Family, embedding_weight, input_device, number_of_positions
from sinkscope.models.in_memory import outside_autocast, own_configurations, unchanged_after
from sinkscope.models.packed import packed_tolerance
from sinkscope.models.wiring import record_ends

READABLE = ("sdpa", "eager")  # attention implementations whose masks this module can read
PROBED_TOKENS = 24
_opening = threading.Lock()  # two threads may open seams on one model


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention with the taps before and after the kernel: (B,H,T,d), 2 × (B,K,T,d) → (B,T,H,d).

    It is registered with transformers. A module without a seam, a further denominator term or another operation, for
    example in a vision tower, gets plain SDPA.
    """
    seam: Seam | None = getattr(module, NAME, None)
    denominator, other = denominator_of(module), operation_of(module)
    if (seam, denominator, other) == (None, None, None):
        kwargs |= {"scaling": scaling, "position_bias": position_bias, "dropout": dropout}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    causal = getattr(module, "is_causal", True) if seam is None else seam.causal
    if position_bias is not None:
        attention_mask = biased_mask(attention_mask, position_bias, causal=causal)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    sink_logits = s_aux if sinks is None else sinks.squeeze(-1)  # (H,), or for every query (B,H,T,1)
    if attention_mask is not None and attention_mask.shape[2] != query.shape[2]:
        # older encoders make one row (B,1,1,T) for all queries
        attention_mask = attention_mask.expand(-1, -1, query.shape[2], -1)
    call = AttentionCall(attention_mask, scaling, softcap, sink_logits, dropout=dropout, causal=causal)
    if other is not None:
        call = replace(call, operation=other.operation, reads_lse=denominator is not None)
        query, key = other.features(query), other.features(key)
    if seam is not None:
        call = replace(call, forbidden=seam.forbidden, prefix=seam.prefix, reads_lse=True)
        query, key, value = seam.query(query), seam.key(key), seam.value(value)
    widened = call if denominator is None else denominator.added_to(call, query)
    if seam is not None:
        seam.call = widened  # before the kernel, because the kernel of streaming.py removes it again
    mix, lse = (fused_attention if seam is None else seam.kernel)(query, key, value, widened)
    if denominator is not None:
        mix = denominator.mixed(mix, lse, query, call)
    mix = mix.transpose(1, 2).contiguous()
    if seam is None:
        return mix, None
    seam.lse(lse)
    return seam.mix(mix), None


def biased_mask(mask: torch.Tensor | None, bias: torch.Tensor, causal: bool = True) -> torch.Tensor:
    """Return an additive mask with a model's bias on the logits, (B|1,H,T,T); `mask` is as in AttentionCall."""
    if mask is None and not causal:
        return bias
    if mask is None:
        mask = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).tril()
    return bias.masked_fill(~mask, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else bias + mask


AttentionInterface.register(NAME, attend)
# Without a registered mask function an implementation gets no mask at all: no causality, no padding.
AttentionMaskInterface.register(NAME, sdpa_mask)


@contextmanager
def open_seam(
    model: PreTrainedModel, family: Family, kernel: str = "sdpa", aside: bool = False
) -> Iterator[dict[int, Seam]]:
    """Put a seam into every attention layer until the end of the block, and yield the seams by layer.

    `kernel` is "sdpa" (fused) or "eager" (the reference). With `aside`, the model's own computation stays the same bit
    for bit, and the calls of this thread then run the taps on the same tensors, without gradient and dropout. A model
    with open seams raises SinkscopeError.
    """
    numbers_that_fit.cache_clear()
    attentions = family.attentions(model)
    seams = {layer: Seam(kernel, family.door, family.causal, family.prefix) for layer in attentions}
    with ExitStack() as stack:
        with _opening:
            if any(hasattr(attention, NAME) for attention in attentions.values()):
                raise SinkscopeError("this model has its seams in already: close the tracer that is open on it first")
            for layer, attention in attentions.items():
                attention.add_module(NAME, seams[layer])
                # a term computes its attention through the interceptor, with or without taps
                if aside and (family.door == "interface" or denominator_of(attention) is None):
                    seams[layer].beside = threading.get_ident()
                stack.callback(attention._modules.pop, NAME, None)
        for attention in attentions.values() if family.door == "interceptor" else ():
            if denominator_of(attention) is None:  # a module with a term is already watched
                interceptor = Interceptor()
                stack.callback(interceptor.leave)  # after an interrupt
                for handle in interceptor.watch(attention):
                    stack.callback(handle.remove)
        if family.door == "interface" and seams:
            stack.enter_context(_interface(model, aside))
        yield seams


@contextmanager
def _interface(model: PreTrainedModel, aside: bool) -> Iterator[None]:
    """Call `attend` in place of the model's own attention function within the block."""

    def attend_or_forward(plain: Attend, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call `attend` if the module is measured or changed, or else its own function, as for another model."""
        seam: Seam | None = getattr(module, NAME, None)
        if seam is None or seam.beside is None:
            return (attend if seam is not None or attends_by_us(module) else plain)(module, *args, **kwargs)
        mix = without_seam(attend if attends_by_us(module) else plain, module, args, kwargs)
        if seam.beside == threading.get_ident():
            with torch.no_grad(), outside_autocast():
                attend(module, *args, **kwargs | {"dropout": 0.0})
        return mix

    configs = (vars(module).get("config") for module in model.modules())
    names = {config._attn_implementation for config in configs if isinstance(config, PreTrainedConfig)}
    with ExitStack() as stack:
        if not names <= {*READABLE, NAME}:  # masks of flash attention have other formats
            if aside:
                others = ", ".join(map(str, names - {*READABLE, NAME}))
                raise SinkscopeError(f"{others} has masks of its own: load the model with attn_implementation='sdpa'")
            stack.enter_context(attention_implementation(model, "sdpa" if model._supports_sdpa else "eager"))
        stack.enter_context(attending_by(model, attend_or_forward))
        yield


def without_seam(function: Attend, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call an attention function on a module without its seam."""
    seam = module._modules.pop(NAME, None)
    try:
        return function(module, *args, **kwargs)
    finally:
        if seam is not None:  # None if another thread calls without it
            module._modules[NAME] = seam


@contextmanager
def recorded_taps(seams: Mapping[int, Seam]) -> Iterator[dict[int, dict[str, torch.Tensor]]]:
    """Yield a dict into which layers put the query, key, value and log-sum-exp that pass their taps in the block."""
    seen: dict[int, dict[str, torch.Tensor]] = {layer: {} for layer in seams}

    def keep(layer: int, name: str, tap: nn.Module, args: tuple, output: torch.Tensor) -> None:
        seen[layer][name] = output

    with ExitStack() as hooks:
        for layer, seam in seams.items():
            for name in ("query", "key", "value", "lse"):
                hooks.enter_context(getattr(seam, name).register_forward_hook(partial(keep, layer, name)))
        yield seen


def why_unread(seam: Seam, seen: Mapping[str, torch.Tensor], tokens: torch.Size, is_whole: bool = True) -> str | None:
    """Return why a layer's attention cannot be read from its taps after a run on tokens (B,T); None if it can.

    The tokens are complete sequences if `is_whole`; otherwise a KV cache has further keys.
    """
    keys = seen["key"].shape[2] if "key" in seen else tokens[1]
    if is_whole and seam.call is not None and keys != tokens[1]:
        return f"it attends to {keys} keys for {tokens[1]} tokens: keys that belong to no token are not measured"
    is_complete = {"query", "key", "value", "lse"} <= seen.keys() and seam.call is not None
    if not is_complete or seen["lse"].shape != (tokens[0], seen["query"].shape[1], tokens[1]):
        return (
            "its attention is not one softmax of q·k over the whole sequence, or not in a form that sinkscope "
            "recognizes; see `sinkscope doctor`"
        )
    return None


@torch.no_grad()
def unread_attentions(model: PreTrainedModel, family: Family) -> dict[int, str]:
    """Return layer → why its attention cannot be read, after a run with the seams on a few tokens.

    The layers get the same inputs as without the seams, so that their attention has to give the same outputs.
    """
    length = min(PROBED_TOKENS, number_of_positions(model, family) or PROBED_TOKENS)
    ids = torch.arange(3, 3 + length, device=input_device(model))[None] % len(embedding_weight(model))
    inputs = {"input_ids": ids, "use_cache": False}
    layers, attentions = family.layer_modules(model), family.attentions(model)
    with unchanged_after(model):
        bare = record_ends(model, [*layers, *attentions.values()], inputs)
    with open_seam(model, family) as seams, recorded_taps(seams) as seen, ExitStack() as edits:
        for layer in seams:
            edits.enter_context(edited_input(layers[layer], lambda module, x: bare[module][0].x.to(x.device)))
        seamed = record_ends(model, attentions.values(), inputs)
        reasons = {layer: why_unread(seam, seen[layer], ids.shape) for layer, seam in seams.items()}
    for layer, attention in attentions.items():
        if reasons[layer] is None:
            ours, theirs = (ends[attention][-1].x for ends in (seamed, bare))
            difference = float((ours.double() - theirs.double()).norm() / theirs.double().norm())
            exact = max(torch.finfo(theirs.dtype).eps, torch.finfo(torch.float32).eps) ** 0.5
            if difference > max(exact, packed_tolerance(model)):
                by = unknown_code([attention]) or type(attention).__name__
                why = f"it attends by {by}, which is not one softmax of q·k: it differs by {difference:.1e} of its norm"
                return dict.fromkeys(attentions, why)  # the layers of a model have one attention function
    return {layer: reason for layer, reason in reasons.items() if reason is not None}


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Set the model's attention implementation within the block."""
    with own_configurations(model):
        model.set_attn_implementation(name)
        yield


@contextmanager
def attending_by_kernels(seams: Mapping[int, Seam], kernels: Mapping[int, Kernel]) -> Iterator[None]:
    """Let these layers attend by other kernels until the end of the block."""
    with ExitStack() as stack:
        for layer, kernel in kernels.items():
            stack.callback(setattr, seams[layer], "kernel", seams[layer].kernel)
            seams[layer].kernel = kernel
        yield

"""Attention over a cache of the last tokens, with or without the first: StreamingLLM, Xiao et al. 2024.

When token t is processed, the cache holds the first `keep` tokens and the last `window`, including t:

    t sees s   iff   s ≤ t  and  (s < keep  or  t − s < window)

Keys and values are computed when a token enters, so deeper layers still depend on tokens that have left the cache.
Positions are slots of the cache: the query's is c(t) = min(t, keep + window - 1), that of first token i is i, and a
token in the window is t - s slots before the query. So only the pairs with a first token differ from dense attention:
with rotary positions they use the query rotated to c(t); with learned positions each token gets the vector of c(t).

Register tokens are ordinary tokens: they come first, so they are among the first `keep`, or leave the cache if `keep`
is smaller. A learned sink logit and a key bias are not tokens and never leave; a key bias has no position, and uses the
query at c(t), as dense attention over a text that fits into the cache does.

The complete text goes through the model in one pass, in blocks of queries against the keys in their caches: time grows
with T · (keep + window), memory with T. Dense attention of a model with sliding windows also needs a T × T mask.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from sinkscope.attention.kernels import (
    AttentionCall,
    grouped_matmul,
    numbers_at_once,
    raw_logits,
    row_weights,
    rows_at_once,
)
from sinkscope.attention.seam import attend, attention_implementation
from sinkscope.attention.taps import Seam, denominator_of
from sinkscope.errors import InputError, SinkscopeError, described
from sinkscope.models.family import NO_POSITIONS, Family, rotary_limits, text_arguments

NAME = "sinkscope-streaming"  # name of the attention implementation
BLOCK = 128  # queries at a time on a CPU

# (sequence, head, query's position, key's position) → bool, broadcasting: transformers makes its masks from it
Sees = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Cache(NamedTuple):
    """A cache of the first `keep` tokens and the last `window`."""

    keep: int
    window: int

    def positions(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return c(t), the slot of each token (any shape) when it enters the cache."""
        return tokens.clamp(max=self.keep + self.window - 1)

    def band(self, rows: slice) -> slice:
        """Return the tokens, except the first `keep`, that are in the window of any of these queries."""
        return slice(max(self.keep, rows.start - self.window + 1), max(self.keep, rows.stop))

    def visible(self, queries: torch.Tensor, keys: torch.Tensor, sees: Sees) -> torch.Tensor:
        """Return whether keys (C,) are in the cache and the model's mask shows them to queries (R,): (R,C) bool."""
        query, key = queries[:, None], keys[None]
        is_first = key < self.keep
        slot = self.positions(query)
        key_slot = torch.where(is_first, key, slot - (query - key))
        none = torch.zeros_like(slot)
        return (is_first | (query - key < self.window)) & sees(none, none, slot, key_slot)


def streamed_attention(
    query: torch.Tensor,
    query_in_cache: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: AttentionCall,
    cache: Cache,
    sees: Sees,
    block: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute mix and log-sum-exp of every token over its cache, as one row over the first tokens and the window.

    query (B,H,T,d) is rotated to t, for the keys of the window; query_in_cache to c(t), for the keys of the first
    tokens. `sees` is the model's own mask.
    """
    mixes, lses = [], []
    length, device, row = query.shape[2], query.device, query[:, :, 0, 0].numel()
    if block is None and device.type == "cpu":
        block = BLOCK
    elif block is None:
        block = max(1, rows_at_once(numbers_at_once(device, row * length**2) // row, cache.keep + cache.window))
    for start in range(0, length, block):
        rows = slice(start, min(start + block, length))
        first, band = slice(0, min(cache.keep, rows.stop)), cache.band(rows)
        to_first = raw_logits(query_in_cache[:, :, rows], key[:, :, first], call)
        to_band = raw_logits(query[:, :, rows], key[:, :, band], call)
        tokens = torch.arange(rows.stop, device=query.device)
        visible = cache.visible(tokens[rows], torch.cat([tokens[first], tokens[band]]), sees)
        logits = torch.cat([to_first, to_band], dim=-1)
        logits = logits.masked_fill(~visible, torch.finfo(logits.dtype).min)
        weights, lse = row_weights(logits, call, rows)
        mixes.append(grouped_matmul(weights.to(value.dtype), torch.cat([value[:, :, first], value[:, :, band]], dim=2)))
        lses.append(lse)
    return torch.cat(mixes, dim=2), torch.cat(lses, dim=2)


class QueryKnown(Exception):
    """Ends an attention module's forward as soon as its query and the sink logits that depend on it are computed."""

    def __init__(self, query: torch.Tensor, sink_logits: torch.Tensor | None) -> None:
        super().__init__()
        self.query, self.sink_logits = query, sink_logits


def query_at(tables: Any, seam: Seam, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> QueryKnown:
    """Run a module's own code until it calls the kernel, with these cosines and sines; return its query (B,H,T,d)."""

    def stop(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall) -> Any:
        raise QueryKnown(query, call.sink_logits)

    kernel, seam.kernel = seam.kernel, stop
    try:
        module.forward(*args, **kwargs | {"position_embeddings": tables})
    except QueryKnown as known:
        return known
    finally:
        seam.kernel = kernel
    raise SinkscopeError("an attention layer did not call its kernel: see `sinkscope doctor`")


class _Streaming:
    """The streaming of one attention layer: a hook before its forward, and the kernel in its seam."""

    def __init__(self, seam: Seam, family: Family, positions: str, cache: Cache, reads_query: bool) -> None:
        self.seam, self.family, self.cache = seam, family, cache
        self.positions = positions  # positions in this layer
        self.reads_query = reads_query  # whether a term of the denominator depends on the query
        self.sees: Sees | None = None  # in the current forward, like `in_cache`
        self.in_cache: QueryKnown | None = None

    def enter(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Keep the model's mask function and compute `in_cache`; a forward pre-hook of the attention module."""
        self.sees = kwargs.get("attention_mask")
        if not callable(self.sees):
            raise not_streamable(self.family, "it does not get the mask of its attention from transformers")
        kwargs = kwargs | {"attention_mask": None}
        self.in_cache = None
        if self.positions == "rotary":
            tables = kwargs.get("position_embeddings")
            if tables is None:
                raise not_streamable(self.family, "its attention does not get its rotary positions as an argument")
            if self.cache.keep or self.reads_query:  # otherwise all distances are the distances in the text
                in_cache = tuple(_at_cache_positions(table, self.cache) for table in tables)  # cosines and sines
                self.in_cache = query_at(in_cache, self.seam, module, args, kwargs)
        return args, kwargs

    def kernel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.sees is None or key.shape[2] != query.shape[2] or call.forbidden:
            raise SinkscopeError("streaming needs whole sequences, use_cache=False and no other forbidden attention")
        if call.mask is not None:  # it was not made by transformers: see `_mask_function`
            raise not_streamable(self.family, "it adds a bias of its own to its logits")
        in_cache, sees = self.in_cache, self.sees
        self.in_cache = self.sees = self.seam.call = None  # weights computed from the taps would be wrong
        first_query = query
        if in_cache is not None:
            first_query, call = in_cache.query, replace(call, sink_logits=in_cache.sink_logits)
        return streamed_attention(query, first_query, key, value, call, self.cache, sees)


def _at_cache_positions(table: torch.Tensor, cache: Cache) -> torch.Tensor:
    """Return rows (…,T,d) of a table by position at c(t) instead of t."""
    return table.index_select(-2, cache.positions(torch.arange(table.shape[-2], device=table.device)))


def _mask_function(
    *,
    config: PreTrainedConfig,
    mask_function: Sees,
    q_length: int,
    kv_length: int,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> Sees:
    """Return the function from which transformers would make a T × T mask; registered as a mask function."""
    if attention_mask is not None and not bool(attention_mask.all()):
        raise InputError("streaming reads sequences of one length, without padding")
    if q_length != kv_length:
        raise InputError("streaming reads whole sequences: call the model with use_cache=False")
    for limit in rotary_limits(config).values():
        if q_length > limit:
            raise InputError(
                f"streaming does not apply to {q_length} tokens, because past {limit} the rotary frequencies of this "
                f"{config.get_text_config().model_type} differ from those of a short cache: use a --seq-len of at most "
                f"{limit}"
            )
    return mask_function


@contextmanager
def streaming(model: PreTrainedModel, family: Family, seams: dict[int, Seam], keep: int, window: int) -> Iterator[None]:
    """Let the model read whole sequences with a cache of the first `keep` and the last `window` tokens.

    `seams` come from `open_seam`. An unsuitable model, keep < 0 or window < 1 raise InputError.
    """
    check_streaming_applies(model, family)
    if keep < 0 or window < 1:
        raise InputError(f"a cache of the first {keep} and the last {window} tokens: at least 0 and 1 are needed")
    cache = Cache(keep, window)
    with attention_implementation(model, NAME), ExitStack() as stack:
        for layer_index, attention in family.attentions(model).items():
            seam, term = seams[layer_index], denominator_of(attention)
            layer = _Streaming(
                seam, family, family.positions_at(layer_index), cache, term is not None and term.reads_query
            )
            stack.callback(setattr, seam, "kernel", seam.kernel)
            seam.kernel = layer.kernel
            stack.callback(attention.register_forward_pre_hook(layer.enter, with_kwargs=True).remove)
        if "learned" in family.kinds_of_positions:
            embedding = model.get_submodule(family.position_embedding)
            hook = embedding.register_forward_hook(lambda module, args, rows: _at_cache_positions(rows, cache))
            stack.callback(hook.remove)
        try:
            yield
        except (AttributeError, TypeError) as error:  # code with its own format of masks or positions
            raise not_streamable(family, f"its own code fails under it [{described(error)}]") from error


def inapplicable(model: PreTrainedModel, family: Family) -> str | None:
    """Return why this model cannot stream; None if it can."""
    if not family.causal:
        return "it attends both ways, and a stream has no later tokens"
    if family.prefix:
        return "its first tokens see later ones, which a stream does not have"
    reasons = {
        "alibi": "its positions are a bias on the logits (ALiBi)",
        "relative": "its positions are a bias on the logits",
        "sinusoidal": "its positions are sines that are added to the token embeddings",
    }
    for kind in sorted(family.kinds_of_positions - {"rotary", "learned", NO_POSITIONS}):
        return reasons.get(kind, "the kind of its positions is not known")
    if family.door != "interface":
        return "it has attention code of its own, in which sinkscope cannot change the window"
    if family.blocks:
        return "its layers are not all attention of one kind"
    terms = [term for attention in family.attentions(model).values() if (term := denominator_of(attention))]
    depends_on_query = any(term.reads_query and term.values() is not None for term in terms)
    if "rotary" in family.kinds_of_positions and depends_on_query:
        return "its key biases have values, which are weighted by queries at their positions in the text"
    if text_arguments(model):
        return "which tokens a token sees depends on an input for each token"
    return None


def check_streaming_applies(model: PreTrainedModel, family: Family) -> None:
    """Raise InputError if this model cannot stream."""
    if reason := inapplicable(model, family):
        raise not_streamable(family, reason)


def not_streamable(family: Family, reason: str) -> InputError:
    return InputError(f"streaming does not apply to {family.name}, because {reason}")


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, _mask_function)

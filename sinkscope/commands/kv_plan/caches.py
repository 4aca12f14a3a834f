"""A model that reads one text once for each plan, in a batch, with the caches of these plans."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn

from sinkscope.attention.kernels import AttentionCall, fused_attention, upcast
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
from sinkscope.commands.kv_plan.plan import FULL_BITS, SERVED, Attended, Plan, Sizes, snap_rotated
from sinkscope.text.batch import Batch, sent

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
        exact = exact_tokens(key.device, key.shape[2], sinks_of_rows)
        center = centers[layer] if centers else [x.new_zeros(x.shape[1], 1, x.shape[3]) for x in (key, value)]
        formats = [[(plan.served, int(plan.bits[index, part])) for plan in plans] for part in range(2)]
        key, value = rounded_pair((key, value), formats, exact, center)
        windows = [plan.windows[index].tolist() for plan in plans]
        return evicting_attention(query, key, value, call, windows, sinks_of_rows)

    sinks_of_rows = tuple(tuple(positions) for positions in sinks)
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

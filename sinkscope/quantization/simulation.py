"""Simulated quantization of a model: context managers around any use of it."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from sinkscope.attention.kernels import ROW_CHUNK, AttentionCall, grouped_matmul, masked_logits, raw_logits, row_weights
from sinkscope.attention.seam import attending_by_kernels, open_seam
from sinkscope.attention.taps import Seam
from sinkscope.models.edits import edited_output, first_argument, replaced, wrapped_forward
from sinkscope.models.families import find_family
from sinkscope.models.in_memory import called_uncompiled, on_cpu_by_default, unwrapped
from sinkscope.models.projections import by_output
from sinkscope.quantization.formats import PerActivation, PerCache, PerWeight, Precision
from sinkscope.quantization.grids import Range, site_grid
from sinkscope.quantization.sites import (
    IN_ATTENTION,
    INPUT,
    KEYS,
    OUTPUT,
    SCORES,
    SOFTMAX,
    SUM,
    VALUES,
    WEIGHT,
    Site,
    chosen_sites,
)
from sinkscope.quantization.spared import ALL_ROWS, NOTHING, Spared

# (part, all keys or values (B,Hkv,T,D), or rows of scores or weights (B,H,R,T), these rows) → their replacement
AttentionChange = Callable[[str, torch.Tensor, slice], torch.Tensor]


def attending_with(seams: Mapping[int, Seam], changes: Mapping[int, AttentionChange]) -> AbstractContextManager[None]:
    """Pass keys, values, scores and attention weights of these layers through their change until the end of the block.

    Scores include the softcap, but no mask. A learned sink logit enters the softmax unchanged. No T × T matrix larger
    than one row chunk is kept.
    """

    def attend(
        change: AttentionChange, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = change(KEYS, key, ALL_ROWS), change(VALUES, value, ALL_ROWS)
        mixes, lses = [], []
        for start in range(0, query.shape[2], ROW_CHUNK):
            rows = slice(start, min(start + ROW_CHUNK, query.shape[2]))
            scores = change(SCORES, raw_logits(query[:, :, rows], key, call), rows)
            logits = masked_logits(scores, call, rows, query.shape[2])
            weights, lse = row_weights(logits, call, rows)
            mixes.append(grouped_matmul(change(SOFTMAX, weights, rows).to(value.dtype), value))
            lses.append(lse)
        return torch.cat(mixes, dim=2), torch.cat(lses, dim=2)

    return attending_by_kernels(seams, {layer: partial(attend, change) for layer, change in changes.items()})


Snap = Callable[..., torch.Tensor]  # (x), or (x, its rows) → x on its grid


@contextmanager
def quantized(
    model: PreTrainedModel,
    ranges: Mapping[Site, Range],
    *,
    except_sites: Iterable[Site | str] = (),
    bits_weights: int = 8,
    bits_activations: int = 8,
    bits_kv_cache: int = 8,
    weights_per: PerWeight = "tensor",
    activations_per: PerActivation = "tensor",
    kv_cache_per: PerCache = "tensor",
) -> Iterator[None]:
    """Quantize the weights and activations of a model until the end of the block, and then restore it.

    Quantization is simulated: the numbers are on the grids, the arithmetic is the model's own.

    Args:
        ranges: The result of `calibrate_ranges`; keys and values are quantized if they are in it.
        except_sites: Sites that stay in full precision, named as in `chosen_sites`.
        bits_weights, bits_activations, bits_kv_cache: Numbers of bits.
        weights_per, activations_per, kv_cache_per: Units with a grid of their own; see `Precision`.

    Raises:
        InputError: A site or a grid does not exist, or a number of bits is out of range.
    """
    model = unwrapped(model, changed=True)
    spared = chosen_sites(ranges.keys(), except_sites)
    quantized_ranges = {site: known for site, known in ranges.items() if site not in spared}
    precision = Precision(bits_weights, bits_activations, bits_kv_cache, weights_per, activations_per, kv_cache_per)
    with ExitStack() as stack:
        with on_cpu_by_default():
            stack.enter_context(called_uncompiled(model))
            stack.enter_context(quantized_sites(model, quantized_ranges, precision))
            if any(site.part in IN_ATTENTION for site in quantized_ranges):
                seams = stack.enter_context(open_seam(model, find_family(model)))
                stack.enter_context(quantized_attention(seams, quantized_ranges, precision))
        yield


@contextmanager
def quantized_sites(
    model: PreTrainedModel, ranges: Mapping[Site, Range], precision: Precision, spared: Spared = NOTHING
) -> Iterator[None]:
    """Quantize these sites, except sites in attention (`quantized_attention`), until the end of the block."""

    def snap_ends(before: Snap | None, after: Snap | None, forward: Any, x: torch.Tensor, *args: Any, **kw: Any) -> Any:
        output = forward(x if before is None else before(x), *args, **kw)
        return output if after is None else after(output)

    def snapped(snap: Snap, module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return snap(x)

    def snap_in_place(snap: Snap, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        x = first_argument(args, kwargs)
        x.copy_(snap(x))  # the residual stream continues with the same tensor

    snaps: dict[str, dict[str, Snap]] = defaultdict(dict)
    for site, known in ranges.items():
        snaps[site.path][site.part] = partial(spared.snap, site, site_grid(precision, site, known))
    with ExitStack() as stack:
        for path, mine in snaps.items():
            if WEIGHT in mine:
                module = model.get_submodule(path)
                weight = by_output(module, module.get_parameter("weight").detach())
                stack.enter_context(replaced([(module, "weight", by_output(module, mine[WEIGHT](weight)))]))
            if INPUT in mine or OUTPUT in mine:
                around = partial(snap_ends, mine.get(INPUT), mine.get(OUTPUT))
                stack.enter_context(wrapped_forward(model.get_submodule(path), around))
            if SUM in mine:  # edited once for all modules that read the sum
                owner, _, end = path.rpartition(".")
                module = model.get_submodule(owner)
                if end == "output":
                    stack.enter_context(edited_output(module, partial(snapped, mine[SUM])))
                else:
                    hook = partial(snap_in_place, mine[SUM])
                    stack.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield


def quantized_attention(
    seams: Mapping[int, Seam], ranges: Mapping[Site, Range], precision: Precision, spared: Spared = NOTHING
) -> AbstractContextManager[None]:
    """Quantize the keys, values, scores and softmax outputs among these sites, in a model with its seams in place."""
    snaps: dict[int, dict[str, Snap]] = defaultdict(dict)
    for site, known in ranges.items():
        if site.part in IN_ATTENTION:
            snaps[site.layer][site.part] = partial(spared.snap, site, site_grid(precision, site, known))

    def change(mine: Mapping[str, Snap], part: str, x: torch.Tensor, rows: slice) -> torch.Tensor:
        return mine[part](x, rows) if part in mine else x

    return attending_with(seams, {layer: partial(change, mine) for layer, mine in snaps.items()})

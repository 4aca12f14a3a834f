"""A model as it would run quantized: context managers around any use of it."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from sinkscope.models.edits import Edit, replaced, wrapped_forward
from sinkscope.quantization.arithmetic import Grid, quantize_symmetric
from sinkscope.quantization.ranges import Bits, Range
from sinkscope.quantization.sites import INPUT, OUTPUT, WEIGHT, Site, chosen_sites


@contextmanager
def quantized(
    model: PreTrainedModel,
    ranges: Mapping[Site, Range],
    *,
    except_sites: Iterable[Site | str] = (),
    bits_weights: int = 8,
    bits_activations: int = 8,
) -> Iterator[None]:
    """Until the end of the block the model computes with quantized weights and activations; then it is as it was.

    Simulated: the numbers lie on the grids, the arithmetic is the model's own.

    Args:
        ranges: from `calibrate_ranges`.
        except_sites: stay in full precision; named as in `chosen_sites`.

    Raises:
        InputError: a site that does not exist, or bits out of range.
    """
    kept = chosen_sites(ranges.keys(), except_sites)
    rest = {site: known for site, known in ranges.items() if site not in kept}
    with quantized_sites(model, rest, Bits(bits_weights, bits_activations)):
        yield


@contextmanager
def quantized_sites(model: PreTrainedModel, ranges: Mapping[Site, Range], bits: Bits) -> Iterator[None]:
    """These sites quantized, and no others."""
    grids: dict[str, dict[str, Grid]] = defaultdict(dict)
    weights = []
    for site, known in ranges.items():
        if site.part == WEIGHT:
            weights.append(site.path)
        else:
            grids[site.path][site.part] = bits.grid(site, known)
    with ExitStack() as stack:
        stack.enter_context(replaced(_weight_edits(model, weights, bits.weights)))
        for path, mine in grids.items():
            stack.enter_context(_snapped(model.get_submodule(path), mine.get(INPUT), mine.get(OUTPUT)))
        yield


def _weight_edits(model: PreTrainedModel, paths: Iterable[str], bits: int) -> Iterator[Edit]:
    for path in paths:
        module = model.get_submodule(path)
        yield module, "weight", quantize_symmetric(module.get_parameter("weight").detach(), bits)


def _snapped(module: nn.Module, before: Grid | None, after: Grid | None) -> AbstractContextManager[None]:
    """module(x) computes with x on one grid, and gives its output on another."""

    def around(forward: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        output = forward(x if before is None else before.snap(x), *args, **kwargs)
        return output if after is None else after.snap(output)

    return wrapped_forward(module, around)

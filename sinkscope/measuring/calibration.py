"""Calibrates quantization: the range of each site on the calibration sequences, and the effect of rounding on it.

Sequences are read one at a time, so there is no padding, and tensors are reduced at once.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from sinkscope.attention.kernels import upcast
from sinkscope.errors import InputError, SinkscopeError
from sinkscope.measuring.observables.massive import is_massive, median_magnitude
from sinkscope.measuring.parity import check_beforehand
from sinkscope.measuring.subject import family_of
from sinkscope.measuring.tracer import Tracer, open_tracer
from sinkscope.models.edits import first_argument
from sinkscope.models.family import first_tensor
from sinkscope.models.in_memory import undisturbed, unwrapped
from sinkscope.quantization.grids import Precision, Range, Rounding
from sinkscope.quantization.simulation import attending_with
from sinkscope.quantization.sites import (
    CACHED,
    IN_ATTENTION,
    INPUT,
    LINEAR_SCHEME,
    OUTPUT,
    SUM,
    WEIGHT,
    Site,
    by_output,
    sites_of,
)
from sinkscope.text.batch import Batch

See = Callable[[Site, torch.Tensor], None]

WITHOUT_HIDDEN_STATES = (WEIGHT, *IN_ATTENTION)  # parts that cannot have massive activations


def calibrate_ranges(
    model: PreTrainedModel, sequences: Iterable[Any], scheme: str = LINEAR_SCHEME, has_cache: bool = False
) -> dict[Site, Range]:
    """Measure the static ranges of a loaded model, for `quantized`.

    A linear layer that no token reaches (an expert never chosen) has a range of its weight only.

    Args:
        sequences: Token ids on which the ranges of activations are measured.
        scheme: Which sites: see quantization/sites.py.
        has_cache: Measure also the keys and values of every layer.

    Raises:
        InputError: There is no sequence, the weights are not quantizable, or the scheme is unknown or does not apply.
        SinkscopeError: The model gives NaN, or its attention code differs from what sinkscope computes.
    """
    model = unwrapped(model)
    with undisturbed(model):
        family, notices = family_of(model)
        check_beforehand(model, family, is_calibrated=bool(notices))
        sites = sites_of(model, family, scheme, has_cache)
        with open_tracer(model, family) as tracer:
            return measured_ranges(tracer, sites, sequences)


def measured_ranges(tracer: Tracer, sites: Sequence[Site], sequences: Iterable[Any]) -> dict[Site, Range]:
    """Measure the ranges of these sites, with an open tracer; see `calibrate_ranges`."""
    seen: dict[Site, _RunningRange] = defaultdict(_RunningRange)
    _read(tracer, sites, sequences, lambda site, x: seen[site].add(site, x))
    if not seen:
        raise InputError("static ranges need at least one sequence to calibrate by")
    for site, weight in _weights(tracer.model, sites):
        seen[site].add(site, weight)
    return {site: seen[site].range(site) for site in sites if site in seen}


def measured_roundings(
    tracer: Tracer, sequences: Iterable[Any], ranges: Mapping[Site, Range], precision: Precision
) -> dict[Site, Rounding]:
    """Measure the effect of rounding on each site separately, in the model in full precision."""
    grids = {site: precision.grid(site, known) for site, known in ranges.items()}
    # numbers of nonzero entries and of those that become 0, and the energies of signal and noise
    sums: dict[Site, np.ndarray] = defaultdict(lambda: np.zeros(4))
    steps: dict[Site, list[tuple[float, int]]] = defaultdict(list)  # mean step of some grids, and their number

    def see(site: Site, x: torch.Tensor) -> None:
        grid = grids[site].of(x)
        snapped = grid.snap(x)
        nonzero = x != 0
        zeroed = nonzero & (snapped == 0)
        noise = snapped.sub_(x)
        totals = (nonzero.sum(), zeroed.sum(), x.double().square().sum(), noise.double().square().sum())
        sums[site] += np.array([float(total) for total in totals])
        widths = torch.as_tensor(grid.step, dtype=torch.float64)
        steps[site].append((float(widths.mean()), widths.numel()))

    _read(tracer, ranges, sequences, see)
    for site, weight in _weights(tracer.model, ranges):
        see(site, weight)
    found: dict[Site, Rounding] = {}
    for site in ranges:
        nonzero, zeroed, signal, noise = map(float, sums[site])
        sqnr = 10 * math.log10(signal / noise) if signal and noise else math.inf
        count = sum(grids for _, grids in steps[site])
        step = sum(mean * grids for mean, grids in steps[site]) / count if count else math.nan
        found[site] = Rounding(zeroed / nonzero if nonzero else 0.0, sqnr, step)
    return found


class _RunningRange:
    """The running reductions of one site."""

    def __init__(self) -> None:
        self.low, self.high = math.inf, -math.inf
        self.channels: tuple[torch.Tensor, torch.Tensor] | None = None
        self.medians: list[float] = []
        self.has_massive = False

    def add(self, site: Site, x: torch.Tensor) -> None:
        low, high = (float(end) for end in x.aminmax())
        if not (math.isfinite(low) and math.isfinite(high)):
            raise SinkscopeError(f"{site}: the model itself gives NaN or infinite numbers; try --dtype float32")
        median = median_magnitude(x)
        largest = median.new_tensor(max(-low, high))
        self.low, self.high = min(self.low, low), max(self.high, high)
        if site.part in CACHED:  # keys or values (B,Hkv,T,D)
            ends = x.amin((0, 2), keepdim=True), x.amax((0, 2), keepdim=True)
            seen = self.channels or ends
            self.channels = torch.minimum(ends[0], seen[0]), torch.maximum(ends[1], seen[1])
        self.medians.append(float(median))
        self.has_massive |= site.part not in WITHOUT_HIDDEN_STATES and bool(is_massive(largest, median))

    def range(self, site: Site) -> Range:
        return Range(self.low, self.high, float(np.mean(self.medians)), self.has_massive, self.channels)


def _read(tracer: Tracer, sites: Iterable[Site], sequences: Iterable[Any], see: See) -> None:
    """Call `see` with the tensors at these sites, in float32 or better, while the model reads the sequences.

    Outputs are seen before a retrofit's hook changes them, because they are quantized before it. Scores and softmax
    outputs are seen in row chunks.
    """

    def look(site: Site, end: str, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any = None) -> None:
        x = first_argument(args, kwargs) if end == INPUT else first_tensor(output)
        if x.numel():  # an expert may be given no token
            see(site, upcast(x.detach()))

    def shown(mine: Mapping[str, Site], part: str, x: torch.Tensor) -> torch.Tensor:
        if part in mine:
            see(mine[part], upcast(x))
        return x

    in_attention: dict[int, dict[str, Site]] = defaultdict(dict)
    with ExitStack() as hooks:
        for site in sites:
            if site.part in IN_ATTENTION:
                in_attention[site.layer][site.part] = site
            if site.part not in (INPUT, OUTPUT, SUM):
                continue
            path, _, end = site.path.rpartition(".") if site.part == SUM else (site.path, "", site.part)
            module, looking = tracer.model.get_submodule(path), partial(look, site, end)
            if end == INPUT:  # before the module, which may change its input in place
                hooks.enter_context(module.register_forward_pre_hook(looking, with_kwargs=True))
            else:
                hooks.enter_context(module.register_forward_hook(looking, prepend=True, with_kwargs=True))
        changes = {layer: partial(shown, mine) for layer, mine in in_attention.items()}
        hooks.enter_context(attending_with(tracer.seams, changes))
        for index, sequence in enumerate(sequences):
            ids = torch.as_tensor(np.array(sequence))[None]
            tracer.forward(Batch(ids, torch.ones_like(ids), index), [])


def _weights(model: nn.Module, sites: Iterable[Site]) -> Iterator[tuple[Site, torch.Tensor]]:
    for site in sites:
        if site.part == WEIGHT:
            module = model.get_submodule(site.path)
            yield site, upcast(by_output(module, module.get_parameter("weight").detach()))

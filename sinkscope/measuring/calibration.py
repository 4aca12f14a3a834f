"""Calibrates quantization: the range of each site on the calibration sequences, and the effect of rounding on it.

Sequences are read one at a time, so there is no padding, and tensors are reduced at once.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
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
from sinkscope.quantization.grids import Grid, Precision, Range, Rounding
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
        model: The model.
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
    sums: dict[Site, np.ndarray] = defaultdict(lambda: np.zeros(4))
    steps: dict[Site, list[tuple[float, int]]] = defaultdict(list)  # mean step of some grids, and their number

    def see(site: Site, x: torch.Tensor) -> None:
        grid = grids[site].of(x)
        sums[site] += _rounding_sums(x, grid)
        widths = torch.as_tensor(grid.step, dtype=torch.float64)
        steps[site].append((float(widths.mean()), widths.numel()))

    _read(tracer, ranges, sequences, see)
    for site, weight in _weights(tracer.model, ranges):
        see(site, weight)
    return {site: _rounding(sums[site], steps[site]) for site in ranges}


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
        if site.part in CACHED:
            self._add_channels(x)
        self.medians.append(float(median))
        self.has_massive |= site.part not in WITHOUT_HIDDEN_STATES and bool(is_massive(largest, median))

    def _add_channels(self, x: torch.Tensor) -> None:
        """Update the range of each channel of keys or values x (B,Hkv,T,D)."""
        low, high = x.amin((0, 2), keepdim=True), x.amax((0, 2), keepdim=True)
        if self.channels is not None:
            low, high = torch.minimum(low, self.channels[0]), torch.maximum(high, self.channels[1])
        self.channels = low, high

    def range(self, site: Site) -> Range:
        return Range(self.low, self.high, float(np.mean(self.medians)), self.has_massive, self.channels)


def _rounding_sums(x: torch.Tensor, grid: Grid) -> np.ndarray:
    """Return the numbers of nonzero entries and of those that become 0, and the energies of signal and noise."""
    snapped = grid.snap(x)
    nonzero = x != 0
    zeroed = nonzero & (snapped == 0)
    noise = snapped.sub_(x)
    sums = (nonzero.sum(), zeroed.sum(), x.double().square().sum(), noise.double().square().sum())
    return np.array([float(total) for total in sums])


def _rounding(sums: np.ndarray, steps: list[tuple[float, int]]) -> Rounding:
    nonzero, zeroed, signal, noise = map(float, sums)
    sqnr = 10 * math.log10(signal / noise) if signal and noise else math.inf
    count = sum(grids for _, grids in steps)
    step = sum(mean * grids for mean, grids in steps) / count if count else math.nan
    return Rounding(zeroed / nonzero if nonzero else 0.0, sqnr, step)


def _read(tracer: Tracer, sites: Iterable[Site], sequences: Iterable[Any], see: See) -> None:
    sites = list(sites)
    with _watched(tracer.model, sites, see), _watched_attention(tracer, sites, see):
        for place, sequence in enumerate(sequences):
            ids = torch.as_tensor(np.array(sequence))[None]
            tracer.forward(Batch(ids, torch.ones_like(ids), place), [])


@contextmanager
def _watched(model: nn.Module, sites: Iterable[Site], see: See) -> Iterator[None]:
    """Call `see` with the inputs, outputs and residual sums among these sites, in float32 or better.

    Outputs are seen before a retrofit's hook changes them, because that is what is quantized.
    """

    def look(site: Site, end: str, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any = None) -> None:
        x = first_argument(args, kwargs) if end == INPUT else first_tensor(output)
        if x.numel():  # an expert may be given no token
            see(site, upcast(x.detach()))

    with ExitStack() as hooks:
        for site in sites:
            if site.part not in (INPUT, OUTPUT, SUM):
                continue
            path, _, end = site.path.rpartition(".") if site.part == SUM else (site.path, "", site.part)
            module, looking = model.get_submodule(path), partial(look, site, end)
            if end == INPUT:  # before the module, which may change its input in place
                handle = module.register_forward_pre_hook(looking, with_kwargs=True)
            else:
                handle = module.register_forward_hook(looking, prepend=True, with_kwargs=True)
            hooks.callback(handle.remove)
        yield


def _watched_attention(tracer: Tracer, sites: Iterable[Site], see: See) -> AbstractContextManager[None]:
    """Call `see` with the keys and values among these sites, and with scores and softmax outputs in row chunks."""
    parts: dict[int, dict[str, Site]] = defaultdict(dict)
    for site in sites:
        if site.part in IN_ATTENTION:
            parts[site.layer][site.part] = site

    def shown(mine: Mapping[str, Site], part: str, x: torch.Tensor) -> torch.Tensor:
        if part in mine:
            see(mine[part], upcast(x))
        return x

    return attending_with(tracer.seams, {layer: partial(shown, mine) for layer, mine in parts.items()})


def _weights(model: nn.Module, sites: Iterable[Site]) -> Iterator[tuple[Site, torch.Tensor]]:
    for site in sites:
        if site.part == WEIGHT:
            module = model.get_submodule(site.path)
            yield site, upcast(by_output(module, module.get_parameter("weight").detach()))

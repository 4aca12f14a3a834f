"""Quantization: the ranges of its sites, its cost, and the sites that cost most (the tables of `quantize`).

Sequences are calibrated one at a time, so there is no padding. Settings of the whole model are measured on all
sequences, the search for costly sites on the first PROBED ones.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from rich.console import Console
from torch import nn
from transformers import PreTrainedModel

from sinkscope.attention.kernels import upcast
from sinkscope.errors import InputError, SinkscopeError, counted
from sinkscope.interventions import Intervention
from sinkscope.measuring.console import print_line
from sinkscope.measuring.losses import perplexity
from sinkscope.measuring.observables.activation import Outlier
from sinkscope.measuring.observables.massive import is_massive, median_magnitude
from sinkscope.measuring.observables.observable import Observable, Settings
from sinkscope.measuring.parity import Parity, check_beforehand
from sinkscope.measuring.passes import Change, passes_over, resumes, whole_pass
from sinkscope.measuring.subject import Subject, family_of
from sinkscope.measuring.tracer import Tracer, open_tracer
from sinkscope.models.edits import Beginning, first_argument
from sinkscope.models.family import first_tensor
from sinkscope.models.in_memory import undisturbed, unwrapped
from sinkscope.quantization import settings
from sinkscope.quantization.grids import Precision, Range, Rounding
from sinkscope.quantization.simulation import attending_with, quantized_attention, quantized_sites
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
from sinkscope.quantization.spared import NOTHING, Spared
from sinkscope.results.statistics import bootstrap, resamplings_of
from sinkscope.results.tables import Column, Columns
from sinkscope.text.batch import Batch
from sinkscope.text.inputs import TokenInputs

See = Callable[[Site, torch.Tensor], None]


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
        SinkscopeError: The model gives NaN, or its attention differs from sinkscope's computation.
    """
    model = unwrapped(model)
    with undisturbed(model):
        family, notices = family_of(model)
        check_beforehand(model, family, is_calibrated=bool(notices))
        sites = sites_of(model, family, scheme, has_cache)
        with open_tracer(model, family) as tracer:
            return measured_ranges(tracer, sites, sequences)


def measured_ranges(
    tracer: Tracer, sites: Sequence[Site], sequences: Iterable[Any], spared: Spared = NOTHING
) -> dict[Site, Range]:
    """Measure the ranges of these sites, with an open tracer; see `calibrate_ranges`."""
    seen: dict[Site, list[Range]] = defaultdict(list)
    if not (sequences := list(sequences)):
        raise InputError("static ranges need at least one sequence to calibrate by")
    read(tracer, sites, sequences, lambda site, x: seen[site].append(_range(site, x)), spared)
    return {site: _together(seen[site]) for site in sites if site in seen}


def _range(site: Site, x: torch.Tensor) -> Range:
    """Return the range of one tensor at a site."""
    low, high = (float(end) for end in x.aminmax())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise SinkscopeError(f"{site}: the model itself gives NaN or infinite numbers; try --dtype float32")
    median = median_magnitude(x)
    is_hidden_state = site.part not in (WEIGHT, *IN_ATTENTION)  # others cannot have massive activations
    massive = is_hidden_state and bool(is_massive(median.new_tensor(max(-low, high)), median))
    by_channel = (x.amin((0, 2), keepdim=True), x.amax((0, 2), keepdim=True)) if site.part in CACHED else None
    return Range(low, high, float(median), massive, by_channel)  # keys and values are (B,Hkv,T,D)


def _together(parts: Sequence[Range]) -> Range:
    """Return the range of all tensors at a site."""
    by_channel = None
    if parts[0].channels is not None:
        lows, highs = zip(*(part.channels for part in parts if part.channels is not None), strict=True)
        by_channel = torch.stack(lows).amin(0), torch.stack(highs).amax(0)
    low, high = min(part.low for part in parts), max(part.high for part in parts)
    median = float(np.mean([part.median_abs for part in parts]))
    return Range(low, high, median, any(part.is_massive for part in parts), by_channel)


def measured_roundings(
    tracer: Tracer, sequences: Iterable[Any], ranges: Mapping[Site, Range], precision: Precision
) -> dict[Site, Rounding]:
    """Measure the effect of rounding on each site separately, in the model in full precision."""
    grids = {site: precision.grid(site, known) for site, known in ranges.items()}
    # numbers of nonzero entries and of entries that become 0, energies of signal and noise, sum and number of steps
    sums: dict[Site, np.ndarray] = defaultdict(lambda: np.zeros(6))

    def see(site: Site, x: torch.Tensor) -> None:
        grid = grids[site].of(x)
        snapped = grid.snap(x)
        nonzero = x != 0
        zeroed = nonzero & (snapped == 0)
        noise = snapped.sub_(x)
        steps = torch.as_tensor(grid.step, dtype=torch.float64)
        energies = x.double().square().sum(), noise.double().square().sum()
        totals = (nonzero.sum(), zeroed.sum(), *energies, float(steps.mean()) * steps.numel(), steps.numel())
        sums[site] += np.array([float(total) for total in totals])

    read(tracer, ranges, sequences, see)
    found: dict[Site, Rounding] = {}
    for site in ranges:
        nonzero, zeroed, signal, noise, step, count = map(float, sums[site])
        sqnr = 10 * math.log10(signal / noise) if signal and noise else math.inf
        found[site] = Rounding(zeroed / nonzero if nonzero else 0.0, sqnr, step / count if count else math.nan)
    return found


def read(tracer: Tracer, sites: Iterable[Site], sequences: Iterable[Any], see: See, spared: Spared = NOTHING) -> None:
    """Call `see` with the tensors at these sites, in float32 or better: while the model reads the sequences, then with
    the weights. Spared entries are 0.
    """
    # Outputs of linear layers are seen before a retrofit's hook changes them, as they are quantized. Scores and softmax
    # outputs are seen in row chunks.

    def look(site: Site, end: str, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any = None) -> None:
        x = first_argument(args, kwargs) if end == INPUT else first_tensor(output)
        if x.numel():  # an expert may be given no token
            see(site, spared.without(site, upcast(x.detach())))

    def shown(mine: Mapping[str, Site], part: str, x: torch.Tensor, rows: slice) -> torch.Tensor:
        if part in mine:
            see(mine[part], spared.without(mine[part], upcast(x), rows))
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
                hooks.enter_context(
                    module.register_forward_hook(looking, prepend=site.part == OUTPUT, with_kwargs=True)
                )
        changes = {layer: partial(shown, mine) for layer, mine in in_attention.items()}
        hooks.enter_context(attending_with(tracer.seams, changes))
        for index, sequence in enumerate(sequences):
            ids = torch.as_tensor(np.array(sequence))[None]
            spared.read(batch := Batch(ids, torch.ones_like(ids), index))
            tracer.forward(batch, [])
    for site in sites:
        if site.part == WEIGHT:
            module = tracer.model.get_submodule(site.path)
            see(site, upcast(by_output(module, module.get_parameter("weight").detach())))


@dataclass(frozen=True)
class Measured:
    """The measurements of one setting."""

    losses: np.ndarray = field(compare=False)  # (N,): of each sequence, summed over its predicted tokens, in nats
    loss: float  # per predicted token
    max_inf_norm: float = math.nan  # largest over sites and layers
    kurtosis: float = math.nan  # mean over sites and layers

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)


@dataclass
class Bench:
    """Measures a model with any sites quantized, always under the same interventions."""

    subject: Subject
    precision: Precision
    kernel: str = "sdpa"
    batch_size: int | Literal["auto"] = "auto"
    interventions: tuple[Intervention, ...] = ()
    console: Console | None = None
    parity: Parity | None = None  # for passes in full precision
    scheme: str = LINEAR_SCHEME
    used_batch_size: int = field(default=0, init=False)

    @cached_property
    def sites(self) -> list[Site]:
        has_cache = self.precision.kv_cache_per is not None
        return sites_of(self.subject.loaded.model, self.subject.family, self.scheme, has_cache)

    def ranges(self, calibration: TokenInputs) -> dict[Site, Range]:
        sites = self.sites  # in a tracer, modules have another forward, which the check of sites refuses
        with self.tracer() as tracer:
            return measured_ranges(tracer, sites, calibration.read)

    def measure(self, ranges: Mapping[Site, Range], inputs: TokenInputs, outliers: bool = False) -> Measured:
        """Measure the loss with these sites quantized; with `outliers` also infinity norm and kurtosis."""

        def fresh() -> list[Observable]:
            compared = self.parity.fresh() if self.parity and not ranges else []
            return [*([Outlier(Settings())] if outliers else []), *compared]

        subject, change = replace(self.subject, inputs=inputs), Change(0, partial(self._quantized, ranges), fresh)
        done = whole_pass(subject, change, Tracer.forward_with_loss, *self._sizes)
        self.used_batch_size = self.used_batch_size or done.batch_size
        losses, loss = done.losses.numpy(), done.loss / inputs.num_predicted
        if not outliers:
            return Measured(losses, loss)
        by_site = done.observables[0].tables()["outlier"]
        kurtosis = by_site.groupby("layer")["kurtosis"].mean().mean()
        return Measured(losses, loss, float(by_site["max_inf_norm"].max()), float(kurtosis))

    def losses(self, ranges: Mapping[Site, Range], inputs: TokenInputs, spared: Spared = NOTHING) -> np.ndarray:
        """Measure the loss of each sequence (N,), summed over its predicted tokens, with these sites quantized."""

        def step(tracer: Tracer, batch: Batch, observables: Sequence[Observable]) -> torch.Tensor:
            spared.read(batch)
            return tracer.forward_with_loss(batch, observables)

        change = Change(0, partial(self._quantized, ranges, spared=spared))
        done = whole_pass(replace(self.subject, inputs=inputs), change, step, *self._sizes)
        return done.losses.numpy()

    def measure_each(self, settings: Sequence[Mapping[Site, Range]], inputs: TokenInputs) -> list[Measured]:
        """Measure every setting. If the model allows it, passes start at the first layer with a quantized site."""
        layers = [min(site.layer for site in ranges) for ranges in settings]
        order = sorted(range(len(settings)), key=layers.__getitem__)
        changes = [Change(layers[index], partial(self._quantized, settings[index])) for index in order]
        how, step = (replace(self.subject, inputs=inputs), self.kernel), Tracer.forward_with_loss
        may_resume = changes and changes[0].layer > 0 and not self.interventions and self.subject.family.causal
        if not may_resume or not resumes(*how, changes[-1], None, step, *self._sizes):
            return [self.measure(ranges, inputs) for ranges in settings]
        done = dict(zip(order, passes_over(*how, changes, step, *self._sizes), strict=True))
        each = [done[index] for index in range(len(settings))]
        return [Measured(one.losses.numpy(), one.loss / inputs.num_predicted) for one in each]

    @property
    def _sizes(self) -> tuple[int | Literal["auto"], bool, Console | None]:
        """Return the last arguments of passes. A batch size that fitted is used again."""
        return self.used_batch_size or self.batch_size, False, self.console

    @contextmanager
    def _quantized(
        self, ranges: Mapping[Site, Range], beginning: Beginning | None = None, spared: Spared = NOTHING
    ) -> Iterator[Tracer]:
        with (
            quantized_sites(self.subject.loaded.model, ranges, self.precision, spared),
            self.tracer(beginning) as tracer,
            quantized_attention(tracer.seams, ranges, self.precision, spared),
        ):
            yield tracer

    def tracer(self, beginning: Beginning | None = None) -> AbstractContextManager[Tracer]:
        subject = self.subject
        return open_tracer(subject.loaded.model, subject.family, self.kernel, self.interventions, beginning)


def w8a8(
    subject: Subject,
    calibration: TokenInputs,
    *,
    precision: Precision | None = None,
    kernel: str = "sdpa",
    batch_size: int | Literal["auto"] = "auto",
) -> dict[str, float]:
    """Measure the cost of quantizing every linear layer except the LM head, on the subject's input.

    The parameters of a retrofit (gates, λ, logits, keys, registers) stay in full precision. The value projection's
    output is quantized before a gate on values, the output projection's input after a gate on heads' outputs. Static
    ranges are measured on other sequences, `calibration`.

    Returns:
        loss, perplexity, max_inf_norm and kurtosis in full precision, and the same names with `_quantized`.
    """
    bench = Bench(subject, precision or Precision(), kernel, batch_size)
    arms: dict[str, dict[Site, Range]] = {"": {}, "_quantized": bench.ranges(calibration)}
    measured = {ending: bench.measure(ranges, subject.inputs, outliers=True) for ending, ranges in arms.items()}
    names = ("loss", "perplexity", "max_inf_norm", "kurtosis")
    return {name + ending: getattr(found, name) for ending, found in measured.items() for name in names}


LINEAR = Column("site", "kind of module, as mlp.down_proj, or mid or layer_out of a residual sum", kind="text")
PART = Column(
    "part",
    "input, weight or output; scheme full: also residual sum, scores, softmax output; KV cache: keys, values",
    kind="text",
)
QUANTIZATION_TABLES: dict[str, Columns] = {
    "quantization": (
        Column("setting", "quantized sites: see quantization/settings.py", kind="text"),
        LINEAR,
        PART,
        Column("quantized", "number of quantized sites", kind="whole"),
        Column("kept", "sites in full precision, if they were searched for", kind="text"),
        Column("sequences", "number of sequences measured", kind="whole"),
        Column("loss", "mean cross-entropy", "nats per token"),
        Column("perplexity", "exp(loss)"),
        Column("cost", "loss minus the loss in full precision on the same sequences", "nats per token"),
        Column("cost_low", "lower end of its 95 % interval over sequences", "nats per token", since=3),
        Column("cost_high", "upper end", "nats per token", since=3),
        Column("max_inf_norm", "largest absolute entry over sites and layers; NaN where it was not measured"),
        Column("kurtosis", "mean over sites and layers; NaN where it was not measured"),
    ),
    "quantization_sites": (
        LINEAR,
        PART,
        Column("path", "of the module in the model, or the address of a residual sum", kind="text"),
        Column("low", "smallest entry on the calibration sequences"),
        Column("high", "largest entry"),
        Column("median_abs", "median absolute entry of a sequence, or of 64 rows of attention; mean over all of them"),
        Column("max_abs", "largest absolute entry"),
        Column("is_massive", "whether a sequence has a massive activation here; hidden states only", kind="truth"),
        Column("step", "step of the grid; the mean if there is one grid per channel or token"),
        Column("zeroed", "share of the nonzero entries that the grid rounds to 0"),
        Column("sqnr", "signal to quantization noise, 10 log₁₀ Σx² ÷ Σ(x-x̂)²", "dB"),
    ),
}


def resampled_cost(
    losses: np.ndarray, full: np.ndarray, predicted: Sequence[int] | np.ndarray, texts: Sequence[int]
) -> np.ndarray:
    """Return (1 + draws,) replicates of the cost in nats per token, from the losses (N,) of sequences of `texts`."""
    weights = resamplings_of(texts)
    with np.errstate(invalid="ignore", divide="ignore"):  # a single text has no interval
        return (weights @ (losses - full)) / (weights @ np.array(predicted))


class Study:
    """Measures the settings of `quantize`, each of which is a row of the table `quantization`."""

    def __init__(self, bench: Bench, calibration: TokenInputs, console: Console) -> None:
        self.bench = bench
        self.inputs = bench.subject.inputs
        self.probes = self.inputs.part(0, settings.PROBED)
        self.ranges = bench.ranges(calibration)
        with bench.tracer() as tracer:
            self.roundings = measured_roundings(tracer, calibration.read, self.ranges, bench.precision)
        self.console = console
        self.rows: list[dict[str, Any]] = []
        self.full: dict[int, Measured] = {}  # number of sequences → full precision on them

    def tables(self) -> dict[str, pd.DataFrame]:
        print_line(self.console, f"{self.bench.precision} on {counted(len(self.inputs), 'sequence')}")
        self._whole_model()
        print_line(self.console, f"looking for the sites that cost most on {counted(len(self.probes), 'sequence')}")
        self._keep_costliest(self._costliest_sites(self._costly_kinds()))
        return {"quantization": pd.DataFrame(self.rows), "quantization_sites": self._sites()}

    def _whole_model(self) -> None:
        weights = {site for site in self.ranges if site.part == WEIGHT}
        massive = {site for site, known in self.ranges.items() if known.is_massive}
        self._note(settings.FULL, {}, outliers=True)
        self._note(settings.ALL, self.ranges, outliers=True)
        self._note(settings.WEIGHTS, self._without(self.ranges.keys() - weights))
        self._note(settings.ACTIVATIONS, self._without(weights))
        if cached := {site for site in self.ranges if site.part in CACHED}:
            self._note(settings.KV_CACHE, {site: self.ranges[site] for site in cached})
        if massive:
            self._note(settings.MASSIVE_KEPT, self._without(massive))
        if len(self.probes) < len(self.inputs):
            self._note(settings.FULL, {}, self.probes)
            self._note(settings.ALL, self.ranges, self.probes)

    def _costly_kinds(self) -> list[str]:
        """Quantize each kind of site alone, and all except each costly kind. Returns costly kinds, costliest first."""
        costs: dict[str, float] = {}
        for role in dict.fromkeys(site.role for site in self.ranges):
            alone = {site: known for site, known in self.ranges.items() if site.role == role}
            costs[role] = self._note(settings.ALONE, alone, self.probes, next(iter(alone)))
        costly = sorted((role for role in costs if costs[role] >= settings.COSTLY), key=lambda role: -costs[role])
        for role in costly:
            kept = {site for site in self.ranges if site.role == role}
            self._note(settings.KEPT, self._without(kept), self.probes, next(iter(kept)))
        return costly

    def _costliest_sites(self, costly: list[str]) -> list[Site]:
        """Quantize single layers of the costliest kinds. Returns the sites with a positive cost, costliest first."""
        costs: dict[Site, float] = {}
        for role in costly[: settings.BY_LAYER]:
            sites = [site for site in self.ranges if site.role == role]
            coarsest = sorted(sites, key=lambda site: -self.roundings[site].zeroed)[: settings.LAYERS]
            by_layer = sorted(coarsest, key=lambda site: site.layer)
            alone = [{site: self.ranges[site]} for site in by_layer]
            for site, one, measured in zip(by_layer, alone, self.bench.measure_each(alone, self.probes), strict=True):
                costs[site] = self._note(settings.ALONE, one, self.probes, site, site.layer, measured=measured)
        return sorted((site for site in costs if costs[site] > 0), key=lambda site: -costs[site])

    def _keep_costliest(self, costliest: list[Site]) -> None:
        """Keep 1, 2, 4, … sites in full precision until little of the cost remains; measure that choice on all text."""
        quantized = (row for row in self.rows if row["setting"] == settings.ALL)
        full_cost = next(row["cost"] for row in quantized if row["sequences"] == len(self.probes))
        if not costliest or full_cost < settings.COSTLY:
            return
        count, cost = 0, math.inf
        while cost > settings.RESTORED * full_cost and count < len(costliest):
            count = min(max(1, 2 * count), len(costliest))
            kept = costliest[:count]
            cost = self._note(settings.COSTLIEST_KEPT, self._without(set(kept)), self.probes, kept=kept)
        if len(self.probes) < len(self.inputs):
            self._note(settings.COSTLIEST_KEPT, self._without(set(kept)), kept=kept)

    def _without(self, kept: Set[Site]) -> dict[Site, Range]:
        return {site: known for site, known in self.ranges.items() if site not in kept}

    def _note(
        self,
        setting: str,
        ranges: Mapping[Site, Range],
        inputs: TokenInputs | None = None,
        site: Site | None = None,
        layer: int = settings.ALL_LAYERS,
        kept: Iterable[Site] = (),
        outliers: bool = False,
        measured: Measured | None = None,
    ) -> float:
        """Measure and record one setting. Returns its cost: the loss minus that in full precision on the same text."""
        inputs = inputs or self.inputs
        measured = measured or self.bench.measure(ranges, inputs, outliers)
        full = self.full.setdefault(len(inputs), measured)  # full precision is measured first
        cost = measured.loss - full.loss
        interval = bootstrap(resampled_cost(measured.losses, full.losses, inputs.predicted, inputs.texts))
        self.rows.append(
            {
                "layer": layer,
                "setting": setting,
                "site": site.kind if site else "",
                "part": site.part if site else "",
                "quantized": len(ranges),
                "kept": ", ".join(str(site) for site in kept),
                "sequences": len(inputs),
                "cost": cost,
                "cost_low": interval.low,
                "cost_high": interval.high,
                "perplexity": measured.perplexity,
                **{name: value for name, value in vars(measured).items() if name != "losses"},
            }
        )
        return cost

    def _sites(self) -> pd.DataFrame:
        rows = [
            {"layer": site.layer, "site": site.kind, "part": site.part, "path": site.path, "max_abs": known.max_abs}
            | {name: getattr(known, name) for name in ("low", "high", "median_abs", "is_massive")}
            | asdict(self.roundings[site])
            for site, known in self.ranges.items()
        ]
        return pd.DataFrame(rows)

"""Quantization: the ranges of its sites, its cost, and the sites that cost most (the tables of `quantize`).

Sequences are calibrated one at a time, so there is no padding. Settings of the whole model are measured on all
sequences, the search for costly sites on the first PROBED ones.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import torch
from rich.console import Console
from torch import nn
from transformers import PreTrainedModel

from sinkscope.attention.kernels import upcast
from sinkscope.errors import InputError, SinkscopeError, counted
from sinkscope.measuring.console import print_line
from sinkscope.measuring.engine import Setting, resampled_cost, run_settings
from sinkscope.measuring.losses import perplexity
from sinkscope.measuring.observables.activation import Outlier
from sinkscope.measuring.observables.massive import ENTRIES_AT_ONCE, is_massive, median_magnitude, row_medians
from sinkscope.measuring.observables.observable import Accumulator, Observable, Pending, Settings, Sums, deliver
from sinkscope.measuring.parity import Parity, check_beforehand
from sinkscope.measuring.passes import Pass
from sinkscope.measuring.subject import Subject, family_of
from sinkscope.measuring.summary import kurtosis_with_norms, layer_inf_norm
from sinkscope.measuring.tracer import Tracer, open_tracer
from sinkscope.models.edits import Beginning, first_argument
from sinkscope.models.family import first_tensor
from sinkscope.models.in_memory import undisturbed, unwrapped
from sinkscope.models.projections import NO_LAYER, by_output
from sinkscope.quantization import settings
from sinkscope.quantization.formats import STATIC_SCHEME, Precision
from sinkscope.quantization.grids import Range, Rounding, site_grid
from sinkscope.quantization.simulation import attending_with, quantized_attention, quantized_sites
from sinkscope.quantization.sites import CACHED, IN_ATTENTION, INPUT, OUTPUT, SUM, WEIGHT, Site, sites_of
from sinkscope.quantization.spared import NOTHING, Spared
from sinkscope.results.statistics import bootstrap
from sinkscope.results.tables import Column, Columns
from sinkscope.text.batch import Batch
from sinkscope.text.inputs import TokenInputs

SeeSite = Callable[[Site, torch.Tensor], None]


def calibrate_ranges(
    model: PreTrainedModel, sequences: Iterable[Any], scheme: str = STATIC_SCHEME, has_cache: bool = False
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
    if not (sequences := list(sequences)):
        raise InputError("static ranges need at least one sequence to calibrate by")
    seen: dict[Site, list[Range]] = defaultdict(list)
    reductions = StackedReductions(_ends_and_median)

    def see(site: Site, x: torch.Tensor) -> None:
        # keys and values are (B,Hkv,T,D)
        channels = (x.amin((0, 2), keepdim=True), x.amax((0, 2), keepdim=True)) if site.part in CACHED else None
        reductions.add(partial(keep, site, channels), x)

    def keep(site: Site, channels: Any, low: torch.Tensor, high: torch.Tensor, median: torch.Tensor) -> None:
        if not (low.isfinite() and high.isfinite()):
            raise SinkscopeError(f"{site}: the model itself gives NaN or infinite numbers; try --dtype float32")
        is_hidden_state = site.part not in (WEIGHT, *IN_ATTENTION)  # others cannot have massive activations
        massive = is_hidden_state and bool(is_massive(torch.maximum(-low, high), median))
        seen[site].append(Range(float(low), float(high), float(median), massive, channels))

    read(tracer, sites, sequences, see, spared)
    reductions.finish()
    ranges: dict[Site, Range] = {}
    for site in (site for site in sites if site in seen):
        parts, channels = seen[site], None
        if site.part in CACHED:
            lows, highs = zip(*(part.channels for part in parts if part.channels is not None), strict=True)
            channels = torch.stack(lows).amin(0), torch.stack(highs).amax(0)
        low, high = min(part.low for part in parts), max(part.high for part in parts)
        median = float(np.mean([part.median_abs for part in parts]))
        ranges[site] = Range(low, high, median, any(part.is_massive for part in parts), channels)
    return ranges


class StackedReductions(Accumulator):
    """Reduces tensors to numbers, which it passes on as tensors of the CPU.

    On an accelerator, tensors with equally many entries are reduced together, and all numbers copied together.

    Args:
        reduce: (dim, *tensors) → the numbers of one tensor of any shape if `dim` is None, or of rows (N,E) if it is -1.
    """

    def __init__(self, reduce: Callable[..., Iterable[torch.Tensor]]) -> None:
        self.reduce, self.pending, self.entries = reduce, Pending(), 0

    def add(self, by: Callable[..., None], x: torch.Tensor, *own: torch.Tensor) -> None:
        """Call `by` with the numbers of x, which the model may change later, and of others of its shape, at once or in
        `finish`.
        """
        if x.device.type == "cpu":
            by(*self.reduce(None, x, *own))
            return
        rows = {str(nth): each.reshape(1, -1) for nth, each in enumerate((x.clone(), *own))}
        self.pending.add(rows, by=by)
        self.entries += x.numel() * len(rows)
        if self.entries > ENTRIES_AT_ONCE:
            self._reduce()

    def _reduce(self) -> None:
        for _, rows, columns in self.pending.take():
            numbers = self.reduce(-1, *(entries[0] for entries in columns.values()))
            for row, *mine in zip(rows, *(each.unbind() for each in numbers), strict=True):
                self.receive(row["by"], *mine)
        self.entries = 0

    def finish(self) -> None:
        self._reduce()
        deliver([self])


def _ends_and_median(dim: int | None, x: torch.Tensor) -> Iterable[torch.Tensor]:
    return *x.aminmax(dim=dim), median_magnitude(x) if dim is None else row_medians(x)


def _counts_and_norms(dim: int | None, x: torch.Tensor, rounded: torch.Tensor) -> Iterable[torch.Tensor]:
    """Return the numbers of entries that are not 0, before and after rounding, and the norms of signal and noise."""
    counts = [each.count_nonzero(dim=dim) for each in (x, rounded)]
    return *counts, *(torch.linalg.vector_norm(e, dim=dim, dtype=torch.float64) for e in (x, rounded.sub_(x)))


def measured_roundings(
    tracer: Tracer, sequences: Iterable[Any], ranges: Mapping[Site, Range], precision: Precision
) -> dict[Site, Rounding]:
    """Measure the effect of rounding on each site separately, in the model in full precision."""
    grids = {site: site_grid(precision, site, known) for site, known in ranges.items()}
    # numbers of nonzero entries before and after rounding, energies of signal and noise, sum and number of steps
    sums: Sums[Site] = Sums()
    reductions = StackedReductions(_counts_and_norms)

    def see(site: Site, x: torch.Tensor) -> None:
        grid = grids[site].of(x)
        reductions.add(partial(add, site), x, grid.snap(x))
        steps = torch.as_tensor(grid.step, dtype=torch.float64)
        sums.receive(lambda total: sums.add(site, np.array([0, 0, 0, 0, total, steps.numel()])), steps.sum())

    def add(site: Site, before: Any, after: Any, signal: Any, noise: Any) -> None:
        sums.add(site, np.array([before, after, signal**2, noise**2, 0, 0], float))

    read(tracer, ranges, sequences, see)
    reductions.finish()
    deliver([sums])
    roundings: dict[Site, Rounding] = {}
    for site in ranges:
        before, after, signal, noise, step, count = map(float, sums.get(site, np.zeros(6)))
        sqnr = 10 * math.log10(signal / noise) if signal and noise else math.inf
        # 0 stays exact, so that each entry that is lost was rounded to 0
        roundings[site] = Rounding(1 - after / before if before else 0.0, sqnr, step / count if count else math.nan)
    return roundings


def read(
    tracer: Tracer, sites: Iterable[Site], sequences: Iterable[Any], see: SeeSite, spared: Spared = NOTHING
) -> None:
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


@dataclass
class Simulation:
    """A model that reads texts with any of its sites quantized."""

    subject: Subject
    precision: Precision
    kernel: str = "sdpa"
    batch_size: int | Literal["auto"] = "auto"
    console: Console | None = None
    scheme: str = STATIC_SCHEME
    used_batch_size: int = field(default=0, init=False)  # the first that fitted into memory, which is used again

    @cached_property
    def sites(self) -> list[Site]:
        has_cache = self.precision.kv_cache_per is not None
        return sites_of(self.subject.loaded.model, self.subject.family, self.scheme, has_cache)

    def ranges(self, calibration: TokenInputs) -> dict[Site, Range]:
        sites = self.sites  # computed before tracing, which replaces forwards and fails the check of sites
        with self.tracer() as tracer:
            return measured_ranges(tracer, sites, calibration.read)

    def tracer(self, beginning: Beginning | None = None) -> AbstractContextManager[Tracer]:
        return open_tracer(self.subject.loaded.model, self.subject.family, self.kernel, beginning=beginning)

    def setting(
        self,
        ranges: Mapping[Site, Range],
        spared: Spared = NOTHING,
        observables: Callable[[], list[Observable]] = list,
        inputs: TokenInputs | None = None,
    ) -> Setting:
        """Return the setting in which these sites are quantized, except for the entries that are spared."""

        @contextmanager
        def quantized(beginning: Beginning | None) -> Iterator[Tracer]:
            with (
                quantized_sites(self.subject.loaded.model, ranges, self.precision, spared),
                self.tracer(beginning) as tracer,
                quantized_attention(tracer.seams, ranges, self.precision, spared),
            ):
                yield tracer

        def read_batch(tracer: Tracer, batch: Batch, seen_by: Sequence[Observable]) -> torch.Tensor:
            spared.read(batch)
            return tracer.forward_with_loss(batch, seen_by)

        layer = min((site.layer for site in ranges), default=0)
        return Setting(quantized, read_batch, layer, observables, inputs)

    def run(self, settings: Sequence[Setting], inputs: TokenInputs | None = None) -> list[Pass]:
        """Run settings on the subject's text or on `inputs`."""
        subject = replace(self.subject, inputs=inputs or self.subject.inputs)
        size = self.used_batch_size or self.batch_size
        passes = run_settings(subject, settings, kernel=self.kernel, batch_size=size, console=self.console)
        self.used_batch_size = self.used_batch_size or max((done.batch_size for done in passes), default=0)
        return passes


def numbers_of(done: Pass, inputs: TokenInputs) -> dict[str, float]:
    """Return loss per token, perplexity, and norms and kurtosis, which are NaN without `Outlier`.

    Norms are those of the largest layer, kurtosis is a mean over layers. `layer_inf_norm` and `kurtosis_with_norms` are
    of Bondarenko et al.'s sites; a model without norms has no `kurtosis_with_norms`.
    """
    loss = done.loss / inputs.num_predicted
    outliers = dict.fromkeys(("max_inf_norm", "kurtosis", "layer_inf_norm", "kurtosis_with_norms"), math.nan)
    for observable in done.observables:
        if isinstance(observable, Outlier):
            tables = observable.tables()
            sites, with_norms = tables["outlier"], kurtosis_with_norms(tables)
            outliers |= {
                "max_inf_norm": float(sites["max_inf_norm"].max()),
                "kurtosis": float(sites.groupby("layer")["kurtosis"].mean().mean()),
                "layer_inf_norm": float(layer_inf_norm(tables).max()),
                "kurtosis_with_norms": math.nan if with_norms is None else float(with_norms.mean()),
            }
    return {"loss": loss, "perplexity": perplexity(loss)} | outliers


def outliers() -> list[Observable]:
    return [Outlier(Settings())]


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
        loss, perplexity, max_inf_norm, kurtosis, and the norm and kurtosis at Bondarenko et al.'s sites
        (layer_inf_norm, kurtosis_with_norms) in full precision, and the same names with `_quantized`.
    """
    simulation = Simulation(subject, precision or Precision(), kernel, batch_size)
    arms = {"": {}, "_quantized": simulation.ranges(calibration)}
    passes = simulation.run([simulation.setting(ranges, observables=outliers) for ranges in arms.values()])
    measured = {ending: numbers_of(done, subject.inputs) for ending, done in zip(arms, passes, strict=True)}
    return {name + ending: value for ending, numbers in measured.items() for name, value in numbers.items()}


SITE_COLUMN = Column("site", "kind of module, as mlp.down_proj, or mid or layer_out of a residual sum", kind="text")
PART_COLUMN = Column(
    "part",
    "input, weight or output; scheme full: also residual sum, scores, softmax output; KV cache: keys, values",
    kind="text",
)
QUANTIZATION_TABLES: dict[str, Columns] = {
    "quantization": (
        Column("setting", "quantized sites: see quantization/settings.py", kind="text"),
        SITE_COLUMN,
        PART_COLUMN,
        Column("quantized", "number of quantized sites", kind="whole"),
        Column("kept", "sites in full precision, if they were searched for", kind="text"),
        Column("sequences", "number of sequences measured", kind="whole"),
        Column("loss", "mean cross-entropy", "nats per token"),
        Column("perplexity", "exp(loss)"),
        Column("cost", "loss minus the loss in full precision on the same sequences", "nats per token"),
        Column("cost_low", "lower end of its 95 % interval over texts", "nats per token"),
        Column("cost_high", "upper end", "nats per token"),
        Column("max_inf_norm", "largest absolute entry over sites and layers; NaN where it was not measured"),
        Column("kurtosis", "mean over sites and layers; NaN where it was not measured"),
    ),
    "quantization_sites": (
        SITE_COLUMN,
        PART_COLUMN,
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


class Row(NamedTuple):
    """A setting of `quantize`, which becomes a row of the table `quantization`."""

    setting: str
    ranges: Mapping[Site, Range]  # quantized site → its range
    site: Site | None = None  # the only site that is quantized or not quantized, or an example of its kind
    layer: int = settings.ALL_LAYERS
    kept: Sequence[Site] = ()  # sites in full precision, if the setting searched for them


class QuantizationStudy:
    """Measures the settings of `quantize`."""

    def __init__(self, simulation: Simulation, calibration: TokenInputs, parity: Parity) -> None:
        """`parity` is compared with in passes in full precision."""
        self.simulation, self.parity = simulation, parity
        self.inputs = simulation.subject.inputs
        self.probes = self.inputs.part(0, settings.PROBED)
        self.ranges = simulation.ranges(calibration)
        with simulation.tracer() as tracer:
            self.roundings = measured_roundings(tracer, calibration.read, self.ranges, simulation.precision)
        self.rows: list[dict[str, Any]] = []
        self.full: dict[int, Pass] = {}  # number of sequences → full precision on them

    def tables(self, console: Console) -> dict[str, pd.DataFrame]:
        print_line(console, f"{self.simulation.precision} on {counted(len(self.inputs), 'sequence')}")
        self._whole_model()
        print_line(console, f"looking for the sites that cost most on {counted(len(self.probes), 'sequence')}")
        self._keep_costliest(self._costliest_sites())
        sites = [
            {"layer": site.layer, "site": site.kind, "part": site.part, "path": site.path, "max_abs": known.max_abs}
            | {name: getattr(known, name) for name in ("low", "high", "median_abs", "is_massive")}
            | asdict(self.roundings[site])
            for site, known in self.ranges.items()
        ]
        return {"quantization": pd.DataFrame(self.rows), "quantization_sites": pd.DataFrame(sites)}

    def _whole_model(self) -> None:
        weights = [site for site in self.ranges if site.part == WEIGHT]
        cached = [site for site in self.ranges if site.part in CACHED]
        massive = [site for site, known in self.ranges.items() if known.is_massive]
        base = [Row(settings.FULL, {}), Row(settings.ALL, self.ranges)]
        parts = [
            Row(settings.WEIGHTS, {site: self.ranges[site] for site in weights}),
            Row(settings.ACTIVATIONS, self._without(weights)),
            *([Row(settings.KV_CACHE, {site: self.ranges[site] for site in cached})] if cached else []),
            *([Row(settings.MASSIVE_KEPT, self._without(massive))] if massive else []),
        ]
        self._measure([*base, *parts], self.inputs)
        if len(self.probes) < len(self.inputs):
            self._measure(base, self.probes)

    def _costliest_sites(self) -> list[Site]:
        """Quantize each kind of site alone, all except each costly kind, and single layers of the costliest kinds.

        Returns the sites with a positive cost, the costliest first.
        """
        by_role: dict[str, list[Site]] = defaultdict(list)
        for site in self.ranges:
            by_role[site.role].append(site)
        alone = [
            Row(settings.ALONE, {site: self.ranges[site] for site in sites}, sites[0]) for sites in by_role.values()
        ]
        of_roles = dict(zip(by_role, self._measure(alone, self.probes), strict=True))
        costly = sorted((role for role in by_role if of_roles[role] >= settings.COSTLY), key=lambda r: -of_roles[r])
        all_others = [Row(settings.KEPT, self._without(by_role[role]), by_role[role][0]) for role in costly]
        self._measure(all_others, self.probes)
        costs: dict[Site, float] = {}
        for role in costly[: settings.BY_LAYER]:
            first = by_role[role][0]
            if first.layer == NO_LAYER:  # the only site of its role, which has been measured alone
                costs[first] = of_roles[role]
                continue
            coarsest = sorted(by_role[role], key=lambda site: -self.roundings[site].zeroed)[: settings.LAYERS]
            by_layer = sorted(coarsest, key=lambda site: site.layer)
            rows = [Row(settings.ALONE, {site: self.ranges[site]}, site, site.layer) for site in by_layer]
            costs |= zip(by_layer, self._measure(rows, self.probes), strict=True)
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
            row = Row(settings.COSTLIEST_KEPT, self._without(costliest[:count]), kept=costliest[:count])
            (cost,) = self._measure([row], self.probes)
        if len(self.probes) < len(self.inputs):
            self._measure([row], self.inputs)

    def _without(self, exact: Collection[Site]) -> dict[Site, Range]:
        return {site: known for site, known in self.ranges.items() if site not in exact}

    def _measure(self, rows: Sequence[Row], inputs: TokenInputs) -> list[float]:
        """Measure and record settings. Returns their costs: the loss minus that in full precision on the same text."""

        def observables(row: Row) -> list[Observable]:
            is_full = row.setting == settings.FULL
            has_outliers = (is_full or row.setting == settings.ALL) and len(inputs) == len(self.inputs)
            return [*(outliers() if has_outliers else []), *(self.parity.fresh() if is_full else [])]

        run = [self.simulation.setting(row.ranges, observables=partial(observables, row)) for row in rows]
        costs = []
        for row, done in zip(rows, self.simulation.run(run, inputs) if run else [], strict=True):
            full = self.full.setdefault(len(inputs), done)  # full precision is measured first
            numbers, losses = numbers_of(done, inputs), done.losses.numpy()
            interval = bootstrap(resampled_cost(losses, full.losses.numpy(), inputs.predicted, inputs.texts))
            costs.append(numbers["loss"] - full.loss / inputs.num_predicted)
            self.rows.append(
                {
                    "layer": row.layer,
                    "setting": row.setting,
                    "site": row.site.kind if row.site else "",
                    "part": row.site.part if row.site else "",
                    "quantized": len(row.ranges),
                    "kept": ", ".join(str(site) for site in row.kept),
                    "sequences": len(inputs),
                    "cost": costs[-1],
                    "cost_low": interval.low,
                    "cost_high": interval.high,
                    **numbers,
                }
            )
        return costs

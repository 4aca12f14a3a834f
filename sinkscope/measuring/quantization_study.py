"""The tables of `quantize`: what quantization costs, and which sites cost most.

Settings of the whole model are measured on all sequences, the search for costly sites on the first PROBED ones.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

import pandas as pd
from rich.console import Console

from sinkscope.errors import counted
from sinkscope.interventions import Intervention
from sinkscope.measuring.calibration import measured_ranges, measured_roundings
from sinkscope.measuring.console import print_line
from sinkscope.measuring.losses import perplexity
from sinkscope.measuring.observables.observable import Observable, Settings
from sinkscope.measuring.observables.outlier import Outlier
from sinkscope.measuring.parity import ParityCheck
from sinkscope.measuring.passes import Pass, pass_over
from sinkscope.measuring.resumed import FEW, Change, passes_over, tried
from sinkscope.measuring.subject import Subject
from sinkscope.measuring.tracer import Tracer, open_tracer
from sinkscope.models.edits import Beginning
from sinkscope.quantization import settings
from sinkscope.quantization.grids import Precision, Range, Rounding
from sinkscope.quantization.simulation import quantized_attention, quantized_sites
from sinkscope.quantization.sites import CACHED, LINEAR_SCHEME, WEIGHT, Site, sites_of
from sinkscope.results.tables import Column, Columns
from sinkscope.text.inputs import TokenInputs


@dataclass(frozen=True)
class Measured:
    """The measurements of one setting."""

    loss: float  # per predicted token, in nats
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
    parity: ParityCheck | None = None  # for passes in full precision
    scheme: str = LINEAR_SCHEME
    used_batch_size: int = field(default=0, init=False)

    def ranges(self, calibration: TokenInputs) -> dict[Site, Range]:
        model, family = self.subject.loaded.model, self.subject.family
        sites = sites_of(model, family, self.scheme, has_cache=self.precision.kv_cache_per is not None)
        with self._tracer() as tracer:
            return measured_ranges(tracer, sites, calibration.sequences)

    def roundings(self, calibration: TokenInputs, ranges: Mapping[Site, Range]) -> dict[Site, Rounding]:
        with self._tracer() as tracer:
            return measured_roundings(tracer, calibration.sequences, ranges, self.precision)

    def measure(self, ranges: Mapping[Site, Range], inputs: TokenInputs, outliers: bool = False) -> Measured:
        """Measure the loss with these sites quantized; with `outliers` also infinity norm and kurtosis."""

        def fresh() -> list[Observable]:
            compared = self.parity.fresh() if self.parity and not ranges else []
            return [*([Outlier(Settings())] if outliers else []), *compared]

        with self._quantized(ranges) as tracer:
            done = pass_over(tracer.model, inputs, fresh, tracer.forward_with_loss, self._size, console=self.console)
        self.used_batch_size = self.used_batch_size or done.batch_size
        loss = done.loss / inputs.num_predicted
        if not outliers:
            return Measured(loss)
        by_site = done.observables[0].tables()["outlier"]
        kurtosis = by_site.groupby("layer")["kurtosis"].mean().mean()
        return Measured(loss, float(by_site["max_inf_norm"].max()), float(kurtosis))

    def measure_each(self, settings: Sequence[Mapping[Site, Range]], inputs: TokenInputs) -> list[Measured]:
        """Measure every setting, starting at the first layer of which it quantizes a site.

        This shortcut is first tried on a few sequences at the last of these layers: if the loss is not bit for bit that
        of a whole pass, whole passes are used.
        """
        layers = [min(site.layer for site in ranges) for ranges in settings]
        order = sorted(range(len(settings)), key=lambda index: layers[index])
        changes = [Change(layers[index], partial(self._quantized, settings[index])) for index in order]
        if not changes or layers[order[0]] < 1 or not self._resumes(changes[-1], settings[order[-1]], inputs):
            return [self.measure(ranges, inputs) for ranges in settings]
        done = dict(zip(order, self._passes_from(changes, inputs), strict=True))
        return [Measured(done[index].loss / inputs.num_predicted) for index in range(len(settings))]

    def _resumes(self, change: Change, ranges: Mapping[Site, Range], inputs: TokenInputs) -> bool:
        if self.interventions or not self.subject.family.causal:
            return False
        few = inputs.part(0, FEW)
        resumed = tried(lambda changes: self._passes_from(changes, few), change)
        return resumed is not None and resumed.loss / few.num_predicted == self.measure(ranges, few).loss

    def _passes_from(self, changes: Sequence[Change], inputs: TokenInputs) -> list[Pass[Observable]]:
        subject = replace(self.subject, inputs=inputs)
        done = passes_over(subject, self.kernel, changes, Tracer.forward_with_loss, self._size, 1, self.console)
        self.used_batch_size = self.used_batch_size or done[0].batch_size
        return done

    @property
    def _size(self) -> int | Literal["auto"]:
        return self.used_batch_size or self.batch_size  # a size that fitted is used again

    @contextmanager
    def _quantized(self, ranges: Mapping[Site, Range], beginning: Beginning | None = None) -> Iterator[Tracer]:
        with (
            quantized_sites(self.subject.loaded.model, ranges, self.precision),
            self._tracer(beginning) as tracer,
            quantized_attention(tracer.seams, ranges, self.precision),
        ):
            yield tracer

    def _tracer(self, beginning: Beginning | None = None) -> AbstractContextManager[Tracer]:
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

    The same layers are quantized in a retrofitted model. The parameters of a retrofit (gates, λ, logits, keys,
    registers) stay in full precision. The value projection's output is quantized before a gate on values, the output
    projection's input after a gate on heads' outputs.

    Args:
        calibration: Other sequences, on which the static ranges are measured.
        precision: Bits and grids; None means 8 bits and one grid per tensor.

    Returns:
        loss, perplexity, max_inf_norm and kurtosis in full precision, and the same names with `_quantized`.
    """
    bench = Bench(subject, precision or Precision(), kernel, batch_size)
    arms: dict[str, dict[Site, Range]] = {"": {}, "_quantized": bench.ranges(calibration)}
    measured = {ending: bench.measure(ranges, subject.inputs, outliers=True) for ending, ranges in arms.items()}
    names = ("loss", "perplexity", "max_inf_norm", "kurtosis")
    return {name + ending: getattr(found, name) for ending, found in measured.items() for name in names}


Ranges = Mapping[Site, Range]

LINEAR = Column("site", "kind of module, as mlp.down_proj, or mid or layer_out of a residual sum", kind="text")
PART = Column(
    "part",
    "input, weight or output; scheme full: also residual sum, scores, softmax output; KV cache: keys, values",
    kind="text",
)
QUANTIZATION_TABLES: dict[str, Columns] = {
    "quantization": (
        Column("setting", "what is quantized: quantization/settings.py", kind="text"),
        LINEAR,
        PART,
        Column("quantized", "number of quantized sites", kind="whole"),
        Column("kept", "sites in full precision, if they were searched for", kind="text"),
        Column("sequences", "number of sequences measured", kind="whole"),
        Column("loss", "mean cross-entropy", "nats per token"),
        Column("perplexity", "exp(loss)"),
        Column("cost", "loss above that of full precision on the same sequences", "nats per token"),
        Column("max_inf_norm", "largest absolute entry over sites and layers; NaN where it was not measured"),
        Column("kurtosis", "mean over sites and layers; NaN where it was not measured"),
    ),
    "quantization_sites": (
        LINEAR,
        PART,
        Column("path", "of the module in the model, or the address of a residual sum", kind="text"),
        Column("low", "smallest entry on the calibration sequences"),
        Column("high", "largest entry"),
        Column("median_abs", "median of a sequence's absolute entries, or of 64 rows of attention, mean over these"),
        Column("max_abs", "largest absolute entry"),
        Column("is_massive", "whether a sequence has a massive activation here; hidden states only", kind="truth"),
        Column("step", "step of the grid; the mean if there is one grid per channel or token"),
        Column("zeroed", "share of the nonzero entries that the grid rounds to 0"),
        Column("sqnr", "signal to quantization noise, 10 log₁₀ Σx² ÷ Σ(x-x̂)²", "dB"),
    ),
}


@dataclass
class Study:
    """Measures the settings of `quantize`, each of which is a row of the table `quantization`."""

    inputs: TokenInputs
    bench: Bench
    ranges: Ranges
    roundings: Mapping[Site, Rounding]
    console: Console
    rows: list[dict[str, Any]] = field(default_factory=list)

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
            measured = self.bench.measure_each([{site: self.ranges[site]} for site in by_layer], self.probes)
            for site, alone in zip(by_layer, measured, strict=True):
                costs[site] = self._write(settings.ALONE, alone, 1, self.probes, site, site.layer)
        return sorted((site for site in costs if costs[site] > 0), key=lambda site: -costs[site])

    def _keep_costliest(self, costliest: list[Site]) -> None:
        """Keep 1, 2, 4, … sites in full precision until little of the cost remains; measure that choice on all text."""
        full_cost = self._row(settings.ALL, self.probes)["cost"]
        if not costliest or full_cost < settings.COSTLY:
            return
        count, cost = 0, math.inf
        while cost > settings.RESTORED * full_cost and count < len(costliest):
            count = min(max(1, 2 * count), len(costliest))
            kept = costliest[:count]
            cost = self._note(settings.COSTLIEST_KEPT, self._without(set(kept)), self.probes, kept=kept)
        if len(self.probes) < len(self.inputs):
            self._note(settings.COSTLIEST_KEPT, self._without(set(kept)), kept=kept)

    @property
    def probes(self) -> TokenInputs:
        return self.inputs.part(0, settings.PROBED)

    def _without(self, kept: Set[Site]) -> dict[Site, Range]:
        return {site: known for site, known in self.ranges.items() if site not in kept}

    def _note(
        self,
        setting: str,
        ranges: Ranges,
        inputs: TokenInputs | None = None,
        site: Site | None = None,
        kept: Iterable[Site] = (),
        outliers: bool = False,
    ) -> float:
        """Measure and record one setting. Returns its cost: the loss minus that of full precision on the same text."""
        inputs = inputs or self.inputs
        measured = self.bench.measure(ranges, inputs, outliers)
        return self._write(setting, measured, len(ranges), inputs, site, kept=kept)

    def _write(
        self,
        setting: str,
        measured: Measured,
        quantized: int,
        inputs: TokenInputs,
        site: Site | None = None,
        layer: int = settings.ALL_LAYERS,
        kept: Iterable[Site] = (),
    ) -> float:
        """Add the row of a setting. Returns its cost."""
        cost = 0.0 if setting == settings.FULL else measured.loss - self._row(settings.FULL, inputs)["loss"]
        self.rows.append(
            {
                "layer": layer,
                "setting": setting,
                "site": site.kind if site else "",
                "part": site.part if site else "",
                "quantized": quantized,
                "kept": ", ".join(str(site) for site in kept),
                "sequences": len(inputs),
                "cost": cost,
                "perplexity": measured.perplexity,
                **asdict(measured),
            }
        )
        return cost

    def _row(self, setting: str, inputs: TokenInputs) -> dict[str, Any]:
        return next(row for row in self.rows if row["setting"] == setting and row["sequences"] == len(inputs))

    def _sites(self) -> pd.DataFrame:
        rows = [
            {"layer": site.layer, "site": site.kind, "part": site.part, "path": site.path, "max_abs": known.max_abs}
            | {name: getattr(known, name) for name in ("low", "high", "median_abs", "is_massive")}
            | asdict(self.roundings[site])
            for site, known in self.ranges.items()
        ]
        return pd.DataFrame(rows)

"""One model on one input, measured in full precision and quantized, whatever the sites."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from rich.console import Console

from sinkscope.interventions import Intervention
from sinkscope.measuring.calibration import measured_ranges, measured_roundings
from sinkscope.measuring.losses import perplexity
from sinkscope.measuring.observables.observable import Observable, Settings
from sinkscope.measuring.observables.outlier import Outlier
from sinkscope.measuring.parity import ParityCheck
from sinkscope.measuring.passes import Pass, Step, pass_over
from sinkscope.measuring.resumed import FEW, Change, Resumed, tried
from sinkscope.measuring.subject import Subject
from sinkscope.measuring.tracer import Tracer, open_tracer
from sinkscope.models.edits import Beginning
from sinkscope.quantization.ranges import Precision, Range, Rounding
from sinkscope.quantization.simulation import quantized_attention, quantized_sites
from sinkscope.quantization.sites import LINEAR_SCHEME, Site, sites_of
from sinkscope.text.inputs import TokenInputs


@dataclass(frozen=True)
class Measured:
    """What was measured of one setting."""

    loss: float  # per predicted token, in nats
    max_inf_norm: float = math.nan  # the largest over sites and layers
    kurtosis: float = math.nan  # mean over sites and layers

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)


@dataclass
class Bench:
    """A model and its inputs, to be measured with any sites quantized, always under the same interventions."""

    subject: Subject
    precision: Precision
    kernel: str = "sdpa"
    batch_size: int | Literal["auto"] = "auto"
    interventions: tuple[Intervention, ...] = ()
    console: Console | None = None
    parity: ParityCheck | None = None  # of passes in full precision
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
        """Measure the model with these sites quantized; with `outliers` infinity norm and kurtosis, too."""

        def fresh() -> list[Observable]:
            compared = self.parity.fresh() if self.parity and not ranges else []
            return [*([Outlier(Settings())] if outliers else []), *compared]

        with self._quantized(ranges) as tracer:
            done = self._pass(inputs, fresh, tracer.forward_with_loss)
        return Measured(done.loss / inputs.num_predicted, **_outliers(done.observables))

    def measure_each(self, settings: Sequence[Mapping[Site, Range]], inputs: TokenInputs) -> list[Measured]:
        """As `measure` of every setting, each begun at the first layer that it quantizes a site of.

        Whether the model can begin at a layer is tried on the first sequences, at the last of these layers: the loss
        has to be bit for bit that of a whole pass.
        """
        layers = [min(site.layer for site in ranges) for ranges in settings]
        order = sorted(range(len(settings)), key=lambda place: layers[place])
        changes = [Change(layers[place], partial(self._quantized, settings[place])) for place in order]
        if not changes or layers[order[0]] < 1 or not self._resumes(changes[-1], settings[order[-1]], inputs):
            return [self.measure(ranges, inputs) for ranges in settings]
        done = dict(zip(order, self._passes_from(changes, inputs), strict=True))
        return [Measured(done[place].loss / inputs.num_predicted) for place in range(len(settings))]

    def _resumes(self, change: Change, ranges: Mapping[Site, Range], inputs: TokenInputs) -> bool:
        if self.interventions or not self.subject.family.causal:
            return False
        few = inputs.part(0, FEW)
        resumed = tried(lambda changes: self._passes_from(changes, few), change)
        return resumed is not None and resumed.loss / few.num_predicted == self.measure(ranges, few).loss

    def _passes_from(self, changes: Sequence[Change], inputs: TokenInputs) -> list[Pass[Observable]]:
        resumed = Resumed(self.subject, self.kernel, changes, Tracer.forward_with_loss)
        return resumed.passes(self._pass(inputs, resumed.fresh, resumed))

    def _pass(self, inputs: TokenInputs, fresh: Callable[[], list[Observable]], step: Step) -> Pass[Observable]:
        size = self.used_batch_size or self.batch_size
        done = pass_over(self.subject.loaded.model, inputs, fresh, step, size, console=self.console)
        self.used_batch_size = self.used_batch_size or done.batch_size  # what fitted once fits again
        return done

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


def _outliers(observables: Iterable[Observable]) -> dict[str, float]:
    for by_site in (observable.tables()["outlier"] for observable in observables if isinstance(observable, Outlier)):
        by_layer = by_site.groupby("layer")["kurtosis"].mean()
        return {"max_inf_norm": float(by_site["max_inf_norm"].max()), "kurtosis": float(by_layer.mean())}
    return {}


def w8a8(
    subject: Subject,
    calibration: TokenInputs,
    *,
    precision: Precision | None = None,
    kernel: str = "sdpa",
    batch_size: int | Literal["auto"] = "auto",
    interventions: Iterable[Intervention] = (),
) -> dict[str, float]:
    """What quantizing every linear layer but the LM head costs on the subject's input.

    In a retrofitted model the same layers are quantized. What a retrofit has added (gates, λ, logits, keys, registers)
    stays in full precision. The value projection's output is quantized before a gate on values, the output projection's
    input after a gate on heads' outputs.

    Args:
        calibration: other sequences, from which the static ranges come.
        precision: None: 8 bits, one grid a tensor.
        interventions: on the model throughout, calibration included.

    Returns:
        loss, perplexity, max_inf_norm and kurtosis in full precision, and the same quantized: loss_quantized, ….
    """
    bench = Bench(subject, precision or Precision(), kernel, batch_size, tuple(interventions))
    arms: dict[str, dict[Site, Range]] = {"": {}, "_quantized": bench.ranges(calibration)}
    found: dict[str, float] = {}
    for ending, ranges in arms.items():
        measured = bench.measure(ranges, subject.inputs, outliers=True)
        for name in ("loss", "perplexity", "max_inf_norm", "kurtosis"):
            found[name + ending] = getattr(measured, name)
    return found

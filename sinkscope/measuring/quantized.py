"""One model on one input, measured in full precision and quantized, whatever the sites."""

import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from rich.console import Console

from sinkscope.interventions import Intervention
from sinkscope.measuring.calibration import measured_ranges, measured_roundings
from sinkscope.measuring.observables.observable import Observable, Settings
from sinkscope.measuring.observables.outlier import Outlier
from sinkscope.measuring.parity import ParityCheck
from sinkscope.measuring.passes import pass_over
from sinkscope.measuring.subject import Subject
from sinkscope.measuring.tracer import Tracer, open_tracer
from sinkscope.quantization.ranges import Precision, Range, Rounding
from sinkscope.quantization.simulation import quantized_attention, quantized_sites
from sinkscope.quantization.sites import LINEAR_SCHEME, Site
from sinkscope.text.inputs import TokenInputs


@dataclass(frozen=True)
class Measured:
    """What was measured of one setting."""

    loss: float  # per predicted token, in nats
    max_inf_norm: float = math.nan  # the largest over sites and layers
    kurtosis: float = math.nan  # mean over sites and layers

    @property
    def perplexity(self) -> float:
        with np.errstate(over="ignore"):
            return float(np.exp(self.loss))


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
        with self._tracer() as tracer:
            has_cache = self.precision.kv_cache_per is not None
            return measured_ranges(tracer, calibration.sequences, self.scheme, has_cache)

    def roundings(self, calibration: TokenInputs, ranges: Mapping[Site, Range]) -> dict[Site, Rounding]:
        with self._tracer() as tracer:
            return measured_roundings(tracer, calibration.sequences, ranges, self.precision)

    def measure(self, ranges: Mapping[Site, Range], inputs: TokenInputs, outliers: bool = False) -> Measured:
        """Measure the model with these sites quantized; with `outliers` infinity norm and kurtosis, too."""

        def fresh() -> list[Observable]:
            compared = self.parity.fresh() if self.parity and not ranges else []
            return [*([Outlier(Settings())] if outliers else []), *compared]

        with (
            quantized_sites(self.subject.loaded.model, ranges, self.precision),
            self._tracer() as tracer,
            quantized_attention(tracer.seams, ranges, self.precision),
        ):
            size = self.used_batch_size or self.batch_size
            done = pass_over(tracer, inputs, fresh, tracer.forward_with_loss, size, console=self.console)
        self.used_batch_size = self.used_batch_size or done.batch_size  # what fitted once fits again
        return Measured(done.loss / inputs.num_predicted, **_outliers(done.observables))

    def _tracer(self) -> AbstractContextManager[Tracer]:
        return open_tracer(self.subject.loaded.model, self.subject.family, self.kernel, self.interventions)


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

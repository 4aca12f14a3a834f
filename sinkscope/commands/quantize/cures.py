"""Cures of what a number format costs (the table `formats_cures`), each measured next to its control.

A cure keeps some modules in full precision, or changes the model so that it computes the same function with numbers
that the format rounds better, or puts a prefix before each sequence. It is measured on all texts, like three draws of
its control: as many random modules, the same factors at random channels, a permutation of coordinates (which moves the
gains of norms into the weights as a rotation does), or random tokens. What it recovers is the scheme's cost minus the
cost with the cure, which is the rise of the loss above full precision with the same cure.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from sinkscope.attention.kernels import upcast
from sinkscope.commands.quantize.prefixes import OUTLIER_RATIO, Prefixes, SparingText, outlier_prefix
from sinkscope.commands.quantize.served import AHEAD, RANDOM_DRAWS, Factors, LargestFactors, ServedStudy, StoredInputs
from sinkscope.errors import InputError
from sinkscope.measuring.console import print_line
from sinkscope.measuring.engine import Setting
from sinkscope.measuring.observables.observable import Observable, Sums, deliver
from sinkscope.measuring.processes import alone
from sinkscope.measuring.tracer import Tracer
from sinkscope.models.family import embedding_weight
from sinkscope.models.norms import ModuleEnds, reparametrized, scaled_inputs
from sinkscope.models.rotation import random_rotation, rotated
from sinkscope.quantization import settings
from sinkscope.quantization.formats import Preset
from sinkscope.quantization.products import Matrix, Product
from sinkscope.quantization.smoothing import NormOutputs, awq_factors, shuffled, smoothing_factors
from sinkscope.results.tables import WHOLE_MODEL, Column, Columns
from sinkscope.text.batch import Batch

MOST_SPARED = 0.25  # largest share of the modules that is spared

CURE_TABLES: dict[str, Columns] = {
    "formats_cures": (
        Column("scheme", "as in formats", kind="text"),
        Column("cure", "spare, smoothquant, awq, rotation or prefix", kind="text"),
        Column("setting", "of the cure: the number of modules, α, or the ids of the prefix", kind="text"),
        Column("cost", "of the scheme without a cure, as in formats", "nats per token"),
        Column("cost_low", "lower end of its 95 % interval over texts", "nats per token"),
        Column("cost_high", "upper end", "nats per token"),
        Column("recovered", "cost minus the cost with the cure", "nats per token"),
        Column("recovered_low", "lower end of its 95 % interval over texts", "nats per token"),
        Column("recovered_high", "upper end", "nats per token"),
        Column("random_recovered", "the same of the control, mean over draws", "nats per token"),
        Column("random_recovered_low", "the smallest draw", "nats per token"),
        Column("random_recovered_high", "the largest draw", "nats per token"),
        *AHEAD,
    ),
    "formats_modules": (
        Column("scheme", "as in formats", kind="text"),
        Column("module", "path of the module in the model", kind="text"),
        Column("predicted", "rise of the loss if it alone is quantized, by gradients", "nats per token"),
        Column("is_spared", "whether the cure `spare` keeps it in full precision", kind="truth"),
    ),
}


class OutputErrors:
    """Predicts how much the loss rises if one matrix alone is quantized, from gradients and errors of its outputs.

    An output y_t that is off by e_t raises the loss by about ½ (g_t · e_t)², where g_t is the gradient of the loss: the
    second-order term with the empirical Fisher matrix of each token (Optimal Brain Surgeon; LeCun et al. 1990).
    """

    def __init__(self, factors: Factors) -> None:
        """`factors` have one setting."""
        self.factors = factors
        self.rise: Sums[Matrix] = Sums()  # in nats, summed over the text

    def read(self, tracer: Tracer, batch: Batch, observables: Sequence[Observable]) -> torch.Tensor:
        self.factors.begin(batch)
        losses = tracer.forward_backward(batch, observables)
        deliver([self.rise])
        return losses

    def __call__(
        self, matrix: Matrix, product: Product, x: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor | None
    ) -> torch.Tensor:
        y = product(x, weight)
        with torch.no_grad():
            error = self.factors(matrix, product, x, weight, tokens) - y

        def see(gradient: torch.Tensor) -> None:
            rise = (upcast(gradient) * upcast(error)).sum(-1).square().sum() / 2
            self.rise.receive(lambda nats: self.rise.add(matrix, float(nats)), rise)

        if y.requires_grad:
            y.register_hook(see)
        return y


class Cured(NamedTuple):
    """A cure's setting, and the rises of the loss (N,) of sequences above full precision, with it and its control."""

    setting: str
    rise: np.ndarray
    control: list[np.ndarray]


class CureStudy:
    """Measures cures of schemes that a study has measured."""

    def __init__(self, study: ServedStudy, alpha: float, seed: int) -> None:
        self.study, self.alpha, self.seed = study, alpha, seed
        self.model, self.family = study.subject.loaded.model, study.subject.family
        self.dense = study.full.losses.numpy()
        self.absent: dict[str, dict[str, str]] = {}  # scheme → cure → why it does not apply
        self.modules: list[dict[str, Any]] = []  # rows of formats_modules

    def tables(self, schemes: Mapping[str, Preset], cures: Sequence[str]) -> dict[str, pd.DataFrame]:
        measures: dict[str, Callable[[str, Preset], Cured]]
        measures = {
            "spare": self.spare,
            "smoothquant": self.smoothquant,
            "awq": self.awq,
            "rotation": self.rotation,
            "prefix": self.prefix,
        }
        rows = []
        for name, preset in schemes.items():
            every = self._rise(preset)
            for cure in cures:
                try:
                    setting, rise, control = measures[cure](name, preset)
                except InputError as error:
                    self.absent.setdefault(name, {})[cure] = str(error)
                    continue
                print_line(self.study.console, f"{name}: {cure} is measured")
                row: dict[str, Any] = {"layer": WHOLE_MODEL, "scheme": name, "cure": cure, "setting": setting}
                row |= self.study.cost(every, np.zeros_like(every)).as_columns("cost")
                rows.append(row | self.study.recovery(("recovered", "random_recovered"), every, rise, control))
        tables = {"formats_cures": pd.DataFrame(rows)} if rows else {}
        return tables | ({"formats_modules": pd.DataFrame(self.modules)} if self.modules else {})

    def _rise(self, preset: Preset) -> np.ndarray:
        """Return the rise of the loss (N,) that a scheme causes."""
        return self.study.losses[preset.weights, preset.inputs][0] - self.dense

    # --- modules in full precision

    def spare(self, name: str, preset: Preset) -> Cured:
        """Keep the modules in full precision that cost most.

        Modules are ranked by `OutputErrors` on the first PROBED sequences; 1, 2, 4, … of them are spared until little
        of the cost remains.
        """
        study = self.study
        probed = min(settings.PROBED, len(study.subject.inputs))
        probes = replace(study.subject, inputs=study.subject.inputs.part(0, probed))
        layers = {matrix.module: matrix.layer for matrix in study.matrices}
        inputs = StoredInputs(preset.inputs, (), study.largest_inputs)
        factors = Factors(preset.weights, [inputs], study.largest_weights, study.registers)
        errors = OutputErrors(factors)
        predicting = Setting(partial(study.opened, study.matrices, errors), errors.read)
        with alone():
            study.run([predicting], probes, backward=True, batch_size=study.batch_size)
        predicted: dict[str, float] = defaultdict(float)
        for matrix, nats in errors.rise.items():
            predicted[matrix.module] += nats / probes.inputs.num_predicted
        modules = sorted(predicted, key=lambda module: -predicted[module])

        def setting(spared: Sequence[str]) -> Setting:
            matrices = [matrix for matrix in study.matrices if matrix.module not in spared]
            return Setting(partial(study.opened, matrices, factors), factors.read)

        whole = self._rise(preset)[:probed].sum()
        count, cost, most = 0, math.inf, int(MOST_SPARED * len(modules))
        while cost > settings.RESTORED * whole and count < most:
            count = min(max(1, 2 * count), most)
            (remaining,) = study.run([setting(modules[:count])], probes)
            cost = float(remaining.losses.sum()) - self.dense[:probed].sum()
        for place, module in enumerate(modules):
            row = {"layer": layers[module], "scheme": name, "module": module, "predicted": predicted[module]}
            self.modules.append(row | {"is_spared": place < count})
        drawn = np.random.default_rng(self.seed)
        choices = [modules[:count], *(list(drawn.choice(modules, count, False)) for _ in range(RANDOM_DRAWS))]
        spared = [done.losses[:, 0].numpy() - self.dense for done in study.run([setting(each) for each in choices])]
        return Cured(str(count), spared[0], spared[1:])

    # --- the same function with other numbers

    def smoothquant(self, name: str, preset: Preset) -> Cured:
        if preset.inputs is None:
            raise InputError("its inputs are not quantized")
        outputs, readers = self._norm_outputs, self._readers
        factors = {norm: smoothing_factors(outputs.largest[norm], readers[norm], self.alpha) for norm in readers}
        return Cured(f"{self.alpha:g}", *self._scaled(factors, preset))

    def awq(self, name: str, preset: Preset) -> Cured:
        if preset.inputs is not None:
            raise InputError("it is for schemes that quantize weights alone")
        outputs, factors = self._norm_outputs, {}
        for norm, readers in self._readers.items():
            rows = torch.cat(outputs.rows[norm]).to(outputs.largest[norm].device)
            factors[norm] = awq_factors(outputs.mean(norm), rows, readers, preset.weights)
        return Cured("", *self._scaled(factors, preset))

    def rotation(self, name: str, preset: Preset) -> Cured:
        """Rotate the residual stream; the control only permutes its coordinates."""
        width = embedding_weight(self.model).shape[1]
        permutations = [
            torch.eye(width, dtype=torch.float64)[np.random.default_rng(self.seed + draw).permutation(width)]
            for draw in range(RANDOM_DRAWS)
        ]
        rotations = [random_rotation(width, self.seed), *permutations]
        rise, *control = (
            self._losses_under(preset, rotated(self.model, self.family, rotation)) - self.dense
            for rotation in rotations
        )
        return Cured("", rise, control)

    @cached_property
    def _readers(self) -> dict[Any, list[Any]]:
        """The norms whose readers are all quantized, with those readers."""
        paths = {matrix.path for matrix in self.study.matrices}
        modules = {self.model.get_submodule(path) for path in paths}
        readers = ModuleEnds(self.model).readers_of_norms()
        if not (readers := {norm: layers for norm, layers in readers.items() if modules.issuperset(layers)}):
            raise InputError("no norm is read by quantized linear layers alone")
        return readers

    @cached_property
    def _norm_outputs(self) -> NormOutputs:
        outputs = NormOutputs(self._readers, len(self.study.calibration))
        with outputs.recorded():
            self.study.calibrated(self.study.calibration)
        return outputs

    def _scaled(self, factors: Mapping[Any, torch.Tensor], preset: Preset) -> tuple[np.ndarray, list[np.ndarray]]:
        """Return the rises (N,) with inputs divided by factors, and with the same factors at random channels."""
        choices = [factors, *(shuffled(factors, self.seed + draw) for draw in range(RANDOM_DRAWS))]
        edits = [partial(scaled_inputs, self._readers, each) for each in choices]
        rise, *control = (
            self._losses_under(preset, reparametrized(self.model, each, "scaling of norms")) - self.dense
            for each in edits
        )
        return rise, control

    def _losses_under(
        self,
        preset: Preset,
        changed: AbstractContextManager[None],
        text: SparingText | None = None,
        calibration: SparingText | None = None,
    ) -> np.ndarray:
        """Return the losses (N,) with a scheme in a changed model or on other texts, with ranges measured there."""
        study = self.study
        text, calibration = text or SparingText(study.subject.inputs), calibration or SparingText(study.calibration)
        with changed:
            recorder = LargestFactors(study.registers)  # of nothing
            if preset.is_calibrated:
                recorder, _ = study.calibrated(calibration.inputs)
            inputs = StoredInputs(preset.inputs, text.spared, recorder.inputs(calibration.spared))
            factors = Factors(preset.weights, [inputs], recorder.fused_weights(), study.registers)
            quantized = Setting(partial(study.opened, study.matrices, factors), factors.read, inputs=text.inputs)
            (done,) = study.run([quantized])
        return done.losses[:, 0].numpy()

    # --- a prefix

    def prefix(self, name: str, preset: Preset) -> Cured:
        """Put tokens before each sequence, with their inputs in full precision."""
        if preset.inputs is None:
            raise InputError("its inputs are not quantized")
        ids, texts = self._prefixed
        rise, *control = (
            self._losses_under(preset, nullcontext(), text, calibration) - dense for text, calibration, dense in texts
        )
        return Cured(" ".join(map(str, ids)), rise, control)

    @cached_property
    def _prefixed(self) -> tuple[tuple[int, ...], list[tuple[SparingText, SparingText, np.ndarray]]]:
        """PrefixQuant's tokens and the BOS; and with them, then with random tokens, before each sequence: the texts to
        evaluate and to calibrate, and the losses (N,) in full precision.

        Outlier tokens are those of the input of any matrix, in full precision.
        """
        study = self.study
        prefixes = Prefixes(study.subject, study.calibration)
        reads = [each for each in study.recorder.of_inputs.values() if all(rows is None for _, rows, _ in each)]
        outliers = [
            np.array([magnitudes > OUTLIER_RATIO * np.median(magnitudes) for magnitudes in of_sequence])
            for of_sequence in zip(*([magnitudes for *_, magnitudes in each] for each in reads), strict=True)
        ]
        last = () if prefixes.bos is None else (prefixes.bos,)
        rule = (*outlier_prefix(outliers, study.calibration.sequences), *last)
        ids = prefixes.checked(rule or (int(study.calibration.sequences[0][0]),))
        drawn = np.random.default_rng(self.seed)
        choices = [ids, *(prefixes.random(len(ids), drawn) for _ in range(RANDOM_DRAWS))]
        texts, calibrations = (
            [prefixes.before(choice, inputs) for choice in choices]
            for inputs in (study.subject.inputs, study.calibration)
        )
        full = [Setting(partial(study.opened, (), study.recorder), inputs=text.inputs) for text in texts]
        dense = [done.losses.numpy() for done in study.run(full)]
        return ids, list(zip(texts, calibrations, dense, strict=True))

"""What the number formats that are served cost (the table `formats`): weights and inputs of every linear layer.

Each setting stores weights, inputs or both in a format. The sinks' share is the cost that disappears if the inputs of
sink tokens stay in full precision and out of the calibration; equally many random tokens are its control. Settings with
the same weights are read in one forward pass, side by side in the batch, so that the weights are rounded once for them.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from rich.console import Console

from sinkscope.errors import InputError
from sinkscope.measuring.console import lasting, print_line
from sinkscope.measuring.engine import Setting, resampled_cost, run_settings
from sinkscope.measuring.losses import perplexity
from sinkscope.measuring.memory import sequences_that_fit
from sinkscope.measuring.observables.massive import Massive
from sinkscope.measuring.observables.observable import Accumulator, Lists, Observable, Settings, deliver
from sinkscope.measuring.parity import Parity
from sinkscope.measuring.passes import Pass
from sinkscope.measuring.processes import alone
from sinkscope.measuring.sink_rule import SinkRule
from sinkscope.measuring.subject import Subject
from sinkscope.measuring.tracer import Tracer, open_tracer
from sinkscope.models.adapters import check_no_adapter
from sinkscope.models.edits import Beginning
from sinkscope.models.packed import check_not_packed
from sinkscope.quantization.formats import Encoding, Preset
from sinkscope.quantization.products import (
    Matrix,
    Product,
    ProductChange,
    all_experts_read,
    changed_products,
    matrices_of,
)
from sinkscope.quantization.rounding import snap
from sinkscope.quantization.spared import random_tokens
from sinkscope.results.statistics import Estimate, bootstrap
from sinkscope.results.tables import SEQUENCE, WHOLE_MODEL, Column, Columns, names_of
from sinkscope.retrofits.retrofit import registers_before
from sinkscope.text.batch import Batch, sent
from sinkscope.text.inputs import TokenInputs

RANDOM_DRAWS = 3  # draws of a control
PARTS = ALL, WEIGHTS, INPUTS = "all", "weights", "inputs"

AHEAD: Columns = (
    Column("ahead", "what is recovered minus the mean of the control's draws, on the same texts", "nats per token"),
    Column("ahead_low", "lower end of its 95 % interval over texts", "nats per token"),
    Column("ahead_high", "upper end", "nats per token"),
)
FORMAT_TABLES: dict[str, Columns] = {
    "formats": (
        Column("scheme", "a preset of compressed-tensors", kind="text"),
        Column("part", "what is stored in its formats: all, weights or inputs", kind="text"),
        Column("loss", "mean cross-entropy", "nats per token"),
        Column("perplexity", "exp(loss)"),
        Column("cost", "loss minus the loss in full precision", "nats per token"),
        Column("cost_low", "lower end of its 95 % interval over texts", "nats per token"),
        Column("cost_high", "upper end", "nats per token"),
        Column("ratio", "perplexity ÷ that in full precision"),
        Column("sink_share", "cost minus the cost with sink tokens in full precision", "nats per token"),
        Column("sink_share_low", "lower end of its 95 % interval over texts", "nats per token"),
        Column("sink_share_high", "upper end", "nats per token"),
        Column("random_share", "the same for as many random tokens, mean over draws", "nats per token"),
        Column("random_share_low", "the smallest draw", "nats per token"),
        Column("random_share_high", "the largest draw", "nats per token"),
        *AHEAD,
    ),
    "formats_losses": (
        Column("scheme", "as in formats", kind="text"),
        Column("part", "as in formats", kind="text"),
        SEQUENCE,
        Column("predicted", "number of predicted tokens of the sequence", kind="whole"),
        Column("loss", "cross-entropy, summed over them", "nats"),
        Column("cost", "loss minus the loss in full precision", "nats"),
    ),
}

Pair = tuple[Encoding | None, Encoding | None]  # of weights and of inputs
Spared = Sequence[np.ndarray]  # by sequence: (T,) bool, the tokens whose inputs stay in full precision


@dataclass(frozen=True)
class StoredInputs:
    """How a setting stores inputs."""

    encoding: Encoding | None = None  # None: as they are
    spared: Spared = ()
    largest: Mapping[Matrix, float] = field(default_factory=dict)  # of static ranges


class Factors:
    """Rounds the factors of products for settings that are side by side in the batch, with the same weights."""

    def __init__(
        self,
        weights: Encoding | None,
        settings: Sequence[StoredInputs],
        largest_weights: Mapping[Matrix, float],
        registers: int,
    ) -> None:
        self.weights, self.settings, self.largest_weights = weights, settings, largest_weights
        # the numbers of settings that follow each other and store inputs in one format, which are rounded together
        numbers = range(len(settings))
        self.alike = [list(each) for _, each in groupby(numbers, key=lambda number: settings[number].encoding)]
        self.largest: dict[tuple[Matrix, int, torch.device], torch.Tensor] = {}  # of static ranges, by first setting
        self.registers = registers  # tokens that the model puts before each sequence
        # (settings · B · T,), of the batch that is read, by device
        self.spared: dict[torch.device, torch.Tensor] = {}
        self.number_of_tokens = 0  # settings · B · T

    def begin(self, batch: Batch) -> None:
        """Take the spared tokens of a batch, which the model reads once for each setting."""
        size, columns = batch.token_ids.shape
        spared = torch.zeros(len(self.settings), size, columns + self.registers, dtype=torch.bool)
        for of_setting, setting in zip(spared, self.settings, strict=True):
            for row, mask in zip(of_setting, setting.spared[batch.first : batch.first + size], strict=False):
                row[self.registers : self.registers + len(mask)] = torch.from_numpy(mask)
        self.spared, self.number_of_tokens = {spared.device: spared.flatten()}, spared.numel()

    def spared_on(self, device: torch.device) -> torch.Tensor:
        if device not in self.spared:
            self.spared[device] = sent(self.spared[torch.device("cpu")], device)
        return self.spared[device]

    def read(self, tracer: Tracer, batch: Batch, observables: Sequence[Observable]) -> torch.Tensor:
        """Return the loss of each sequence under each setting, (B,settings)."""
        self.begin(batch)
        losses = tracer.forward_with_loss(batch.repeated(len(self.settings)), ())
        return losses.view(len(self.settings), -1).T

    def __call__(
        self, matrix: Matrix, product: Product, x: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor | None
    ) -> torch.Tensor:
        if self.weights is not None:
            is_fused = self.weights.strategy == "tensor_group"
            weight = snap(self.weights, weight, self.largest_weights[matrix] if is_fused else None)
        if not any(setting.encoding for setting in self.settings):
            return product(x, weight)
        rows = x.reshape(-1, x.shape[-1])
        # the text's tokens, not a picture's patches
        is_by_token = tokens is not None or len(rows) == self.number_of_tokens
        count = (self.number_of_tokens if is_by_token else len(rows)) // len(self.settings)  # rows of a setting
        rounded = rows.clone()
        for numbers in self.alike:
            encoding = self.settings[numbers[0]].encoding
            first, end = numbers[0] * count, (numbers[-1] + 1) * count
            selected: Any = slice(first, end) if tokens is None else (tokens >= first) & (tokens < end)
            # an expert may be given no token of these settings
            if encoding is None or not (entries := rows[selected]).numel():
                continue
            largest = None if encoding.dynamic is True else self._largest(matrix, numbers, x)
            if isinstance(largest, torch.Tensor):
                places = torch.arange(first, end, device=x.device) if tokens is None else tokens[selected]
                largest = largest[places // count - numbers[0]]
            snapped = snap(encoding, entries, largest)
            if is_by_token and any(self.settings[number].spared for number in numbers):
                exact = self.spared_on(x.device)[selected if tokens is None else tokens[selected]][:, None]
                snapped = torch.where(exact, entries, snapped)
            rounded[selected] = snapped
        return product(rounded.view_as(x), weight)

    def _largest(self, matrix: Matrix, numbers: Sequence[int], x: torch.Tensor) -> float | torch.Tensor | None:
        """Return the largest magnitude of the inputs of a matrix under some settings, (settings,1) if they differ."""
        largest = [self.settings[number].largest.get(matrix) for number in numbers]
        if len(set(largest)) == 1:
            return largest[0]
        key = matrix, numbers[0], x.device
        if key not in self.largest:
            of_settings = torch.tensor(largest, dtype=torch.promote_types(x.dtype, torch.float32))
            self.largest[key] = sent(of_settings[:, None], x.device)
        return self.largest[key]


class LargestFactors(Accumulator):
    """Records the largest magnitudes of all weights, and of inputs token by token; sequences are read one by one."""

    def __init__(self, registers: int) -> None:
        self.registers = registers
        self.of_weights: dict[Matrix, float] = {}
        self.widths: dict[Matrix, int] = {}  # of inputs
        # matrix → sequence, its tokens that the matrix reads (None: all), and the largest magnitude of each
        self.of_inputs: Lists[Matrix, tuple[int, np.ndarray | None, np.ndarray]] = Lists(list)
        self.sequence = 0

    def read(self, tracer: Tracer, batch: Batch, observables: Sequence[Observable]) -> torch.Tensor:
        self.sequence = batch.first
        losses = tracer.forward_with_loss(batch, observables)
        deliver([self])
        return losses

    def __call__(
        self, matrix: Matrix, product: Product, x: torch.Tensor, weight: torch.Tensor, tokens: torch.Tensor | None
    ) -> torch.Tensor:
        if matrix not in self.widths:
            self.widths[matrix] = weight.shape[1]
            self.receive(lambda most: self.of_weights.update({matrix: float(most)}), weight.abs().max())
        largest = x.reshape(-1, x.shape[-1]).abs().amax(-1).float()
        self.receive(partial(self._add, matrix, self.sequence), largest, *([] if tokens is None else [tokens]))
        return product(x, weight)

    def _add(self, matrix: Matrix, sequence: int, largest: torch.Tensor, tokens: torch.Tensor | None = None) -> None:
        self.of_inputs[matrix].append((sequence, None if tokens is None else tokens.numpy(), largest.numpy()))

    def fused_weights(self) -> dict[Matrix, float]:
        """Return the largest magnitude of each weight and of those next to it that read the same input.

        Servers fuse them into one matrix (query, key and value; gate and up), and llm-compressor gives it one scale.
        """
        groups: dict[tuple, list[Matrix]] = {}
        for matrix, reads in self.of_inputs.items():
            same = matrix.path.rpartition(".")[0], *(largest.tobytes() for *_, largest in reads)
            groups.setdefault(same if matrix.expert is None else (matrix,), []).append(matrix)
        largest = (max(self.of_weights[matrix] for matrix in group) for group in groups.values())
        return {matrix: most for group, most in zip(groups.values(), largest, strict=True) for matrix in group}

    def inputs(self, spared: Spared = ()) -> dict[Matrix, float]:
        """Return the largest magnitude of each matrix's inputs, without those of spared tokens."""
        largest: dict[Matrix, float] = {}
        masks = [np.concatenate([np.zeros(self.registers, dtype=bool), mask]) for mask in spared]
        for matrix, reads in self.of_inputs.items():
            largest[matrix] = 0.0
            for sequence, tokens, magnitudes in reads:
                if masks:
                    mask = masks[sequence] if tokens is None else masks[sequence][tokens]
                    if len(mask) == len(magnitudes):  # the text's tokens, not a picture's patches
                        magnitudes = magnitudes[~mask]
                largest[matrix] = max(largest[matrix], float(magnitudes.max(initial=0.0)))
        return largest


class ServedStudy:
    """Measures schemes on a subject's inputs; static ranges are those of other texts, `calibration`."""

    def __init__(
        self,
        subject: Subject,
        calibration: TokenInputs,
        parity: Parity,
        kernel: str,
        batch_size: int | Literal["auto"],
        console: Console,
    ) -> None:
        self.subject, self.kernel, self.batch_size, self.console = subject, kernel, batch_size, console
        model, family = subject.loaded.model, subject.family
        check_not_packed(model, "simulated quantization")
        check_no_adapter(model, "simulated quantization")
        self.registers = registers_before(model)
        self.calibration = calibration
        self.losses: dict[Pair, np.ndarray] = {}  # (settings,N) of the sequences, as `tables` measured them
        self.matrices = matrices_of(model, family)
        self.recorder, calibrated = self.calibrated(calibration)
        dense = Setting(
            partial(self.opened, (), self.recorder), observables=lambda: [Massive(Settings()), *parity.fresh()]
        )
        start = time.monotonic()
        (self.full,) = self.run([dense], batch_size=batch_size)
        self.seconds = time.monotonic() - start  # of one pass over the texts
        self.fitting_sequences = self.full.batch_size
        if batch_size == "auto" and self.full.batch_size == len(subject.inputs):  # more than there are may fit
            self.fitting_sequences = sequences_that_fit(model, subject.inputs.longest, backward=False)
        self.largest_weights, self.largest_inputs = self.recorder.fused_weights(), self.recorder.inputs()
        if not (widths := self.recorder.widths):
            raise InputError("this model has no linear layers that could be quantized")
        self.matrices, self.widths = [matrix for matrix in self.matrices if matrix in widths], set(widths.values())
        entries, of_text = (done.observables[0].tables()["massive"] for done in (calibrated, self.full))
        self.rule = SinkRule.of(entries[entries["is_massive"]])
        texts = ((calibration, entries), (subject.inputs, of_text))
        self.calibration_sinks, self.sinks = (
            [
                np.isin(np.arange(len(ids)), positions)
                for ids, positions in zip(inputs.sequences, self.rule.of_each(table, range(len(inputs))), strict=True)
            ]
            for inputs, table in texts
        )

    @property
    def share(self) -> float:
        """The share of the model's parameters that the matrices have."""
        parameters = dict(self.subject.loaded.model.named_parameters())
        total = sum(parameter.numel() for parameter in parameters.values())
        return sum(parameters[path].numel() for path in {each.parameter_path for each in self.matrices}) / total

    @contextmanager
    def opened(
        self, matrices: Sequence[Matrix], change: ProductChange, beginning: Beginning | None
    ) -> Iterator[Tracer]:
        model, family = self.subject.loaded.model, self.subject.family
        with (
            changed_products(model, matrices, change),
            open_tracer(model, family, self.kernel, beginning=beginning) as tracer,
        ):
            yield tracer

    def run(self, settings: Sequence[Setting], subject: Subject | None = None, **how: Any) -> list[Pass]:
        """Run settings on the texts that are evaluated, or on those of another subject."""
        if "batch_size" not in how:
            how["batch_size"] = self.full.batch_size  # the one that fitted into memory
        how |= {"kernel": self.kernel, "console": self.console}
        return run_settings(subject or self.subject, settings, **how)

    def calibrated(self, calibration: TokenInputs) -> tuple[LargestFactors, Pass]:
        """Read the calibration text with the model as it is now."""
        recorder = LargestFactors(self.registers)
        opened = partial(self.opened, self.matrices, recorder)
        setting = Setting(opened, recorder.read, observables=lambda: [Massive(Settings())])
        with all_experts_read(self.subject.loaded.model, self.matrices), alone():
            return recorder, self.run([setting], replace(self.subject, inputs=calibration), batch_size=1)[0]

    def tables(self, schemes: Mapping[str, Preset], seed: int) -> dict[str, pd.DataFrame]:
        """Measure schemes, each with everything, weights and inputs in its formats."""
        drawn = np.random.default_rng(seed)
        spared: list[tuple[Spared, Spared]] = [(self.sinks, self.calibration_sinks)]
        spared += [
            ([random_tokens(mask, drawn) for mask in self.sinks], [random_tokens(mask, drawn) for mask in masks])
            for masks in [self.calibration_sinks] * RANDOM_DRAWS
        ]
        inputs: list[tuple[Spared, Mapping[Matrix, float]]]
        inputs = [(of_text, self.recorder.inputs(of_calibration)) for of_text, of_calibration in spared]
        inputs = [((), self.largest_inputs), *inputs]
        # weights → inputs → the settings that store them so, with nothing spared, sinks, and random tokens
        wanted: dict[Encoding | None, dict[Encoding | None, list[StoredInputs]]] = {}
        for preset in schemes.values():
            for weights, encoding in ((preset.weights, preset.inputs), (preset.weights, None), (None, preset.inputs)):
                variants = inputs if weights and encoding else inputs[:1]
                if weights or encoding:
                    wanted.setdefault(weights, {})[encoding] = [StoredInputs(encoding, *each) for each in variants]
        passes = sum(len(variants) for by_inputs in wanted.values() for variants in by_inputs.values())
        print_line(self.console, f"{passes} passes over the texts, at least {lasting(passes * self.seconds)}")
        self.losses = losses = self._losses(wanted)
        rows, by_sequence, dense = [], [], self.full.losses.numpy()
        sequences = {"sequence": np.arange(len(dense)), "predicted": self.subject.inputs.predicted}
        for name, preset in schemes.items():
            parts: dict[str, Pair] = {ALL: (preset.weights, preset.inputs), WEIGHTS: (preset.weights, None)}
            parts |= {INPUTS: (None, preset.inputs)} if preset.inputs else {}
            for part, pair in parts.items():
                labels: dict[str, Any] = {"layer": WHOLE_MODEL, "scheme": name, "part": part}
                rows.append(labels | self._row(losses[pair]))
                of_sequences = {"loss": losses[pair][0], "cost": losses[pair][0] - dense}
                by_sequence.append(pd.DataFrame(labels | sequences | of_sequences))
        every = pd.DataFrame(rows, columns=["layer", *names_of(FORMAT_TABLES["formats"])])  # also those that no row has
        return {"formats": every, "formats_losses": pd.concat(by_sequence, ignore_index=True)}

    def _losses(
        self, wanted: Mapping[Encoding | None, Mapping[Encoding | None, Sequence[StoredInputs]]]
    ) -> dict[Pair, np.ndarray]:
        """Return the losses (settings,N) of sequences for all pairs of encodings."""
        run = []
        for weights, by_inputs in wanted.items():
            side_by_side = [setting for each in by_inputs.values() for setting in each]
            factors = Factors(weights, side_by_side, self.largest_weights, self.registers)
            run.append(Setting(partial(self.opened, self.matrices, factors), factors.read))
        most = max(sum(map(len, by_inputs.values())) for by_inputs in wanted.values())
        passes = self.run(run, batch_size=max(1, self.fitting_sequences // most))
        losses: dict[Pair, np.ndarray] = {}
        for (weights, by_inputs), done in zip(wanted.items(), passes, strict=True):
            columns = iter(done.losses.numpy().T)
            losses |= {
                (weights, encoding): np.stack([next(columns) for _ in each]) for encoding, each in by_inputs.items()
            }
        return losses

    def cost(self, losses: np.ndarray, base: np.ndarray) -> Estimate:
        """Return how much losses (N,) are above others, in nats per token, with its interval over texts."""
        inputs = self.subject.inputs
        return bootstrap(resampled_cost(losses, base, inputs.predicted, inputs.texts))

    def _row(self, losses: np.ndarray) -> dict[str, float]:
        """Return the numbers of a row from the losses (settings,N): with nothing spared, sinks, and random tokens."""
        whole = self.cost(losses[0], self.full.losses.numpy())
        loss = losses[0].sum() / self.subject.inputs.num_predicted
        row = {"loss": loss, "perplexity": perplexity(loss), **whole.as_columns("cost"), "ratio": math.exp(whole.value)}
        if len(losses) > 1:
            row |= self.recovery(("sink_share", "random_share"), losses[0], losses[1], list(losses[2:]))
        return row

    def recovery(
        self, names: tuple[str, str], losses: np.ndarray, treated: np.ndarray, control: Sequence[np.ndarray]
    ) -> dict[str, float]:
        """Return the columns of what a treatment and its control lower losses by, and of the difference by text.

        Args:
            names: Of the columns of the treatment, and of its control: the mean over draws, the smallest and largest.
            losses, treated, control: (N,) of sequences without and with the treatment, and with each draw.
        """
        draws = [self.cost(losses, each).value for each in control]
        columns = self.cost(losses, treated).as_columns(names[0])
        columns |= Estimate(float(np.mean(draws)), min(draws), max(draws)).as_columns(names[1])
        return columns | self.cost(np.mean(control, axis=0), treated).as_columns("ahead")

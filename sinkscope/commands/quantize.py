"""`quantize`: what simulated W8A8 costs, and which sites' outliers it is that cost so much (settings.py)."""

import math
import os
import time
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from sinkscope.errors import InputError
from sinkscope.measuring.console import print_line
from sinkscope.measuring.manifest import Facts, make_manifest
from sinkscope.measuring.quantized import Bench
from sinkscope.measuring.subject import ModelLike, Subject, config_of, load_subject
from sinkscope.options.measuring import BITS, CALIBRATION, RunConfig
from sinkscope.quantization.arithmetic import check_bits
from sinkscope.quantization.ranges import Bits, Range, Rounding
from sinkscope.quantization.settings import (
    ACTIVATIONS,
    ALL,
    ALL_LAYERS,
    ALONE,
    BY_LAYER,
    COSTLIEST_KEPT,
    COSTLY,
    FULL,
    KEPT,
    LAYERS,
    MASSIVE_KEPT,
    PROBED,
    RESTORED,
    WEIGHTS,
)
from sinkscope.quantization.sites import WEIGHT, Site, not_quantised
from sinkscope.report.run import Run, finished
from sinkscope.results.folders import check_output
from sinkscope.results.tables import shape_table
from sinkscope.text.inputs import TokenInputs

Ranges = Mapping[Site, Range]


def quantize(
    model: ModelLike = None,
    *,
    bits_weights: int = BITS,
    bits_activations: int = BITS,
    calibration: int = CALIBRATION,
    tokenizer: PreTrainedTokenizerBase | None = None,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    quiet: bool = True,
    config: RunConfig | None = None,
    figures: Iterable[str] | None = None,
    **options: Any,
) -> Run:
    """Simulate post-training quantisation: weights symmetric and activations asymmetric, one static range a tensor,
    from `calibration` sequences that follow those evaluated in the same input. `model` and `options` as for `analyze`.

    → a Run with the tables `quantisation` (what every setting costs) and `quantisation_sites` (what every site holds).

    Errors: InputError for wrong options, or an input with too few sequences, before anything is written. The model is
    then bit for bit as it was, and so it is afterwards.
    """
    start = time.time()
    bits = _checked(bits_weights, bits_activations, calibration)
    if options.get("observables") or (config and config.observables):
        raise InputError("`quantize` always measures perplexity and outliers: leave `observables` out")
    config = config or config_of(model, options)
    folder = None if out is None else check_output(out, overwrite)
    console = Console(stderr=True, quiet=quiet)
    enough = config.model_copy(update={"num_seqs": config.num_seqs + calibration})
    subject, held_out = _split(load_subject(model, tokenizer, enough, console), config, calibration)
    bench = Bench(subject, bits, config.attn, config.batch_size, console=console)

    print_line(console, f"calibrating on {calibration} sequences")
    ranges = bench.ranges(held_out)
    study = _Study(subject.inputs, bench, ranges, bench.roundings(held_out, ranges), console)
    tables = {
        name: shape_table(name, table, subject.loaded.name, subject.inputs.condition, {})
        for name, table in study.tables().items()
    }
    manifest = make_manifest(subject, config, Facts(bench.used_batch_size), list(tables), start)
    manifest |= {"command": "quantize", "quantisation": _record(subject, bits, held_out, ranges)}
    return finished(Run(manifest, tables, folder), console, figures)


def _checked(bits_weights: int, bits_activations: int, calibration: int) -> Bits:
    check_bits(bits_weights, "--bits-weights")
    check_bits(bits_activations, "--bits-activations")
    if isinstance(calibration, bool) or not isinstance(calibration, int) or calibration < 1:
        raise InputError(f"--calibration {calibration}: it must be a whole number of at least 1")
    return Bits(bits_weights, bits_activations)


def _split(subject: Subject, config: RunConfig, calibration: int) -> tuple[Subject, TokenInputs]:
    """The first sequences to evaluate, those behind to calibrate by. Errors: InputError where there are too few."""
    inputs, wanted = subject.inputs, config.num_seqs + calibration
    if len(inputs) < wanted:
        what = f"--dataset {config.dataset}" if config.dataset else f"--input {config.input}"
        raise InputError(
            f"{what} holds {len(inputs)} sequences, fewer than the {config.num_seqs} to evaluate and {calibration} to "
            "calibrate by: take a smaller --num-seqs or --calibration"
        )
    evaluated = Subject(subject.loaded, subject.family, inputs.part(0, config.num_seqs))
    return evaluated, inputs.part(config.num_seqs, wanted)


def _record(subject: Subject, bits: Bits, held_out: TokenInputs, ranges: Ranges) -> dict[str, Any]:
    """For the manifest."""
    return {
        "bits_weights": bits.weights,
        "bits_activations": bits.activations,
        "calibration": len(held_out),
        "calibration_sha256": held_out.sha256,
        "split": f"sequences 0–{len(subject.inputs) - 1} are evaluated, those behind them calibrated by",
        "linear_layers": sum(site.part == WEIGHT for site in ranges),
        "not_quantised": not_quantised(subject.loaded.model, subject.family),
    }


@dataclass
class _Study:
    """From the ranges to the sites that cost most, row by row of the table `quantisation`."""

    inputs: TokenInputs
    bench: Bench
    ranges: Ranges
    roundings: Mapping[Site, Rounding]
    console: Console
    rows: list[dict[str, Any]] = field(default_factory=list)

    def tables(self) -> dict[str, pd.DataFrame]:
        print_line(self.console, f"{self.bench.bits} on {len(self.inputs)} sequences")
        self._whole_model()
        print_line(self.console, f"looking for the sites that cost most on {len(self.probes)} sequences")
        self._keep_costliest(self._costliest_sites(self._costly_kinds()))
        return {"quantisation": pd.DataFrame(self.rows), "quantisation_sites": self._sites()}

    # --- what is measured

    def _whole_model(self) -> None:
        weights = {site for site in self.ranges if site.part == WEIGHT}
        massive = {site for site, known in self.ranges.items() if known.is_massive}
        self._note(FULL, {}, outliers=True)
        self._note(ALL, self.ranges, outliers=True)
        self._note(WEIGHTS, self._without(self.ranges.keys() - weights))
        self._note(ACTIVATIONS, self._without(weights))
        if massive:
            self._note(MASSIVE_KEPT, self._without(massive))
        if len(self.probes) < len(self.inputs):
            self._note(FULL, {}, self.probes)
            self._note(ALL, self.ranges, self.probes)

    def _costly_kinds(self) -> list[str]:
        """Every kind of site alone, and each that is costly kept. → the costly ones, the costliest first."""
        costs: dict[str, float] = {}
        for role in dict.fromkeys(site.role for site in self.ranges):
            alone = {site: known for site, known in self.ranges.items() if site.role == role}
            costs[role] = self._note(ALONE, alone, self.probes, next(iter(alone)))
        costly = sorted((role for role in costs if costs[role] >= COSTLY), key=lambda role: -costs[role])
        for role in costly:
            kept = {site for site in self.ranges if site.role == role}
            self._note(KEPT, self._without(kept), self.probes, next(iter(kept)))
        return costly

    def _costliest_sites(self, costly: list[str]) -> list[Site]:
        """Of the costliest kinds, one layer alone. → sites whose cost shows, the costliest first."""
        costs: dict[Site, float] = {}
        for role in costly[:BY_LAYER]:
            sites = [site for site in self.ranges if site.role == role]
            coarsest = sorted(sites, key=lambda site: -self.roundings[site].zeroed)[:LAYERS]
            for site in sorted(coarsest, key=lambda site: site.layer):
                costs[site] = self._note(ALONE, {site: self.ranges[site]}, self.probes, site, site.layer)
        return sorted((site for site in costs if costs[site] > 0), key=lambda site: -costs[site])

    def _keep_costliest(self, costliest: list[Site]) -> None:
        """One, two, four … of them in full precision, until nearly all of the cost is gone; these on all sequences."""
        whole = self._row(ALL, self.probes)["cost"]
        if not costliest or whole < COSTLY:
            return
        count, cost = 0, math.inf
        while cost > RESTORED * whole and count < len(costliest):
            count = min(max(1, 2 * count), len(costliest))
            kept = costliest[:count]
            cost = self._note(COSTLIEST_KEPT, self._without(set(kept)), self.probes, kept=kept)
        if len(self.probes) < len(self.inputs):
            self._note(COSTLIEST_KEPT, self._without(set(kept)), kept=kept)

    @property
    def probes(self) -> TokenInputs:
        return self.inputs.part(0, PROBED)

    def _without(self, kept: Set[Site]) -> dict[Site, Range]:
        return {site: known for site, known in self.ranges.items() if site not in kept}

    # --- how it is written down

    def _note(
        self,
        setting: str,
        ranges: Ranges,
        inputs: TokenInputs | None = None,
        site: Site | None = None,
        layer: int = ALL_LAYERS,
        kept: Iterable[Site] = (),
        outliers: bool = False,
    ) -> float:
        """Measure one setting as a row. → its cost: the loss above that of full precision on the same sequences."""
        inputs = inputs or self.inputs
        measured = self.bench.measure(ranges, inputs, outliers)
        cost = 0.0 if setting == FULL else measured.loss - self._row(FULL, inputs)["loss"]
        self.rows.append(
            {
                "layer": layer,
                "setting": setting,
                "site": site.kind if site else "",
                "part": site.part if site else "",
                "quantised": len(ranges),
                "kept": ", ".join(str(site) for site in kept),
                "sequences": len(inputs),
                "loss": measured.loss,
                "perplexity": measured.perplexity,
                "cost": cost,
                "max_inf_norm": measured.max_inf_norm,
                "kurtosis": measured.kurtosis,
            }
        )
        return cost

    def _row(self, setting: str, inputs: TokenInputs) -> dict[str, Any]:
        return next(row for row in self.rows if row["setting"] == setting and row["sequences"] == len(inputs))

    def _sites(self) -> pd.DataFrame:
        rows = [
            {
                "layer": site.layer,
                "site": site.kind,
                "part": site.part,
                "path": site.path,
                "low": known.low,
                "high": known.high,
                "median_abs": known.median_abs,
                "max_abs": known.max_abs,
                "is_massive": known.is_massive,
                "step": self.bench.bits.grid(site, known).step,
                "zeroed": self.roundings[site].zeroed,
                "sqnr": self.roundings[site].sqnr,
            }
            for site, known in self.ranges.items()
        ]
        return pd.DataFrame(rows)

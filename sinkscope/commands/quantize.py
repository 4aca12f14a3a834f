"""`quantize`: what simulated W8A8 costs, and which sites' outliers it is that cost so much (settings.py)."""

import os
import time
from collections.abc import Iterable
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from sinkscope.errors import InputError
from sinkscope.measuring.console import say
from sinkscope.measuring.manifest import Facts, make_manifest
from sinkscope.measuring.quantization_study import Ranges, Study
from sinkscope.measuring.quantized import Bench
from sinkscope.measuring.subject import ModelLike, Subject, config_of, subject_of
from sinkscope.measuring.tables import publish
from sinkscope.options.measuring import BITS, CALIBRATION, RunConfig
from sinkscope.quantization.arithmetic import check_bits
from sinkscope.quantization.ranges import Bits
from sinkscope.quantization.sites import WEIGHT, not_quantized
from sinkscope.report.run import Run, finished
from sinkscope.results.folders import check_output
from sinkscope.text.inputs import TokenInputs


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
    """Measure what simulated post-training quantization costs, and find the sites that cost most.

    Weights are quantized symmetrically and activations asymmetrically, with one static range a tensor. The model is
    afterwards bit for bit as it was.

    Args:
        bits_weights: 2 to 16.
        bits_activations: 2 to 16.
        calibration: how many sequences the ranges come from; they follow those evaluated in the same input.
        figures: names of the figures to draw; None: all that apply.
        **options: these and the other arguments as for `analyze`.

    Returns:
        A Run with the tables `quantization` (what each setting costs) and `quantization_sites` (what each site holds).

    Raises:
        InputError: wrong options, or an input with too few sequences; nothing was written.
        SinkscopeError: the run failed.
    """
    start = time.time()
    bits = _checked(bits_weights, bits_activations, calibration)
    if options.get("observables") or (config and config.observables):
        raise InputError("`quantize` always measures perplexity and outliers: leave `observables` out")
    config = config or config_of(model, options)
    folder = None if out is None else check_output(out, overwrite)
    console = Console(stderr=True, quiet=quiet)
    enough = config.model_copy(update={"num_seqs": config.num_seqs + calibration})
    subject, held_out = _split(subject_of(model, tokenizer, enough, console), config, calibration)
    bench = Bench(subject, bits, config.attn, config.batch_size, console=console)

    say(console, f"calibrating on {calibration} sequences")
    ranges = bench.ranges(held_out)
    study = Study(subject.inputs, bench, ranges, bench.roundings(held_out, ranges), console)
    tables = publish(study.tables(), subject.loaded, subject.inputs.condition)
    manifest = make_manifest(subject, config, Facts(bench.used_batch_size), list(tables), start)
    manifest |= {"command": "quantize", "quantization": _record(subject, bits, held_out, ranges)}
    return finished(Run(manifest, tables, folder), console, figures)


def _checked(bits_weights: int, bits_activations: int, calibration: int) -> Bits:
    check_bits(bits_weights, "--bits-weights")
    check_bits(bits_activations, "--bits-activations")
    if isinstance(calibration, bool) or not isinstance(calibration, int) or calibration < 1:
        raise InputError(f"--calibration {calibration}: it must be a whole number of at least 1")
    return Bits(bits_weights, bits_activations)


def _split(subject: Subject, config: RunConfig, calibration: int) -> tuple[Subject, TokenInputs]:
    """The first sequences, to evaluate, and those behind them, to calibrate by."""
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
    """The manifest's entry."""
    return {
        "bits_weights": bits.weights,
        "bits_activations": bits.activations,
        "calibration": len(held_out),
        "calibration_sha256": held_out.sha256,
        "split": f"sequences 0–{len(subject.inputs) - 1} are evaluated, those behind them calibrated by",
        "linear_layers": sum(site.part == WEIGHT for site in ranges),
        "not_quantized": not_quantized(subject.loaded.model, subject.family),
    }

"""The command `quantize`: measures what number formats cost, and of static schemes where."""

import os
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import pandas as pd
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from sinkscope.commands.measured import opened, shown
from sinkscope.commands.printout import Printout
from sinkscope.commands.quantize.cures import CureStudy
from sinkscope.commands.quantize.options import QuantizeOptions
from sinkscope.commands.quantize.served import ServedStudy
from sinkscope.commands.quantize.split import Split
from sinkscope.commands.quantize.study import QuantizationStudy, Simulation
from sinkscope.errors import InputError, counted
from sinkscope.measuring.console import print_line
from sinkscope.measuring.measure import Facts, run_manifest
from sinkscope.measuring.parity import Parity, parity_check
from sinkscope.measuring.subject import ModelLike, Subject, check_config, options_of
from sinkscope.measuring.tables import publish
from sinkscope.options.keywords import QuantizeKeywords
from sinkscope.options.output import OutputOptions
from sinkscope.options.signatures import with_options
from sinkscope.output.run import Run, finished
from sinkscope.quantization.formats import PRESETS, STATIC_SCHEME, Precision, Preset
from sinkscope.quantization.prefix_cache import prefix_cache, write_prefix
from sinkscope.quantization.sites import INPUT, linear_modules_without, not_quantized
from sinkscope.text.inputs import TokenInputs
from sinkscope.text.tokens import encode, token_texts

PRECISION = tuple(field.name for field in fields(Precision))  # names of options


def command(options: QuantizeOptions, output: OutputOptions) -> Printout:
    return shown(quantize(options.model, config=options, **output.where), output)


check = check_config  # checks the options of a recipe before a model is loaded


@with_options(QuantizeOptions)
def quantize(
    model: ModelLike = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    quiet: bool = True,
    config: QuantizeOptions | None = None,
    figures: Iterable[str] | None = None,
    page: bool = True,
    **options: Unpack[QuantizeKeywords],
) -> Run:
    """Simulate post-training quantization: what number formats cost, and of static schemes the sites that cost most.

    Presets store weights and inputs of linear layers as vLLM serves them. Afterwards the model is restored bit for bit,
    also after an error.

    Args:
        model, tokenizer, out, overwrite, quiet, config, figures, page: as for `analyze`.
        **options: see below; quantization/rounding.py has the arithmetic of presets, quantization/sites.py describes
            static schemes, and quantization/grids.py their grids.

    Returns:
        A Run with the table `formats` (the cost of every preset). Of a static scheme, it has the tables `quantization`
        (the cost of every setting) and `quantization_sites` (the activations at every site) and, with `prefix`, also
        `quantization_split` (the cost with tokens, coordinates or a prefix spared).

    Raises:
        InputError: an option is wrong, or the input has too few sequences; nothing was written.
        SinkscopeError: the run failed.
    """
    start = time.time()
    config = config or options_of(QuantizeOptions, model, options)
    enough = config.model_copy(update={"num_seqs": config.num_seqs + config.calibration})
    with opened(model, tokenizer, enough, out, overwrite, quiet) as (whole, folder, console):
        inputs, wanted = whole.inputs, config.num_seqs + config.calibration
        if len(inputs) < wanted:
            what = f"--dataset {config.dataset}" if config.dataset else f"--input {config.input}"
            raise InputError(
                f"{what} holds {counted(len(inputs), 'sequence')}, fewer than the {config.num_seqs} to evaluate and "
                f"{config.calibration} to calibrate with: take a smaller --num-seqs or --calibration"
            )
        subject = replace(whole, inputs=inputs.part(0, config.num_seqs))
        held_out = inputs.part(config.num_seqs, wanted)
        subject.need_loss()
        parity = parity_check(subject, config)
        print_line(console, f"calibrating on {config.calibration} sequences")
        measure = _served if config.static_scheme is None else _static
        raw, batch_size, record, write = measure(subject, held_out, parity, config, console)
        tables = publish(raw, subject.loaded, subject.inputs.condition)
        manifest = run_manifest(subject, config, Facts(batch_size, parity=parity.error), list(tables), start)
        calibration = {
            "calibration": len(held_out),
            "calibration_sha256": held_out.sha256,
            "split": f"sequences 0–{len(subject.inputs) - 1} are evaluated, the following ones calibrate",
        }
        manifest |= {"command": "quantize"} | {name: calibration | entries for name, entries in record.items()}
        return finished(Run(manifest, tables, folder, further=write), console, figures, page)


Measured = tuple[dict[str, pd.DataFrame], int, dict[str, Any], Callable[[Path], None] | None]


def _served(
    subject: Subject, held_out: TokenInputs, parity: Parity, config: QuantizeOptions, console: Console
) -> Measured:
    """Measure presets. Returns tables, batch size, entries of run.json, and no writer of further files."""
    study = ServedStudy(subject, held_out, parity, config.attn, config.batch_size, console)
    schemes: dict[str, Preset] = {}
    absent: dict[str, str] = {}
    for name, preset in PRESETS.items():
        if name in config.scheme:
            try:
                schemes[name] = preset.fitted(study.widths)
            except InputError as error:
                absent[name] = str(error)
    if not schemes:
        raise InputError(f"no scheme applies to {subject.loaded.name}: {'; '.join(dict.fromkeys(absent.values()))}")
    print_line(console, f"{', '.join(schemes)} on {counted(len(subject.inputs), 'sequence')}")
    tables = study.tables(schemes, config.seed)
    cures = CureStudy(study, config.alpha, config.seed)
    tables |= cures.tables(schemes, config.cures)
    model = subject.loaded.model
    record = {
        "schemes": {name: asdict(preset) for name, preset in schemes.items()},
        "absent": absent,
        "alpha": config.alpha,
        "absent_cures": cures.absent,
        "matrices": len(study.matrices),
        "share": study.share,
        "not_quantized": not_quantized(model, subject.family, {matrix.parameter_path for matrix in study.matrices}),
        "full_precision_modules": linear_modules_without(
            model, {each.path for each in study.matrices if each.expert is None}
        ),
        "sink_layer": study.rule.layer,
        "sinks": float(np.mean([mask.sum() for mask in study.sinks])),
    }
    return tables, study.full.batch_size, {"served": record}, None


def _static(
    subject: Subject, held_out: TokenInputs, parity: Parity, config: QuantizeOptions, console: Console
) -> Measured:
    """Measure a static scheme. Returns tables, batch size, entries of run.json, and what writes the prefix's cache."""
    precision = Precision(*(getattr(config, name) for name in PRECISION))
    scheme = config.static_scheme or STATIC_SCHEME
    simulation = Simulation(subject, precision, config.attn, config.batch_size, console, scheme)
    split = None if config.prefix is None else Split(simulation, held_out, config.seed)
    prefix = None if split is None else _named_prefix(split, config)
    study = QuantizationStudy(simulation, held_out, parity)
    raw = study.tables(console)
    record = {
        "scheme": scheme,
        **{name: getattr(config, name) for name in PRECISION},
        "linear_layers": sum(site.part == INPUT for site in study.ranges),
        "not_quantized": not_quantized(subject.loaded.model, subject.family),
        "full_precision_modules": linear_modules_without(
            subject.loaded.model, {site.path for site in study.ranges if site.part == INPUT}
        ),
    }
    write = None
    if split:
        print_line(console, "splitting the cost: tokens, coordinates, a prefix and a rotation")
        raw |= split.tables(study.ranges, prefix, config.prefix_draws)
        texts = token_texts(subject.loaded.tokenizer, split.prefix)
        record |= {"prefix": list(split.prefix), "prefix_text": "".join(texts[token] for token in split.prefix)}
        record |= {"without_rotation": split.without_rotation, "without_cache": ""}
        try:
            cache = prefix_cache(subject.loaded.model, split.prefix)
            write = partial(write_prefix, cache, subject.loaded.name)
        except InputError as error:
            record["without_cache"] = str(error)
    return raw, simulation.used_batch_size, {"quantization": record}, write


def _named_prefix(split: Split, config: QuantizeOptions) -> tuple[int, ...] | None:
    """Return the token ids of the prefix that the user names; None if it is to be found."""
    wanted, tokenizer = str(config.prefix), split.simulation.subject.loaded.tokenizer
    if wanted == "auto":
        return None
    if re.fullmatch(r"\d+(,\d+)*", wanted):
        return split.prefixes.checked(tuple(map(int, wanted.split(","))))
    if tokenizer is None:
        raise InputError(f"--prefix {wanted!r}: the model has no tokenizer, so name token ids, such as 5,8, or auto")
    return split.prefixes.checked(tuple(encode(tokenizer, wanted, special=False)))

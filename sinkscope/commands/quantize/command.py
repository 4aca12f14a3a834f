"""The command `quantize`: measures the cost of simulated W8A8, and finds the sites whose outliers cause it."""

import os
import re
import time
from collections.abc import Iterable
from dataclasses import fields, replace
from functools import partial
from typing import Unpack

from transformers import PreTrainedTokenizerBase

from sinkscope.commands.measured import opened, shown
from sinkscope.commands.printout import Printout
from sinkscope.commands.quantize.options import QuantizeOptions
from sinkscope.commands.quantize.split import Split
from sinkscope.commands.quantize.study import QuantizationStudy, Simulation
from sinkscope.errors import InputError, counted
from sinkscope.measuring.console import print_line
from sinkscope.measuring.measure import Facts, run_manifest
from sinkscope.measuring.parity import parity_check
from sinkscope.measuring.subject import ModelLike, check_config, options_of
from sinkscope.measuring.tables import publish
from sinkscope.options.keywords import QuantizeKeywords
from sinkscope.options.output import OutputOptions
from sinkscope.options.signatures import with_options
from sinkscope.output.run import Run, finished
from sinkscope.quantization.formats import Precision
from sinkscope.quantization.prefix_cache import prefix_cache, write_prefix
from sinkscope.quantization.sites import INPUT, full_precision_modules, not_quantized
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
    """Simulate post-training quantization: its cost, and the sites whose outliers cause it.

    By default weights are symmetric and activations asymmetric, with one static range per tensor. Afterwards the model
    is restored bit for bit, also after an error.

    Args:
        model, tokenizer, out, overwrite, quiet, config, figures, page: as for `analyze`.
        **options: see below; quantization/sites.py describes `scheme`, and quantization/grids.py the grids.

    Returns:
        A Run with the tables `quantization` (the cost of every setting) and `quantization_sites` (the activations at
        every site). With `prefix`, also `quantization_split` (the cost with tokens, coordinates or a prefix spared).

    Raises:
        InputError: an option is wrong, or the input has too few sequences; nothing was written.
        SinkscopeError: the run failed.
    """
    start = time.time()
    config = config or options_of(QuantizeOptions, model, options)
    precision = Precision(*(getattr(config, name) for name in PRECISION))
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
        simulation = Simulation(subject, precision, config.attn, config.batch_size, console, config.scheme)
        print_line(console, f"calibrating on {config.calibration} sequences")
        split = None if config.prefix is None else Split(simulation, held_out, config.seed)
        prefix = None if split is None else _named_prefix(split, config)
        study = QuantizationStudy(simulation, held_out, parity)
        raw = study.tables(console)
        if split:
            print_line(console, "splitting the cost: tokens, coordinates, a prefix and a rotation")
            raw |= split.tables(study.ranges, prefix, config.prefix_draws)
        tables = publish(raw, subject.loaded, subject.inputs.condition)
        facts = Facts(simulation.used_batch_size, parity=parity.error)
        manifest = run_manifest(subject, config, facts, list(tables), start)
        record = {
            "scheme": config.scheme,
            **{name: getattr(config, name) for name in PRECISION},
            "calibration": len(held_out),
            "calibration_sha256": held_out.sha256,
            "split": f"sequences 0–{len(subject.inputs) - 1} are evaluated, the following ones calibrate",
            "linear_layers": sum(site.part == INPUT for site in study.ranges),
            "not_quantized": not_quantized(subject.loaded.model, subject.family),
            "full_precision_modules": full_precision_modules(subject.loaded.model, study.ranges),
        }
        write = None  # writes the prefix's keys and values
        if split:
            texts = token_texts(subject.loaded.tokenizer, split.prefix)
            record |= {"prefix": list(split.prefix), "prefix_text": "".join(texts[token] for token in split.prefix)}
            record |= {"without_rotation": split.without_rotation, "without_cache": ""}
            try:
                cache = prefix_cache(subject.loaded.model, split.prefix)
                write = partial(write_prefix, cache, subject.loaded.name)
            except InputError as error:
                record["without_cache"] = str(error)
        manifest |= {"command": "quantize", "quantization": record}
        return finished(Run(manifest, tables, folder, further=write), console, figures, page)


def _named_prefix(split: Split, config: QuantizeOptions) -> tuple[int, ...] | None:
    """Return the token ids of the prefix that the user names; None if it is to be found."""
    wanted, tokenizer = str(config.prefix), split.simulation.subject.loaded.tokenizer
    if wanted == "auto":
        return None
    if re.fullmatch(r"\d+(,\d+)*", wanted):
        return split.checked(tuple(map(int, wanted.split(","))))
    if tokenizer is None:
        raise InputError(f"--prefix {wanted!r}: the model has no tokenizer, so name token ids, such as 5,8, or auto")
    return split.checked(tuple(encode(tokenizer, wanted, special=False)))

"""The command `doctor`: shows the wiring of a model, and checks before a long run that its numbers would be right.

With --dtype also whether the model overflows in it, and with --compare whether logits from elsewhere are the model's.
"""

import os
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Unpack

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sinkscope.attention.seam import attention_implementation
from sinkscope.attention.taps import attends_by_us
from sinkscope.commands.doctor.kernels import compare_kernels, compare_logits, tokens_to_compare
from sinkscope.commands.doctor.options import DoctorOptions
from sinkscope.commands.doctor.overflow import OVERFLOW_DTYPES, OverflowCheck
from sinkscope.commands.printout import Printout
from sinkscope.errors import InputError, counted, one_line, printable
from sinkscope.interventions import INTERVENTIONS, Target
from sinkscope.measuring.console import Messages
from sinkscope.measuring.measure import Facts, run_manifest
from sinkscope.measuring.observables import OBSERVABLES
from sinkscope.measuring.observables.gradient import undefined_ratios
from sinkscope.measuring.observables.observable import ATTENTION_SITES
from sinkscope.measuring.parity import AttentionComparison, Parity, comparing, last_output, round_off
from sinkscope.measuring.pictures import picture_batches
from sinkscope.measuring.subject import (
    ModelLike,
    Subject,
    check_config,
    family_of,
    inputs_for,
    load_model,
    options_of,
    tokens_within_positions,
    without_head_or_mask,
)
from sinkscope.measuring.tables import publish
from sinkscope.measuring.tracer import open_tracer
from sinkscope.models.family import RESIDUAL_SITES, Family, embedding_weight, input_device, tower_notice, vocabulary
from sinkscope.models.in_memory import undisturbed
from sinkscope.models.loading import LoadedModel
from sinkscope.models.wiring import check_wiring, read_sites
from sinkscope.options.files import user_path
from sinkscope.options.keywords import DoctorKeywords
from sinkscope.options.option import flag
from sinkscope.options.output import OutputOptions
from sinkscope.options.signatures import with_options
from sinkscope.output.run import Run, finished
from sinkscope.results.findings import Outcome
from sinkscope.results.folders import own_folder
from sinkscope.text.batch import Batch
from sinkscope.text.sources import read_array
from sinkscope.text.tokens import check_ids
from sinkscope.verdict.report import layers_text

TOKENS = 64
TEXT_OPTIONS = ("input", "prompt", "dataset", "num_seqs", "seq_len", "bos", "seed")
# finding of --dtype → the check's name
ALARMS = {"overflow": "no overflow", "float8": "cost as served", "overflow-norms": "norms decomposed"}
Check = tuple[str, bool, str]  # the check, whether it passed, a detail


@dataclass
class Report:
    """The result of `doctor`."""

    name: str
    facts: dict[str, str] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    run: Run | None = None  # with --dtype: the tables `overflow` and `overflow_runs`, and their findings

    @property
    def ok(self) -> bool:
        return all(passed for _, passed, _ in self.checks)

    def __str__(self) -> str:
        lines = [self.name]
        lines += [f"  {name:<14} {value}" for name, value in self.facts.items()]
        lines += [f"  {'ok  ' if passed else 'FAIL'} {what}: {detail}" for what, passed, detail in self.checks]
        return printable("\n".join(lines + [f"  note: {note}" for note in self.notes]))


def command(options: DoctorOptions, output: OutputOptions) -> Printout:
    report = doctor(options.model, config=options, **output.where)
    failed = [what for what, passed, _ in report.checks if not passed]
    wrong = "" if report.ok else f"a check failed: {'; '.join(failed)}"
    return Printout(report, text=str(report), data=vars(report) | {"ok": report.ok}, folder=output.out, failure=wrong)


@with_options(DoctorOptions)
def doctor(
    model: ModelLike = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    quiet: bool = True,
    config: DoctorOptions | None = None,
    page: bool = True,
    **options: Unpack[DoctorKeywords],
) -> Report:
    """Examine one model before it is measured, quantized or served.

    Args:
        model, tokenizer, out, overwrite, quiet, config, page: as for `analyze`. Only the tables of `dtype` are written.
        **options: those of the command line, which are listed below.

    Returns:
        A Report whose `ok` is True if every check passed.

    Raises:
        InputError: an option is wrong, or the model cannot be loaded, or its architecture is unknown and cannot be
            calibrated.
    """
    start = time.time()
    config = config or options_of(DoctorOptions, model, options)
    check_config(config)
    has_overflow = config.dtype in OVERFLOW_DTYPES and config.compare is None
    if not has_overflow and (out is not None or config.images is not None):
        raise InputError(
            "--out and --images need --dtype, because nothing else is measured: name one, such as --dtype float16"
        )
    for name in () if has_overflow else TEXT_OPTIONS:
        if config.compare is not None and name != "input" and config.is_changed(name):
            raise InputError(f"{flag(name)} does not go with --compare, which takes all ids of --input as they are")
        if config.compare is None and config.is_changed(name):
            raise InputError(
                f"{flag(name)} needs --dtype, because nothing else reads a text: name one, such as --dtype float16"
            )
    # an accelerator may lack the memory for float32
    is_on_cpu = config.device_map == "cpu" or not torch.accelerator.is_available()
    exact_dtype = "float32" if is_on_cpu or config.dtype == "float32" else "bfloat16"
    loading = config.model_copy(update={"dtype": exact_dtype if config.dtype else None})
    with ExitStack() as stack:
        reads = (config.model, config.adapter, str(config.input), config.images)
        folder = stack.enter_context(own_folder(out, overwrite, reads=reads))
        loaded = load_model(model, tokenizer, loading)
        stack.enter_context(undisturbed(loaded.model))
        family, notices = family_of(loaded.model)
        report, tolerance = _check_model(loaded, family, notices)
        if config.compare is not None:
            report.checks.append(_logits(loaded, family, config, config.compare))
        if has_overflow:
            subject = Subject(loaded, family, inputs_for(loaded, config, family))
            pictures = [] if config.images is None else picture_batches(subject, config, config.images)
            overflow = OverflowCheck(subject, str(config.dtype), Messages(quiet), pictures)
            tables = publish(overflow.tables, loaded, subject.inputs.condition)
            manifest = run_manifest(subject, config, Facts(batch_size=1), list(tables), start, "doctor")
            record = {"dtype": config.dtype, "limit": overflow.limit, "refused": overflow.refused}
            run = Run(manifest | {"overflow": record}, tables, folder)
            report.run = finished(run, Messages(quiet), page=page)
            report.notes += subject.inputs.notices
            for finding in run.findings:
                is_alarm = finding.outcome == Outcome.PRESENT
                if finding.is_headline or (finding.name in ALARMS and is_alarm):
                    what = f"{ALARMS[finding.name]} in {config.dtype}"
                    report.checks.append((what, not is_alarm, finding.sentence))
                else:
                    report.notes.append(finding.sentence)
        if family.door == "interface" and not any(map(attends_by_us, loaded.model.modules())):
            # all kernels come last, because torch compiles one of them
            if input_device(loaded.model).type != "cpu":
                message = "comparing attention kernels: flex attention is compiled first, which takes a minute or more"
                Messages(quiet=quiet).print(message)
            batch = _random_batch(loaded.model, tokens_to_compare(loaded.model, family))
            kernels = compare_kernels(loaded.model, family, batch, tolerance)
            for kernel in (one for one in kernels if not one.untried):
                detail = f"within {kernel.difference:.1e}, by round-off at most {tolerance:.1e}"
                if kernel.layer is not None:
                    detail = f"it departs from layer {kernel.layer} on, by {kernel.difference:.1e} at the end"
                if kernel.layer is not None and kernel.dropped:
                    detail = f"{kernel.name} ignores the {' and the '.join(kernel.dropped)}: {detail}"
                report.checks.append((f"{kernel.name} equals eager attention", kernel.layer is None, detail))
            for reason in dict.fromkeys(one.untried for one in kernels if one.untried):
                names = ", ".join(one.name for one in kernels if one.untried == reason)
                report.notes.append(f"not compared with eager attention: {names} ({reason})")
    return report


def _logits(loaded: LoadedModel, family: Family, config: DoctorOptions, path: Path) -> Check:
    """Compare logits from elsewhere with the model's; InputError for a file of something else, or of another shape."""
    ids = np.array([document.ids for document in read_array(user_path(str(config.input)))])
    size = vocabulary(loaded.model)
    for row, sequence in enumerate(ids):
        check_ids(sequence.tolist(), size, f"{config.input}, row {row}")
    try:
        loaded_file = np.load(path, allow_pickle=False)
        arrays = {"logits": loaded_file} if isinstance(loaded_file, np.ndarray) else dict(loaded_file)
    except Exception as error:  # numpy raises almost anything for a damaged file
        raise InputError(f"--compare {path} is no .npz or .npy file ({one_line(error)})") from error
    if "logits" not in arrays and len(arrays) != 1:
        raise InputError(f"--compare {path}: none of its arrays ({', '.join(arrays)}) is named logits")
    logits = arrays.get("logits", next(iter(arrays.values())))
    if logits.dtype.kind != "f":
        raise InputError(f"--compare {path}: it holds {logits.dtype}, not floating-point logits")
    if len(infinite := np.argwhere(~np.isfinite(logits))):
        raise InputError(f"--compare {path}: its logits are NaN or infinite, first at {infinite[0].tolist()}")
    if logits.shape != (*ids.shape, size):
        shape, wanted = (" × ".join(map(str, numbers)) for numbers in (logits.shape, (*ids.shape, size)))
        raise InputError(
            f"--compare {path}: its logits are {shape}; these ids and this model's vocabulary need {wanted}"
        )
    elsewhere = torch.tensor(logits)
    # NumPy has no bfloat16, so such logits are saved in float32
    stored = "bfloat16" if torch.equal(elsewhere, elsewhere.bfloat16().to(elsewhere.dtype)) else str(logits.dtype)
    dtype = OVERFLOW_DTYPES.get(config.dtype or stored, torch.float32)
    departure = compare_logits(loaded.model, family, torch.tensor(ids), elsewhere, dtype)
    within = f"{departure.excess:.2g} times what round-off in {str(dtype).removeprefix('torch.')} explains"
    detail = f"{counted(departure.tokens, 'token')} within {within}"
    if departure.departing:
        first = f"sequence {departure.sequence}, position {departure.position}"
        detail = f"{departure.departing} of {counted(departure.tokens, 'token')} depart, first {first}, by {within}"
    if departure.dropped:
        detail += f": it equals eager attention without the {' and the '.join(departure.dropped)}"
    return f"{path.name} equals the model's logits", departure.departing == 0, detail


def _check_model(loaded: LoadedModel, family: Family, notices: Sequence[str]) -> tuple[Report, float]:
    """Return the report, without the comparison of kernels, and the difference that round-off explains."""
    model = loaded.model
    report = Report(loaded.name, _facts(loaded, family))
    calibrated = _calibrated(family) if notices else []
    report.notes = [*loaded.notices, *tower_notice(model), *notices, *calibrated]
    # the sites, gradients and observables that do not apply to this model
    report.notes += [f"no site '{site}': {reason}" for site, reason in family.absent_sites().items()]
    report.notes += [f"gradients: {ratio} undefined: {reason}" for ratio, reason in undefined_ratios(family).items()]
    target = Target(model, family, seams={})
    reasons = {name: kind.inapplicable(model, family) for name, kind in OBSERVABLES.items() if kind.expected}
    reasons |= {name: kind.inapplicable(target) for name, kind in INTERVENTIONS.items() if kind.expected}
    report.notes += [f"{name} does not apply: {reason}" for name, reason in reasons.items() if reason]
    if reason := without_head_or_mask(loaded, family):
        report.notes.append(f"no loss and no gradients: {reason}")
    batch = _random_batch(model, tokens_within_positions(TOKENS, model, family))
    bare = last_output(model, family, batch)
    noise = round_off(model, family, batch, bare)
    records = read_sites(model, family, batch.token_ids.to(input_device(model)))
    worst = max(check_wiring(family.block(layer), sites) for layer, sites in enumerate(records))
    tolerance = 20 * torch.finfo(next(model.parameters()).dtype).eps
    detail = f"the {family.wiring} equation holds to {worst:.1e} at every layer"
    report.checks = [("residual stream", worst < tolerance, detail)]
    report.checks += [_output(model, family, batch, kernel, bare, noise.tolerance) for kernel in ("sdpa", "eager")]
    if noise.attention:
        report.checks.append(_attention_check("each layer's attention equals the bare model's", noise.attention))
    if any(map(attends_by_us, model.modules())):
        report.notes.append(
            "attention weights: transformers' eager attention lacks the retrofit, so there is nothing to compare with"
        )
    elif not family.has_attention:
        report.notes.append(f"attention weights: {family.without_attention}")
    elif family.door == "interface":  # compare our weights with the weights of transformers' eager attention
        with torch.no_grad(), attention_implementation(model, "eager"), comparing(model, family, batch) as comparisons:
            model(batch.token_ids.to(input_device(model)), use_cache=False)
        what = "attention to position 0 equals transformers' eager attention"
        report.checks.append(_attention_check(what, comparisons))
    else:
        report.notes.append("attention weights come from the model's own code: there is nothing to compare them with")
    return report, noise.tolerance


def _random_batch(model: PreTrainedModel, length: int) -> Batch:
    """Return one sequence of random ids, for which no tokenizer is needed."""
    size = embedding_weight(model).shape[0]
    ids = torch.randint(size // 10, size, (1, length), generator=torch.Generator().manual_seed(0))
    return Batch(ids, torch.ones_like(ids))


def _calibrated(family: Family) -> list[str]:
    """Describe the calibrated row, with the addresses of the sites in a layer of each kind."""
    row = f"layers at '{family.layers}', attention '{family.attention}', {family.wiring}, door {family.door}"
    lines = [f"the calibrated row: {row}"]
    kinds = {block.kind: (layer, block) for layer, block in reversed(list(enumerate(family.blocks)))}
    for layer, block in sorted(kinds.values() or [(0, family.block(0))], key=lambda pair: pair[0]):
        addresses = []
        for site in (site for site in RESIDUAL_SITES if site in block.sites):
            terms = [
                f"{term.scale:g} · {term.address}" if term.scale != 1 else term.address for term in block.terms(site)
            ]
            if terms not in (["input"], ["output"]):
                addresses.append(f"{site} = {' + '.join(terms)}")
        lines.append(f"layer {layer} ({block.kind}): {', '.join(addresses)}")
    return lines


def _facts(loaded: LoadedModel, family: Family) -> dict[str, str]:
    model, text = loaded.model, loaded.model.config.get_text_config()
    parameter = next(model.parameters())
    counts = Counter(block.kind for block in family.blocks)
    kinds = f" ({', '.join(f'{count} {kind}' for kind, count in counts.items())})" if len(counts) > 1 else ""
    where = {
        kind: [layer for layer, positions in enumerate(family.layer_positions) if positions == kind]
        for kind in sorted(family.kinds_of_positions)
    }
    rare = sorted(where, key=lambda kind: len(where[kind]))[:-1]
    positions = "; ".join(f"{kind} in {layers_text(where[kind])}" for kind in rare)
    sliding = sum(kind == "sliding_attention" for kind in getattr(text, "layer_types", None) or [])
    windows = f"; {sliding} layers slide a window of {text.sliding_window}" if sliding else ""
    residual, here = [site for site in RESIDUAL_SITES if site in family.sites], {*ATTENTION_SITES, *family.sites}
    observables = {name: kind for name, kind in OBSERVABLES.items() if not here.isdisjoint(kind.sites)}
    interventions = {name: kind for name, kind in INTERVENTIONS.items() if not kind.is_control}
    target = Target(model, family, seams={})
    layers = counted(len(family.layer_modules(model)), "layer")
    return {
        "architecture": f"{type(model).__name__}, {layers}{kinds}, family '{family.name}'",
        "wiring": f"{family.wiring}, positions {family.positions}" + (f" ({positions})" if positions else ""),
        "attention": f"{model.config._attn_implementation} by itself; seam through the {family.door}{windows}",
        "dtype": f"{str(parameter.dtype).removeprefix('torch.')} on {parameter.device}",
        "tokenizer": type(loaded.tokenizer).__name__ if loaded.tokenizer else "none: only token ids, random, repeated",
        "sites": ", ".join([*residual, "query", "key", "value", "attn_mix"]),
        "observables": ", ".join(name for name in observables if not observables[name].inapplicable(model, family)),
        "interventions": ", ".join(name for name in interventions if not interventions[name].inapplicable(target)),
    }


@torch.no_grad()
def _output(
    model: PreTrainedModel, family: Family, batch: Batch, kernel: str, bare: torch.Tensor, tolerance: float
) -> Check:
    """Compare the outputs as every run does in its first batch; a difference is reported, not raised."""
    parity = Parity(family.last_layer(model), bare, tolerance=inf)
    with open_tracer(model, family, kernel) as tracer:
        tracer.forward(batch, [parity])
    assert parity.error is not None
    detail = "bit for bit" if parity.error == 0 else f"within {parity.error:.1e}, by round-off at most {tolerance:.1e}"
    what = f"the last layer's output through the seam ({kernel}) equals the bare model's"
    return (what, parity.error <= tolerance, detail)


def _attention_check(what: str, comparisons: Sequence[AttentionComparison]) -> Check:
    """Compare attention of all layers with a function of transformers, both on the same queries, keys and values."""
    worst = max(comparisons, key=lambda one: one.excess)
    within = f"within {worst.difference:.1e} of its values' norm on the same queries and keys"
    return (what, worst.excess <= 1, f"{within}, {worst.excess:.1g} times what round-off explains")

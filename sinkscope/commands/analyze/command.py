"""The command `analyze`: measures a model and returns a Run. Read this file to follow a run from end to end."""

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from transformers import PreTrainedTokenizerBase

from sinkscope.commands.analyze.options import AnalyzeOptions
from sinkscope.commands.measured import opened, shown
from sinkscope.commands.printout import Printout
from sinkscope.errors import InputError, SinkscopeError
from sinkscope.measuring.console import Messages, print_line, print_notices, print_part
from sinkscope.measuring.keeping import ModelReference, check_sites, keep
from sinkscope.measuring.measure import Facts, measure, run_manifest, settings_of
from sinkscope.measuring.pictures import PICTURES_CONDITION, measure_encoder, measure_pictures, processor_for
from sinkscope.measuring.processes import together
from sinkscope.measuring.random_weights import random_weights
from sinkscope.measuring.spike_mask import SpikeFilter, SpikeMask, calibrated_filter, measured_mask
from sinkscope.measuring.subject import ModelLike, check_config, is_in_memory, options_of
from sinkscope.measuring.tables import publish
from sinkscope.measuring.watching import check_decoding, decode
from sinkscope.models.in_memory import text_of
from sinkscope.models.loading import load_encoder
from sinkscope.models.steps import find_checkpoints
from sinkscope.options.keywords import AnalyzeKeywords
from sinkscope.options.option import checked, flag
from sinkscope.options.output import OutputOptions
from sinkscope.options.signatures import with_options
from sinkscope.output.result import draw, figure_failure, write_data
from sinkscope.output.run import Run, finished
from sinkscope.results.activations import Activations
from sinkscope.results.folders import new_folder, own_folder
from sinkscope.text.pictures import read_pictures

if TYPE_CHECKING:
    from sinkscope.commands.steps.series import Series


def command(options: AnalyzeOptions, output: OutputOptions) -> Printout:
    if options.has_steps:
        typed = {name: getattr(options, name) for name in options.model_fields_set - {"model", "revision"}}
        series = analyze_steps(options.model, options.revision, record=output.record, **output.where, **typed)
        failure = figure_failure(series.manifest, *(run.manifest for run in series.runs.values()))
        return Printout(
            series, series.verdict, numbers=series.headlines, notes=series.warnings, folder=output.out, failure=failure
        )
    return shown(analyze(options.model, config=options, **output.where), output)


def check(options: AnalyzeOptions) -> None:
    """Raise InputError for wrong options of one run in a recipe or a sweep, before a model is loaded."""
    if options.has_steps:
        raise InputError("each run or cell measures one model: name a single revision or checkpoint")
    check_config(options)
    check_sites(options.keep)


# options of texts, observables and weights that a vision transformer does not have
NOT_OF_PICTURES = (
    "input", "dataset", "prompt", "seq_len", "bos", "observables", "heads", "keep", "export_mask", "generate",
    "random_weights",
)  # fmt: skip


@with_options(AnalyzeOptions)
def analyze(
    model: ModelLike = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    quiet: bool = True,
    config: AnalyzeOptions | None = None,
    figures: Iterable[str] | None = None,
    page: bool = True,
    **options: Unpack[AnalyzeKeywords],
) -> Run:
    """Measure one model and return its Run; with `out`, also write the run folder.

    Under `accelerate launch`, all processes call this and share the sequences of a named model; the first one writes.

    Args:
        model: a hub id, a folder, a .gguf file, or a model already loaded; None for SmolLM2-135M-Instruct.
        tokenizer: the tokenizer of a model already loaded.
        out: the run folder to write; None: in memory only.
        overwrite: replace an earlier run in `out`.
        quiet: print no progress.
        config: all options at once, in place of `options`.
        figures: names of the figures to draw; None: all that apply.
        page: also write index.html.
        **options: those of the command line, which are listed below.

    Raises:
        InputError: an option or the input is wrong; nothing was written.
        SinkscopeError: the run failed.
    """
    start = time.time()
    config = config or options_of(AnalyzeOptions, model, options)
    check_sites(config.keep)
    pictures = None if config.images is None else read_pictures(config.images, config.num_seqs)
    if pictures is not None and not is_in_memory(model) and (encoder := load_encoder(config)) is not None:
        for name in NOT_OF_PICTURES:
            if config.is_changed(name):
                raise InputError(f"{flag(name)} is not possible for a vision transformer, which reads pictures alone")
        with own_folder(out, overwrite, reads=(config.model, str(config.images))) as folder:
            raw, subject = measure_encoder(encoder, pictures)
            print_line(Messages(quiet), f"read: {subject.inputs.said}")
            tables, facts = publish(raw, encoder, PICTURES_CONDITION), Facts(batch_size=1)
            manifest = run_manifest(subject, config, facts, list(tables), start)
            return finished(Run.of_analysis(manifest, tables, folder), Messages(quiet), figures, page)
    with (
        opened(model, tokenizer, config, out, overwrite, quiet) as (learned, folder, console),
        random_weights(learned, config.seed) if config.random_weights else nullcontext(learned) as subject,
    ):
        processor = None if pictures is None else processor_for(subject, config)
        if config.generate is not None:
            check_decoding(subject, config.generate)
        activations = Activations(keep(subject, config))
        tables, facts = measure(subject, config, console, config.pairs)
        if config.generate is not None:
            decoded = decode(subject, settings_of(subject, config), config.generate, facts.batch_size)
            tables |= publish(decoded, subject.loaded, subject.inputs.condition)
        if pictures is not None:
            pictured, facts.pictures = measure_pictures(subject, config, pictures, processor, tables["massive"])
            tables |= publish(pictured, subject.loaded, subject.inputs.condition)
        print_notices(console, facts.notices)
        manifest = run_manifest(subject, config, facts, list(tables), start) | {"activations": list(activations)}
        loaded = ModelReference(subject.loaded) if is_in_memory(model) else None
        mask = measured_mask(subject, config, tables).write if config.export_mask else None
        run = Run.of_analysis(manifest, tables, folder, activations=activations, loaded=loaded, further=mask)
        return finished(run, console, figures, page)


@with_options(AnalyzeOptions)
def analyze_steps(
    model: str | os.PathLike[str] | None,
    revisions: str | Iterable[str] | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    quiet: bool = True,
    page: bool = True,
    record: Mapping[str, Any] | None = None,
    **options: Unpack[AnalyzeKeywords],
) -> "Series":
    """Measure a model at several steps of its training; with `out`, also write a run folder per step and the figures.

    Args:
        model: a hub id, or a folder with a checkpoint in each subfolder.
        revisions: the revisions of the hub id that hold the steps, or the subfolders. The default for a folder is its
            subfolders `checkpoint-…`, as transformers' Trainer writes them.
        out: the folder to write; None: in memory only.
        overwrite: replace an earlier series in `out`.
        quiet, page, **options: as for `analyze`.
        record: the content of a recipe, for run.json; of each step, only the figures that it names are drawn.

    Raises:
        InputError: an option or the input is wrong, a name has no step, or two names have the same step.
        SinkscopeError: a run failed; nothing is written.
    """
    from sinkscope.commands.steps.series import COMMAND, Series

    start = time.time()
    if model is None:
        raise InputError("several revisions were given, but no model to take them from")
    model = text_of(model)
    checkpoints = find_checkpoints(model, revisions)
    configs = [
        checked(AnalyzeOptions, options | {"model": checkpoint.model, "revision": checkpoint.revision})
        for checkpoint in checkpoints
    ]
    check(configs[0])
    recipe = {"recipe": record} if record else {}
    runs: dict[int, Run] = {}
    with (
        together(configs[0].device_map) as members,
        own_folder(members.only_first(out), overwrite, (COMMAND,), reads=(model, str(configs[0].input))) as folder,
    ):
        console = members.console(quiet)
        with nullcontext() if folder is None else new_folder(folder) as fresh:
            for place, (checkpoint, config) in enumerate(zip(checkpoints, configs, strict=True), 1):
                print_part(console, f"step {checkpoint.step}", place, len(checkpoints))
                try:
                    run = analyze(config.model, config=config, quiet=quiet)
                except SinkscopeError as error:
                    raise type(error)(f"at step {checkpoint.step}: {error}") from error
                run = replace(run, manifest=run.manifest | recipe)
                if folder is not None and fresh is not None:
                    written = fresh / checkpoint.folder
                    written.mkdir()
                    write_data(replace(run, folder=folder / checkpoint.folder), written)
                    run = Run.open(written)  # its tables are no longer in memory
                runs[checkpoint.step] = run
            series = replace(Series.of(model, checkpoints, configs[0], runs, start, **recipe), folder=folder)
            if fresh is not None:
                write_data(series, fresh)
        if folder is None:
            return series
        series = Series.open(folder)
        for run in series.runs.values():
            draw(run, record["content"].get("figures", ()) if record else None, page)
        draw(series, page=page)
    return Series.open(folder)


@with_options(AnalyzeOptions)
def spike_mask(
    model: ModelLike = None,
    ids: Any = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    quiet: bool = True,
    **options: Unpack[AnalyzeKeywords],
) -> SpikeMask:
    """Return which tokens are sinks in which layers' outputs, and massive coordinates: what `export_mask` writes.

    Args:
        model, tokenizer, quiet, **options: as for `analyze`.
        ids: token ids (N,T), or texts; None: the input that the options name.

    Raises:
        InputError: an option or the input is wrong.
        SinkscopeError: the measurement failed.
    """
    config = options_of(AnalyzeOptions, model, options if ids is None else {"bos": "never", "input": ids} | options)
    with opened(model, tokenizer, config, None, False, quiet) as (subject, _, _):
        return measured_mask(subject, config)


@with_options(AnalyzeOptions)
def spike_filter(
    model: ModelLike = None,
    ids: Any = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    quiet: bool = True,
    **options: Unpack[AnalyzeKeywords],
) -> SpikeFilter:
    """Return a filter that recognizes the model's sink tokens in states of batches of your own.

        spikes = sinkscope.spike_filter(model, tokenizer=tokenizer)
        states = model(**batch, output_hidden_states=True).hidden_states[layer + 1]
        others = states[~spikes(states, layer)]

    Args:
        model, ids, tokenizer, quiet, **options: as for `spike_mask`; the input is what the filter is calibrated on.

    Raises:
        InputError: an option or the input is wrong.
        SinkscopeError: the measurement failed, or the model has no sink token.
    """
    config = options_of(AnalyzeOptions, model, options if ids is None else {"bos": "never", "input": ids} | options)
    with opened(model, tokenizer, config, None, False, quiet) as (subject, _, _):
        return calibrated_filter(subject, config)

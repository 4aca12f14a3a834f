"""`analyze`: from a model's name to a Run. Read this file to see a run from end to end."""

import os
import time
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from sinkscope.commands.repeat import differences
from sinkscope.commands.result import Result
from sinkscope.commands.series import analyze_steps
from sinkscope.errors import InputError
from sinkscope.measuring.console import tell
from sinkscope.measuring.manifest import make_manifest
from sinkscope.measuring.measure import measure
from sinkscope.measuring.observables import check_names
from sinkscope.measuring.subject import ModelLike, options_of, subject_of
from sinkscope.options.measuring import AnalyzeOptions
from sinkscope.options.output import OutputOptions
from sinkscope.report.run import Run, finished
from sinkscope.results.folders import check_output
from sinkscope.text.sources import check_source


def command(options: AnalyzeOptions, output: OutputOptions) -> Result:
    if options.has_steps:
        given = {name: getattr(options, name) for name in options.model_fields_set - {"model", "revision"}}
        series = analyze_steps(options.model, options.revision, **output.where, **given)
        return Result(series, numbers=series.headlines, notes=series.warnings, folder=output.out)
    run = analyze(options.model, config=options, **output.where)
    return Result(run, run.verdict, notes=differences(output.from_, run.manifest), folder=output.out)


def check(options: AnalyzeOptions) -> None:
    """What can be wrong with the options of a recipe, before a model is loaded. Raises: InputError."""
    if options.has_steps:
        raise InputError("a recipe measures one model: of several steps, name one revision or checkpoint")
    check_names(options.observables)
    check_source(options.input)


def analyze(
    model: ModelLike = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    quiet: bool = True,
    config: AnalyzeOptions | None = None,
    **options: Any,
) -> Run:
    """Measure one model and return its Run; with `out`, also write the run folder.

    `model` is a hub id, a folder, a .gguf file, or a model already loaded (with its tokenizer beside it); without
    one, SmolLM2-135M-Instruct. `options` are those of the command line, with underscores: see `AnalyzeOptions`. A whole
    `config` takes their place.

    Errors: InputError for wrong options or input, before anything is written; SinkscopeError for a run that failed.
    """
    start = time.time()
    config = config or options_of(AnalyzeOptions, model, options)
    folder = None if out is None else check_output(out, overwrite)
    console = Console(stderr=True, quiet=quiet)
    subject = subject_of(model, tokenizer, config, console)

    tables, facts = measure(subject, config, console)
    tell(console, facts.notices)
    manifest = make_manifest(subject, config, facts, list(tables), start)
    return finished(Run(manifest, tables, folder), console)

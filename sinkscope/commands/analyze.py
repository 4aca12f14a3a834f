"""`analyze`: from a model's name to a Run. Read this file to see a run from end to end."""

import os
import time
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from sinkscope.measuring.console import tell
from sinkscope.measuring.manifest import make_manifest
from sinkscope.measuring.measure import measure
from sinkscope.measuring.subject import ModelLike, config_of, subject_of
from sinkscope.options.measuring import RunConfig
from sinkscope.report.run import Run, finished
from sinkscope.results.folders import check_output


def analyze(
    model: ModelLike = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    quiet: bool = True,
    config: RunConfig | None = None,
    **options: Any,
) -> Run:
    """Measure one model and return its Run; with `out`, also write the run folder.

    `model` is a hub id, a folder, a .gguf file, or a model already loaded (with its tokenizer beside it); without
    one, SmolLM2-135M. `options` are those of the command line, with underscores: see `RunConfig`. A whole `config`
    takes their place.

    Errors: InputError for wrong options or input, before anything is written; SinkscopeError for a run that failed.
    """
    start = time.time()
    config = config or config_of(model, options)
    folder = None if out is None else check_output(out, overwrite)
    console = Console(stderr=True, quiet=quiet)
    subject = subject_of(model, tokenizer, config, console)

    tables, facts = measure(subject, config, console)
    tell(console, facts.notices)
    manifest = make_manifest(subject, config, facts, list(tables), start)
    return finished(Run(manifest, tables, folder), console)

"""Commands that measure one model and return a Run: their folder and subject, their result, and --from RUN."""

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from sinkscope.commands.printout import Printout
from sinkscope.errors import InputError, one_line
from sinkscope.measuring.processes import together
from sinkscope.measuring.subject import ModelLike, Subject, check_config, is_in_memory, open_subject
from sinkscope.models.files import is_demo
from sinkscope.options.given import OBJECTS
from sinkscope.options.measuring import PERMISSIONS, RunConfig
from sinkscope.options.option import Options, checked, flag
from sinkscope.options.output import OutputOptions
from sinkscope.output.result import both, figure_failure
from sinkscope.output.run import Run
from sinkscope.results.folders import own_folder
from sinkscope.results.manifest import MANIFEST, folder_of, read_manifest
from sinkscope.results.side_by_side import differing_settings


@contextmanager
def opened(
    model: ModelLike,
    tokenizer: PreTrainedTokenizerBase | None,
    config: RunConfig,
    out: str | os.PathLike[str] | None,
    overwrite: bool,
    quiet: bool,
) -> Iterator[tuple[Subject, Path | None, Console]]:
    """Lock the folder, load the model and make its inputs; launched processes share the passes of the block."""
    check_config(config)
    reads = (config.model, config.adapter, str(config.input))
    with (
        together(config.device_map, is_in_memory(model)) as members,
        own_folder(members.only_first(out), overwrite, reads=reads) as folder,
        open_subject(model, tokenizer, config, console := members.console(quiet)) as subject,
    ):
        yield subject, folder, console


def shown(run: Run, output: OutputOptions, failure: str = "") -> Printout:
    """Return the result for the command line."""
    failure, notes = both(failure, figure_failure(run.manifest)), differences(output.from_, run.manifest)
    return Printout(run, run.verdict, notes=notes, folder=output.out, failure=failure)


def options_of_run(
    path: str | os.PathLike[str], command: str, kind: type[Options], permitted: Collection[str] = ()
) -> Options:
    """Return the options of a run, without its permissions: run.json may come from anywhere.

    InputError if it is not a run of `command`, its model was passed as an object in Python, or it was made with
    PERMISSIONS that are not in `permitted`.
    """
    folder = folder_of(path)
    manifest = read_manifest(folder)
    if manifest["command"] != command:
        raise InputError(
            f"{folder} is a run of `sinkscope {manifest['command']}`: repeat it with that command's --from"
        )
    try:
        options = checked(kind, manifest["config"])
        source = str(manifest["model"]["source"])
    except (InputError, TypeError, KeyError) as error:
        by = manifest.get("sinkscope", "?")
        raise InputError(f"{folder / MANIFEST} (of sinkscope {by}) cannot be repeated here: {error}") from None
    if getattr(options, "model", None) is None and not is_demo(source):
        raise InputError(
            f"{folder / MANIFEST} cannot be repeated: its model was passed as an object in Python, not by name. "
            f"Analyze that again, or name a model instead of --from (its name was {source})"
        )
    if (given := getattr(options, "input", None)) in OBJECTS:
        raise InputError(
            f"{folder / MANIFEST} cannot be repeated: its input ({given}) was passed as an object in Python, not by "
            "name. Analyze that again, or save it to a file and name this as --input"
        )
    lacking = [flag(name) for name in PERMISSIONS if getattr(options, name) and name not in permitted]
    if lacking:
        flags = " and ".join(lacking)
        raise InputError(
            f"{folder / MANIFEST} is of a run with {flags}, which lets code that comes with a model run: "
            f"if you trust the maker of {one_line(getattr(options, 'model', None) or source, 80)}, add {flags}"
        )
    return options.model_copy(update={name: name in permitted for name in PERMISSIONS})


def differences(path: str | os.PathLike[str] | None, now: dict[str, Any]) -> list[str]:
    """Describe how a repetition's manifest differs from the original run's: files and models may change."""
    if path is None:
        return []
    rows = differing_settings([read_manifest(folder_of(path)), now], ["then", "now"])
    return [
        f"unlike in the original run, {setting} was {row['then']} and is now {row['now']}"
        for setting, row in rows.iterrows()
    ]

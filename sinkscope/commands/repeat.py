"""--from RUN: the options of a run, read back from its run.json."""

import os
from typing import Any

from sinkscope.errors import InputError
from sinkscope.models.files import is_demo
from sinkscope.options.option import Options, checked
from sinkscope.report.comparison import differing_settings
from sinkscope.results.manifest import MANIFEST, folder_of, read_manifest


def options_of_run(path: str | os.PathLike[str], command: str, kind: type[Options]) -> Options:
    """The whole options of a command's run.

    Args:
        path: the run's folder or its run.json.
        command: which must have made it.
        kind: the command's options.

    Raises:
        InputError: it is no run, another command's, or its model was handed over in Python.
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
            f"{folder / MANIFEST} cannot be repeated: its model was handed over in Python, not named. "
            f"Analyze that again, or name a model instead of --from (it called itself {source})"
        )
    return options


def differences(path: str | os.PathLike[str] | None, now: dict[str, Any]) -> list[str]:
    """How a repetition differs from what it repeats, by their manifests: files and models change."""
    if path is None:
        return []
    rows = differing_settings([read_manifest(folder_of(path)), now], ["then", "now"])
    return [
        f"unlike in the run repeated, {setting} was {row['then']} and is now {row['now']}"
        for setting, row in rows.iterrows()
    ]

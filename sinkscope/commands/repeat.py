"""The option --from RUN: reads the options of a run from its run.json."""

import os
from collections.abc import Collection
from typing import Any

from sinkscope.errors import InputError, one_line
from sinkscope.models.files import is_demo
from sinkscope.options.measuring import PERMISSIONS
from sinkscope.options.option import Options, checked, flag
from sinkscope.output.comparison import differing_settings
from sinkscope.results.manifest import MANIFEST, folder_of, read_manifest


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

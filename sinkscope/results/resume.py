"""Resuming: a folder that was left unfinished is gone on with by the same options, and by no others."""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from sinkscope.errors import InputError, one_line
from sinkscope.results.folders import check_output, unfinished
from sinkscope.results.manifest import MANIFEST, read_manifest, write_manifest

SHOWN = 3  # differing options that a message names


def resumable(
    folder: Path, command: str, options: Mapping[str, Any], defaults: Mapping[str, Any] | None = None
) -> dict[str, Any] | None:
    """The manifest of what the same command with the same options has left in a folder.

    Args:
        folder: where it is to go on.
        command: as in the manifest.
        options: entries of the manifest that must be alike, single values or mappings of names to values. Whatever may
            differ between two sessions is left out.
        defaults: values that count as given where the manifest, of an older version, does not have them.

    Returns:
        The manifest; None if there is none yet.

    Raises:
        InputError: the folder is another command's, its manifest is damaged, or the options differ.
    """
    if not (folder / MANIFEST).exists():
        return None
    found = read_manifest(folder, (command,))
    recorded = {name: found[name] for name in options if name in found}
    broken = [
        name
        for name, value in options.items()
        if isinstance(value, dict) and not isinstance(recorded.get(name, {}), dict | None)
    ]
    if broken:
        raise InputError(f"{folder / MANIFEST} is damaged ({broken[0]}): overwrite it, or name another folder")
    before, after = _flat(defaults or {}) | _flat(recorded), _flat(json.loads(json.dumps(options)))
    differing = [key for key in after | before if before.get(key) != after.get(key)]
    if differing:
        named = ", ".join(
            f"{key[-1]} was {one_line(before.get(key), 40)}, now {one_line(after.get(key), 40)}"
            for key in differing[:SHOWN]
        )
        raise InputError(
            f"{folder} holds what `{command}` made with other options ({named}): repeat them to go on with it, "
            "overwrite it, or name another folder"
        )
    return found


def check_resumable(
    folder: Path,
    command: str,
    options: Mapping[str, Any],
    overwrite: bool,
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Check, before anything is computed, that a command can begin in a folder, or go on there.

    Raises:
        InputError: as `resumable` and `check_output` do.
    """
    if overwrite or resumable(folder, command, options, defaults) is None:
        check_output(folder, overwrite, (command,))


def claim(folder: Path, manifest: Mapping[str, Any], leftovers: Callable[[Path], Iterable[Path]] = unfinished) -> None:
    """Make a folder this command's: clear what a kill has left half written, and write run.json before all else.

    Args:
        folder: new, or checked with `resumable`.
        manifest: to be written.
        leftovers: finds the folders that are half written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in leftovers(folder):
        shutil.rmtree(path, ignore_errors=True)
    write_manifest(folder, manifest)


def _flat(options: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """(entry, name) → value of each option in a mapping, (entry,) → value of any other."""
    flat: dict[tuple[str, ...], Any] = {}
    for entry, value in options.items():
        if isinstance(value, dict):
            flat |= {(entry, name): part for name, part in value.items()}
        else:
            flat[entry,] = value
    return flat

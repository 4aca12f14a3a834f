"""Resuming: a folder that was left unfinished is gone on with by the same options, and by no others."""

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sinkscope.errors import InputError, SinkscopeError, one_line
from sinkscope.results.folders import check_no_link, check_output, new_folder
from sinkscope.results.manifest import MANIFEST, files_in, read_manifest, strangers, write_manifest
from sinkscope.results.swap import put_right_within, remove

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
        raise InputError(f"{folder / MANIFEST} is damaged ({broken[0]}): delete {folder}, or name another folder")
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
    reads: Iterable[str | os.PathLike[str] | None] = (),
    renewed: Collection[str] = (),
) -> None:
    """Check, before anything is computed, that a command can begin in a folder, or go on there.

    Args:
        folder, command, options, defaults: as for `resumable`.
        overwrite, reads: as for `check_output`.
        renewed: folders in it that are replaced whenever the command goes on.

    Raises:
        InputError: as `resumable` and `check_output` do; or something else lies in a folder that is renewed.
    """
    found = None if overwrite else resumable(folder, command, options, defaults)
    if found is None:
        check_output(folder, overwrite, (command,), reads)
        return
    check_no_link(folder)
    if found.get("files") is not None:
        for path in strangers(folder):
            if path.relative_to(folder).parts[0] in renewed:
                raise InputError(f"{path} is none of `{command}`'s files, and their folder is renewed: move it away")


def claim(
    folder: Path, manifest: Mapping[str, Any], leftovers: Callable[[Path], Iterable[Path]] = lambda folder: ()
) -> None:
    """Make a folder this command's: clear what a kill has left half written, and write run.json before all else.

    Args:
        folder: new, or checked with `resumable`.
        manifest: to be written.
        leftovers: finds further folders that are half written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    put_right_within(folder)
    for path in leftovers(folder):
        remove(path)
    write_manifest(folder, manifest)


@dataclass
class FileList:
    """The files of a folder that is written bit by bit, as its run.json lists them: each before it is there.

    Attributes:
        folder: that holds run.json.
        names: as in run.json; None in a folder of an older version, which lists none.
        record: writes run.json anew.
    """

    folder: Path
    names: list[str] | None
    record: Callable[[], None]

    def add(self, *names: str) -> None:
        """Names are paths in the folder; a folder whose whole content is the command's ends with a slash."""
        if self.names is not None and not set(self.names).issuperset(names):
            self.names = sorted({*self.names, *names})
            try:
                self.record()
            except OSError as error:
                told = f"writing {self.folder / MANIFEST} failed, and what was reached is kept: {one_line(error)}"
                raise SinkscopeError(told) from error

    @contextmanager
    def new_folder(self, target: Path) -> Iterator[Path]:
        """As the function of that name, for a folder in this one."""

        def others(real: Path) -> list[Path]:
            if self.names is None or not (self.folder / MANIFEST).exists():
                return []
            return [path for path in strangers(self.folder.resolve()) if path.is_relative_to(real)]

        with new_folder(target, others) as fresh:
            yield fresh
            within = [MANIFEST] if (fresh / MANIFEST).exists() else files_in(fresh)
            self.add(*((target / name).relative_to(self.folder).as_posix() for name in within))


def _flat(options: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    """(entry, name) → value of each option in a mapping, (entry,) → value of any other."""
    flat: dict[tuple[str, ...], Any] = {}
    for entry, value in options.items():
        if isinstance(value, dict):
            flat |= {(entry, name): part for name, part in value.items()}
        else:
            flat[entry,] = value
    return flat

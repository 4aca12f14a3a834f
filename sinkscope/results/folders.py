"""Folders that a command writes: checked before, written under a temporary name, renamed when whole."""

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinkscope.errors import InputError, SinkscopeError, one_line

if TYPE_CHECKING:
    pass
from sinkscope.results.manifest import MANIFEST


def check_output(folder: str | os.PathLike[str], overwrite: bool, manifest: str = MANIFEST) -> Path:
    """Before anything is computed: can a run be written there? → the folder. Errors: InputError.

    `manifest` is the file by which a folder is known as one of ours, that --overwrite may replace.
    """
    folder = Path(folder)
    try:
        _check_target(folder, overwrite, manifest)
    except OSError as error:
        raise InputError(f"--out {folder} cannot be used: {error.strerror}") from None
    return folder


def _check_target(folder: Path, overwrite: bool, manifest: str) -> None:
    real = folder.resolve()
    parent = next((path for path in real.parents if path.exists()), real)
    in_the_way = real if real.exists() else parent
    if not in_the_way.is_dir():
        raise InputError(f"--out {folder}: the file {in_the_way} is in the way")
    if (real / manifest).exists() and not overwrite:
        raise InputError(f"--out {folder} already holds a run: --overwrite replaces it, or name another folder")
    if real.is_dir() and any(real.iterdir()) and not (real / manifest).exists():
        kind = "" if manifest == MANIFEST else f" with a {manifest}"
        raise InputError(f"--out {folder} is not empty and holds no run{kind}: name another folder, or a new one in it")
    if os.path.ismount(real) or Path.cwd().is_relative_to(real):
        raise InputError(f"--out {folder} cannot be made anew: name a new folder in it, such as {folder / 'run'}")
    try:  # permission bits do not tell: root passes them, read-only file systems do not ask
        os.rmdir(tempfile.mkdtemp(prefix=_TEMPORARY, dir=parent))
    except OSError as error:
        raise InputError(
            f"--out {folder} cannot be written: making a folder in {parent} fails ({error.strerror})"
        ) from None


_TEMPORARY = ".sinkscope-"  # how the names of unfinished folders begin


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Under a temporary name and then renamed: a kill leaves the file as it was."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` when the block ends well, and vanishes when it does not.

    What `folder` held before is replaced only then. Errors: SinkscopeError where the disk refuses.
    """
    real = folder.resolve()
    made = [path for path in real.parents if not path.exists()]  # the innermost first
    temporary = real.parent / f"{_TEMPORARY}{secrets.token_hex(4)}"
    try:
        temporary.mkdir(parents=True)
        yield temporary
        _put_in_place(temporary, real)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        with suppress(OSError):  # not empty: another run's by now
            for path in made:
                path.rmdir()
        if isinstance(error, OSError):
            raise SinkscopeError(f"writing {folder} failed, and nothing of it is left: {one_line(error)}") from error
        raise


def clear_unfinished(folder: Path) -> None:
    """Away with what kills have left of `new_folder` anywhere in a folder that is ours alone."""
    for path in list(folder.rglob(f"{_TEMPORARY}*")):
        shutil.rmtree(path, ignore_errors=True)


def _put_in_place(temporary: Path, folder: Path) -> None:
    """Rename, with what was there before put aside: at no time is there neither."""
    if not folder.exists():
        os.replace(temporary, folder)
        return
    aside = temporary.with_name(temporary.name + "-old")
    os.replace(folder, aside)
    try:
        os.replace(temporary, folder)
    except BaseException:
        os.replace(aside, folder)
        raise
    shutil.rmtree(aside, ignore_errors=True)

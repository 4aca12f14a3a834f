"""Folders that a command writes: checked beforehand, written under a temporary name, renamed when they are complete."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sinkscope.errors import InputError, SinkscopeError, one_line
from sinkscope.results.manifest import MANIFEST, RUNS, read_manifest

_TEMPORARY = ".sinkscope-"  # how the names of unfinished folders begin


def check_output(folder: str | os.PathLike[str], overwrite: bool, commands: Collection[str] = RUNS) -> Path:
    """Check, before anything is computed, that a command can write its folder.

    Args:
        folder: where to write.
        overwrite: whether an earlier result there may be replaced.
        commands: those whose earlier result may be replaced; any other folder is left alone.

    Returns:
        The folder as a path.

    Raises:
        InputError: it holds something else, or cannot be written.
    """
    folder = Path(folder)
    try:
        _check_target(folder, overwrite, commands)
    except OSError as error:
        raise InputError(f"--out {folder} cannot be used: {error.strerror}") from None
    return folder


def _check_target(folder: Path, overwrite: bool, commands: Collection[str]) -> None:
    real = folder.resolve()
    parent = next((path for path in real.parents if path.exists()), real)
    in_the_way = real if real.exists() else parent
    if not in_the_way.is_dir():
        raise InputError(f"--out {folder}: the file {in_the_way} is in the way")
    if (real / MANIFEST).exists():
        if not overwrite:
            raise InputError(f"--out {folder} already holds a run: --overwrite replaces it, or name another folder")
        _check_replaceable(folder, commands)
    elif real.is_dir() and any(real.iterdir()):
        raise InputError(f"--out {folder} is not empty and holds no run: name another folder, or a new one in it")
    if os.path.ismount(real) or Path.cwd().is_relative_to(real):
        raise InputError(f"--out {folder} cannot be made anew: name a new folder in it, such as {folder / 'run'}")
    try:  # permission bits do not tell: root passes them, read-only file systems do not ask
        os.rmdir(tempfile.mkdtemp(prefix=_TEMPORARY, dir=parent))
    except OSError as error:
        raise InputError(
            f"--out {folder} cannot be written: making a folder in {parent} fails ({error.strerror})"
        ) from None


def _check_replaceable(folder: Path, commands: Collection[str]) -> None:
    """What another command wrote may have taken days; a damaged manifest protects nothing."""
    try:
        by = read_manifest(folder, None)["command"]
    except InputError:
        return
    if by not in commands:
        raise InputError(f"--out {folder} holds what `{by}` wrote, and is not replaced: name another folder")


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` when the block ends well, and vanishes when it does not.

    What `folder` held before is replaced only then.

    Raises:
        SinkscopeError: the disk refuses.
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


def unfinished(folder: Path) -> Iterable[Path]:
    """What kills have left of `new_folder` anywhere in a folder."""
    return list(folder.rglob(f"{_TEMPORARY}*"))


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

"""Folders that a command writes: checked beforehand, one command's at a time, renamed when they are complete."""

import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from sinkscope.errors import InputError, SinkscopeError, one_line
from sinkscope.results.manifest import MANIFEST, RUNS, read_manifest, strangers
from sinkscope.results.swap import NEW, beside, locked, put_in_place, put_right


@contextmanager
def own_folder(
    folder: str | os.PathLike[str] | None,
    overwrite: bool,
    commands: Collection[str] = RUNS,
    reads: Iterable[str | os.PathLike[str] | None] = (),
) -> Iterator[Path | None]:
    """Have the folder that a command writes to oneself, checked before anything is computed.

    Args:
        folder: where to write. None: nowhere, which is never in the way.
        overwrite, commands, reads: as for `check_output`.

    Yields:
        The folder as a path.

    Raises:
        InputError: as `check_output` and `alone_in` do.
    """
    if folder is None:
        yield None
        return
    with alone_in(folder) as path:
        check_output(path, overwrite, commands, reads)
        yield path


@contextmanager
def alone_in(folder: str | os.PathLike[str], option: str = "--out") -> Iterator[Path]:
    """Keep other processes out of a folder, which need not exist, and put right what a kill has left of it.

    Args:
        folder: to be written.
        option: by which another folder can be named; "": the command writes this one only.

    Raises:
        InputError: another process writes it, or nobody can.
    """
    path = Path(folder)
    named, instead = (f"{option} {path}", ", or name another folder") if option else (str(path), "")
    real, parent = _place(path)
    with ExitStack() as stack:
        stack.callback(_remove_empty, _missing_parents(real))
        try:
            real.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(real))
            put_right(real)
        except BlockingIOError:
            raise InputError(f"{named} is being written by another process: wait for it{instead}") from None
        except OSError as error:  # permission bits do not tell: root passes them, read-only file systems do not ask
            hint = "" if option else ": copy it to where that can be done"
            raise InputError(f"{named} cannot be written: writing in {parent} fails ({error.strerror}){hint}") from None
        yield path


def _place(folder: Path) -> tuple[Path, Path]:
    """The real path of a folder, and the folder there is that it is or will be in. Raises: InputError."""
    try:
        real = folder.resolve()
        parent = next((path for path in real.parents if path.exists()), real)
        in_the_way = real if real.exists() else parent
        is_folder = in_the_way.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # also a circle of links, and what no path can be
        reason = getattr(error, "strerror", None) or one_line(error)
        raise InputError(f"--out {folder} cannot be used: {reason}") from None
    if not is_folder:
        raise InputError(f"--out {folder}: the file {in_the_way} is in the way")
    if not real.name:
        raise _not_replaceable(folder)
    return real, parent


def _not_replaceable(folder: Path) -> InputError:
    return InputError(f"--out {folder} cannot be made anew: name a new folder in it, such as {folder / 'run'}")


def check_output(
    folder: Path,
    overwrite: bool,
    commands: Collection[str] = RUNS,
    reads: Iterable[str | os.PathLike[str] | None] = (),
) -> None:
    """Check, before anything is computed, that a command can write its folder.

    Args:
        folder: where to write.
        overwrite: whether an earlier result there may be replaced.
        commands: those whose earlier result may be replaced; any other folder is left alone.
        reads: names of a model, an input, …: where one is a file or folder, nothing that holds it is replaced.

    Raises:
        InputError: it holds something else, or a link, or cannot be replaced.
    """
    real = folder.resolve()
    try:
        if (real / MANIFEST).exists():
            if not overwrite:
                raise InputError(f"--out {folder} already holds a run: --overwrite replaces it, or name another folder")
            _check_replaceable(folder, commands, reads)
        elif real.is_dir() and any(real.iterdir()):
            raise InputError(f"--out {folder} is not empty and holds no run: name another folder, or a new one in it")
    except OSError as error:
        raise InputError(f"--out {folder} cannot be used: {error.strerror}") from None
    if os.path.ismount(real) or Path.cwd().is_relative_to(real):
        raise _not_replaceable(folder)
    check_no_link(real)


def check_no_link(folder: Path) -> None:
    """Refuse a folder that holds a link to anything but a file: a command would write where the link leads. A link to
    a file is replaced when that name is written.

    Raises:
        InputError: there is such a link.
    """
    for parent, folders, files in os.walk(folder):
        for path in (Path(parent, name) for name in (*folders, *files)):
            if path.is_symlink() and not path.is_file():
                raise InputError(f"{path} is a link, and nothing is written through links: put what it leads to there")


def _check_replaceable(folder: Path, commands: Collection[str], reads: Iterable[str | os.PathLike[str] | None]) -> None:
    """Only what a command of ours wrote is replaced, which may have taken days, and only with nothing else in it."""
    try:
        by = read_manifest(folder, None)["command"]
        stranger = next(strangers(folder), None) if by in commands else None
    except InputError as error:
        raise InputError(f"--out {folder} is not replaced: {error}; delete it, or name another folder") from None
    if by not in commands:
        raise InputError(f"--out {folder} holds what `{by}` wrote, and is not replaced: name another folder")
    if stranger is not None:
        raise InputError(
            f"--out {folder} is not replaced: it holds {stranger.relative_to(folder)}, which no run wrote; "
            "move that away, or name another folder"
        )
    for source in reads:  # where that is the folder itself, it is a word such as `natural`: a model would be a stranger
        if source is not None and folder.resolve() in _real(source).parents:
            raise InputError(f"--out {folder} is not replaced: it holds {source}, which is read; name another folder")


def _real(source: str | os.PathLike[str]) -> Path:
    """Of a file or folder, if it is one: `org/name` may also be of the hub."""
    try:
        return Path(source).expanduser().resolve()
    except (OSError, RuntimeError, ValueError):  # no path at all
        return Path(os.devnull)


@contextmanager
def new_folder(folder: Path, others: Callable[[Path], Iterable[Path]] | None = None) -> Iterator[Path]:
    """A temporary folder that becomes `folder` when the block ends well, and vanishes when it does not.

    What `folder` held before is replaced only then. No other command may write it meanwhile: see `own_folder`.

    Args:
        folder: to be written.
        others: finds, at the end, the files in it that are not the command's, which stay. Default: all that its
            run.json does not list.

    Raises:
        SinkscopeError: the disk refuses.
    """
    real = folder.resolve()
    try:
        with _undone(real):
            put_right(real)
            fresh = beside(real, NEW)
            fresh.mkdir(parents=True)
            yield fresh
            for path in (others or _others)(real):
                _keep(path, fresh / path.relative_to(real))
            put_in_place(real)
    except OSError as error:
        raise SinkscopeError(f"writing {folder} failed, and nothing of it is left: {one_line(error)}") from error


def _others(folder: Path) -> list[Path]:
    """What somebody has put into the folder since it was checked."""
    if (folder / MANIFEST).exists():
        return list(strangers(folder))
    return [path for path in folder.rglob("*") if not path.is_dir()]


def _keep(path: Path, target: Path) -> None:
    if target.exists():
        raise SinkscopeError(f"{path} was written by somebody else meanwhile: move it away, and repeat the command")
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path, target, follow_symlinks=False)


@contextmanager
def _undone(real: Path) -> Iterator[None]:
    """What a block that fails has written of a folder is removed."""
    made = _missing_parents(real)
    try:
        yield
    except BaseException:
        put_right(real)
        _remove_empty(made)
        raise


def _missing_parents(folder: Path) -> list[Path]:
    """Innermost first."""
    return [path for path in folder.parents if not path.exists()]


def _remove_empty(folders: Iterable[Path]) -> None:
    with suppress(OSError):  # not empty: something was written, or is another run's
        for path in folders:
            path.rmdir()

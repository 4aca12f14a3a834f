"""Folders that a command writes: checked beforehand, locked against other processes, and renamed when complete.

An interrupted folder can be resumed only with identical options, but for numbers that its command allows to grow.
"""

import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sinkscope.errors import InputError, SinkscopeError, one_line
from sinkscope.options.files import user_path
from sinkscope.results.manifest import MANIFEST, RUNS, files_in, foreign_files, read_manifest, write_manifest
from sinkscope.results.swap import MOMENT, NEW, OLD, beside, locked, remove, repair, repair_within

Sources = Iterable[str | os.PathLike[str] | None]
NOT_REPLACEABLE = "--out {} cannot be replaced: name a new folder in it, such as {}"


@contextmanager
def own_folder(
    folder: str | os.PathLike[str] | None, overwrite: bool, commands: Collection[str] = RUNS, reads: Sources = ()
) -> Iterator[Path | None]:
    """Lock the folder that a command writes (None: it writes none), and check it before anything is computed."""
    if folder is None:
        yield None
        return
    with alone_in(folder) as path:
        check_output(path, overwrite, commands, reads)
        yield path.absolute()  # the same folder after os.chdir


@contextmanager
def alone_in(folder: str | os.PathLike[str], option: str = "--out", patience: float = MOMENT) -> Iterator[Path]:
    """Lock a folder, which need not exist, against other processes, and repair it after a killed process.

    `option` is the option that names another folder, or "" if the command can write only this one. Raises InputError if
    another process writes the folder for `patience` seconds, a file is in the way, or the folder cannot be written.
    """
    path = user_path(folder)
    named, instead = (f"{option} {path}", ", or name another folder") if option else (str(path), "")
    try:
        real = path.resolve()
        parent = next((above for above in real.parents if above.exists()), real)
        in_the_way = real if real.exists() else parent
        is_folder = in_the_way.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # also for a loop of links or an invalid path
        reason = getattr(error, "strerror", None) or one_line(error)
        raise InputError(f"--out {path} cannot be used: {reason}") from None
    if not is_folder:
        raise InputError(f"--out {path}: the file {in_the_way} is in the way")
    if not real.name:
        raise InputError(NOT_REPLACEABLE.format(path, path / "run"))
    missing = [place for place in real.parents if not place.exists()]  # the innermost first

    def remove_empty() -> None:
        with suppress(OSError):  # not empty: a file was written, or another run is there
            for place in missing:
                place.rmdir()

    with ExitStack() as stack:
        stack.callback(remove_empty)
        try:
            real.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(real, patience))
            repair(real)
        except BlockingIOError:
            raise InputError(f"{named} is being written by another process: wait for it{instead}") from None
        # permission bits are not enough: root ignores them, and a read-only file system does not show in them
        except OSError as error:
            hint = "" if option else ": copy it to where that can be done"
            raise InputError(f"{named} cannot be written: writing in {parent} fails ({error.strerror}){hint}") from None
        yield path


def check_output(folder: Path, overwrite: bool, commands: Collection[str] = RUNS, reads: Sources = ()) -> None:
    """Raise InputError, before anything is computed, if a command cannot write its folder.

    With `overwrite`, a result of one of `commands`, which may have taken days, is replaced if the folder has no other
    file, no link, and none of the files that are read: `reads` are names of a model, an input, ….
    """
    real, refused = folder.resolve(), f"--out {folder} is not replaced"
    try:
        if (real / MANIFEST).exists():
            if not overwrite:
                raise InputError(f"--out {folder} already holds a run: --overwrite replaces it, or name another folder")
            try:
                by = read_manifest(folder, None)["command"]
                foreign = next(foreign_files(folder), None) if by in commands else None
            except InputError as error:
                raise InputError(f"{refused}: {error}; delete it, or name another folder") from None
            if by not in commands:
                raise InputError(f"--out {folder} holds what `{by}` wrote, and is not replaced: name another folder")
            if foreign is not None:
                what = f"it holds {foreign.relative_to(folder)}, which no run wrote"
                raise InputError(f"{refused}: {what}; move that away, or name another folder")
            # a source equal to the folder is a word such as `natural`; `foreign_files` finds a model in it
            for source in reads:
                with suppress(OSError, RuntimeError, ValueError):  # not a path
                    if source is not None and real in Path(source).expanduser().resolve().parents:
                        raise InputError(f"{refused}: it holds {source}, which is read; name another folder")
        elif real.is_dir() and any(real.iterdir()):
            raise InputError(f"--out {folder} is not empty and holds no run: name another folder, or a new one in it")
    except OSError as error:
        raise InputError(f"--out {folder} cannot be used: {error.strerror}") from None
    if os.path.ismount(real) or Path.cwd().is_relative_to(real):
        raise InputError(NOT_REPLACEABLE.format(folder, folder / "run"))
    check_no_link(real)


def check_no_link(folder: Path) -> None:
    """Raise InputError for a folder that contains a link to a folder, or a broken link.

    A command would write to its target. A link to a file is allowed, because it is replaced when that name is written.
    """
    for parent, folders, files in os.walk(folder):
        for path in (Path(parent, name) for name in (*folders, *files)):
            if path.is_symlink() and not path.is_file():
                raise InputError(f"{path} is a link, and nothing is written through links: put its target there")


@contextmanager
def new_folder(folder: Path, inside: Path | None = None) -> Iterator[Path]:
    """Yield a temporary folder that replaces `folder` when the block succeeds, and is removed when it fails.

    `own_folder` prevents other commands from writing `folder` in the meantime. Files of other origin are kept: those
    that run.json of the folder (or of `inside`, a parent folder) does not list at the end. Raises SinkscopeError if the
    disk cannot be written.
    """
    real = folder.resolve()
    try:
        repair(real)
        fresh = beside(real, NEW)
        fresh.mkdir(parents=True)
        try:
            yield fresh
            root = (inside or folder).resolve()
            has_list = (root / MANIFEST).exists()
            others = foreign_files(root) if has_list else (path for path in real.rglob("*") if not path.is_dir())
            for path in [path for path in others if path.is_relative_to(real)]:
                target = fresh / path.relative_to(real)
                if target.exists():
                    raise SinkscopeError(
                        f"{path} was written by another process in the meantime: move it away, and repeat the command"
                    )
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target, follow_symlinks=False)
            if real.exists():
                os.replace(real, beside(real, OLD))
            os.replace(fresh, real)
        finally:
            repair(real)
    except OSError as error:
        raise SinkscopeError(f"writing {folder} failed, and nothing of it is left: {one_line(error)}") from error


# --------------------------------------------------------------------------------------------------------- resuming


def resumable(
    folder: Path, command: str, options: Mapping[str, Any], may_grow: Collection[str] = ()
) -> dict[str, Any] | None:
    """Return the manifest of an interrupted folder that can be resumed; None if the folder has no manifest yet.

    `options` are the entries of the manifest, single values or mappings of names to values, that must be equal;
    numbers of `may_grow` may be larger than before, unless they were 1. Raises InputError if the folder belongs to
    another command, its manifest is damaged, or the options differ.
    """
    if not (folder / MANIFEST).exists():
        return None
    manifest = read_manifest(folder, (command,))
    before = _flat({name: manifest[name] for name in options if name in manifest})
    after = _flat(json.loads(json.dumps(options)))
    for key in before.keys() & after.keys():
        are_numbers = isinstance(before[key], int) and isinstance(after[key], int)
        if key[-1] in may_grow and are_numbers and 1 < before[key] < after[key]:
            before[key] = after[key]
    changed = [key for key in after | before if before.get(key) != after.get(key)]
    differing = [
        f"{key[-1]} was {one_line(before.get(key), 40)}, now {one_line(after.get(key), 40)}" for key in changed
    ]
    if differing:
        raise InputError(
            f"{folder} holds what `{command}` made with other options ({', '.join(differing[:3])}): repeat them to "
            "resume it, overwrite it, or name another folder"
        )
    return manifest


def _flat(options: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    """Return (entry, name) → value for the values of an entry; a single value has the entry's own name."""
    nested = {entry: value if isinstance(value, dict) else {entry: value} for entry, value in options.items()}
    return {(entry, name): value for entry, values in nested.items() for name, value in values.items()}


def check_resumable(
    folder: Path,
    command: str,
    options: Mapping[str, Any],
    overwrite: bool,
    reads: Sources = (),
    renewed: Collection[str] = (),
    may_grow: Collection[str] = (),
) -> None:
    """Check, before anything is computed, that a command can start in a folder (`check_output`) or resume in it.

    `renewed` are folders in it that are replaced whenever the command resumes: they may contain no other files.
    `may_grow` as for `resumable`.
    """
    if overwrite or resumable(folder, command, options, may_grow) is None:
        check_output(folder, overwrite, (command,), reads)
        return
    check_no_link(folder)
    for path in foreign_files(folder):
        if path.relative_to(folder).parts[0] in renewed:
            raise InputError(f"{path} is not a file of `{command}`, which replaces its folder: move it away")


def claim(
    folder: Path, manifest: Mapping[str, Any], leftovers: Callable[[Path], Iterable[Path]] = lambda folder: ()
) -> None:
    """Claim a folder for a command: remove what a killed process left half written, and write run.json first of all.

    `leftovers` finds more folders that are half written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    repair_within(folder)
    for path in leftovers(folder):
        remove(path)
    write_manifest(folder, manifest)


@dataclass
class FileList:
    """The files that run.json lists, for a folder that is written step by step: each is listed before it is written."""

    folder: Path  # the folder with run.json
    names: list[str]  # the files that run.json lists
    record: Callable[[], None]  # writes run.json again

    def add(self, *names: str) -> None:
        """List more files by their paths. A name that ends with a slash is a folder with all its content."""
        if not set(self.names).issuperset(names):
            self.names = sorted({*self.names, *names})
            try:
                self.record()
            except OSError as error:
                reason = f"writing {self.folder / MANIFEST} failed, and what was reached is kept: {one_line(error)}"
                raise SinkscopeError(reason) from error

    @contextmanager
    def new_folder(self, target: Path) -> Iterator[Path]:
        """Yield a temporary folder, as the function `new_folder` does, for a folder in this one, and list its files."""
        with new_folder(target, inside=self.folder) as fresh:
            yield fresh
            within = [MANIFEST] if (fresh / MANIFEST).exists() else files_in(fresh)
            self.add(*((target / name).relative_to(self.folder).as_posix() for name in within))

"""run.json: the command that wrote a folder, its options, versions, time and memory. Every folder has one.

It lists the files that the command wrote, so that no other file is replaced. Paths are relative to the folder; a path
that ends with / is a folder with all its content. If a folder inside has its own run.json, only this run.json is
listed.
"""

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sinkscope.errors import InputError, one_line
from sinkscope.options.files import kind_of, read_json, user_path, wrong_entry
from sinkscope.options.recipe import COMPARISON
from sinkscope.options.register import Command, records
from sinkscope.plugins import plugin_versions
from sinkscope.results.swap import TEMPORARY_PREFIX, find_again, new_file

MANIFEST = "run.json"
PAGE = "index.html"
# The version of run.json and of the tables that it lists: folders of another format are refused. Increase it when an
# entry or a column that readers need is added, renamed or gets another meaning.
FORMAT = 4
CALLBACK_TRAINING = Command("training", __name__)  # for the folder of SinkCallback, which is not a command
MANIFEST_KINDS = records() | {CALLBACK_TRAINING.name: CALLBACK_TRAINING}
RUNS = tuple(name for name, record in records().items() if record.report)  # commands whose folder is one run
RECORDED_LIBRARIES = ("torch", "transformers", "nnsight", "accelerate", "pandas")
_version = cache(version)  # it reads the package's files each time
_NOTED: ContextVar[Mapping[str, Any]] = ContextVar("noted", default={})  # noqa: B039 (nothing changes it)


# --- writing


@contextmanager
def noting(**facts: Any) -> Iterator[None]:
    """Add entries to every run.json that is made in the block."""
    before = _NOTED.set(facts)
    try:
        yield
    finally:
        _NOTED.reset(before)


def make_manifest(
    command: str, config: Mapping[str, Any], start: float, tables: Iterable[str] = (), **facts: Any
) -> dict[str, Any]:
    """Return the content of run.json of a command that began at `start`, with `facts` as further entries.

    The command is named as its function in Python; `config` has its options, as in JSON, and `tables` the names.
    """
    return {
        "sinkscope": _version("sinkscope"),
        "format": FORMAT,
        "command": command,
        "config": dict(config),
        **facts,
        **_NOTED.get(),
        "versions": {name: _version(name) for name in RECORDED_LIBRARIES} | plugin_versions(),
        "python": platform.python_version(),
        "git_commit": _git_commit(),
        "started": datetime.fromtimestamp(start, UTC).isoformat(timespec="seconds"),
        "wall_seconds": round(time.time() - start, 2),
        "peak_memory_mb": _peak_memory_mb(),
        "tables": sorted(tables),
    }


@cache
def _git_commit() -> str | None:
    """Return the commit of the running sinkscope if it runs from a checkout."""
    root = Path(__file__).resolve().parents[2]
    with suppress(OSError, subprocess.CalledProcessError):
        if (root / ".git").exists():
            head = ["git", "-C", str(root), "rev-parse", "HEAD"]
            return subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip()
    return None


def _peak_memory_mb() -> float:
    """Return the peak memory of all accelerators if any was used, else the peak resident memory of this process."""
    import torch  # imported late, because reading a manifest does not need it

    kinds = [kind for kind in (torch.cuda, torch.xpu) if kind.is_available()]
    peak = sum(kind.max_memory_allocated(index) for kind in kinds for index in range(kind.device_count()))
    if not peak:
        try:
            import resource

            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 2**10)
        except ModuleNotFoundError:  # Windows
            import psutil

            peak = psutil.Process().memory_info().peak_wset
    return round(peak / 2**20, 1)


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write run.json as the last file, with the list of the files that exist unless `files` is given.

    A killed process leaves the earlier run.json unchanged.
    """
    listed = manifest if "files" in manifest else {**manifest, "files": files_in(folder)}
    with new_file(folder / MANIFEST) as fresh:
        fresh.write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")


# --- the files of a folder


def files_in(folder: Path) -> list[str]:
    """Return the files of a folder that run.json lists, without run.json itself."""
    return sorted(name for path in _finished_files(folder) if (name := path.relative_to(folder).as_posix()) != MANIFEST)


def _finished_files(folder: Path) -> Iterator[Path]:
    """Yield all finished files; for a folder with its own run.json, only this run.json."""
    for path in folder.iterdir():
        if path.name.startswith(TEMPORARY_PREFIX):
            continue
        if path.is_symlink() or not path.is_dir():
            yield path
        elif (path / MANIFEST).exists():
            yield path / MANIFEST
        else:
            yield from _finished_files(path)


def foreign_files(folder: Path) -> Iterator[Path]:
    """Yield the files in a folder that its command did not write. Raises InputError for a damaged run.json."""
    listed = read_manifest(folder, None)["files"]
    known, folders = {MANIFEST, *listed}, tuple(name for name in listed if name.endswith("/"))
    for path in sorted(_finished_files(folder)):
        name = path.relative_to(folder).as_posix()
        if folders and name.startswith(folders):
            continue
        if name not in known:
            yield path
        elif path.name == MANIFEST and path.parent != folder:
            yield from foreign_files(path.parent)


def folder_of(path: str | os.PathLike[str]) -> Path:
    """Return the folder that is given by its path or by the path of its run.json."""
    path = user_path(path)
    return path.parent if path.name == MANIFEST else path


def tables_folder(folder: Path) -> Path:
    """Return the folder with the tables of a command; for a folder of runs, the comparison (unless it is a link)."""
    comparison = folder / COMPARISON
    is_here = (comparison / MANIFEST).is_file() and not comparison.is_symlink()
    return comparison if is_here and not read_manifest(folder, None)["tables"] else folder


# --- reading


def read_manifest(folder: Path, commands: Collection[str] | None = RUNS) -> dict[str, Any]:
    """Read FOLDER/run.json of one of the commands (None: of any).

    Raises InputError if it is missing, unreadable, another file, of another command, of another format, or damaged.
    """
    path = folder / MANIFEST
    if kind_of(path) is None and not find_again(folder):
        what = f"it has no {MANIFEST}" if folder.is_dir() else "it does not exist"
        raise InputError(f"{folder} is not a run folder: {what}{_runs_inside(folder)}")
    try:
        manifest = read_json(path)
    except InputError as error:
        raise InputError(f"{error}: it is not the manifest of a run, or damaged") from None
    if not isinstance(manifest, dict) or not manifest.keys() >= {"command", "config", "tables"}:
        raise InputError(f"{path} is not the manifest of a run: it is another JSON file")
    by = manifest["command"]
    kind = MANIFEST_KINDS.get(by) if isinstance(by, str) else None
    if kind is None:
        raise InputError(f"{path} is not the manifest of a run: no command is called {one_line(by, 40)}")
    if commands is not None and by not in commands:
        if by == CALLBACK_TRAINING.name:
            raise InputError(f"{path} is of SinkCallback: `sinkscope.compare({str(folder)!r}).by_step` has its curves")
        raise InputError(f"{path} is of `sinkscope {by}`, not of `{'`, `'.join(commands)}`{_runs_inside(folder)}")
    if manifest.get("format") != FORMAT:
        form = one_line(manifest.get("format"), 40)
        if isinstance(manifest.get("format"), int) and manifest["format"] > FORMAT:
            raise InputError(f"{path} is of a newer sinkscope (format {form}, this one reads {FORMAT}): update it")
        raise InputError(f"{path} is of another sinkscope (format {form}, this one reads {FORMAT}): measure again")
    try:
        kind.entries.model_validate(manifest)
    except ValidationError as error:
        raise InputError(f"{path} is not the manifest of a run: it is damaged: {wrong_entry(error)}") from None
    return manifest


def _runs_inside(folder: Path) -> str:
    run = min((str(path.parent) for path in folder.glob(f"*/{MANIFEST}")), default="")
    return f", but holds runs: name one of them, such as {run}" if run else ""


def is_undrawn(manifest: Mapping[str, Any]) -> bool:
    """Return whether a folder lacks figures or its page: the command was killed, or one of them failed."""
    return manifest.get("drawn") is False or bool(manifest.get("failed_figures"))

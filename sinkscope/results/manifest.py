"""run.json: which command wrote a folder, with what options, versions, time and memory. Every folder has one."""

import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sinkscope.errors import InputError

MANIFEST = "run.json"
LIBRARIES = ("torch", "transformers", "nnsight", "accelerate", "pandas")
RUNS = ("analyze", "intervene", "quantize")  # commands whose folder is one run, with tables of its own
# what a manifest needs besides its head, by the command that wrote it: opening a folder rests on these
_NEEDED = {command: {"condition", "model"} for command in RUNS}
_NEEDED |= {"analyze_steps": {"steps"}, "retrofit": {"arms"}, "train": {"arms"}}


def make_manifest(
    command: str, config: Mapping[str, Any], start: float, tables: Iterable[str] = (), **facts: Any
) -> dict[str, Any]:
    """The content of run.json.

    Args:
        command: that writes the folder: a function of the Python API.
        config: its options, as JSON has them.
        start: when it began, in seconds since the epoch.
        tables: names of the tables in the folder.
        **facts: what else is to be known of the folder.
    """
    return {
        "sinkscope": version("sinkscope"),
        "command": command,
        "config": dict(config),
        **facts,
        "versions": {name: version(name) for name in LIBRARIES},
        "python": platform.python_version(),
        "git_commit": _git_commit(),
        "started": datetime.fromtimestamp(start, UTC).isoformat(timespec="seconds"),
        "wall_seconds": round(time.time() - start, 2),
        "peak_memory_mb": _peak_memory_mb(),
        "tables": sorted(tables),
    }


def write_manifest(folder: Path, manifest: Mapping[str, Any]) -> None:
    """Write run.json under a temporary name and rename it: a kill leaves the file as it was."""
    temporary = folder / f"{MANIFEST}.tmp"
    temporary.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, folder / MANIFEST)


def folder_of(path: str | os.PathLike[str]) -> Path:
    """A folder, named itself or by the run.json in it."""
    path = Path(path)
    return path.parent if path.name == MANIFEST else path


def read_manifest(folder: Path, commands: Collection[str] | None = RUNS) -> dict[str, Any]:
    """Read FOLDER/run.json.

    Args:
        folder: any folder that sinkscope wrote.
        commands: those that may have written it; by default those whose folder is one run. None: any.

    Raises:
        InputError: there is no run.json, it cannot be read, it is another file, or another command wrote it.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        what = f"it has no {MANIFEST}" if folder.is_dir() else "it does not exist"
        raise InputError(f"{folder} is not a run folder: {what}{_runs_inside(folder)}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):  # no JSON, or not even UTF-8
        raise InputError(f"{path} is not the manifest of a run: it is damaged, or another file") from None
    if not isinstance(manifest, dict) or not manifest.keys() >= {"command", "config", "tables"}:
        raise InputError(f"{path} is not the manifest of a run: it is another JSON file")
    by = manifest["command"]
    if commands is not None and by not in commands:
        raise InputError(f"{path} is of `sinkscope {by}`, not of `{'`, `'.join(commands)}`{_runs_inside(folder)}")
    if not manifest.keys() >= _NEEDED.get(by, set()) or not isinstance(manifest["config"], dict):
        raise InputError(f"{path} is not the manifest of a run: it is damaged")
    return manifest


def _runs_inside(folder: Path) -> str:
    runs = sorted(str(path.parent) for path in folder.glob(f"*/{MANIFEST}"))
    return f", but holds runs: name one of them, such as {runs[0]}" if runs else ""


def _peak_memory_mb() -> float:
    """Of the accelerator if there is one, else this process's largest resident memory."""
    import torch  # here: reading a manifest needs none of it

    if torch.cuda.is_available():
        return round(torch.cuda.max_memory_allocated() / 2**20, 1)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)


@cache
def _git_commit() -> str | None:
    """Of the sinkscope that runs, if it runs from a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        answer = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return answer.stdout.strip()

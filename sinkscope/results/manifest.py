"""run.json: reading it back."""

import json
import os
from pathlib import Path
from typing import Any

from sinkscope.errors import InputError
from sinkscope.options.measuring import RunConfig, make_config

MANIFEST = "run.json"


def folder_of(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    return path.parent if path.name == MANIFEST else path


def read_manifest(folder: Path) -> dict[str, Any]:
    """RUN/run.json. Errors: InputError where there is none, or it is another file."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        what = f"has no {MANIFEST}" if folder.is_dir() else "does not exist"
        runs = sorted(str(path.parent) for path in folder.glob(f"*/{MANIFEST}"))  # of a series, or a recipe
        what += f", but holds runs: name one of them, such as {runs[0]}" if runs else ""
        raise InputError(f"{folder} is not a run folder: it {what}") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):  # no JSON, or not even UTF-8
        raise InputError(f"{path} is not the manifest of a run: it is damaged, or another file") from None
    if not isinstance(manifest, dict) or not manifest.keys() >= _MANIFEST_FIELDS:
        raise InputError(f"{path} is not the manifest of a run: it is another JSON file")
    return manifest


_MANIFEST_FIELDS = {"config", "condition", "model", "tables"}  # that opening a run rests on


def to_repeat(path: str | os.PathLike[str], command: str = "analyze") -> tuple[RunConfig, dict[str, Any]]:
    """The whole configuration of a command's run, to repeat it, and its manifest. Errors: InputError."""
    from sinkscope.models.files import DEMO_FILE, DEMO_REPO

    folder = folder_of(path)
    manifest = read_manifest(folder)
    by = manifest.get("command", command)
    if by != command:
        raise InputError(f"{folder} is a run of `sinkscope {by}`: repeat it with that command's --from")
    try:
        config = make_config(**manifest["config"])
        source = str(manifest["model"]["source"])
    except (InputError, TypeError, KeyError) as error:
        by = manifest.get("sinkscope", "?")
        raise InputError(f"{folder / MANIFEST} (of sinkscope {by}) cannot be repeated here: {error}") from None
    if config.model is None and source != DEMO_REPO and Path(source).name != DEMO_FILE:
        raise InputError(
            f"{folder / MANIFEST} cannot be repeated: its model was handed over in Python, not named. "
            f"Analyze that again, or name a model instead of --from (it called itself {source})"
        )
    return config, manifest

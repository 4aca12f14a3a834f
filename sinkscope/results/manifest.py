"""run.json: reading it back."""

import json
import os
from pathlib import Path
from typing import Any

from sinkscope.errors import InputError

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

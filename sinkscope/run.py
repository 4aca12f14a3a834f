"""A run: its tables and manifest, in memory or in a folder.

    RUN/run.json          the manifest: whole configuration, what was loaded, versions, time and memory
    RUN/tables/*.parquet  one row one observation
    RUN/figures/*.png|pdf
    RUN/verdict.md        the verdict as printed
"""

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from sinkscope.errors import InputError
from sinkscope.tables import read_table, write_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MANIFEST = "run.json"


@dataclass(frozen=True)
class Run:
    """One analysis. `tables` maps a table's name to its DataFrame; `figure(name)` draws one."""

    manifest: dict[str, Any]
    tables: Mapping[str, pd.DataFrame] = field(repr=False)
    folder: Path | None = None

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> "Run":
        """Open a run folder. Errors: InputError if it is none."""
        folder = Path(folder)
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            paths = {name: folder / "tables" / f"{name}.parquet" for name in manifest["tables"]}
        except FileNotFoundError:
            raise InputError(f"{folder} is not a run folder: it has no {MANIFEST}") from None
        except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError, NotADirectoryError):
            raise InputError(f"{folder / MANIFEST} is not the manifest of a run") from None
        missing = [str(path) for path in paths.values() if not path.is_file()]
        if missing:
            raise InputError(f"{folder} is incomplete: {missing[0]} is missing")
        return cls(manifest, _TablesOnDisk(paths), folder)

    @property
    def model(self) -> str:
        return self.manifest["model"]["name"]

    @property
    def condition(self) -> str:
        return self.manifest["condition"]

    def figure(self, name: str) -> "Figure":
        """Draw one figure from the tables. Errors: InputError if it is unknown, or has no data here."""
        from sinkscope.figures import draw

        return draw(name, self)

    @cached_property
    def verdict(self) -> str:
        """The findings as text: a short table and a paragraph."""
        from sinkscope.verdict import verdict

        return verdict(self)

    def metric(self, name: str, layer: int = -1) -> float:
        """One value of the table `summary`; NaN if it was not measured. Layer -1 is the whole model."""
        summary = self.tables["summary"]
        found = summary[(summary["metric"] == name) & (summary["layer"] == layer)]["value"]
        return float(found.iloc[0]) if len(found) else float("nan")

    def _repr_markdown_(self) -> str:  # what a notebook shows
        return self.verdict


class _TablesOnDisk(Mapping[str, pd.DataFrame]):
    """Tables read when they are first asked for."""

    def __init__(self, paths: dict[str, Path]) -> None:
        self._paths = paths
        self._read: dict[str, pd.DataFrame] = {}

    def __getitem__(self, name: str) -> pd.DataFrame:
        if name not in self._read:
            self._read[name] = read_table(self._paths[name])
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def check_output(folder: str | os.PathLike[str], overwrite: bool) -> Path:
    """Before anything is computed: can the run be written there? Errors: InputError."""
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--out {folder}: a file is in the way")
    if (folder / MANIFEST).exists() and not overwrite:
        raise InputError(f"--out {folder} already holds a run; --overwrite replaces it")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / MANIFEST).exists():
        raise InputError(f"--out {folder} is not empty and holds no run: choose another folder")
    parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"--out {folder} cannot be written: no permission in {parent}")
    return folder


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes `folder` when the block ends well, and vanishes when it does not."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp's is private
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_run(run: Run, folder: Path) -> None:
    """Tables, figures, verdict and manifest into an empty folder; the manifest last."""
    from sinkscope.figures import save_all

    (folder / "tables").mkdir()
    for name, table in run.tables.items():
        write_table(table, folder / "tables" / f"{name}.parquet")
    (folder / "figures").mkdir()
    save_all(run, folder / "figures")
    (folder / "verdict.md").write_text(run.verdict + "\n", encoding="utf-8")
    (folder / MANIFEST).write_text(json.dumps(run.manifest, indent=2) + "\n", encoding="utf-8")

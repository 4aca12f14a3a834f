"""A run: its tables and manifest, in memory or in a folder.

RUN/run.json          the manifest: whole configuration, what was loaded, versions, time and memory
RUN/tables/*.parquet  one row one observation
RUN/figures/*.png|pdf
RUN/verdict.md        the verdict as printed
"""

import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from sinkscope.config import RunConfig, make_config, unknown
from sinkscope.errors import InputError, SinkscopeError
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
        """Open a run: its folder, or the run.json in it. Errors: InputError if it is none."""
        folder = _folder_of(folder)
        manifest = read_manifest(folder)
        paths = {name: folder / "tables" / f"{name}.parquet" for name in manifest["tables"]}
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

    @property
    def command(self) -> str:
        """That made it, as on the command line."""
        return self.manifest.get("command", "analyze")

    @property
    def is_experiment(self) -> bool:
        """Of `intervene`: its tables hold several arms, each with a `condition` of its own."""
        return self.command == "intervene"

    def at(self, condition: str) -> "Run":
        """One arm of an experiment, as a run by itself. Errors: InputError if there is none of this name."""
        tables = {name: table[table["condition"] == condition] for name, table in self.tables.items()}
        tables = {name: table for name, table in tables.items() if len(table)}
        if not tables:
            known = sorted({condition for table in self.tables.values() for condition in table["condition"].unique()})
            raise InputError(f"arm {unknown(condition, known)}")
        return Run(self.manifest | {"command": "analyze", "condition": condition}, tables, self.folder)

    def figure(self, name: str) -> "Figure":
        """Draw one figure from the tables. Errors: InputError if it is unknown, or has no data here."""
        from sinkscope.figures import draw

        return draw(name, self)

    @cached_property
    def verdict(self) -> str:
        """The findings as text: a short table, and sentences."""
        from sinkscope import effects, verdict
        from sinkscope.quantisation import verdict as quantisation

        of_command = {"intervene": effects.verdict, "quantize": quantisation.verdict}
        return of_command.get(self.command, verdict.verdict)(self)

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
            try:
                self._read[name] = read_table(self._paths[name])
            except (OSError, ValueError) as error:  # pyarrow's are both
                raise InputError(f"{self._paths[name]} is damaged: {_one_line(error)}") from error
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def _folder_of(path: str | os.PathLike[str]) -> Path:
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
    from sinkscope.loading import DEMO_FILE, DEMO_REPO  # heavy, and the rest of this file is not

    folder = _folder_of(path)
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
            raise SinkscopeError(f"writing {folder} failed, and nothing of it is left: {_one_line(error)}") from error
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


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def write_run(run: Run, folder: Path, figures: Iterable[str] | None = None) -> None:
    """Tables, figures (None: all that apply), verdict and manifest into an empty folder; the manifest last."""
    from sinkscope.figures import save_all
    from sinkscope.paper_tables import as_markdown, paper_tables

    (folder / "tables").mkdir()
    for name, table in run.tables.items():
        write_table(table, folder / "tables" / f"{name}.parquet")
    (folder / "figures").mkdir()
    if figures is None:
        save_all(run, folder / "figures")
    else:
        save_figures({name: run.figure(name) for name in figures}, folder / "figures")
    for name, paper_table in paper_tables(run).items():
        (folder / "tables" / f"{name}.md").write_text(as_markdown(paper_table) + "\n", encoding="utf-8")
    (folder / "verdict.md").write_text(run.verdict + "\n", encoding="utf-8")
    (folder / MANIFEST).write_text(json.dumps(run.manifest, indent=2) + "\n", encoding="utf-8")


def save_figures(figures: "Mapping[str, Figure]", folder: Path) -> None:
    """Each as NAME.png and NAME.pdf."""
    for name, figure in figures.items():
        for kind in ("png", "pdf"):
            figure.savefig(folder / f"{name}.{kind}")

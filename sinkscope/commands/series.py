"""A model while it was trained: `analyze` over its checkpoints, and the same quantities against the step.

OUT/series.json               which steps, and the configuration that they share
OUT/step512/                  an ordinary run folder a step
OUT/tables/series.parquet     the summaries of all steps, one row a value
OUT/figures/training-*.png|pdf
"""

import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from sinkscope.errors import InputError, SinkscopeError, unknown
from sinkscope.measuring.summary import WHOLE_MODEL
from sinkscope.options.measuring import RunConfig, make_config
from sinkscope.report.comparison import differing_settings
from sinkscope.report.figures import OF_STEPS, save_figures
from sinkscope.report.figures.spec import draw_all
from sinkscope.report.figures.style import Figure
from sinkscope.report.run import Run, write_run
from sinkscope.results.folders import check_output, new_folder
from sinkscope.results.tables import read_table, write_table

MANIFEST = "series.json"
COLUMNS = ["model", "condition", "step", "layer", "metric", "value"]
HEADLINES = ("sink_rate", "value_drain", "norm_ratio", "massive_count", "value_gradient_ratio", "loss")


@dataclass(frozen=True)
class Series:
    """One model at several steps of its training, in their order.

    runs     step → Run
    table    the runs' summaries: model, condition, step, layer (-1: whole model), metric, value
    """

    manifest: dict[str, Any]
    runs: Mapping[int, Run]
    table: pd.DataFrame = field(repr=False)
    folder: Path | None = None

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> "Series":
        """Open what `analyze_steps` wrote. Errors: InputError where there is none, or it is damaged."""
        folder = Path(folder)
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            runs = {int(at["step"]): Run.open(folder / at["folder"]) for at in manifest["steps"]}
            table = read_table(folder / "tables" / "series.parquet")
        except (FileNotFoundError, NotADirectoryError) as error:
            raise InputError(f"{folder} is not a series of runs: {error.filename} is missing") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{folder} is not a series of runs, or is damaged: {error}") from error
        return cls(manifest, runs, table, folder)

    def figures(self) -> dict[str, Figure]:
        """The figures against the step, by name: `training-by-step`, …"""
        return draw_all(OF_STEPS, list(self.runs.items()))

    def figure(self, name: str) -> Figure:
        """One of them. Errors: InputError if it is unknown."""
        figures = self.figures()
        if name not in figures:
            raise InputError(f"figure {unknown(name, figures)}")
        return figures[name]

    @property
    def headlines(self) -> pd.DataFrame:
        """The best-known metrics of the whole model: rows steps, columns metrics."""
        whole = self.table[(self.table["layer"] == WHOLE_MODEL) & self.table["metric"].isin(HEADLINES)]
        wide = whole.pivot(index="step", columns="metric", values="value")
        return wide.reindex(index=list(self.runs), columns=[name for name in HEADLINES if name in wide])

    @property
    def warnings(self) -> list[str]:
        """One line a setting in which the steps differ: it stands in the way of comparing them."""
        names = [f"step {step}" for step in self.runs]
        rows = differing_settings([run.manifest for run in self.runs.values()], names)
        return [
            f"{setting} differs: {', '.join(f'{value} ({step})' for step, value in row.items())}"
            for setting, row in rows.iterrows()
        ]

    def _repr_html_(self) -> str:  # what a notebook shows
        return self.headlines.to_html(float_format="{:.4g}".format, na_rep="–")


def analyze_steps(
    model: str | os.PathLike[str] | None,
    revisions: str | Iterable[str] | None = None,
    *,
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    quiet: bool = True,
    **options: Any,
) -> Series:
    """Measure a model at several steps of its training; with `out`, also write a run folder each and the figures.

    `model` is a hub id, with the `revisions` that hold the steps, or a folder with a checkpoint in each subfolder:
    those called `checkpoint-…`, as transformers' Trainer writes them, or those named as `revisions`. `options` are
    those of `analyze`.

    Errors: as for `analyze`; also InputError for names without a step, or with the same one.
    """
    from sinkscope.commands.analyze import analyze
    from sinkscope.text.sources import check_source

    if model is None:
        raise InputError("several revisions were given, but no model to take them from")
    model = os.fspath(model)
    checkpoints = find_checkpoints(model, revisions)
    configs = [
        make_config(**options | {"model": checkpoint.model, "revision": checkpoint.revision})
        for checkpoint in checkpoints
    ]
    check_source(configs[0].input)
    folder = None if out is None else check_output(out, overwrite, MANIFEST)
    console = Console(stderr=True, quiet=quiet)
    runs: dict[int, Run] = {}
    with nullcontext() if folder is None else new_folder(folder) as fresh:
        for place, (checkpoint, config) in enumerate(zip(checkpoints, configs, strict=True), 1):
            console.print(f"step {checkpoint.step} ({place} of {len(checkpoints)})", highlight=False)
            try:
                run = analyze(config.model, config=config, quiet=quiet)
            except SinkscopeError as error:
                raise type(error)(f"at step {checkpoint.step}: {error}") from error
            if folder is not None and fresh is not None:
                run = _written(replace(run, folder=folder / checkpoint.folder), fresh / checkpoint.folder)
            runs[checkpoint.step] = run
        series = Series(_manifest(model, checkpoints, configs, runs), runs, _table(_name(model), runs), folder)
        if fresh is not None:
            _write(series, fresh)
    return series if folder is None else Series.open(folder)


# --- which steps


@dataclass(frozen=True)
class Checkpoint:
    """One step: what `analyze` loads for it."""

    step: int
    name: str  # the revision's or the subfolder's
    model: str
    revision: str | None

    @property
    def folder(self) -> str:
        return f"step{self.step}"


def is_series(config: RunConfig) -> bool:
    """Whether more than one model is meant: revisions with commas between, or a folder of checkpoints and no model."""
    if config.revision is not None:
        return "," in config.revision
    folder = Path(config.model).expanduser() if config.model else None
    if folder is None or config.gguf_file is not None or (folder / "config.json").exists():
        return False
    return bool(_trainer_checkpoints(folder))


def find_checkpoints(model: str, revisions: str | Iterable[str] | None = None) -> list[Checkpoint]:
    """The checkpoints by step. Errors: InputError for fewer than two, or steps that cannot be told."""
    if isinstance(revisions, str):
        revisions = revisions.split(",")
    names = [name.strip() for name in revisions or () if name.strip()]
    folder = Path(model).expanduser()
    if folder.is_file():
        raise InputError(f"{model} is one file, so it has no steps: name a folder of checkpoints, or a hub id")
    if folder.is_dir():
        names = _subfolders(model, folder, names)
    elif len(names) < 2:
        alone = f" ({names[0]} alone goes without a comma)" if names else ""
        raise InputError(f"name two or more steps of {model}, as --revision step0,step512,step1000{alone}")
    steps = {name: step_of(name, names) for name in names}
    for first, second in combinations(names, 2):
        if first == second:
            raise InputError(f"'{first}' is named twice: name each step once")
        if steps[first] == steps[second]:
            raise InputError(f"'{first}' and '{second}' are both step {steps[first]}: name each step once")
    return [
        Checkpoint(steps[name], name, str(Path(model) / name), None)
        if folder.is_dir()
        else Checkpoint(steps[name], name, model, name)
        for name in sorted(names, key=steps.__getitem__)
    ]


def step_of(name: str, among: Iterable[str] = ()) -> int:
    """The number behind `step`, else the one at the end: of OLMo's step1000-tokens4B it is 1000.

    Errors: InputError where there is none; it says which of the names `among` have one.
    """
    found = _step(name)
    if found is None:
        others = [other for other in among if _step(other) is not None]
        hint = f": leave it out, as in --revision {','.join(others)}" if len(others) > 1 else ""
        raise InputError(f"'{name}' does not end in the number of a step, as step512 or checkpoint-512 do{hint}")
    return found


def _step(name: str) -> int | None:
    if re.fullmatch(r"[0-9a-f]{40}", name):  # a commit
        return None
    found = re.search(r"step[-_]?(\d{1,15})(?!\d)", name, re.IGNORECASE) or re.search(r"(?<![\d.])(\d{1,15})$", name)
    return int(found[1]) if found else None


def _trainer_checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*") if path.is_dir())


def _subfolders(model: str, folder: Path, names: list[str]) -> list[str]:
    """Those named, or else all `checkpoint-…`, each of them a model as far as can be told before loading it."""
    there = sorted(path.name for path in folder.iterdir() if path.is_dir())
    for name in names:
        if not (folder / name).is_dir():
            raise InputError(f"{model} has no such folder: {unknown(name, there)}")
    found = _trainer_checkpoints(folder)
    if not names and not found:
        raise InputError(f"{model} holds no steps: no folder in it is called checkpoint-…")
    names = names or found
    if len(names) == 1:
        raise InputError(f"{model}: only {names[0]} was found or named; to analyse it alone, name {folder / names[0]}")
    for name in names:
        if not (folder / name / "config.json").is_file():
            raise InputError(
                f"{folder / name} is not a model in HuggingFace format: it has no config.json. "
                "Save it whole, or name the other steps with --revision"
            )
    return names


# --- tables and files


def _name(model: str) -> str:
    """As in a run's tables: the hub id, or the folder's name."""
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else model


def _table(model: str, runs: Mapping[int, Run]) -> pd.DataFrame:
    parts = [run.tables["summary"].assign(model=model, step=step) for step, run in runs.items()]
    return pd.concat(parts, ignore_index=True)[COLUMNS]


def _manifest(
    model: str, checkpoints: list[Checkpoint], configs: list[RunConfig], runs: Mapping[int, Run]
) -> dict[str, Any]:
    shared = configs[0].model_dump(mode="json") | {
        "model": model,
        "revision": ",".join(checkpoint.name for checkpoint in checkpoints),
    }
    return {
        "sinkscope": version("sinkscope"),
        "command": "analyze",
        "model": _name(model),
        "condition": runs[checkpoints[0].step].condition,
        "config": shared,
        "steps": [
            {"step": checkpoint.step, "name": checkpoint.name, "folder": checkpoint.folder}
            for checkpoint in checkpoints
        ],
    }


def _written(run: Run, folder: Path) -> Run:
    """The run as it is on disk: its tables leave the memory to the next step."""
    folder.mkdir()
    write_run(run, folder)
    return Run.open(folder)


def _write(series: Series, folder: Path) -> None:
    """Table, figures and manifest into a folder that holds the runs; the manifest last."""
    (folder / "tables").mkdir()
    write_table(series.table, folder / "tables" / "series.parquet")
    save_figures(series.figures(), folder / "figures")
    (folder / MANIFEST).write_text(json.dumps(series.manifest, indent=2) + "\n", encoding="utf-8")

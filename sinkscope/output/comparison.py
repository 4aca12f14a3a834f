"""Runs of `analyze` side by side, from their folders alone: no model is loaded.

OUT/run.json                             which runs, and the settings in which they differ
OUT/tables/comparison.parquet            one row a metric of the whole model, one column a run
OUT/tables/comparison_by_layer.parquet   the same metrics by layer, one row a value
OUT/figures/*.png|pdf
"""

import html
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from sinkscope.errors import InputError
from sinkscope.figures import OF_RUNS
from sinkscope.figures.labels import labels
from sinkscope.figures.spec import draw_all
from sinkscope.figures.style import Figure
from sinkscope.html_page import Contents
from sinkscope.measuring.summary import WHOLE_MODEL
from sinkscope.output.drawing import Drawings, drawings_of
from sinkscope.output.result import Result, written
from sinkscope.output.run import Run
from sinkscope.results.folders import own_folder
from sinkscope.results.manifest import make_manifest
from sinkscope.results.run import policy_of
from sinkscope.verdict.report import span

# What two runs must share for their numbers to be comparable, and where run.json has it.
SETTINGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    # the arms of a retrofit have their method for a condition
    "input": lambda manifest: manifest["input"].get("text", manifest["condition"]),
    "input tokens": lambda manifest: str(manifest["input"]["sha256"])[:12],
    "BOS": lambda manifest: policy_of(manifest["input"]["token_zero"]),
    "token 0": lambda manifest: manifest["input"]["token_zero"],
    "sequences": lambda manifest: manifest["input"]["sequences"],
    "seq-len": lambda manifest: span((manifest["input"]["shortest"], manifest["input"]["longest"])),
    "window": lambda manifest: manifest["config"]["window"],
    "positions": lambda manifest: manifest["config"]["positions"],
    "epsilon": lambda manifest: manifest["config"]["epsilon"],
    "dtype": lambda manifest: manifest["dtype"],
    "kernel": lambda manifest: manifest["kernel"],
    "sinkscope": lambda manifest: manifest["sinkscope"],
}


@dataclass(frozen=True)
class Comparison(Result):
    """Runs side by side.

    table        rows metrics of the whole model, columns runs; of two runs also `difference` (second − first)
                 and `ratio` (second ÷ first)
    by_layer     model, condition, layer, run, metric, value
    differing    rows settings in which the runs differ, columns runs: these stand in the way of comparing
    manifest     the content of run.json
    """

    runs: tuple[Run, ...]
    table: pd.DataFrame
    by_layer: pd.DataFrame = field(repr=False)
    differing: pd.DataFrame
    manifest: dict[str, Any] = field(repr=False)
    folder: Path | None = None

    def figures(self) -> dict[str, Figure]:
        """The comparison's figures, by name."""
        return draw_all(OF_RUNS, self.runs)

    @property
    def summary_tables(self) -> dict[str, pd.DataFrame]:
        return {"": self.table.reset_index()}

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        return {"comparison": self.table.reset_index(), "comparison_by_layer": self.by_layer}

    @property
    def drawings(self) -> Drawings:
        return drawings_of(OF_RUNS, self.runs)

    @property
    def contents(self) -> Contents:
        parts = dict(zip(_labels(self.runs), self.runs, strict=True))
        return Contents(self.manifest, self.tables, parts, folder=self.folder)

    @property
    def warnings(self) -> list[str]:
        """One line a setting in which the runs differ."""
        return differing_lines(self.differing.to_dict(orient="index"))

    def _repr_html_(self) -> str:  # what a notebook shows
        warned = "".join(f"<li>{html.escape(line)}</li>" for line in self.warnings)
        return self.table.to_html(float_format="{:.4g}".format, na_rep="–") + (warned and f"<ul>{warned}</ul>")


def compare(
    *runs: Run | str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    page: bool = True,
) -> Comparison:
    """Compare runs, or run folders; with `out`, also write the tables and figures there, and without `page=False` the
    page.

    Errors: InputError for fewer than two runs, for a folder that holds none, or for an `out` that is taken;
    SinkscopeError where writing fails.
    """
    start = time.time()
    check_count(runs)
    with own_folder(out, overwrite, ("compare",), reads=_folders(runs)) as folder:
        return written(replace(compared(runs, start), folder=folder), page)


def check_count(given: Sequence[object]) -> None:
    """InputError for fewer than two."""
    if len(given) < 2:
        raise InputError(f"a comparison needs at least two runs; {len(given) or 'none'} was given")


def _folders(runs: tuple[Run | str | os.PathLike[str], ...]) -> list[str | os.PathLike[str] | None]:
    return [run.folder if isinstance(run, Run) else run for run in runs]


def compared(runs: Sequence[Run | str | os.PathLike[str]], start: float) -> Comparison:
    """Compare runs in memory. `start`: when the command began."""
    opened = tuple(run if isinstance(run, Run) else Run.open(run) for run in runs)
    for run in opened:
        if run.command != "analyze":
            raise InputError(
                f"{run.folder or run.model} is a run of `{run.command}`: what it compares is in its own tables"
            )
    names = _labels(opened)
    differing = differing_settings([run.manifest for run in opened], names)
    listed = [
        {"label": name, "folder": run.folder and str(run.folder), "model": run.model, "condition": run.condition}
        for run, name in zip(opened, names, strict=True)
    ]
    config, tables = {"runs": [run["folder"] for run in listed]}, ("comparison", "comparison_by_layer")
    facts = {"runs": listed, "differing": differing.to_dict(orient="index")}
    manifest = make_manifest("compare", config, start, tables, **facts)
    return Comparison(opened, _table(opened, names), _by_layer(opened, names), differing, manifest)


def differing_settings(manifests: list[dict[str, Any]], names: list[str]) -> pd.DataFrame:
    """Rows the settings in which runs are not all alike, by their manifests; columns the runs."""
    rows = {setting: [_setting(read, manifest) for manifest in manifests] for setting, read in SETTINGS.items()}
    differing = {setting: values for setting, values in rows.items() if len(set(values)) > 1}
    if "input" in differing:
        differing.pop("input tokens", None)  # goes without saying
    return pd.DataFrame.from_dict(differing, orient="index", columns=names)


def differing_lines(differing: Mapping[Any, Mapping[Any, object]]) -> list[str]:
    """One line a setting: «dtype differs: float32 (a), bfloat16 (b)»."""
    return [
        f"{setting} differs: {', '.join(f'{value} ({run})' for run, value in values.items())}"
        for setting, values in differing.items()
    ]


def _setting(read: Callable[[dict[str, Any]], Any], manifest: dict[str, Any]) -> str:
    try:
        return str(read(manifest))
    except (KeyError, TypeError):
        return "not recorded"


def _labels(runs: tuple[Run, ...]) -> list[str]:
    """As in the figures' legends: of model, revision and condition those that differ."""

    return labels(list(runs))[0]


def _table(runs: tuple[Run, ...], names: list[str]) -> pd.DataFrame:
    columns = []
    for run in runs:
        summary = run.tables["summary"]
        whole = summary[summary["layer"] == WHOLE_MODEL]
        columns.append(whole.set_index("metric")["value"])
    table = pd.concat(columns, axis=1, keys=names, sort=False).rename_axis("metric")
    if len(runs) == 2:
        first, second = table.iloc[:, 0], table.iloc[:, 1]
        table["difference"] = second - first
        table["ratio"] = second / first.where(first != 0)
    return table


def _by_layer(runs: tuple[Run, ...], names: list[str]) -> pd.DataFrame:
    parts = []
    for run, name in zip(runs, names, strict=True):
        summary = run.tables["summary"]
        parts.append(summary[summary["layer"] != WHOLE_MODEL].assign(run=name))
    return pd.concat(parts, ignore_index=True)[["model", "condition", "layer", "run", "metric", "value"]]

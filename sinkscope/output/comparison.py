"""Runs of `analyze` side by side, and the settings in which runs differ."""

import html
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from sinkscope.errors import InputError
from sinkscope.figures import OF_RUNS
from sinkscope.figures.labels import labels
from sinkscope.measuring.summary import WHOLE_MODEL
from sinkscope.output.drawing import Drawings, drawings_of
from sinkscope.output.result import Result
from sinkscope.output.run import Run
from sinkscope.results.manifest import make_manifest
from sinkscope.results.run import policy_of
from sinkscope.verdict.report import span

# the settings that two runs must share for their numbers to be comparable, and where run.json has them
SETTINGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    # the condition of a retrofit's arm is its method
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


@dataclass(frozen=True, kw_only=True)
class Comparison(Result):
    """Runs of `analyze` side by side. Settings in which the runs differ make their numbers hard to compare."""

    runs: tuple[Run, ...]
    differing: pd.DataFrame  # settings in which the runs differ, a column for each run

    @property
    def table(self) -> pd.DataFrame:
        """Metrics of the whole model by run; for two runs also `difference` (second − first) and `ratio`."""
        return self.tables["comparison"].set_index("metric")

    @property
    def by_layer(self) -> pd.DataFrame:
        """The metrics by layer: model, condition, layer, run, metric, value."""
        return self.tables["comparison_by_layer"]

    @property
    def summary_tables(self) -> dict[str, pd.DataFrame]:
        return {"": self.tables["comparison"]}

    @property
    def drawings(self) -> Drawings:
        return drawings_of(OF_RUNS, self.runs)

    @property
    def parts(self) -> dict[str, Run]:
        return dict(zip(labels(self.runs)[0], self.runs, strict=True))

    @property
    def warnings(self) -> list[str]:
        """A line for each setting in which the runs differ."""
        return differing_lines(self.manifest["differing"])

    def _repr_html_(self) -> str:  # for notebooks
        warned = "".join(f"<li>{html.escape(line)}</li>" for line in self.warnings)
        return self.table.to_html(float_format="{:.4g}".format, na_rep="–") + (warned and f"<ul>{warned}</ul>")


def compared(given: Sequence[Run | str | os.PathLike[str]], start: float) -> Comparison:
    """Compare runs of `analyze` in memory, for a command that began at `start`."""
    runs = tuple(run if isinstance(run, Run) else Run.open(run) for run in given)
    for run in runs:
        if run.command != "analyze":
            raise InputError(
                f"{run.folder or run.model} is a run of `{run.command}`: its own tables hold its comparison"
            )
    names = labels(runs)[0]
    differing = differing_settings([run.manifest for run in runs], names)
    whole, layers = [], []
    for run, name in zip(runs, names, strict=True):
        summary = run.tables["summary"]
        whole.append(summary[summary["layer"] == WHOLE_MODEL].set_index("metric")["value"])
        layers.append(summary[summary["layer"] != WHOLE_MODEL].assign(run=name))
    table = pd.concat(whole, axis=1, keys=names, sort=False).rename_axis("metric")
    if len(runs) == 2:
        first, second = table.iloc[:, 0], table.iloc[:, 1]
        table["difference"] = second - first
        table["ratio"] = second / first.where(first != 0)
    columns = ["model", "condition", "layer", "run", "metric", "value"]
    tables = {
        "comparison": table.reset_index(),
        "comparison_by_layer": pd.concat(layers, ignore_index=True)[columns],
    }
    facts = [
        {"label": name, "folder": run.folder, "model": run.model, "condition": run.condition}
        for name, run in zip(names, runs, strict=True)
    ]
    return Comparison(comparison_manifest(start, tables, facts, differing), tables, runs=runs, differing=differing)


def comparison_manifest(
    start: float, tables: Iterable[str], runs: Iterable[Mapping[str, Any]], differing: pd.DataFrame
) -> dict[str, Any]:
    """Return the manifest of a comparison of runs, each with its label, its folder and further entries."""
    recorded = [{**run, "folder": run["folder"] and str(run["folder"])} for run in runs]
    config = {"runs": [run["folder"] for run in recorded]}
    return make_manifest("compare", config, start, tables, runs=recorded, differing=differing.to_dict(orient="index"))


def differing_settings(manifests: Sequence[dict[str, Any]], names: Sequence[str]) -> pd.DataFrame:
    """Return a row for each setting of the manifests in which the runs differ, and a column for each run."""

    def setting(read: Callable[[dict[str, Any]], Any], manifest: dict[str, Any]) -> str:
        try:
            return str(read(manifest))
        except (KeyError, TypeError):
            return "not recorded"

    rows = {name: [setting(read, manifest) for manifest in manifests] for name, read in SETTINGS.items()}
    differing = {name: values for name, values in rows.items() if len(set(values)) > 1}
    if "input" in differing:
        differing.pop("input tokens", None)  # these then differ, too
    return pd.DataFrame.from_dict(differing, orient="index", columns=list(names))


def differing_lines(differing: Mapping[Any, Mapping[Any, object]]) -> list[str]:
    """Return a line for each setting: "dtype differs: float32 (a), bfloat16 (b)"."""
    return [
        f"{setting} differs: {', '.join(f'{value} ({run})' for run, value in values.items())}"
        for setting, values in differing.items()
    ]

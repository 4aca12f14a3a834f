"""Runs of `analyze` side by side, and the settings in which runs differ."""

import html
import os
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from sinkscope.errors import InputError
from sinkscope.figures import KINDS
from sinkscope.output.drawing import Drawings, drawings_of
from sinkscope.output.result import Result
from sinkscope.output.run import Run
from sinkscope.results.side_by_side import comparison_manifest, differing_lines, differing_settings, labels, metrics_of
from sinkscope.results.tables import WHOLE_MODEL


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
        return drawings_of(KINDS["several runs"], self.runs)

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


def compared(chosen: Sequence[Run | str | os.PathLike[str]], start: float) -> Comparison:
    """Compare runs of `analyze` in memory, for a command that began at `start`."""
    runs = tuple(run if isinstance(run, Run) else Run.open(run) for run in chosen)
    for run in runs:
        if run.command != "analyze":
            which = f"{run.folder or run.model} is a run of `{run.command}`"
            raise InputError(f"{which}: its own tables hold its comparison")
    names = labels(runs)[0]
    differing = differing_settings([run.manifest for run in runs], names)
    metrics = metrics_of(runs, names)
    summaries = {name: run.tables["summary"] for name, run in zip(names, runs, strict=True)}
    layers = [table[table["layer"] != WHOLE_MODEL].assign(run=name) for name, table in summaries.items()]
    columns = ["model", "condition", "layer", "run", "metric", "value"]
    tables = {"comparison": metrics.reset_index(), "comparison_by_layer": pd.concat(layers, ignore_index=True)[columns]}
    facts = [
        {"label": name, "folder": run.folder, "model": run.model, "condition": run.condition}
        for name, run in zip(names, runs, strict=True)
    ]
    return Comparison(comparison_manifest(start, tables, facts, differing), tables, runs=runs, differing=differing)

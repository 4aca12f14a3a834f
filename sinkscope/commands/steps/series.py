"""A model while it was trained: the runs of its checkpoints, and the same quantities against the step.

OUT/run.json                  the steps, and their common options
OUT/step512/                  the run folder of a step
OUT/tables/series.parquet     the summaries of all steps, a row for each value
OUT/tables/onset.parquet      when sink, norm and value gradient appear (onsets.py), if they were measured
OUT/verdict.md                the same in words
OUT/figures/training-*.png|pdf
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from sinkscope.commands.steps.onsets import ONSET, ONSET_COLUMNS, SECTION, RunsByStep, findings, onset_table
from sinkscope.errors import InputError, Known, one_line
from sinkscope.figures import KINDS
from sinkscope.models.steps import Checkpoint
from sinkscope.options.option import Options
from sinkscope.output.drawing import Drawings, drawings_of
from sinkscope.output.result import Result
from sinkscope.output.run import Run
from sinkscope.results.findings import Finding
from sinkscope.results.manifest import folder_of, make_manifest, read_manifest
from sinkscope.results.side_by_side import differing_lines, differing_settings
from sinkscope.results.tables import LEADING, LEADING_COLUMNS, METRIC, VALUE, WHOLE_MODEL, Column, names_of, read_table

COMMAND = "analyze_steps"  # in the manifest
SERIES = "series"
_SCHEMAS = {
    SERIES: (*LEADING_COLUMNS, Column("step", "of the training", kind="whole"), METRIC, VALUE),
    ONSET: (*LEADING_COLUMNS, *ONSET_COLUMNS),
}
HEADLINES = ("sink_rate", "value_drain", "norm_ratio", "massive_count", "value_gradient_ratio", "loss")


@dataclass(frozen=True, kw_only=True)
class Series(Result):
    """One model at several steps of its training: `runs` has the run of each step, in their order."""

    runs: Mapping[int, Run] = field(repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "runs", Known("step", self.runs))

    @classmethod
    def of(
        cls, model: str, steps: list[Checkpoint], options: Options, runs: Mapping[int, Run], start: float, **facts: Any
    ) -> "Series":
        """Return the series of these runs in memory; `options` are those of one run, `facts` more for run.json."""
        path = Path(model).expanduser()
        name = path.resolve().name if path.is_dir() else model  # as in a run's tables
        parts = [run.tables["summary"].assign(model=name, step=step) for step, run in runs.items()]
        columns = ["model", "condition", "step", "layer", "metric", "value"]
        tables = {SERIES: pd.concat(parts, ignore_index=True)[columns]}
        condition = runs[steps[0].step].condition
        if len(onsets := onset_table(list(runs.items()))):
            tables[ONSET] = onsets.assign(model=name, condition=condition)[[*LEADING, *names_of(ONSET_COLUMNS)]]
        revisions = ",".join(checkpoint.name for checkpoint in steps)
        config = options.model_dump(mode="json") | {"model": model, "revision": revisions}
        entries = [{"step": each.step, "name": each.name, "folder": each.folder} for each in steps]
        facts = {"model": name, "condition": condition, "steps": entries} | facts
        return cls(make_manifest(COMMAND, config, start, tables, **facts), tables, runs=runs)

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> "Series":
        """Open what `analyze_steps` wrote; InputError for another folder, or a damaged one."""
        folder = folder_of(folder)
        manifest = read_manifest(folder, (COMMAND,))
        try:
            runs = {int(entry["step"]): Run.open(folder / entry["folder"]) for entry in manifest["steps"]}
            paths = {name: folder / "tables" / f"{name}.parquet" for name in manifest["tables"]}
            tables = {name: read_table(path, _SCHEMAS[name]) for name, path in paths.items()}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{folder} is damaged: {one_line(error)}") from error
        return cls(manifest, tables, folder.absolute(), runs=runs)

    @property
    def table(self) -> pd.DataFrame:
        """The runs' summaries: model, condition, step, layer (−1: the whole model), metric, value."""
        return self.tables[SERIES]

    @property
    def drawings(self) -> Drawings:
        onsets = self.tables.get(ONSET, pd.DataFrame())
        return drawings_of(KINDS["training steps"], RunsByStep(self.runs.items(), onsets))

    @property
    def findings(self) -> Sequence[Finding]:
        return findings(self.tables[ONSET]) if ONSET in self.tables else ()

    @property
    def verdict(self) -> str:
        """The findings as Markdown; "" if there are none."""
        lines = [f"- {finding.sentence}" for finding in self.findings]
        return "\n\n".join([f"## {self.manifest['model']}, {SECTION.lower()}", "\n".join(lines)]) if lines else ""

    @property
    def texts(self) -> Mapping[str, str]:
        return {"verdict.md": self.verdict + "\n"} if self.verdict else {}

    @property
    def parts(self) -> Mapping[int, Run]:
        return self.runs

    @property
    def headlines(self) -> pd.DataFrame:
        """The best-known metrics of the whole model: a row for each step, a column for each metric."""
        whole = self.table[(self.table["layer"] == WHOLE_MODEL) & self.table["metric"].isin(HEADLINES)]
        wide = whole.pivot(index="step", columns="metric", values="value")
        return wide.reindex(index=list(self.runs), columns=[name for name in HEADLINES if name in wide])

    @property
    def summary_tables(self) -> dict[str, pd.DataFrame]:
        return {"": self.headlines.rename_axis(columns=None).reset_index()}

    @property
    def warnings(self) -> list[str]:
        """A line for each setting in which the steps differ, which makes them hard to compare."""
        names = [f"step {step}" for step in self.runs]
        rows = differing_settings([run.manifest for run in self.runs.values()], names)
        return differing_lines(rows.to_dict(orient="index"))

    def _repr_html_(self) -> str:  # for notebooks
        return self.headlines.to_html(float_format="{:.4g}".format, na_rep="–")


def summaries(folder: Path) -> Mapping[str, pd.DataFrame]:
    """Return the table that `compare` prints of the folder of a series."""
    return Series.open(folder).summary_tables

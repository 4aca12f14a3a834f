"""Runs of `analyze` side by side, by metrics or by heads, and the settings in which runs differ."""

import html
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from sinkscope.errors import InputError, counted
from sinkscope.figures import KINDS
from sinkscope.output.drawing import Drawings, drawings_of
from sinkscope.output.result import Result
from sinkscope.output.run import Run
from sinkscope.results.findings import Finding, Outcome
from sinkscope.results.head_differences import FALSE_DISCOVERIES, head_differences
from sinkscope.results.metrics import METRICS
from sinkscope.results.side_by_side import (
    comparison_manifest,
    differing_lines,
    differing_settings,
    labels,
    metrics_of,
    pairing_lines,
)
from sinkscope.results.tables import LEADING, WHOLE_MODEL
from sinkscope.verdict.report import finding

BY_HEAD, COUNTS = "comparison_by_head", "differing_heads"
HEAD_METRICS = ("sink_rate", "window_mass")  # those that are compared by head unless others are named


@dataclass(frozen=True, kw_only=True)
class Comparison(Result):
    """Runs of `analyze` side by side. Settings in which the runs differ make their numbers hard to compare."""

    runs: tuple[Run, ...]
    differing: pd.DataFrame  # settings in which the runs differ, a column for each run

    @property
    def table(self) -> pd.DataFrame:
        """Metrics of the whole model by run; for two runs also `difference` (second − first), its ends, and `ratio`."""
        return self.tables["comparison"].set_index("metric")

    @property
    def by_layer(self) -> pd.DataFrame:
        """The metrics by layer: model, condition, layer, run, metric, value."""
        return self.tables["comparison_by_layer"]

    @property
    def findings(self) -> Sequence[Finding]:
        """How many heads differ, for each metric of a comparison by head."""
        return head_findings(self.tables, [run["label"] for run in self.manifest["runs"]])

    @property
    def summary_tables(self) -> dict[str, pd.DataFrame]:
        if BY_HEAD in self.tables:
            heads = self.tables[BY_HEAD]
            return {"": heads[heads["differs"]].drop(columns=["model", "condition", "differs"])}
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

    @property
    def notes(self) -> list[str]:
        """The warnings, and a line for each pair of runs that do not read the same texts."""
        return [*self.warnings, *pairing_lines(self.runs)]

    def _repr_html_(self) -> str:  # for notebooks
        sentences = [finding.sentence for finding in self.findings]
        lines = [f"<li>{html.escape(line)}</li>" for line in (*sentences, *self.notes)]
        table = self.summary_tables[""].to_html(index=False, float_format="{:.4g}".format, na_rep="–")
        return table + (f"<ul>{''.join(lines)}</ul>" if lines else "")


def compared(
    chosen: Sequence[Run | str | os.PathLike[str]],
    start: float,
    metrics: Sequence[str] = (),
    by: Literal["head"] | None = None,
) -> Comparison:
    """Compare runs of `analyze` in memory, for a command that began at `start`; see `compare`."""
    runs = tuple(run if isinstance(run, Run) else Run.open(run) for run in chosen)
    for run in runs:
        if run.command != "analyze":
            which = f"{run.folder or run.model} is a run of `{run.command}`"
            raise InputError(f"{which}: its own tables hold its comparison")
    names = labels(runs)[0]
    differing = differing_settings([run.manifest for run in runs], names)
    whole = metrics_of(runs, names, () if by else metrics)
    summaries = {name: run.tables["summary"] for name, run in zip(names, runs, strict=True)}
    layers = [table[table["layer"] != WHOLE_MODEL].assign(run=name) for name, table in summaries.items()]
    columns = ["model", "condition", "layer", "run", "metric", "value"]
    tables = {"comparison": whole.reset_index(), "comparison_by_layer": pd.concat(layers, ignore_index=True)[columns]}
    if by == "head":
        heads, counts = zip(*(head_differences(runs, metric) for metric in metrics or HEAD_METRICS), strict=True)
        counted_heads = pd.DataFrame(counts).assign(layer=WHOLE_MODEL)
        for name, table in ((BY_HEAD, pd.concat(heads, ignore_index=True)), (COUNTS, counted_heads)):
            table = table.assign(model=runs[1].model, condition=runs[1].condition)
            tables[name] = table[[*LEADING, *table.columns.difference(LEADING, sort=False)]]
    facts = [
        {"label": name, "folder": run.folder, "model": run.model, "condition": run.condition}
        for name, run in zip(names, runs, strict=True)
    ]
    return Comparison(comparison_manifest(start, tables, facts, differing), tables, runs=runs, differing=differing)


def head_findings(tables: Mapping[str, pd.DataFrame], names: Sequence[str]) -> list[Finding]:
    """Return how many heads differ between two runs, next to the halves of each."""
    findings = []
    for counts in tables[COUNTS].to_dict("records") if COUNTS in tables else ():
        label = METRICS[counts["metric"]].label
        about: dict[str, Any] = {"threshold": FALSE_DISCOVERIES, "is_headline": True}
        texts, splits = (counts["first_texts"], counts["second_texts"]), counts["splits"]
        how = f"paired over {texts[0]} texts" if counts["is_paired"] else f"unpaired, {texts[0]} and {texts[1]} texts"
        halves = " and ".join(
            f"{counts[f'{run}_halves']:.3g} (at most {counts[f'{run}_halves_most']:g}) of {name}"
            for run, name in zip(("first", "second"), names, strict=True)
        )
        sentence = (
            f"{counts['differing']} of {counted(counts['heads'], 'head')} differ in {label} at a false discovery rate "
            f"of {FALSE_DISCOVERIES:.0%} ({how}); between random halves of one run's texts, in the mean of {splits} "
            f"splits: {halves}."
        )
        if counts["untested"]:
            sentence += f" {counted(counts['untested'], 'head')} without a value in both runs cannot be compared."
        if not counts["heads"]:
            about["outcome"] = Outcome.UNDEFINED
            sentence = f"Which heads differ in {label} is not known: fewer than two texts have a value in both runs."
        findings.append(finding("heads-that-differ", "Heads", counts["differing"], sentence, counts, **about))
    return findings

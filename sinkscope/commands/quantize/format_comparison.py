"""The result of comparing two runs of `quantize`."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from sinkscope.commands.quantize import compared
from sinkscope.errors import InputError
from sinkscope.output.result import Result
from sinkscope.output.run import Run
from sinkscope.results.findings import Finding
from sinkscope.results.side_by_side import comparison_manifest, differing_settings, labels
from sinkscope.verdict.report import Report, report_markdown


@dataclass(frozen=True, kw_only=True)
class FormatComparison(Result):
    """Two runs of `quantize` side by side."""

    @property
    def table(self) -> pd.DataFrame:
        """A row for each scheme and part, with the cost in both runs and their difference."""
        return self.tables[compared.TABLE]

    @property
    def names(self) -> list[str]:
        return [run["label"] for run in self.manifest["runs"]]

    @property
    def findings(self) -> list[Finding]:
        return compared.findings(self.table, *self.names)

    @property
    def summary_tables(self) -> dict[str, pd.DataFrame]:
        return {"": compared.overview(self.table, *self.names)}

    @property
    def texts(self) -> Mapping[str, str]:
        return {"formats.md": self.markdown + "\n"}

    @property
    def markdown(self) -> str:
        title = f"Cost of number formats in {' and in '.join(self.names)}"
        return report_markdown(Report(title, [], self.summary_tables[""], self.findings))


def compared_formats(chosen: Sequence[Run | str | os.PathLike[str]], start: float) -> FormatComparison:
    """Compare two runs of `quantize` in memory, for a command that began at `start`."""
    if len(chosen) != 2:
        raise InputError(f"runs of `quantize` are compared in pairs: name two of them; {len(chosen)} were given")
    runs = [run if isinstance(run, Run) else Run.open(run) for run in chosen]
    names = labels(runs)[0]
    differing = differing_settings([run.manifest for run in runs], names)
    facts = [{"label": name, "folder": run.folder} for name, run in zip(names, runs, strict=True)]
    tables = {compared.TABLE: compared.differences(*runs)}
    return FormatComparison(comparison_manifest(start, tables, facts, differing), tables)

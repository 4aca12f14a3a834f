"""What came of `retrofit` or `train`: its runs, its tables with all arms together, and its figures."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from accelerate import PartialState

from sinkscope.report.backcopy_table import backcopy_markdown
from sinkscope.report.comparison import Comparison
from sinkscope.report.figures import OF_ARMS
from sinkscope.report.figures.arms import Arms
from sinkscope.report.figures.spec import draw_all
from sinkscope.report.figures.style import Figure
from sinkscope.report.retrofit_table import UNTOUCHED, retrofit_markdown, retrofit_table
from sinkscope.report.run import Run


@dataclass(frozen=True)
class Trained:
    """What came of `retrofit` or `train`.

    runs         a run an arm; of `retrofit` also "untouched"
    comparison   of these, of the first seed's where there are several, on held-out text; None where there is only one
    tables       `training`, `gates` and `retrofit`, whose condition is the method; `train` on a task has more
    """

    folder: Path
    manifest: dict[str, Any]
    runs: dict[str, Run] = field(repr=False)
    comparison: Comparison | None
    tables: Mapping[str, pd.DataFrame] = field(repr=False)

    @property
    def verdict(self) -> str:
        """VGA's tables, as Markdown; of a task also what the lab found."""
        whole = retrofit_markdown(self.tables["retrofit"])
        return f"{whole}\n{backcopy_markdown(self.tables['training'])}" if "value_norms" in self.tables else whole

    @property
    def notes(self) -> list[str]:
        """How far each method's gates have moved, a line each; and settings in which the runs differ."""
        gates = self.tables["gates"]
        moved = [_moved(label, gates) for label in gates["condition"].unique()]
        return moved + (self.comparison.warnings if self.comparison else [])

    def figures(self) -> dict[str, Figure]:
        """By name, those that the tables, and the runs' own, allow."""
        return draw_all(OF_ARMS, Arms(self.tables, first_runs(self.manifest, self.runs)))

    @property
    def is_main(self) -> bool:
        """Of several processes, the one that prints."""
        return PartialState().is_main_process

    def model(self, label: str) -> Path:
        """The folder of a trained model."""
        return self.folder / label / "model"

    def _repr_markdown_(self) -> str:  # what a notebook shows
        return self.verdict


def by_seed(manifest: Mapping[str, Any], runs: Mapping[str, Run]) -> Iterator[tuple[int, dict[str, Run]]]:
    """Seed, and its runs by method; the untouched model's is every seed's."""
    arms = {label: manifest["arms"][label] for label in runs if label != UNTOUCHED}
    for seed in sorted({arm["seed"] for arm in arms.values()}):
        shared = {UNTOUCHED: runs[UNTOUCHED]} if UNTOUCHED in runs else {}
        yield seed, shared | {arm["label"]: runs[label] for label, arm in arms.items() if arm["seed"] == seed}


def first_runs(manifest: Mapping[str, Any], runs: Mapping[str, Run]) -> dict[str, Run]:
    """By method, of the first seed."""
    return next(by_seed(manifest, runs))[1]


def retrofit_tables(manifest: Mapping[str, Any], runs: Mapping[str, Run], gates: pd.DataFrame) -> pd.DataFrame:
    """The table `retrofit` of all seeds."""
    parts = []
    for seed, mine in by_seed(manifest, runs):
        quantized = {method: run.manifest["w8a8"] for method, run in mine.items()}
        parts.append(retrofit_table(mine, quantized, gates[gates["seed"] == seed], seed))
    return pd.concat(parts, ignore_index=True)


def _moved(label: str, gates: pd.DataFrame) -> str:
    mine = gates[gates["condition"] == label]
    most = mine.loc[mine["displacement"].idxmax()]
    where = "" if most["layer"] < 0 else f", in layer {most['layer']}"
    mean = mine["displacement"].mean()
    return f"{label}: new parameters moved by {mean:.3g} on average, by {most['displacement']:.3g} at most{where}"

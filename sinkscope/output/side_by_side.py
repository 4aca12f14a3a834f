"""`compare` for every kind of folder: analyses by metrics, interventions by routes, scorecards by claims.

No model is loaded. Of analyses: comparison.py. Of the others:

OUT/run.json               what was compared, and the settings in which it differs
OUT/tables/route.parquet   one row a route of a model
OUT/tables/claim.parquet   of scorecards, one row a number of a claim
OUT/figures/*.png|pdf
OUT/routes.md, OUT/scorecard.md
"""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from sinkscope.errors import InputError
from sinkscope.figures import OF_ROUTES
from sinkscope.figures.spec import draw_all
from sinkscope.figures.style import Figure
from sinkscope.output import comparison
from sinkscope.output.comparison import Comparison, check_count, differing_settings
from sinkscope.output.drawing import Drawings, drawings_of
from sinkscope.output.result import Result, written
from sinkscope.output.run import Run
from sinkscope.output.scorecard import DrawnScorecard
from sinkscope.paper_claims.evidence import Evidence
from sinkscope.paper_claims.routes import ROLES, ROUTES_TITLE, routes_of_models, routes_text
from sinkscope.paper_claims.table import models_of
from sinkscope.results.folders import own_folder
from sinkscope.results.manifest import RUNS, folder_of, make_manifest, read_manifest
from sinkscope.results.scorecard import COMMAND as CLAIMS
from sinkscope.results.scorecard import ROUTE as TABLE
from sinkscope.results.scorecard import TABLES
from sinkscope.verdict.scorecard import Scorecard
from sinkscope.verdict.table_formats import as_markdown

Given = Run | Scorecard | str | os.PathLike[str]
SETTINGS = ("input", "dataset", "num_seqs", "seq_len", "window", "epsilon", "dtype", "bos", "seed", "draws")


@dataclass(frozen=True)
class Routes(Result):
    """Interventions on several models side by side.

    Attributes:
        manifest: The content of run.json.
        table: One row a route of a model (`paper_claims/routes.py`).
        differing: Rows settings in which the runs differ, columns runs.
        folder: Where it is written; None if it is in memory only.
    """

    manifest: dict[str, Any]
    table: pd.DataFrame = field(repr=False)
    differing: pd.DataFrame
    folder: Path | None = None

    def figures(self) -> dict[str, Figure]:
        """The comparison's figures, by name."""
        return draw_all(OF_ROUTES, self.table)

    @property
    def summary_tables(self) -> dict[str, pd.DataFrame]:
        return {ROUTES_TITLE: routes_text(self.table)}

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        return {TABLE: self.table}

    @property
    def texts(self) -> Mapping[str, str]:
        return {"routes.md": self.markdown + "\n"}

    @property
    def drawings(self) -> Drawings:
        return drawings_of(OF_ROUTES, self.table)

    @property
    def markdown(self) -> str:
        return f"## {ROUTES_TITLE}\n\n{as_markdown(routes_text(self.table))}"

    def _repr_markdown_(self) -> str:  # what a notebook shows
        return self.markdown


def compare(
    *given: Given | list[Given] | tuple[Given, ...],
    out: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
    page: bool = True,
) -> Comparison | Routes | Scorecard:
    """Put folders of one kind side by side; with `out`, also write tables and figures there.

    Args:
        *given: runs of `analyze`, of `intervene`, or scorecards, or their folders: all of one kind, one by one or in
            lists.
        out: the folder to write.
        overwrite: replace an earlier comparison in `out`.
        page: with `out`, also write index.html.

    Raises:
        InputError: fewer than two, of different kinds, a folder that holds none, or an `out` that is taken.
        SinkscopeError: writing failed.
    """
    runs: list[Given] = []
    for part in given:
        runs += part if isinstance(part, list | tuple) else [part]
    check_count(runs)
    commands = list(dict.fromkeys(map(_command, runs)))
    if len(commands) > 1:
        raise InputError(f"runs of `{'` and `'.join(commands)}` have nothing in common: compare those of one command")
    if commands[0] not in _WAYS:
        return comparison.compare(*runs, out=out, overwrite=overwrite, page=page)  # type: ignore[arg-type]
    start, folders = time.time(), [one.folder if isinstance(one, Run | Scorecard) else one for one in runs]
    with own_folder(out, overwrite, ("compare",), reads=folders) as folder:
        found = replace(_WAYS[commands[0]](runs, start), folder=folder)
        return written(found, page)


def _command(one: Given) -> str:
    if isinstance(one, Run | Scorecard):
        return str(one.manifest.get("command", "analyze"))
    if not isinstance(one, str | os.PathLike):
        raise InputError(f"a run, a scorecard or the folder of one is needed, and this is a {type(one).__name__}")
    return str(read_manifest(folder_of(one), (*RUNS, CLAIMS))["command"])


# --- interventions


def _routes(given: Sequence[Given], start: float) -> Routes:
    runs = [one if isinstance(one, Run) else Run.open(one) for one in given]  # type: ignore[arg-type]
    models = models_of(runs)
    table = routes_of_models({model: Evidence.of(own, ROLES, model) for model, own in models.items()})
    names = _distinct([run.model for run in runs], [run.folder for run in runs])
    differing = differing_settings([run.manifest for run in runs], names)
    manifest = _manifest(start, [TABLE], names, [run.folder for run in runs], differing)
    return Routes(manifest, table, differing)


# --- scorecards


def _scorecards(given: Sequence[Given], start: float) -> DrawnScorecard:
    """One of all their models; those of one model are told apart by their folders."""
    cards = [one if isinstance(one, Scorecard) else Scorecard.open(one) for one in given]  # type: ignore[arg-type]
    if empty := [card.folder for card in cards if not card.models]:
        raise InputError(f"{empty[0]} has no claims to compare")
    labels = iter(_distinct(
        [model for card in cards for model in card.models], [card.folder for card in cards for _ in card.models]
    ))  # fmt: skip
    renamed = [(card, {model: next(labels) for model in card.models}) for card in cards]
    table, routes = (
        pd.concat([getattr(card, name).replace({"model": own}) for card, own in renamed], ignore_index=True)
        for name in ("table", "routes")
    )
    names = [", ".join(own.values()) for _, own in renamed]
    differing = _differing_options(cards, names)
    manifest = _manifest(start, TABLES, names, [card.folder for card in cards], differing)
    return DrawnScorecard(manifest, table, routes)


def _differing_options(cards: Sequence[Scorecard], names: list[str]) -> pd.DataFrame:
    """Of scorecards that were measured; the options of one that judged runs were not those of the runs."""
    configs = [card.manifest["config"] for card in cards]
    rows = {
        name: ["its runs'" if config.get("from_") else str(config.get(name)) for config in configs] for name in SETTINGS
    }
    rows = {name: values for name, values in rows.items() if len(set(values)) > 1}
    return pd.DataFrame.from_dict(rows, orient="index", columns=names)


def _distinct(models: Sequence[str], folders: Sequence[Path | None]) -> list[str]:
    """Names of models; where one occurs several times, with its folder's, or with its place."""
    counts = Counter(models)
    names = [
        f"{model} ({folder.name})" if counts[model] > 1 and folder is not None else model
        for model, folder in zip(models, folders, strict=True)
    ]
    again = Counter(names)
    return [f"{name} ({place})" if again[name] > 1 else name for place, name in enumerate(names, 1)]


def _manifest(
    start: float, tables: Iterable[str], names: Sequence[str], folders: Sequence[Path | None], differing: pd.DataFrame
) -> dict[str, Any]:
    compared = [{"label": name, "folder": folder and str(folder)} for name, folder in zip(names, folders, strict=True)]
    config = {"runs": [one["folder"] for one in compared]}
    return make_manifest("compare", config, start, tables, runs=compared, differing=differing.to_dict(orient="index"))


_WAYS: dict[str, Callable[[Sequence[Given], float], Routes | DrawnScorecard]] = {
    "intervene": _routes,
    CLAIMS: _scorecards,
}
